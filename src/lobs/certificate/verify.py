"""Check a saved result against its own record and, with the dense network and data, its errors."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lobs.calibration.batch_norm import borrow_statistics
from lobs.calibration.batches import Every
from lobs.calibration.collect import collect_moments
from lobs.calibration.comparison import compare
from lobs.calibration.forward import fitted, learn
from lobs.calibration.layer_problem import layer_problem
from lobs.calibration.moments import Moments
from lobs.certificate.certify import Sharing
from lobs.certificate.guarantee import (
    Guarantee,
    chernoff_hoeffding,
    clopper_pearson,
    measured,
)
from lobs.errors import FileError, TargetError
from lobs.layers import Layer, find_layers
from lobs.layers.folding import folded
from lobs.layers.hooks import before_forward
from lobs.layers.untouched import copied
from lobs.layers.uses import learnt
from lobs.solvers.patterns.nbym import broken_groups
from lobs.storage.checkpoint import Checkpoint
from lobs.targets import NByM, for_layer

_NEARLY = 2e-3  # of the inputs: margins that are nearly their limit differ on other machines
_TOLERANCE = 1e-3  # relative; moments are float32 sums, whose order depends on the machine


@dataclass(frozen=True)
class Finding:
    """One check: its name, whether it holds, and the numbers."""

    check: str
    holds: bool
    detail: str


def verify_masks(
    saved: Checkpoint, later: nn.Module | Mapping[str, Tensor] | None = None
) -> list[Finding]:
    """Check that removed weights are zero and that counts are those recorded.

    Args:
        saved: the checkpoint.
        later: a network or state dict that was trained since; the checkpoint itself by default.
    """
    state = (
        saved.state_dict
        if later is None
        else later.state_dict()
        if isinstance(later, nn.Module)
        else later
    )
    findings = [_zeros(name, mask, state) for name, mask in saved.masks.items()]
    for row in _rows(saved):
        own = _parameters(row, saved.masks)
        removed = sum(
            int((~mask[slice(*own[name])]).sum())
            for name, mask in saved.masks.items()
            if name in own
        )
        there = sum(m[slice(*own[name])].numel() for name, m in saved.masks.items() if name in own)
        # Experts that left the network are in no tensor of the file.
        kept = (min(there, row["total"]) if there else row["total"]) - removed
        findings.append(
            Finding(
                f"count {row['name']}",
                kept == row["kept"],
                f"kept {kept:,}, recorded {row['kept']:,}",
            )
        )
    return [*findings, *_patterns(saved, state)]


def _patterns(saved: Checkpoint, state: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Check that no group of an n:m layer has more than n non-zeros."""
    whole = _recorded_pattern(saved)
    if whole is None:
        return
    # Tensors of another shape than their mask's are found wrong already.
    fitting = [
        n
        for n, mask in saved.masks.items()
        if mask.dim() > 1 and n in state and state[n].shape == mask.shape
    ]
    for row in _rows(saved):
        target = for_layer(whole, row["name"])
        if not isinstance(target, NByM):  # left dense
            continue
        own = _parameters(row, saved.masks)
        for name in (n for n in fitting if n in own):
            weight = state[name].cpu()[slice(*own[name])]
            # Transposed convolutions and GPT-2 have the input dimension first; a file does not say.
            broken = min(
                broken_groups(weight, target), broken_groups(weight.transpose(0, 1), target)
            )
            detail = (
                f"{broken:,} groups have too many non-zeros"
                if broken
                else f"every group keeps its {target}"
            )
            yield Finding(f"pattern {row['name']}", not broken, detail)


def _recorded_pattern(saved: Checkpoint) -> NByM | None:
    """Return the n:m pattern of the record; refuse a damaged one."""
    settings = saved.record.get("settings")
    target = settings.get("target") if isinstance(settings, dict) else None
    found = (
        re.fullmatch(r"NByM\(n=(.+), m=(\d+), along='(\w+)'\)", target)
        if isinstance(target, str)
        else None
    )
    if found is None:
        return None
    try:
        return NByM(ast.literal_eval(found[1]), int(found[2]), found[3])  # type: ignore[arg-type]  # checked there
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, TargetError) as error:
        raise FileError("the file's record of its pattern is damaged.") from error


