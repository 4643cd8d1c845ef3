"""Refuse layer problems that cannot be solved, with a message that names the remedy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lobs.errors import ProblemError
from lobs.solvers.linalg import largest_entry, strip_size

if TYPE_CHECKING:
    from lobs.solvers.problem import Problem

_ASYMMETRY = 1e-4  # largest |Ψ − Ψᵀ| allowed, relative to Ψ's largest entry


def check_problem(problem: Problem) -> None:
    """Raise a `ProblemError` where a part of the problem is wrong."""
    w, psi = problem.weight, problem.moment
    _check_shapes(problem)
    for what, tensor in (("weight", w), ("moment", psi)):
        check_finite(problem.name, what, tensor)
    _check_extras(problem)
    _check_moment(problem)
    if not math.isfinite(problem.largest_energy):
        raise ProblemError(
            f"{problem.name}: its output energy exceeds float64: weights reach "
            f"{largest_entry(w):.1e}, Ψ {largest_entry(psi):.1e}. Scale the inputs down."
        )


def check_finite(name: str, what: str, tensor: Tensor) -> None:
    """Refuse NaN and infinities.

    Args:
        name: the layer's name in the message.
        what: what the tensor is, in the message.
        tensor: the tensor to check.
    """
    if largest_entry(tensor) == math.inf:
        bad = int((~torch.isfinite(tensor)).sum())
        raise ProblemError(
            f"{name}: {what} has {bad} NaN or infinite entries. Check the network first."
        )


def _require(problem: Problem, holds: bool, fault: str) -> None:
    if not holds:
        raise ProblemError(f"{problem.name}: {fault}")


def _check_shapes(problem: Problem) -> None:
    w, psi = problem.weight, problem.moment
    for what, tensor in (("weight", w), ("moment", psi)):
        given = isinstance(tensor, Tensor)
        kind = "on the meta device" if given else f"a {type(tensor).__name__}"
        holds = given and not tensor.is_meta
        _require(problem, holds, f"{what} is {kind}; give a tensor that holds numbers.")
    _require(
        problem,
        w.dim() in (2, 3) and psi.dim() == w.dim(),
        f"weight {tuple(w.shape)} and moment {tuple(psi.shape)} must be (rows, columns) and "
        "(columns, columns), or both with a leading group dimension.",
    )
    wanted = (*w.shape[:-2], w.shape[-1], w.shape[-1])
    fault = f"moment has shape {tuple(psi.shape)}, weight asks for {wanted}."
    _require(problem, tuple(psi.shape) == wanted, fault)
    empty = w.shape[-1] == 0 or (w.dim() == 3 and w.shape[0] == 0)
    _require(problem, not empty, f"weight {tuple(w.shape)} has no columns, or no groups.")
    _require(
        problem,
        w.is_floating_point() and psi.is_floating_point(),
        f"weight and moment must be floating point, not {w.dtype}, {psi.dtype}.",
    )


def _check_extras(problem: Problem) -> None:
    """Refuse bad optional parts: a NaN among scores would decide silently."""
    w = problem.weight
    sizes = {
        "row_weight": w[..., 0].numel(),
        "curvature": w.numel(),
        "mean": w[..., 0, :].numel() if w.shape[-2] else None,
    }
    for what, size in sizes.items():
        tensor = getattr(problem, what)
        if tensor is None:
            continue
        fault = f"{what} has {tensor.numel()} entries, the weight asks for {size}."
        _require(problem, size is None or tensor.numel() == size, fault)
        low = float("-inf") if what == "mean" else 0.0
        bad = int((~(torch.isfinite(tensor) & (tensor >= low))).sum())
        kind = "NaN or infinite" if what == "mean" else "NaN, infinite or negative"
        fault = f"{what} has {bad} {kind} entries; it must be finite. "
        _require(problem, not bad, fault + "Leave it out, or correct it.")
    if problem.curvature is not None:
        fault = f"curvature has shape {tuple(problem.curvature.shape)}, weight {tuple(w.shape)}."
        _require(problem, problem.curvature.shape == w.shape, fault)
    if problem.damping is not None:
        holds = problem.damping >= 0 and math.isfinite(problem.damping)
        fault = f"damping is {problem.damping:g}; it must be finite and not negative."
        _require(problem, holds, fault)
    free = w.shape[-1] - problem.protected
    _require(
        problem,
        problem.positions >= 1 and free % problem.positions == 0,
        f"{free} columns are not whole channels of {problem.positions} positions each.",
    )


def _check_moment(problem: Problem) -> None:
    psi = problem.moment
    if psi.numel() == 0:
        return
    _require(
        problem,
        float(psi.diagonal(dim1=-2, dim2=-1).min()) >= 0,
        "Ψ has a negative diagonal; it must be a mean of outer products.",
    )
    most, step = _ASYMMETRY * largest_entry(psi), strip_size(psi.shape[-1])
    for start in range(0, psi.shape[-1], step):
        strip = slice(start, start + step)
        away = float((psi[..., strip, :] - psi[..., :, strip].mT).abs().amax())
        _require(problem, away <= most, "Ψ is not symmetric. Pass Y Yᵀ / n.")
