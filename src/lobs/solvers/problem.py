"""The layer problem: min over sparse V of tr((V − W) Ψ (V − W)ᵀ).

Rows are output units; they share Ψ. A grouped layer carries one Ψ per group and weights of shape
(groups, rows, columns); a mask and a count always speak of the layer as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lobs.errors import ProblemError, SolverError, TargetError
from lobs.solvers.metric import Metric, metrics
from lobs.solvers.solution import Solution
from lobs.targets import Budget, ErrorBudget, Sparsity, Target

_STRIP = 2**23  # numbers looked at together where a copy of the whole would be too large
_DUST = 1e-6  # of a row's largest part in the output


@dataclass(frozen=True, eq=False)
class Problem:
    """One layer to make sparse.

    Args:
        weight: W, (rows, columns) or (groups, rows, columns).
        moment: Ψ = (1/n) Y Yᵀ, (columns, columns) or (groups, columns, columns).
        bias_column: the last column multiplies the constant 1; it is never removed but helps to
            compensate.
        mean: mean input, (columns,) or (groups, columns); only `apozw` needs it.
        curvature: diagonal of the loss's curvature in the weight's shape; only `obd-fisher` needs
            it.
        samples: how many inputs Ψ averages; with fewer than ten a column it is damped.
        damping: λ added to Ψ's diagonal; None lets `lobs.solvers.metric` choose, 0 unless Ψ is
            singular or of few samples.
        row_weight: how much each row's error matters when rows compete for what may stay, (rows,)
            or (groups, rows); it decides which weights go, while errors are still counted plainly.
        positions: how many columns in a row belong to one input channel: the size of a
            convolution's kernel.
        name: what messages call the layer.
        ridge: what every entry of Ψ's diagonal holds beside Ψ; it is taken off errors again. For
            moments too large to copy.
        units: what the layer's own weights were multiplied by, column by column; `solve` takes it
            off solutions again.
        kind: the type of the layer's own weights, where these are of another.

    >>> w = torch.tensor([[1.0, 2.0, 3.0]])
    >>> Problem(w, torch.eye(3)).error_of(torch.tensor([[0.0, 2.0, 3.0]]))
    1.0
    """

    weight: Tensor
    moment: Tensor
    bias_column: bool = False
    mean: Tensor | None = None
    samples: int | None = None
    damping: float | None = None
    row_weight: Tensor | None = None
    positions: int = 1
    name: str = "layer"
    curvature: Tensor | None = None
    ridge: float = 0.0
    units: Tensor | None = None
    kind: torch.dtype | None = None

    def __post_init__(self) -> None:
        for part in ("weight", "moment", "mean", "row_weight", "curvature"):
            tensor = getattr(self, part)
            if isinstance(tensor, Tensor):
                object.__setattr__(self, part, tensor.detach())
        w, psi = self.weight, self.moment
        for what, tensor in (("weight", w), ("moment", psi)):
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                kind = (
                    "on the meta device"
                    if isinstance(tensor, Tensor)
                    else f"a {type(tensor).__name__}"
                )
                raise ProblemError(
                    f"{self.name}: {what} is {kind}; give a tensor that holds numbers."
                )
        if w.dim() not in (2, 3) or psi.dim() != w.dim():
            raise ProblemError(
                f"{self.name}: weight {tuple(w.shape)} and moment {tuple(psi.shape)} must be "
                "(rows, columns) and "
                f"(columns, columns), or both with a leading group dimension."
            )
        wanted = (*w.shape[:-2], w.shape[-1], w.shape[-1])
        if tuple(psi.shape) != wanted:
            raise ProblemError(
                f"{self.name}: moment has shape {tuple(psi.shape)}, weight asks for {wanted}."
            )
        if w.shape[-1] == 0 or (w.dim() == 3 and w.shape[0] == 0):
            raise ProblemError(
                f"{self.name}: weight {tuple(w.shape)} has no columns, or no groups."
            )
        if not w.is_floating_point() or not psi.is_floating_point():
            raise ProblemError(
                f"{self.name}: weight and moment must be floating point, not {w.dtype}, "
                f"{psi.dtype}."
            )
        for what, tensor in (("weight", w), ("moment", psi)):
            check_finite(self.name, what, tensor)
        self._check_extras()
        free = w.shape[-1] - self.protected
        if self.positions < 1 or free % self.positions:
            raise ProblemError(
                f"{self.name}: {free} columns are not whole channels of {self.positions} positions "
                "each."
            )
        self._check_moment()
        if not math.isfinite(self._most_energy()):
            raise ProblemError(
                f"{self.name}: its output energy is beyond float64: weights reach "
                f"{_largest(w):.1e}, Ψ "
                f"{_largest(psi):.1e}. Scale the inputs down."
            )

    def _check_extras(self) -> None:
        """What only some solvers look at must be right all the same: a NaN among scores would decide in silence."""
        w = self.weight
        sizes = {
            "row_weight": w[..., 0].numel(),
            "curvature": w.numel(),
            "mean": w[..., 0, :].numel() if w.shape[-2] else None,
        }
        for what, size in sizes.items():
            tensor = getattr(self, what)
            if tensor is None:
                continue
            if size is not None and tensor.numel() != size:
                raise ProblemError(
                    f"{self.name}: {what} has {tensor.numel()} entries, the weight asks for {size}."
                )
            low = float("-inf") if what == "mean" else 0.0
            bad = int((~(torch.isfinite(tensor) & (tensor >= low))).sum())
            if bad:
                fault = "NaN or infinite" if what == "mean" else "NaN, infinite or negative"
                raise ProblemError(
                    f"{self.name}: {what} has {bad} {fault} entries; it must be finite. Leave it "
                    "out, or mend it."
                )
        if self.curvature is not None and self.curvature.shape != w.shape:
            raise ProblemError(
                f"{self.name}: curvature has shape {tuple(self.curvature.shape)}, weight "
                f"{tuple(w.shape)}."
            )
        if self.damping is not None and not (self.damping >= 0 and math.isfinite(self.damping)):
            raise ProblemError(
                f"{self.name}: damping is {self.damping:g}; it must be finite and not negative."
            )

    def _check_moment(self) -> None:
        psi = self.moment
        if psi.numel() == 0:
            return
        if float(psi.diagonal(dim1=-2, dim2=-1).min()) < 0:
            raise ProblemError(
                f"{self.name}: Ψ has a negative diagonal; it must be a mean of outer products."
            )
        largest = _largest(psi)
        step = _strip(psi.shape[-1])
        for start in range(0, psi.shape[-1], step):
            strip = slice(start, start + step)
            if float((psi[..., strip, :] - psi[..., :, strip].mT).abs().amax()) > 1e-4 * largest:
                raise ProblemError(f"{self.name}: Ψ is not symmetric. Pass Y Yᵀ / n.")

    def _most_energy(self) -> float:
        """No less than the output's energy: what it would be if all inputs pulled the same way."""
        size = (
            self.moment.diagonal(dim1=-2, dim2=-1)
            .to(torch.float64)
            .clamp_min(0.0)
            .sqrt()
            .unsqueeze(-1)
        )
        return sum(float((w.abs() @ size).square().sum()) for w in _differences(self.weight, None))

    @property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, moment) of every group; one pair for an ungrouped layer."""
        if self.weight.dim() == 2:
            return [(self.weight, self.moment)]
        return list(zip(self.weight, self.moment, strict=True))

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Every group's moment made ready for solving; factorised once, whoever asks."""
        return tuple(self.damped_metrics())

    def damped_metrics(self, first: float = 0.0) -> list[Metric]:
        """The same with damping that starts from `first` where a moment is singular."""
        if self.units is not None:  # a wide layer's moment has been made ready, for all solvers
            return list(self.metrics)
        psi = self.moment if self.moment.dim() == 3 else self.moment.unsqueeze(0)
        return metrics(
            psi,
            self.damping,
            first=first,
            protected=self.protected,
            name=self.name,
            samples=self.samples,
        )

    def some_rows(self, rows: Tensor) -> Problem:
        """The same problem for some rows of every together."""
        weight = self.weight.index_select(-2, rows)
        part = replace(self, weight=weight, row_weight=self.importance.index_select(-1, rows))
        part.__dict__["metrics"] = self.metrics  # the moment is the same: do not factorise it again
        return part

    @property
    def protected(self) -> int:
        """How many trailing columns may not be removed: 1 with a bias column, else 0."""
        return int(self.bias_column)

    @property
    def prunable(self) -> int:
        """How many weights may be removed."""
        return self.weight.numel() - self.protected * self.weight[..., 0].numel()

    @property
    def own_weight(self) -> Tensor:
        """The weights as the layer has them, in float64."""
        weight = self.weight.to(torch.float64)
        return weight if self.units is None else weight / self.units

    @property
    def importance(self) -> Tensor:
        """`row_weight` as (groups, rows) in float64; ones where none was given."""
        shape = (len(self.groups), self.weight.shape[-2])
        if self.row_weight is None:
            return torch.ones(shape, dtype=torch.float64, device=self.weight.device)
        return self.row_weight.to(self.weight.device, torch.float64).reshape(shape)

    @cached_property
    def energy(self) -> float:
        """Mean squared output of the dense layer, tr(W Ψ Wᵀ)."""
        return self._quadratic(self.weight)

    def error_of(self, weight: Tensor) -> float:
        """E of any replacement for `weight`, in the same units, in float64."""
        return self._quadratic(weight, self.weight)

    def row_errors_of(self, weight: Tensor) -> Tensor:
        """The same by row, (groups, rows)."""
        return self._by_row(weight, self.weight).view(len(self.groups), self.weight.shape[-2])

    def own_error_of(self, weight: Tensor) -> float:
        """E of any replacement for the layer's own weights."""
        return self.error_of(self._in_units(weight))

    def hidden_error_of(self, weight: Tensor) -> float:
        """How much of the layer's own weights' E rounding may have hidden, because Ψ is a sum of float32 products.

        Entries of Ψ are right to 1e-6 · √(Ψ_ii Ψ_jj), measured; so E is right to 1e-6 · Σ_rows (Σ_i
        |δ_i| √Ψ_ii)².
        """
        size = (
            self.moment.diagonal(dim1=-2, dim2=-1)
            .to(torch.float64)
            .clamp_min(0.0)
            .sqrt()
            .unsqueeze(-1)
        )
        deltas = _differences(self._in_units(weight), self.weight)
        return 1e-6 * sum(float((d.abs() @ size).square().sum()) for d in deltas)

    def largest_error_of(self, weight: Tensor) -> float:
        """E of the layer's own weights plus what rounding may have hidden: for bounds, which must hold."""
        return self.own_error_of(weight) + self.hidden_error_of(weight)

    def given_back(self, solution: Solution) -> Solution:
        """A solution as weights of the layer itself, its error recomputed from the bits that the layer gets."""
        if self.units is None:
            return solution
        most = torch.finfo(self.own_type).max
        weight = solution.weight.div_(self.units).clamp_(-most, most).to(self.own_type)
        return replace(solution, weight=weight, error=self.own_error_of(weight))

    @property
    def own_type(self) -> torch.dtype:
        """The type of the layer's own weights."""
        return self.kind or self.weight.dtype

    def _in_units(self, weight: Tensor) -> Tensor:
        return weight if self.units is None else weight.to(self.weight.dtype) * self.units

    def _quadratic(self, weight: Tensor, other: Tensor | None = None) -> float:
        """tr(Δ Ψ Δᵀ)."""
        return max(0.0, float(self._by_row(weight, other).sum()))

    def _by_row(self, weight: Tensor, other: Tensor | None) -> Tensor:
        """δ Ψ δᵀ of every row, some rows at a time; of a moment that is too large to copy some columns at a time."""
        d = self.moment.shape[-1]
        step = _strip(d) if self.ridge else d
        parts = []
        for delta in _differences(weight, other):
            found = -self.ridge * delta.square().sum(dim=-1)
            for start in range(0, d, step):
                part = self.moment[..., start : start + step].to(torch.float64)
                found += ((delta @ part) * delta[..., start : start + step]).sum(dim=-1)
            parts.append(found)
        return torch.cat(parts, dim=-1)


