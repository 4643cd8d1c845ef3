"""Batch-norm re-estimation: a pruned network feeds its normalisations other numbers than the dense one did.

Both networks run on the same data, and running statistics move by what pruning moved: means by the
difference of the two networks' means, variances by the ratio of their variances. A network that
lost nothing keeps its statistics to the bit, and what a few hundred images have of their own,
against all those that the network was trained on, cancels out.

Every normalisation works with what it has seen so far, so that those behind it see what they will
see in the end. Setting all of them at once from a pass with the old statistics would not do: if the
first is 5 % off, it is corrected, and each one behind it once more for its own measure of the same
5 %; after fifty layers nothing is left of the network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lobs.solvers import linalg
from lobs._system.distributed import process_group
from lobs.calibration.forward import call
from lobs.layers.hooks import before_forward

# See `reestimate`.
Compare: TypeAlias = Callable[[Callable[[Any], None] | None], float | None]
# Statistics that bring the output nearer by less stay: others than the dense network's cost the
# certificate its bound.
_WORTH = 0.01
_PIECE = 2**18  # values that are summed at a time, which stay in the cache
# a variance that changed by more is that of a channel with next to nothing in it, on these data
_MOST = 4.0


@dataclass(frozen=True)
class BatchNormEffect:
    """What re-estimation did: how far the output was from the dense one before and after, root mean square over the data.

    `changed` is False where it did not help: the old statistics then stand.
    """

    layers: tuple[str, ...]
    before: float | None
    after: float | None
    changed: bool

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"statistics of {self._norms} re-estimated; effect not measured"
        help_ = "hardly helps" if self.after < self.before else "does not help"
        done = (
            "re-estimated"
            if self.changed
            else f"left as they were, since re-estimating them {help_}"
        )
        moved = f"output deviation {self.before:.4g} → {self.after:.4g}"
        return f"statistics of {self._norms} {done} ({moved})"

    @property
    def _norms(self) -> str:
        return f"{len(self.layers)} batch norm{'s' * (len(self.layers) != 1)}"


def find_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Batch norms that keep running statistics; the others use each batch's own and need nothing."""
    norms = {
        name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    }
    return {
        name: m
        for name, m in norms.items()
        if m.running_mean is not None and m.running_var is not None
    }


def reestimate(model: nn.Module, dense: nn.Module, compare: Compare) -> BatchNormEffect | None:
    """Re-estimate the statistics of all batch norms that pruning has reached; None where there is none.

    They start as the dense network's. `compare` runs the dense and then the pruned network on every
    batch, calls what it is given with the batch, and says in the end how far the output is from the
    dense one's; should that not shrink by a hundredth, the statistics are again what they were.
    """
    norms, theirs = find_norms(model), find_norms(dense)
    if not norms:
        return None
    dense_sums = {name: _Sums(_mean(norm)) for name, norm in theirs.items()}
    sums = {name: _Sums(_mean(norm)) for name, norm in norms.items()}

    # After each call of a norm: one that is called twice is compared with what the dense network
    # had seen by then.
    dense_calls: dict[str, list[_Sums]] = {name: [] for name in theirs}

    def note(name: str, x: Tensor) -> None:
        dense_sums[name].add(x)
        dense_calls[name].append(copy.deepcopy(dense_sums[name]))

    def follow(name: str, x: Tensor) -> None:
        sums[name].add(x)
        calls = dense_calls[name]
        _move(norms[name], theirs[name], calls.pop(0) if calls else dense_sums[name], sums[name])

    def once_more(batch: Any) -> None:
        """The pruned network again, every norm with what it has seen so far."""
        with _watching(norms, follow):
            call(model, batch)
        borrow_statistics(model, dense)
        for calls in dense_calls.values():
            calls.clear()

    with _watching(theirs, note):
        before = compare(once_more)
    for name, norm in norms.items():
        dense_sums[name].join()
        sums[name].join()
        _move(norm, theirs[name], dense_sums[name], sums[name])
    moved = [name for name, norm in norms.items() if not _same(norm, theirs[name])]
    if not moved:
        return None
    after = compare(None)
    changed = before is None or after is None or after < (1 - _WORTH) * before
    if not changed:
        borrow_statistics(model, dense)
    return BatchNormEffect(tuple(moved), before, after, changed)


