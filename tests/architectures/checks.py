"""What every architecture must stand: one call, exact counts, no trace, better than magnitude."""

from __future__ import annotations

import copy

import torch

import lobs
from lobs.calibration.forward import call, evaluating, fitted, main_output

KEPT = 0.5


def outputs(model, batches):
    with evaluating(model):
        return torch.cat([main_output(call(model, batch)).flatten().double() for batch in batches])


def magnitude(model, result):
    """Return the network with as many of the same weights removed, the smallest of all."""
    model = copy.deepcopy(model)
    state = model.state_dict()
    sizes = torch.cat([state[name].abs().flatten().float() for name in result.masks])
    gone = torch.zeros(len(sizes), dtype=torch.bool)
    gone[sizes.argsort()[: result.total - result.kept]] = True
    for name, mask in result.masks.items():
        some, gone = gone[: mask.numel()], gone[mask.numel() :]
        state[name][some.view(mask.shape)] = 0
    return model


def passes(make, tmp_path, *, samples=320, worse=1.0):
    """Prune a network in one call and check everything that holds for all of them."""
    model, batch = make()
    torch.manual_seed(1)
    batches = [batch(32) for _ in range(samples // 32)]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    result = lobs.prune(model, copy.deepcopy(batches), keep=KEPT, progress=False)
    assert result.kept == result.total - lobs.Sparsity(1 - KEPT).count(result.total)
    assert sum(int((~mask).sum()) for mask in result.masks.values()) == result.total - result.kept
    state = result.model.state_dict()
    assert not any(bool(state[name][~mask].any()) for name, mask in result.masks.items())
    after = model.state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.items())
    copy.deepcopy(result.model)
    held_out = list(fitted(model, [batch(32) for _ in range(2)]))
    wanted, found = outputs(model, held_out), outputs(result.model, held_out)
    assert bool(torch.isfinite(found).all())
    if set(result.masks) <= set(before):  # names differ where weights were folded
        plain = outputs(magnitude(model, result), held_out)
        assert (found - wanted).norm() <= worse * (plain - wanted).norm()
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    assert all(torch.equal(saved.state_dict[name], t) for name, t in state.items())
    explained_or_smaller(model, batches)
    return result


def explained_or_smaller(model, batches):
    """Shrink the network, or refuse in words."""
    try:
        cut = lobs.prune(
            model, batches[:2], lobs.Structured(0.3), refit="layers", progress=False
        ).model
        small, _ = lobs.shrink(cut, batches[:1])
    except lobs.LobsError as error:
        assert len(str(error)) > 15 and "\n" not in str(error).strip()
        return
    batch = next(iter(fitted(model, batches[:1])))
    torch.testing.assert_close(outputs(small, [batch]), outputs(cut, [batch]), rtol=1e-3, atol=1e-4)
