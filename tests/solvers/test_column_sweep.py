"""One pass over the columns obeys N:M patterns, as it obeys counts."""

from __future__ import annotations

import pytest
import torch

from lobs import Auto, Block, ColumnSweep, LobsError, NByM, Problem, solve
from lobs._system.context import Context
from lobs._system.memory import MemoryLimit
from lobs.calibration.moments import Moments
from lobs.calibration.wide import wide_problem
from lobs.solvers.patterns.nbym import quota_of
from tests.conftest import make_moment
from tests.solvers.test_laws import PROBLEMS

PATTERNS = [(2, 4), (1, 4), (4, 8), (3, 3), (0, 5)]


def shares(mask, problem, target):
    """Return the kept weights of every group of every row, and what they should be."""
    quota = quota_of(problem, target)
    sizes = quota.group[quota.group >= 0].bincount()
    kept = torch.stack([mask[..., quota.group == g].sum(-1) for g in range(len(sizes))], dim=-1)
    return kept, (sizes - quota.allowed).expand_as(kept)


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_group_keeps_its_share_and_biases_stay(kind, pattern):
    problem, target = PROBLEMS[kind], NByM(*pattern)
    found, again = (solve(problem, "columns", target) for _ in range(2))
    assert torch.equal(*shares(found.mask, problem, target))
    assert not problem.bias_column or bool(found.mask[..., -1].all())
    assert bool((found.weight[~found.mask] == 0).all())
    assert found.weight.dtype == problem.weight.dtype
    assert found.removed == int((~found.mask).sum())
    assert found.error == pytest.approx(problem.error_of(found.weight), rel=1e-12)
    assert torch.equal(found.weight, again.weight)


@pytest.mark.parametrize("block", [1, 3, 128])
def test_groups_of_channels_lie_at_one_kernel_position(block):
    problem = Problem(torch.randn(3, 18), make_moment(18), positions=3)
    target = NByM(2, 4, along="channels")
    mask = solve(problem, ColumnSweep(block=block), target).mask
    assert torch.equal(*shares(mask, problem, target))


@pytest.mark.parametrize("seed", range(8))
def test_it_never_ends_above_magnitude_in_groups(seed):
    torch.manual_seed(seed)
    problem = Problem(torch.randn(12, 33), make_moment(33, correlated=1.0), bias_column=True)
    sweep = solve(problem, "columns", NByM(2, 4))
    assert sweep.error <= solve(problem, "magnitude", NByM(2, 4)).error


def test_uncorrelated_inputs_leave_the_largest_of_every_group():
    weight = torch.randn(5, 16)
    found = solve(Problem(weight, torch.eye(16)), "columns", NByM(2, 4))
    best = weight.abs().view(5, 4, 4).topk(2, dim=-1).indices
    assert found.mask.view(5, 4, 4).gather(-1, best).all()


def test_a_wide_layer_keeps_the_pattern():
    inputs, weight = torch.randn(200, 24), torch.randn(1, 6, 24, dtype=torch.bfloat16)
    moments = Moments(1, 24, bias=False)
    moments.add(inputs.unsqueeze(0))
    moments._whole = moments._whole.float()
    problem = wide_problem(weight, moments, overwrite=False)
    found = solve(problem, "columns", NByM(2, 4))
    assert torch.equal(*shares(found.mask, problem, NByM(2, 4)))
    assert found.weight.dtype == torch.bfloat16
    assert found.error < solve(problem, "magnitude", NByM(2, 4)).error


def test_auto_sweeps_where_memory_leaves_no_room():
    problem = Problem(torch.randn(4, 16), make_moment(16))
    short = Context(memory=MemoryLimit(total=10**9, per_layer=1))
    tight = Problem(problem.weight, problem.moment, context=short)
    assert "by columns" in Auto()(tight, NByM(2, 4)).status
    assert "by columns" not in Auto()(problem, NByM(2, 4)).status


@pytest.mark.parametrize("kind", PROBLEMS)
def test_without_least_squares_it_ends_on_the_same_support_a_little_higher(kind):
    problem = PROBLEMS[kind]
    exact, near, plain = (
        solve(problem, sweep, keep=0.5)
        for sweep in (ColumnSweep(), ColumnSweep(exact=False), ColumnSweep(exact=False, steps=0))
    )
    assert torch.equal(exact.mask, near.mask) and torch.equal(exact.mask, plain.mask)
    limit = 1e-6 * exact.energy
    assert exact.error - limit <= near.error <= plain.error + limit


def test_other_patterns_are_refused_in_one_line():
    with pytest.raises(LobsError, match="not compatible with Block") as caught:
        solve(Problem(torch.randn(4, 8), make_moment(8)), "columns", Block(0.5))
    assert "\n" not in str(caught.value)