def _zeros(name: str, mask: Tensor, state: Mapping[str, Tensor]) -> Finding:
    """Check that one tensor's removed weights are zero."""
    check = f"mask {name}"
    if name not in state:
        return Finding(
            check, False, "there is no such tensor; was it renamed, or an adapter never merged?"
        )
    tensor = state[name].cpu()
    if tensor.shape != mask.shape:
        return Finding(
            check, False, f"its shape is {tuple(tensor.shape)}, the mask's {tuple(mask.shape)}"
        )
    back = ~mask & (tensor != 0)
    zeros, revived = int((~mask).sum()), int(back.sum())
    if not revived:
        return Finding(check, True, f"{zeros:,} zeros hold")
    first = tuple(back.nonzero()[0].tolist())
    largest = float(tensor[back].abs().max())
    return Finding(
        check,
        False,
        f"{revived:,} removed weights are not zero ({revived / zeros:.1%} of {zeros:,}); the "
        f"largest is {largest:.3g}, the first at {first}. lobs.training.apply_masks zeroes them, "
        "lobs.hold keeps them zero in training",
    )


def verify_errors(
    saved: Checkpoint, dense: nn.Module, pruned: nn.Module, batches: Iterable[Any]
) -> list[Finding]:
    """Recompute every layer's error from data and compare it with the record.

    With asymmetric inputs an error is the distance between a layer's outputs in the two networks.
    Otherwise errors were measured on the inputs that the dense or the pruned network gives its
    layers. The finished network gives the same inputs, because they depend only on earlier layers.
    Where a weight is used more than once, layers are pruned again one by one with the recorded
    weights.

    Args:
        saved: the checkpoint.
        dense: the dense network.
        pruned: the pruned network.
        batches: the calibration data of the run.
    """
    recorded: Mapping[str, float] = {row["name"]: row["error"] for row in _rows(saved)}
    settings = saved.record.get("settings")
    inputs = settings.get("inputs") if isinstance(settings, dict) else None
    dense, pruned = folded(dense), folded(pruned)
    batches = fitted(dense, batches)
    every = settings.get("measured every", 1) if isinstance(settings, dict) else 1
    if isinstance(every, int) and every > 1:  # a large network is compared on some of the inputs
        batches = Every(batches, every)
    for network in (dense, pruned):
        learn(network, batches, always=learnt(dense) is not None)
    before = {layer.name: layer for layer in find_layers(dense, recorded)}
    after = {layer.name: layer for layer in find_layers(pruned, recorded)}
    if inputs == "asymmetric":
        pairs = [(before[name], after[name]) for name in recorded]
        distances = compare(dense, pruned, batches, pairs).layers
        return [
            _compare(name, recorded[name], distance.mean_error, distance.mean_energy)
            for name, distance in distances.items()
        ]
    on_pruned = inputs == "pruned"
    watched = dense
    if on_pruned:
        watched = copied(pruned)
        borrow_statistics(watched, dense)  # errors come from before batch norms were re-estimated
    layers = find_layers(watched, recorded)
    with _counting(watched, layers) as calls:
        calibration: Mapping[str, Moments] = collect_moments(watched, batches, layers)
    if on_pruned and any(calls[name] > calls[""] for name in recorded):
        calibration = _again(dense, pruned, batches, [*calibration])
    findings = []
    for name, promised in recorded.items():
        problem = layer_problem(before[name], before[name].matrix(), calibration[name])
        weight = after[name].matrix()
        hidden = problem.hidden_error_of(weight) if problem.units is not None else 0.0
        findings.append(
            _compare(name, promised, problem.own_error_of(weight), problem.energy, hidden)
        )
    return findings


def verify_guarantee(
    saved: Checkpoint, dense: nn.Module, pruned: nn.Module, kept_back: Iterable[Any] | None
) -> list[Finding]:
    """Recompute the recorded guarantee from the inputs that were kept back for it.

    Args:
        saved: the checkpoint.
        dense: the dense network.
        pruned: the pruned network.
        kept_back: the inputs; None where they are not known. Then only its limit is recomputed.
    """
    raw = saved.record.get("certificate")
    raw = raw.get("guarantee") if isinstance(raw, dict) else None
    if raw is None:
        return []
    try:
        stated = Guarantee(**raw)
        limit, n = stated.at_most, stated.samples
        if kept_back is not None:
            found = measured(dense, pruned, kept_back).guarantee(stated.confidence)
        elif stated.answers and stated.whole:
            again = clopper_pearson(round(stated.changed * n), n, stated.confidence)
            found = replace(stated, changes_at_most=again)
        else:
            again = chernoff_hoeffding(stated.measured, n, stated.confidence)
            found = (
                replace(stated, changes_at_most=again)
                if stated.answers
                else replace(stated, error_at_most=again)
            )
        # Answers that are nearly a tie may differ on another machine.
        near = abs(found.at_most - limit) <= 2 / max(1, n) + _TOLERANCE * limit
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FileError("the file's record of its guarantee is damaged.") from error
    detail = f"recomputed at most {found.at_most:.6g}, recorded {limit:.6g}, on {n:,} inputs"
    return [Finding("guarantee", near and found.samples == n, detail)]


