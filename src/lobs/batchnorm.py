"""Batch-norm re-estimation: a pruned network feeds its normalisations other numbers than the dense one did.

Running means and variances are set to those that the calibration data gives in the pruned network: sums over all
batches, each element counted once, the variance unbiased as torch keeps it. The first pass lets every normalisation work with
what it has seen so far, so that later layers see activations in their proper range; the second measures the network as it
then stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lobs.calibrate import call, evaluating
from lobs.distributed import crew
from lobs.layers import Layer
from lobs.progress import track

_PASSES = 2


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
            return f"statistics of {len(self.layers)} batch norms re-estimated; effect not measured"
        done = "re-estimated" if self.changed else "left as they were, since re-estimating them does not help"
        moved = f"output deviation {self.before:.4g} → {self.after:.4g}"
        return f"statistics of {len(self.layers)} batch norms {done} ({moved})"


def find_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Batch norms that keep running statistics; the others use each batch's own and need nothing."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return {name: m for name, m in norms.items() if m.running_mean is not None and m.running_var is not None}


def reestimate(
    model: nn.Module, pruned: Sequence[Layer], batches: Iterable[Any], measure: Callable[[], float | None]
) -> BatchNormEffect | None:
    """Re-estimate the statistics of all batch norms that run after a pruned layer; None where there is none.

    `measure` says how far the output is from the dense one. Should that grow, the old statistics come back.
    """
    norms = find_norms(model)
    if not norms:
        return None
    old = {name: (_mean(norm).clone(), _var(norm).clone()) for name, norm in norms.items()}
    before = measure()
    seen: dict[str, _Sums] = {}
    for turn in range(_PASSES):
        seen = {}
        with (
            crew().agree(),
            _watching(norms, pruned, seen, follow=turn == 0) as reached,
            evaluating(model),
            track("batch norm", None) as advance,
        ):
            for batch in batches:
                reached.clear()
                call(model, batch)
                advance(1)
        for name in dict.fromkeys(name for names in crew().hear(list(seen)) for name in names):
            sums = seen.setdefault(name, _Sums(_mean(norms[name])))
            sums.join()
            sums.write(norms[name])
    if not seen:
        return None
    after = measure()
    changed = before is None or after is None or after < before
    if not changed:
        for name, (mean, var) in old.items():
            _mean(norms[name]).copy_(mean)
            _var(norms[name]).copy_(var)
    return BatchNormEffect(tuple(seen), before, after, changed)


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """All running statistics, by name."""
    return {f"{n}:{part}": t for n, m in find_norms(model).items() for part, t in (("mean", _mean(m)), ("var", _var(m)))}


def take_up(model: nn.Module, statistics: Mapping[str, Tensor], effect: Mapping[str, Any] | None) -> BatchNormEffect | None:
    """Put back statistics that `statistics_of` gave, with what re-estimation had said."""
    for name, norm in find_norms(model).items():
        _mean(norm).copy_(statistics[f"{name}:mean"])
        _var(norm).copy_(statistics[f"{name}:var"])
    return None if effect is None else BatchNormEffect(**{**effect, "layers": tuple(effect["layers"])})


def borrow_statistics(model: nn.Module, source: nn.Module) -> None:
    """Give a network another's running statistics: those it had before they were re-estimated."""
    theirs = find_norms(source)
    for name, norm in find_norms(model).items():
        _mean(norm).copy_(_mean(theirs[name]))
        _var(norm).copy_(_var(theirs[name]))


class _Sums:
    """n, Σx and Σx² by channel, in float64 about a first guess of the mean, so that large means cost no digits."""

    def __init__(self, guess: Tensor) -> None:
        self.guess = guess.to(torch.float64).clone()
        self.n, self.first, self.second = 0, torch.zeros_like(self.guess), torch.zeros_like(self.guess)

    def add(self, x: Tensor) -> None:
        by_channel = x.detach().transpose(0, 1).flatten(1).to(torch.float64) - self.guess.unsqueeze(1)
        self.n += by_channel.shape[1]
        self.first += by_channel.sum(dim=1)
        self.second += by_channel.square().sum(dim=1)

    def join(self) -> None:
        """Add up what all processes of the crew have seen; their guesses are the same, the network being so."""
        crew().add(self.first, self.second)
        self.n = round(crew().total(self.n)[0])

    def write(self, norm: _BatchNorm) -> None:
        if self.n < 2:  # no variance in one value
            return
        mean = self.first / self.n
        _mean(norm).copy_(self.guess + mean)
        _var(norm).copy_((self.second - self.n * mean.square()).clamp_min(0.0) / (self.n - 1))


@contextmanager
def _watching(
    norms: dict[str, _BatchNorm], pruned: Sequence[Layer], seen: dict[str, _Sums], *, follow: bool
) -> Iterator[list[str]]:
    """Watch what reaches the batch norms; gives the list of pruned layers that have run, to be cleared before each pass."""
    reached: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            assert isinstance(module, _BatchNorm)
            if not reached:  # nothing before it was pruned: its statistics are still right
                return
            sums = seen.setdefault(name, _Sums(_mean(module)))
            sums.add(args[0])
            if follow:
                sums.write(module)

        return hook

    handles: list[Any] = []
    try:
        for layer in pruned:
            handles.append(layer.on_input(lambda _: reached.append("one more")))  # noqa: PERF401 - what is on must come off
        handles += [norm.register_forward_pre_hook(watch(name)) for name, norm in norms.items()]
        yield reached
    finally:
        for handle in handles:
            handle.remove()


def _mean(norm: _BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _var(norm: _BatchNorm) -> Tensor:
    assert norm.running_var is not None
    return norm.running_var
