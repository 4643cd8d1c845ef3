"""Hostile layers: moments, weights, targets and extras that no sane network gives, combined."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lobs import SOLVERS, Block, Budget, ErrorBudget, NByM, Problem, Sparsity, Structured, solve
from tests.hostile.running import faults

NAN, INF = float("nan"), float("inf")


def scaled(factor):
    return lambda m, _: m * factor


def planted(*entries):
    def plant(m, _):
        for value, i, j in entries:
            m[i % len(m), j % len(m)] = value
        return m

    return plant


def dead(m, rng):
    q = rng.randrange(len(m))
    m[q], m[:, q] = 0, 0
    return m


def duplicated(m, rng):
    p, q = rng.randrange(len(m)), rng.randrange(len(m))
    m[p] = m[q]
    m[:, p] = m[:, q]
    m[p, p] = m[q, q]
    return m


def spread(m, _):
    s = 10.0 ** torch.linspace(-12, 12, len(m), dtype=m.dtype)
    return m * s * s.unsqueeze(1)


MOMENTS = [
    scaled(1.0),
    scaled(0.0),
    *(scaled(s) for s in (1e30, 1e-30, 1e300, 1e-305, -1.0)),
    *(planted((v, 0, 0)) for v in (NAN, INF, -1.0)),
    planted((NAN, 0, 1), (NAN, 1, 0)),
    planted((100.0, 0, 1)),
    planted((100.0, 0, 1), (100.0, 1, 0)),
    dead,
    duplicated,
    spread,
    lambda m, _: torch.eye(len(m), dtype=m.dtype),
    lambda m, _: torch.ones_like(m),
    *(
        lambda m, _, kind=kind: m.to(kind)
        for kind in (torch.float16, torch.bfloat16, torch.float32, torch.int64)
    ),
    lambda m, _: m[:-1],
    lambda m, _: m.to("meta"),
]

WEIGHTS = [
    lambda w: w,
    *(lambda w, s=s: w * s for s in (0.0, 1e30, 1e-30, 1e-42)),
    lambda w: w.round().clamp(-1, 1),
    lambda w: w * 10.0 ** torch.linspace(-20, 20, w.shape[-1]),
    *(
        lambda w, v=v: w.flatten().index_fill(0, torch.arange(min(1, w.numel())), v).view(w.shape)
        for v in (NAN, INF)
    ),
    *(
        lambda w, kind=kind: w.to(kind)
        for kind in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64)
    ),
    lambda w: (w * 30000).clamp(-6e4, 6e4).to(torch.float16),
    lambda w: torch.stack([w, w], dim=-1).flatten(-2)[..., ::2],
    lambda w: w.requires_grad_(),
    lambda w: w.to("meta"),
    lambda w: w.mT,
]

TARGETS = [
    0,
    1,
    0.0,
    1.0,
    0.5,
    0.5,
    0.9,
    1 / 3,
    NAN,
    -0.1,
    1.1,
    INF,
    10**400,
    None,
    "half",
    True,
    ErrorBudget(0),
    ErrorBudget(0.3, relative=True),
    ErrorBudget(1e-30),
    ErrorBudget(1e200),
    Sparsity({"a": 0.5}),
    NByM(2, 4),
    NByM(0, 3),
    NByM(1, 1),
    NByM(1, 2, along="channels"),
    Block(0.5, (2, 2)),
    Block(1.0, (100, 100)),
    Structured(0.5),
    Structured(0.5, "inputs"),
    Structured(1.0),
    Structured(1.0, "inputs"),
    Budget(parameters=3),
]


def drawn(seed):
    rng = random.Random(seed)
    groups, rows, d = (
        rng.choice([None, None, None, 1, 2]),
        rng.choice([0, 1, 1, 2, 3, 5]),
        rng.choice([1, 1, 2, 3, 4, 8, 12]),
    )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rng.choice([1, d // 2 + 1, 3 * d]), d, generator=generator, dtype=torch.float64)
    moment = rng.choice(MOMENTS)(x.T @ x / len(x), rng)
    shape = (rows, d) if groups is None else (groups, rows, d)
    weight = rng.choice([WEIGHTS[0], *WEIGHTS])(torch.randn(shape, generator=generator))
    if groups is not None and rng.random() < 0.95:
        moment = torch.stack([moment] * groups)
    extras = {}
    if rng.random() < 0.3:
        extras["bias_column"] = True
    if rng.random() < 0.2:
        extras["damping"] = rng.choice([0.0, 1e-6, 1e30, 1e-300, -1.0, NAN, INF])
    if rng.random() < 0.2:
        extras["row_weight"] = torch.full(
            shape[:-1], rng.choice([1.0, 0.0, NAN, -1.0, 1e30, 1e-40, INF])
        )
    if rng.random() < 0.4:
        extras["mean"] = torch.full((*shape[:-2], d), rng.choice([0.0, 1.0, NAN, 1e30]))
    if rng.random() < 0.4:
        extras["curvature"] = torch.full(shape, rng.choice([0.0, 1.0, NAN, -1.0, 1e30]))
    if rng.random() < 0.1:
        extras["positions"] = rng.choice([2, 0, -1, 3])
    return (
        weight,
        moment,
        extras,
        rng.choice([*SOLVERS, *SOLVERS, "unheard of", None]),
        rng.choice(TARGETS),
    )


def wrong(seed):
    weight, moment, extras, solver, target = drawn(seed)
    before = [t.detach().clone() for t in (weight, moment)]
    solution = solve(Problem(weight, moment, name="layer 'fc'", **extras), solver, target)
    laws = {
        "meta tensors were solved": not (weight.is_meta or moment.is_meta),
        "inputs were written to": all(
            torch.equal(t.detach(), b) for t, b in zip((weight, moment), before, strict=True)
        ),
        "shape or type changed": solution.weight.shape == weight.shape
        and solution.weight.dtype == weight.dtype,
        "weights are not finite": bool(torch.isfinite(solution.weight).all()),
        "removed weights are not zero": bool((solution.weight[~solution.mask] == 0).all()),
        "error is not a number": math.isfinite(solution.error) and solution.error >= 0,
        "count of removed is wrong": int((~solution.mask).sum()) == solution.removed,
        "a bias went": "bias_column" not in extras or bool(solution.mask[..., -1].all()),
    }
    if isinstance(target, int | float):
        laws["other than the count asked for went"] = solution.removed == math.floor(
            target * solution.prunable + 0.5
        )
    if isinstance(target, ErrorBudget) and solution.removed:
        laws["the error budget is exceeded"] = (
            solution.error <= target.limit(solution.energy) * 1.001
        )
    return "; ".join(fault for fault, holds in laws.items() if not holds)


@pytest.mark.parametrize("start", range(0, 500, 125))
def test_a_hostile_layer_is_solved_or_refused(start):
    assert faults(wrong, range(start, start + 125)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 21_000, 500))
def test_eleven_thousand_hostile_layers_are_solved_or_refused(start):
    assert faults(wrong, range(start, start + 500)) == {}


def test_what_half_precision_cannot_hold_is_held_at_its_end():
    # Without the second column the first must grow past 65,504 to make up for it.
    problem = Problem(
        torch.tensor([[60000.0, 60000.0]], dtype=torch.float16),
        torch.ones(2, 2) + 0.01 * torch.eye(2),
    )
    solution = solve(problem, "greedy", Sparsity(0.5))
    assert float(solution.weight.abs().max()) == 65504.0
    assert solution.error == pytest.approx(problem.error_of(solution.weight))