def _strip(width: int) -> int:
    """How many rows of so many numbers are looked at together."""
    return max(1, _STRIP // max(1, width))


def _differences(weight: Tensor, other: Tensor | None) -> Iterator[Tensor]:
    """Weights, less others where there are some, in float64 and strips of rows."""
    step = _strip(weight[..., 0, :].numel()) if weight.shape[-2] else 1
    rows = torch.split(weight, step, dim=-2)
    others = rows if other is None else torch.split(other, step, dim=-2)
    for some, away in zip(rows, others, strict=True):
        yield (
            some.to(torch.float64)
            if other is None
            else some.to(torch.float64) - away.to(torch.float64)
        )


def check_finite(name: str, what: str, tensor: Tensor) -> None:
    """Refuse NaN and infinities."""
    if _largest(tensor) == math.inf:
        bad = int((~torch.isfinite(tensor)).sum())
        raise ProblemError(
            f"{name}: {what} has {bad} NaN or infinite entries. Check the network first."
        )


def _largest(tensor: Tensor) -> float:
    """The largest size of any entry, infinite if one is not a number, without a copy of the tensor."""
    if not tensor.numel():
        return 0.0
    low, high = float(tensor.amin()), float(tensor.amax())
    return max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.inf


@runtime_checkable
class Solver(Protocol):
    """Anything that turns a problem and a target into a solution.

    `needs` names the optional parts of a `Problem` it cannot do without.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Names of optional `Problem` fields that must be present."""
        ...

    def __call__(self, problem: Problem, target: Target) -> Solution:
        """Solve."""
        ...


def finish(
    problem: Problem,
    weight: Tensor,
    mask: Tensor,
    *,
    damping: float = 0.0,
    curve: Tensor | None = None,
) -> Solution:
    """Round a solver's float64 weights to the layer's type, apply the mask, recompute the error from those bits."""
    # The best weights may lie beyond what the layer's type can hold, as half precision ends at
    # 65,504.
    most = torch.finfo(problem.weight.dtype).max
    final = (
        torch.where(mask, weight, torch.zeros_like(weight))
        .clamp(-most, most)
        .to(problem.weight.dtype)
    )
    # What was zero must not come back as the last digits of a solve, nor a row change that lost
    # nothing but zeros.
    zero = problem.weight == 0
    if bool(zero.any()):
        energy = problem.moment.diagonal(dim1=-2, dim2=-1).clamp_min(0).to(torch.float64)
        size = final.abs() * energy.sqrt().unsqueeze(
            -2
        )  # in float64: half precision would lose small ones and large ones
        dust = zero & (size <= _DUST * size.amax(dim=-1, keepdim=True))
        final = torch.where(
            (mask | zero).all(dim=-1, keepdim=True), problem.weight, torch.where(dust, 0.0, final)
        )
    return Solution(
        weight=final,
        mask=mask,
        error=problem.error_of(final),
        energy=problem.energy,
        removed=int((~mask).sum()),
        prunable=problem.prunable,
        damping=damping,
        curve=curve,
    )


def choose_count(
    problem: Problem, target: Target, error_at: Callable[[int], float], *, step: int = 1
) -> int:
    """How many weights to remove: by fraction directly, by error the most whose error stays within the limit.

    Counts are multiples of `step`, for solvers to which every look is expensive. The search assumes
    that `error_at` grows with the count, as it does for `exact`. For the others it grows in all but
    noise; the count found then satisfies the limit, though a larger one might too.
    """
    match target:
        case Sparsity():
            return target.count(problem.prunable)
        case ErrorBudget():
            limit = target.limit(problem.energy)
            low, high = 0, problem.prunable // step
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (
                    (middle, high) if error_at(middle * step) <= limit else (low, middle - 1)
                )
            return low * step
        case Budget():
            raise TargetError(
                f"{problem.name}: a Budget is for a whole network; a single layer takes Sparsity "
                "or ErrorBudget."
            )
    raise SolverError(
        f"{problem.name}: this solver is not compatible with {target!r}. Use solver='auto' or "
        "solver='greedy'."
    )
