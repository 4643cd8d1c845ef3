"""Re-estimate batch-norm statistics: pruning changes the inputs of the normalisations.

Both networks run on the same data. Running means move by the difference of the two networks' means,
running variances by the ratio of their variances. A network that lost nothing keeps its statistics
to the bit. The peculiarities of a few hundred images cancel out.

Every norm uses the statistics seen so far, so later norms see their final inputs. Setting all norms
at once from one pass with the old statistics fails. If the first norm is 5 % off, it is corrected,
and every later norm is corrected again for the same 5 %. After fifty layers the network is ruined.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lobs._system.distributed import process_group
from lobs.calibration.comparison import Comparison, side_by_side
from lobs.calibration.forward import call
from lobs.layers.hooks import before_forward
from lobs.solvers import linalg

# Smallest relative gain for which new statistics are kept: they cost the certificate its bound.
_WORTH = 0.01
_PIECE = 2**18  # values summed at a time; they fit into the cache
_MOST = 4.0  # largest ratio of variances; a larger one comes from a nearly empty channel


@dataclass(frozen=True)
class BatchNormEffect:
    """The effect of re-estimation on the root mean square distance from the dense output.

    `changed` is False where it did not help. The old statistics are then kept.
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
    """Return the batch norms that keep running statistics, by name."""
    norms = {
        name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    }
    return {
        name: m
        for name, m in norms.items()
        if m.running_mean is not None and m.running_var is not None
    }


def reestimate(
    model: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    comparison: Callable[[], Comparison],
) -> tuple[BatchNormEffect | None, Comparison | None]:
    """Re-estimate the statistics of all batch norms that pruning has reached.

    They start as the dense network's. If the new ones do not bring the output nearer to the dense
    one by a hundredth, the old ones are put back.

    Args:
        model: the pruned network, changed in place.
        dense: the network as it was given.
        batches: the data, read up to twice.
        comparison: makes an empty comparison of the two networks.

    Returns:
        The effect, None where there is nothing to re-estimate, and the comparison that holds for
        the network as it is left, None where none was made.
    """
    norms = find_norms(model)
    if not norms:
        return None, None
    update, before = NormUpdate(model, dense), comparison()
    with (
        side_by_side(dense, model, batches, "batch norm") as passing,
        watching_norms(update.dense, update.see_dense),
    ):
        for batch in passing:
            before.add(batch)
            update.add(batch)
    before.join()
    moved = update.apply()
    if not moved:
        return None, before
    after = comparison().over(batches)
    unknown = before.output is None or after.output is None
    changed = unknown or after.output < (1 - _WORTH) * before.output  # type: ignore[operator]
    if not changed:
        borrow_statistics(model, dense)
    effect = BatchNormEffect(tuple(moved), before.output, after.output, changed)
    return effect, after if changed else before


class NormUpdate:
    """New statistics for a pruned network's batch norms, from both networks' inputs to them."""

    def __init__(self, model: nn.Module, dense: nn.Module) -> None:
        self.model, self.origin = model, dense
        self.norms, self.dense = find_norms(model), find_norms(dense)
        self._dense_sums = {name: _Sums(_mean(norm)) for name, norm in self.dense.items()}
        self._sums = {name: _Sums(_mean(norm)) for name, norm in self.norms.items()}
        # The dense sums after each call: a norm that is called twice in one pass is compared with
        # what the dense network had seen by the same call.
        self._calls: dict[str, list[_Sums]] = {name: [] for name in self.dense}

    def see_dense(self, name: str, x: Tensor) -> None:
        """Add what reached one of the dense network's norms."""
        self._dense_sums[name].add(x)
        self._calls[name].append(copy.deepcopy(self._dense_sums[name]))

    def add(self, batch: Any) -> None:
        """Run the pruned network once more, every norm with the statistics seen so far."""
        with watching_norms(self.norms, self._follow):
            call(self.model, batch)
        borrow_statistics(self.model, self.origin)
        for calls in self._calls.values():
            calls.clear()

    def apply(self) -> list[str]:
        """Write the new statistics and return the names of the norms that changed."""
        for name, norm in self.norms.items():
            self._dense_sums[name].join()
            self._sums[name].join()
            _move(norm, self.dense[name], self._dense_sums[name], self._sums[name])
        return [name for name, norm in self.norms.items() if not _same(norm, self.dense[name])]

    def _follow(self, name: str, x: Tensor) -> None:
        self._sums[name].add(x)
        calls = self._calls[name]
        seen = calls.pop(0) if calls else self._dense_sums[name]
        _move(self.norms[name], self.dense[name], seen, self._sums[name])


def _same(norm: _BatchNorm, other: _BatchNorm) -> bool:
    return _mean(norm).equal(_mean(other)) and _var(norm).equal(_var(other))


def _move(norm: _BatchNorm, old: _BatchNorm, dense: _Sums, pruned: _Sums) -> None:
    """Set a norm's statistics to the old ones, moved by the difference between the networks."""
    if min(dense.n, pruned.n) < 2:  # no variance in one value
        return
    mean, var = _mean(old), _var(old)
    # The norm divides by variance + ε, so the ratio is taken of that.
    tiny = torch.finfo(torch.float64).tiny
    ratio = (pruned.variance + norm.eps).clamp_min(tiny) / (dense.variance + norm.eps).clamp_min(
        tiny
    )
    ratio = ratio.clamp(1 / _MOST, _MOST)
    _mean(norm).copy_(mean + (pruned.mean - dense.mean))
    _var(norm).copy_((var + (var + norm.eps) * (ratio - 1)).clamp_min(0.0))


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all running statistics by name."""
    return {
        f"{n}:{part}": t
        for n, m in find_norms(model).items()
        for part, t in (("mean", _mean(m)), ("var", _var(m)))
    }


def take_up(
    model: nn.Module, statistics: Mapping[str, Tensor], effect: Mapping[str, Any] | None
) -> BatchNormEffect | None:
    """Restore statistics and the effect that were stored with them."""
    for name, norm in find_norms(model).items():
        _mean(norm).copy_(statistics[f"{name}:mean"])
        _var(norm).copy_(statistics[f"{name}:var"])
    return (
        None if effect is None else BatchNormEffect(**{**effect, "layers": tuple(effect["layers"])})
    )


def borrow_statistics(model: nn.Module, source: nn.Module) -> None:
    """Copy another network's running statistics into a network."""
    theirs = find_norms(source)
    for name, norm in find_norms(model).items():
        _mean(norm).copy_(_mean(theirs[name]))
        _var(norm).copy_(_var(theirs[name]))


class _Sums:
    """n, Σx and Σx² by channel, in float64 about a guess of the mean: large means cost no digits.

    Pieces of the data are summed in their own type, each about its own mean.
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
        """Add up the sums of all processes. Their guesses agree because their networks do."""
        process_group().all_reduce(self.first, self.second)
        self.n = round(process_group().sum_numbers(self.n)[0])

    @property
    def mean(self) -> Tensor:
        return self.guess + self.first / self.n

    @property
    def variance(self) -> Tensor:
        return (self.second - self.first.square() / self.n).clamp_min(0.0) / (self.n - 1)


@contextmanager
def watching_norms(
    norms: dict[str, _BatchNorm], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Pass each batch norm's input to `see` before the norm runs."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _, args, named: see(name, args[0] if args else named["input"])

    handles = [before_forward(norm, watch(name), with_kwargs=True) for name, norm in norms.items()]
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