def _compare(
    name: str, promised: float, error: float, energy: float, hidden: float = 0.0
) -> Finding:
    close = abs(error - promised) <= _TOLERANCE * max(error, promised) + 1e-9 * energy + hidden
    return Finding(f"error {name}", close, f"recomputed {error:.6g}, recorded {promised:.6g}")


def verify_margins(
    saved: Checkpoint,
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    kept_back: Iterable[Any] | None = None,
) -> list[Finding]:
    """Recompute which share of the inputs has an answer that provably stays.

    Args:
        saved: the checkpoint.
        dense: the dense network.
        pruned: the pruned network.
        batches: the calibration data of the run.
        kept_back: the held-out inputs, where they are known.
    """
    raw, settings = saved.record.get("certificate"), saved.record.get("settings")
    raw, settings = (part if isinstance(part, dict) else {} for part in (raw, settings))
    recorded = {
        "answers that stay": (raw.get("certified"), batches),
        "held-out answers that stay": (raw.get("certified_held_out"), kept_back),
    }
    stated = {name: pair for name, pair in recorded.items() if None not in pair}
    if not stated:
        return []
    names = [row["name"] for row in _rows(saved)]
    dense, pruned = folded(dense), folded(pruned)
    batches = fitted(dense, batches)
    found = Sharing(dense, pruned, names, str(settings.get("inputs")), batches)
    findings = []
    for name, (share, data) in stated.items():
        again = found.share(None if name == "answers that stay" else data)
        near = (
            isinstance(share, int | float) and again is not None and abs(again - share) <= _NEARLY
        )
        shown = "none" if again is None else f"{again:.4%}"
        stated_share = f"{share:.4%}" if isinstance(share, int | float) else str(share)
        findings.append(Finding(name, near, f"recomputed {shown}, recorded {stated_share}"))
    return findings


@contextmanager
def _counting(model: nn.Module, layers: Sequence[Layer]) -> Iterator[Counter[str]]:
    """Count how often each layer runs; the network itself has the empty name."""
    calls: Counter[str] = Counter()

    def count(name: str, *_: Any) -> None:
        calls[name] += 1

    handles: list[Any] = [before_forward(model, partial(count, ""))]
    try:
        for layer in layers:
            # One by one: whatever was placed before an error must be removed.
            handles.append(layer.on_input(partial(count, layer.name)))  # noqa: PERF401
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _again(
    dense: nn.Module, pruned: nn.Module, batches: Iterable[Any], order: Sequence[str]
) -> dict[str, Moments]:
    """Return each layer's inputs when it was pruned: earlier layers pruned, later ones dense."""
    work = copied(dense)
    after = {layer.name: layer for layer in find_layers(pruned, order)}
    layers = {layer.name: layer for layer in find_layers(work, order)}
    seen: dict[str, Moments] = {}
    for name in order:
        seen[name] = collect_moments(work, batches, [layers[name]])[name]
        layers[name].write(after[name].matrix())
    return seen


def _parameters(
    row: dict[str, Any], masks: Mapping[str, Any]
) -> dict[str, tuple[int | None, int | None]]:
    """Return a layer's parameters and their rows; older files do not record them."""
    recorded = row.get("parameters")
    if not recorded:
        own = {f"{row['name']}.weight", f"{row['name']}.bias"}
        # A network that is one bare layer has parameters without a prefix.
        return dict.fromkeys(own if own & masks.keys() else ("weight", "bias"), (None, None))
    if not isinstance(recorded, dict) or not all(
        isinstance(s, list) and len(s) == 2 and all(isinstance(i, int) for i in s)
        for s in recorded.values()
    ):
        raise FileError("the file's record of layers is damaged.")
    return {name: (start, stop) for name, (start, stop) in recorded.items()}


def _rows(saved: Checkpoint) -> list[dict[str, Any]]:
    """The record's layer table, refused where it is not one: a file may say anything."""
    rows = saved.record.get("layers", [])
    whole = isinstance(rows, list) and all(
        isinstance(row, dict) and isinstance(row.get("name"), str) for row in rows
    )
    if whole:
        whole = all(
            isinstance(row.get(key), int | float)
            for row in rows
            for key in ("kept", "total", "error")
        )
    if not whole:
        raise FileError("the file's record of layers is damaged.")
    return list(rows)
