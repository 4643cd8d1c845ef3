"""Solve Net-Trim (Aghasi et al. 2017): small ℓ₁ norm, nearly the same ReLU outputs.

    min ‖V‖₁  subject to  ‖(V X − Y)_Ω‖_F ≤ ξ ‖Y‖_F  and  (V X)_Ωᶜ ≤ 0,
    where Y = max(W X, 0) and Ω = {Y > 0}

This is the convex form of ‖max(V X, 0) − Y‖_F ≤ ξ‖Y‖_F. It needs the samples, not only their
moment, so it is no solver of `SOLVERS`. ADMM solves it on the splitting U = V, Z = V X. Every step
takes a product with X, a prefactored solve, a soft threshold and a projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lobs.errors import ProblemError
from lobs.solvers import linalg

_RELAXATION = 1.6
_BALANCE_EVERY = 25  # iterations between adjustments of the penalty


@dataclass(frozen=True, eq=False)
class NetTrim:
    """Hold sparse weights, their mask and the relative error of the ReLU outputs.

    `iterations` and `converged` say how ADMM ended.
    """

    weight: Tensor
    mask: Tensor
    relative_error: float
    iterations: int
    converged: bool


def net_trim(
    weight: Tensor,
    inputs: Tensor,
    xi: float,
    *,
    bias_column: bool = False,
    iterations: int = 2000,
    tolerance: float = 1e-4,
) -> NetTrim:
    """Solve Net-Trim's convex program for one fully-connected layer followed by ReLU.

    A step takes 4·rows·columns·samples multiply-adds. Memory is three matrices of outputs and X.

    Args:
        weight: W, (rows, columns).
        inputs: X, (columns, samples); with `bias_column` its last row is the constant 1.
        xi: allowed error relative to ‖Y‖_F.
        bias_column: leave the last column out of ‖V‖₁, free to move.
        iterations: largest number of ADMM steps.
        tolerance: stop when the relative primal and dual residuals are this small.
    """
    if weight.dim() != 2 or inputs.dim() != 2 or weight.shape[1] != inputs.shape[0]:
        raise ProblemError(
            f"net_trim: weight {tuple(weight.shape)} and inputs {tuple(inputs.shape)} do not "
            "multiply."
        )
    if not (math.isfinite(xi) and xi >= 0):
        raise ProblemError(f"net_trim: ξ is {xi:g}; it must be finite and not negative.")
    w, x = weight.to(torch.float64), inputs.to(torch.float64)
    scale = math.sqrt(
        float(x.square().sum()) / x.shape[0]
    )  # scale X to a mean eigenvalue of 1, so that both splits have equal weight
    x = x / max(scale, 1e-300)
    wanted = (w @ x).clamp_min(0.0)
    program = _Program(x, wanted, wanted > 0, xi * float(wanted.norm()), bias_column)
    v, steps, converged = program.run(w, iterations, tolerance)
    mask = v != 0
    if bias_column:
        mask[:, -1] = True
    error = float(((v @ x).clamp_min(0.0) - wanted).norm() / wanted.norm().clamp_min(1e-300))
    return NetTrim(v.to(weight.dtype), mask, error, steps, converged)


@dataclass
class _Program:
    x: Tensor
    wanted: Tensor
    active: Tensor
    radius: float
    bias_column: bool

    def run(self, v: Tensor, iterations: int, tolerance: float) -> tuple[Tensor, int, bool]:
        x = self.x
        solve = linalg.spd_solver(x @ x.T + torch.eye(len(x), dtype=torch.float64))
        penalty = 1.0 / max(float(v.abs().mean()), 1e-300)
        u, z = v.clone(), v @ x
        du, dz = torch.zeros_like(u), torch.zeros_like(z)
        for step in range(1, iterations + 1):
            v = solve((u - du) + (z - dz) @ x.T)
            vx = v @ x
            # Over-relaxation.
            a, b = _RELAXATION * v + (1 - _RELAXATION) * u, _RELAXATION * vx + (1 - _RELAXATION) * z
            before_u, before_z = u, z
            u, z = self._shrink(a + du, 1.0 / penalty), self._project(b + dz)
            du, dz = du + a - u, dz + b - z
            primal = math.hypot(float((v - u).norm()), float((vx - z).norm()))
            dual = float(((u - before_u) + (z - before_z) @ x.T).norm())
            if primal <= tolerance * math.hypot(
                float(u.norm()), float(z.norm())
            ) and dual <= tolerance * float((du + dz @ x.T).norm() + u.norm()):
                return u, step, True
            if step % _BALANCE_EVERY == 0 and (primal > 5 * dual or dual > 5 * primal):
                factor = 2.0 if primal > dual else 0.5
                # The factorisation does not depend on the penalty, so only the duals are rescaled.
                penalty, du, dz = penalty * factor, du / factor, dz / factor
        return u, iterations, False

    def _shrink(self, v: Tensor, by: float) -> Tensor:
        shrunk = v.sign() * (v.abs() - by).clamp_min(0.0)
        if self.bias_column:
            shrunk[:, -1] = v[:, -1]
        return shrunk

    def _project(self, z: Tensor) -> Tensor:
        """Project onto the constraints.

        Active entries end in the ball around Y, the others at or below zero.
        """
        off = torch.where(self.active, z - self.wanted, 0.0)
        length = float(off.norm())
        inside = 1.0 if length <= self.radius else self.radius / length
        return torch.where(self.active, self.wanted + off * inside, z.clamp_max(0.0))


def quadratic_form_bytes(samples: int, inputs: int, outputs: int, *, bytes_each: int = 8) -> int:
    """Return the memory of the quadratic constraint's matrix Q as originally formulated.

    Q has 2 · samples · outputs² · inputs entries.

    >>> quadratic_form_bytes(1000, 300, 100) / 1e9
    48.0
    """
    return 2 * samples * outputs**2 * inputs * bytes_each


def moment_bytes(inputs: int, *, bytes_each: int = 8) -> int:
    """Return the memory of L-OBS's Ψ and its inverse, for any number of samples.

    >>> moment_bytes(300) / 1e6
    1.44
    """
    return 2 * inputs**2 * bytes_each