def _same(norm: _BatchNorm, other: _BatchNorm) -> bool:
    return _mean(norm).equal(_mean(other)) and _var(norm).equal(_var(other))


def _move(norm: _BatchNorm, old: _BatchNorm, dense: _Sums, pruned: _Sums) -> None:
    """Set a norm's statistics to the old one's, moved by what differs between the two networks."""
    if min(dense.n, pruned.n) < 2:  # no variance in one value
        return
    mean, var = _mean(old), _var(old)
    # What the norm divides by is variance + ε; that is what changes by a ratio, also where there is
    # next to no variance.
    tiny = torch.finfo(torch.float64).tiny
    ratio = (pruned.variance + norm.eps).clamp_min(tiny) / (dense.variance + norm.eps).clamp_min(
        tiny
    )
    ratio = ratio.clamp(1 / _MOST, _MOST)
    _mean(norm).copy_(mean + (pruned.mean - dense.mean))
    _var(norm).copy_((var + (var + norm.eps) * (ratio - 1)).clamp_min(0.0))


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """All running statistics, by name."""
    return {
        f"{n}:{part}": t
        for n, m in find_norms(model).items()
        for part, t in (("mean", _mean(m)), ("var", _var(m)))
    }


def take_up(
    model: nn.Module, statistics: Mapping[str, Tensor], effect: Mapping[str, Any] | None
) -> BatchNormEffect | None:
    """Put back statistics that `statistics_of` gave, with what re-estimation had said."""
    for name, norm in find_norms(model).items():
        _mean(norm).copy_(statistics[f"{name}:mean"])
        _var(norm).copy_(statistics[f"{name}:var"])
    return (
        None if effect is None else BatchNormEffect(**{**effect, "layers": tuple(effect["layers"])})
    )


def borrow_statistics(model: nn.Module, source: nn.Module) -> None:
    """Give a network another's running statistics: those it had before they were re-estimated."""
    theirs = find_norms(source)
    for name, norm in find_norms(model).items():
        _mean(norm).copy_(_mean(theirs[name]))
        _var(norm).copy_(_var(theirs[name]))


class _Sums:
    """n, Σx and Σx² by channel, in float64 about a first guess of the mean, so that large means cost no digits.

    Pieces of the data are summed in their own type, each about its own mean, wherever that is from
    the guess.
    """

    def __init__(self, guess: Tensor) -> None:
        self.guess = guess.to(torch.float64).clone()
        self.n, self.first, self.second = (
            0,
            torch.zeros_like(self.guess),
            torch.zeros_like(self.guess),
        )

    def add(self, x: Tensor) -> None:
        kind = torch.promote_types(x.dtype, torch.float32)
        for some in torch.split(x.detach(), max(1, _PIECE // max(1, x[:1].numel()))):
            lines = some.transpose(0, 1).flatten(1).to(kind)
            middle = lines.mean(dim=1, keepdim=True).nan_to_num(
                0.0, 0.0, 0.0
            )  # which float32 may not hold
            about, n = lines - middle, lines.shape[1]
            shift, rest = (
                middle.squeeze(1).to(torch.float64) - self.guess,
                about.sum(dim=1, dtype=torch.float64),
            )
            self.n += n
            self.first += rest + n * shift
            self.second += linalg.squares(about) + shift * (2 * rest + n * shift)

    def join(self) -> None:
        """Add up what all processes of the group have seen; their guesses are the same, the network being so."""
        process_group().all_reduce(self.first, self.second)
        self.n = round(process_group().sum_numbers(self.n)[0])

    @property
    def mean(self) -> Tensor:
        return self.guess + self.first / self.n

    @property
    def variance(self) -> Tensor:
        return (self.second - self.first.square() / self.n).clamp_min(0.0) / (self.n - 1)


@contextmanager
def _watching(norms: dict[str, _BatchNorm], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Show what reaches each batch norm before it works on it."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _, args, named: see(name, args[0] if args else named["input"])

    handles = [
        before_forward(norm, watch(name), with_kwargs=True)
        for name, norm in norms.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mean(norm: _BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _var(norm: _BatchNorm) -> Tensor:
    assert norm.running_var is not None
    return norm.running_var
