"""Remove channels that nothing reads, and prove that the network computes what it did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lobs.calibration.channels.cutting import Cut, Sizes, cut
from lobs.calibration.channels.watching import Family, Slot, observe
from lobs.calibration.forward import call, evaluating, main_output
from lobs.errors import CalibrationError

# Largest difference of outputs, relative to the largest output: rounding only.
_TOLERANCE = 5e-5

Makeup = tuple[int, dict[Slot, int]]  # number of channels, and indices of each by slot


@dataclass
class Removal:
    """Remove channels from a network, in place.

    After each cut the network is observed again. The channels that are left must be as many as
    before less those removed, and of the same make-up. The output on the example must be the same.

    Args:
        model: the network.
        example: a tensor, or a mapping of arguments.
        families: the families of its channels, as `observe` found them.
        sizes: the sizes that have changed so far.
    """

    model: nn.Module
    example: Any
    families: Iterable[Family]
    _made: dict[frozenset[Slot], Makeup] = field(init=False)
    _before: Tensor = field(init=False)
    sizes: Sizes = field(default_factory=Sizes)
    _gone: dict[Slot, Tensor] = field(default_factory=dict)  # indices in the uncut network

    def __post_init__(self) -> None:
        self._made = _makeup(self.families)

    def remove(self, cuts: Sequence[Cut]) -> list[tuple[Cut, str]]:
        """Remove channels, and return those that could not go, with the reason.

        All are tried at once, then those of one kind together, then one family at a time.
        """
        if not cuts:
            return []
        self._before = self._output()
        if not self._cut(cuts, thorough=False):
            return []
        kinds: dict[Any, list[Cut]] = {}
        for each in cuts:
            kinds.setdefault(self._kind(each), []).append(each)
        return [failed for alike in kinds.values() for failed in self._remove_alike(alike)]

    def _remove_alike(self, cuts: Sequence[Cut]) -> list[tuple[Cut, str]]:
        why = self._cut(cuts)
        if not why:
            return []
        failed = [(cuts[0], why)]
        rest = cuts[1:]
        if rest and not self._cut(cuts[:1], thorough=False):
            failed = []
            for each in rest:
                reason = self._cut([each], thorough=False)
                failed += [(each, reason)] if reason else []
            return failed
        return failed + [(each, why) for each in rest]

    def _kind(self, each: Cut) -> Any:
        """Return a key that is equal for the same layers of several blocks."""
        parts = []
        for name, dim in each.family.slots:
            path, _, key = name.rpartition(".")
            own = path.rpartition(".")[2]
            parts.append((type(self.model.get_submodule(path)).__name__, own, key, dim))
        return tuple(parts)

    def _cut(self, cuts: Sequence[Cut], *, thorough: bool = True) -> str:
        expected = self._made | {
            frozenset(each.family.slots): (each.left, _widths(each.family)) for each in cuts
        }
        now = [self._renumbered(each) for each in cuts]
        why = cut(self.model, now, lambda: self._differs(expected), thorough=thorough)
        if not why:
            self._made, self.sizes = expected, self.sizes | Sizes.of(self.model, now)
            for each in cuts:
                for slot, indices in each.family.slots.items():
                    lost = [indices[each.gone].flatten(), *self._lost(slot)]
                    self._gone[slot] = torch.cat(lost).sort().values
        return why

    def _lost(self, slot: Slot) -> list[Tensor]:
        return [self._gone[slot]] if slot in self._gone else []

    def _renumbered(self, each: Cut) -> Cut:
        """Return a cut with the indices that its channels have after earlier cuts."""
        slots = {
            slot: indices - sum(torch.searchsorted(lost, indices) for lost in self._lost(slot))
            for slot, indices in each.family.slots.items()
        }
        return Cut(replace(each.family, slots=slots), each.gone)

    def _differs(self, expected: dict[frozenset[Slot], Makeup]) -> str:
        """Return how the network differs from before; empty if it does not."""
        try:
            after = self._output()
            if after.shape != self._before.shape:
                return f"the output would have shape {tuple(after.shape)}"
            scale = self._before.abs().max().clamp_min(1e-6)
            if not bool(((after - self._before).abs() <= _TOLERANCE * scale).all()):
                return "the output would change"
            now = _makeup(observe(self.model, self.example).families)
        except Exception as error:  # the network's own code, with sizes it does not expect
            return f"its code needs them ({_last(error)})"
        if all(_fits(slots, makeup, expected) for slots, makeup in now.items()):
            return ""
        return "its code would divide the others in another way"

    def _output(self) -> Tensor:
        with evaluating(self.model), torch.random.fork_rng():
            torch.manual_seed(0)
            out = main_output(call(self.model, self.example))
        if out is None:
            raise CalibrationError("the network returns no floating-point tensor.")
        return out


def _last(error: BaseException) -> str:
    """Return the first error of a chain, in one short line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:100]


def _widths(family: Family) -> dict[Slot, int]:
    return {slot: indices.shape[1] for slot, indices in family.slots.items()}


def _makeup(families: Iterable[Family]) -> dict[frozenset[Slot], Makeup]:
    return {frozenset(f.slots): (len(f), _widths(f)) for f in families}


def _fits(slots: frozenset[Slot], makeup: Makeup, expected: dict[frozenset[Slot], Makeup]) -> bool:
    """Return whether channels are those that the cuts should leave."""
    if makeup == expected.get(slots):
        return True
    # Where one head is left, its features no longer go together.
    count, widths = makeup
    for known, (left, before) in expected.items():
        if left == 1 and slots <= known:
            sizes = [(count * width, before[slot]) for slot, width in widths.items()]
            return all(n <= size for n, size in sizes) and any(n == size for n, size in sizes)
    return False
