from __future__ import annotations

import pytest
import torch

from lobs import Block, GreedyOBS, LobsError, NByM, Problem, Sparsity, Structured, solve
from lobs.solvers.patterns.block import block_path
from lobs.solvers.patterns.group_swaps import swap_within_groups
from lobs.solvers.patterns.nbym import quota_of, solve_nbym
from tests import naive
from tests.conftest import make_moment
from tests.solvers.test_laws import PROBLEMS

TARGETS = {
    "2:4": NByM(2, 4),
    "1:3 channels": NByM(1, 3, along="channels"),
    "0:2": NByM(0, 2),
    "4:4": NByM(4, 4),
    "1x4": Block(0.5, (1, 4)),
    "2x2": Block(0.6, (2, 2)),
    "units": Structured(0.5),
    "inputs": Structured(0.5, "inputs"),
    "all units": Structured(1.0),
    "no inputs": Structured(1.0, "inputs"),
}


def kept_in_groups(solution, problem, target):
    group = quota_of(problem, target).group
    return {
        g: solution.mask[..., group == g].sum(-1).unique().tolist()
        for g in group.unique().tolist()
        if g >= 0
    }


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", TARGETS)
def test_every_pattern_obeys_the_laws_of_solvers(name, kind):
    problem = PROBLEMS[kind]
    solution = solve(problem, "greedy", TARGETS[name])
    again = solve(problem, "greedy", TARGETS[name])
    assert torch.equal(solution.weight, again.weight) and torch.equal(solution.mask, again.mask)
    assert solution.weight.shape == solution.mask.shape == problem.weight.shape
    assert solution.weight.dtype == problem.weight.dtype
    assert bool((solution.weight[~solution.mask] == 0).all())
    assert not problem.bias_column or bool(solution.mask[..., -1].all())
    assert solution.removed == int((~solution.mask).sum())
    assert solution.error == pytest.approx(problem.error_of(solution.weight), rel=1e-12)


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (3, 3), (0, 5)])
def test_every_group_keeps_its_share(kind, n, m):
    problem, target = PROBLEMS[kind], NByM(n, m)
    free = problem.weight.shape[-1] - problem.protected
    for g, kept in kept_in_groups(solve(problem, "greedy", target), problem, target).items():
        size = min(m, free - g * m)
        assert kept == [-(-n * size // m)]


def test_groups_of_channels_lie_at_one_kernel_position():
    problem = Problem(torch.randn(3, 18), make_moment(18), positions=3)
    mask = solve(problem, "greedy", NByM(2, 4, along="channels")).mask.view(3, 6, 3)
    assert bool((mask[:, :4].sum(1) == 2).all()) and bool((mask[:, 4:].sum(1) == 1).all())


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_one_group_of_all_columns_is_greedy_with_one_count_for_every_row(backend):
    weight, psi = torch.randn(3, 8, dtype=torch.float64), make_moment(8)
    solution = solve_nbym(
        Problem(weight, psi), NByM(3, 8), backend=backend, method="greedy", swaps=False
    )
    for row, mask in zip(weight, solution.mask, strict=True):
        expected, _ = naive.greedy(row.unsqueeze(0), psi, 5)
        assert torch.equal(mask, expected[0])


@pytest.mark.parametrize("bias", [False, True])
def test_greedy_resolves_every_candidate_that_its_group_may_still_give(bias):
    weight, psi = torch.randn(4, 9, dtype=torch.float64), make_moment(9)
    problem = Problem(weight, psi, bias_column=bias)
    solution = solve_nbym(problem, NByM(2, 4), method="greedy", swaps=False)
    expected = naive.greedy_in_groups(weight, psi, quota_of(problem, NByM(2, 4)))
    assert torch.equal(solution.mask, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", [(2, 4), (4, 8), (1, 4)])
def test_backends_choose_the_same_pattern(pattern, dtype):
    problem = Problem(
        torch.randn(20, 83).to(dtype), make_moment(83, correlated=2.0), bias_column=True
    )
    masks = [
        solve(problem, GreedyOBS(backend=b), NByM(*pattern)).mask for b in ("torch", "compiled")
    ]
    assert torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_a_swap_changes_the_error_by_what_it_says_and_never_for_the_worse(backend):
    weight, psi = torch.randn(12, 40, dtype=torch.float64), make_moment(40, correlated=3.0)
    problem = Problem(weight, psi)
    quota = quota_of(problem, NByM(2, 4))
    before = solve(problem, "magnitude", NByM(2, 4)).mask
    metric = problem.metrics[0]
    after = swap_within_groups(
        metric.gram, metric.scaled(weight), before, quota.group, backend=backend
    )
    errors = [naive.row_errors(weight, psi, mask) for mask in (before, after)]
    assert bool((errors[1] <= errors[0]).all()) and float(errors[1].sum()) < 0.9 * float(
        errors[0].sum()
    )
    # No single swap is left that helps, but in groups that have swapped.
    for row in range(3):
        untouched = [
            g
            for g in range(10)
            if torch.equal(before[row, 4 * g : 4 * g + 4], after[row, 4 * g : 4 * g + 4])
        ]
        best = naive.best_swap(
            weight[row], psi, after[row], [list(range(4 * g, 4 * g + 4)) for g in untouched]
        )
        assert best >= float(errors[1][row]) * (1 - 1e-5)


def test_all_that_can_be_tried_bounds_two_of_four_from_below():
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(2, 8, dtype=torch.float64, generator=generator)
        psi = make_moment(8, seed=seed)
        best = naive.exhaustive_groups(weight, psi, 2, 4)
        found = solve(Problem(weight, psi), "greedy", NByM(2, 4)).error
        assert best * (1 - 1e-9) <= found <= 1.5 * best


def test_auto_is_never_worse_than_greedy_or_admm_before_swaps():
    problem = Problem(torch.randn(30, 64), make_moment(64, correlated=3.0))
    errors = [
        solve_nbym(problem, NByM(2, 4), method=m, swaps=False).error for m in ("greedy", "admm")
    ]
    assert solve_nbym(problem, NByM(2, 4)).error <= min(errors) * (1 + 1e-6)


@pytest.mark.parametrize("pattern", [(2, 4), (4, 8)])
def test_swaps_help_where_float32_would_take_rounding_for_gains(pattern, monkeypatch):
    # Smooth inputs, as of a first convolution: every column is nearly explained by its neighbours.
    places = torch.arange(64, dtype=torch.float64)
    psi = torch.exp(-((places[:, None] - places) ** 2) / 32) + 3e-4 * torch.eye(
        64, dtype=torch.float64
    )
    problem, target = Problem(torch.randn(40, 64), psi), NByM(*pattern)
    assert 1e-4 < problem.metrics[0].independence < 1e-3
    without, with_swaps = (
        solve_nbym(problem, target, method="admm", swaps=swaps).error for swaps in (False, True)
    )
    assert with_swaps < 0.9 * without
    monkeypatch.setattr("lobs.solvers.patterns.nbym._SINGLE_PRECISION_SWAPS", 0.0)
    assert solve_nbym(problem, target, method="admm").error <= without * (
        1 + 1e-9
    )  # rows keep what they had


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("target", [NByM(2, 4), Sparsity(0.5)])
def test_columns_that_are_nearly_the_same_are_no_reason_to_fail(target, groups):
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1536, 128, dtype=torch.float64, generator=generator)
        x[:, :64] = x[:, :1] + 4e-4 * torch.randn(
            1536, 64, dtype=torch.float64, generator=generator
        )
        psi = (x.T @ x / len(x)).expand(groups, -1, -1)
        weight = torch.randn(groups, 8, 128, generator=generator)
        problem = (
            Problem(weight, psi, samples=1536)
            if groups > 1
            else Problem(weight[0], psi[0], samples=1536)
        )
        assert solve(problem, "auto", target).error < solve(problem, "magnitude", target).error


def test_a_layer_without_rows_has_nothing_to_lose():
    problem = Problem(torch.randn(0, 8), torch.eye(8))
    for target in (NByM(2, 4), Sparsity(0.5)):
        assert solve(problem, "auto", target).weight.shape == (0, 8)


def test_wide_layers_take_admm_alone_and_still_obey_the_pattern(monkeypatch):
    monkeypatch.setattr("lobs.solvers.patterns.nbym._GREEDY_UP_TO", 0.0)
    monkeypatch.setattr("lobs.solvers.patterns.nbym._SWAPS_UP_TO", 0.0)
    monkeypatch.setattr("lobs.solvers.least_squares._MANY", 0.0)
    problem = Problem(torch.randn(10, 65), make_moment(65), bias_column=True)
    solution = solve(problem, "greedy", NByM(2, 4))
    assert solution.status == "ok (2:4 by admm)"
    assert bool((solution.mask[:, :64].view(10, 16, 4).sum(-1) == 2).all())
    best = naive.best_on_support(problem.weight, problem.moment, solution.mask)
    assert solution.error <= problem.error_of(best) * (1 + 1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_weights_are_the_best_on_their_support(name):
    weight, psi = torch.randn(6, 12, dtype=torch.float64), make_moment(12)
    solution = solve(Problem(weight, psi, positions=2), "greedy", TARGETS[name])
    torch.testing.assert_close(solution.weight, naive.best_on_support(weight, psi, solution.mask))


def test_blocks_of_one_weight_are_exact():
    problem = Problem(torch.randn(5, 11, dtype=torch.float64), make_moment(11), bias_column=True)
    for fraction in (0.1, 0.5, 0.9, 1.0):
        assert torch.equal(
            solve(problem, "greedy", Block(fraction, (1, 1))).mask,
            solve(problem, "greedy", Sparsity(fraction)).mask,
        )


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (5, 2), (2, 2)])
def test_block_losses_are_those_of_a_greedy_that_resolves_every_candidate(shape):
    weight, psi = torch.randn(4, 7, dtype=torch.float64), make_moment(7)
    problem = Problem(weight, psi)
    path = block_path(problem, *shape)
    for count in range(path.losses.numel() + 1):
        mask, error = naive.greedy_blocks(weight, psi, shape, count)
        assert torch.equal(path.mask_at(count), mask)
        assert float(path.curve[count]) == pytest.approx(error, rel=1e-9, abs=1e-12)
        assert path.cut(count).error == pytest.approx(error, rel=1e-9, abs=1e-12)


def test_block_counts_are_exact_with_edges_as_blocks():
    problem = Problem(
        torch.randn(5, 11), make_moment(11), bias_column=True
    )  # 3 × 3 blocks of 2×4, at the edges smaller
    for count in range(10):
        mask = solve(problem, "greedy", Block(count / 9, (2, 4))).mask
        tiles = [mask[r : r + 2, c : min(10, c + 4)] for r in (0, 2, 4) for c in (0, 4, 8)]
        assert all(bool(t.all()) or not bool(t.any()) for t in tiles)
        assert sum(not bool(t.any()) for t in tiles) == count


def test_removed_units_fall_back_to_their_mean_output_and_others_stay():
    x = torch.randn(200, 6, dtype=torch.float64) + 1
    y = torch.cat([x, torch.ones(200, 1, dtype=torch.float64)], dim=1)
    weight = torch.randn(5, 7, dtype=torch.float64)
    problem = Problem(weight, y.T @ y / 200, bias_column=True)
    solution = solve(problem, "greedy", Structured(0.4))
    variance = (y @ weight.T).var(dim=0, correction=0)
    gone = variance.argsort()[:2]
    assert bool((solution.weight[gone, :-1] == 0).all())
    torch.testing.assert_close(solution.weight[gone, -1], (y @ weight.T).mean(0)[gone])
    assert solution.error == pytest.approx(float(variance[gone].sum()))
    stay = torch.tensor([i for i in range(5) if i not in gone])
    assert torch.equal(solution.weight[stay], weight[stay])


def test_channels_go_whole_from_every_row_by_greedy_with_true_losses():
    weight, psi = torch.randn(4, 12, dtype=torch.float64), make_moment(12, correlated=2.0)
    solution = solve(Problem(weight, psi, positions=3), "greedy", Structured(0.5, "inputs"))
    mask, error = naive.greedy_blocks(weight, psi, (4, 3), 2)
    assert torch.equal(solution.mask, mask) and solution.error == pytest.approx(error, rel=1e-9)


def test_channels_of_grouped_layers_are_counted_together():
    psi = torch.stack([make_moment(6), make_moment(6, seed=1)])
    solution = solve(
        Problem(torch.randn(2, 3, 6), psi, positions=2), "greedy", Structured(0.5, "inputs")
    )
    per_channel = solution.mask.view(2, 3, 3, 2).any(dim=3).any(dim=1)
    assert int((~per_channel).sum()) == 3 and int((~solution.mask).sum()) == 3 * 2 * 3


@pytest.mark.parametrize("target", [NByM(2, 4), Block(0.5), Structured(0.5)])
def test_solvers_that_cannot_do_a_pattern_say_so(target):
    with pytest.raises(
        LobsError, match=r"not compatible with .* Use solver='auto' or solver='greedy'"
    ):
        solve(Problem(torch.randn(3, 8), make_moment(8)), "lobs", target)


def test_refine_keeps_the_pattern_and_lowers_the_error():
    problem = Problem(torch.randn(6, 16), make_moment(16))
    plain, refined = (
        solve(problem, name, NByM(2, 4)) for name in ("magnitude", "magnitude+refine")
    )
    assert torch.equal(plain.mask, refined.mask) and refined.error < plain.error
    assert solve(problem, "greedy", NByM(2, 4)).error <= refined.error


def test_inputs_that_are_nearly_dead_get_no_enormous_weights():
    psi = make_moment(16, correlated=2.0)
    scale = torch.ones(16, dtype=torch.float64)
    scale[8:12] = 1e-4  # a whole group: two of its weights must stay
    psi = psi * scale * scale.unsqueeze(1)
    weight = torch.randn(20, 16)
    solution = solve(Problem(weight, psi), "greedy", NByM(2, 4))
    assert float(solution.weight.abs().max()) < 20 and solution.damping > 0
    bold = solve(Problem(weight, psi, damping=0.0), "greedy", NByM(2, 4))
    assert float(bold.weight.abs().max()) > 1000 and bold.damping == 0


def test_the_column_sweep_is_never_better():
    from benchmarks.baselines.column_sweep import best_column_sweep

    for seed in range(3):
        weight, psi = torch.randn(24, 70), make_moment(70, seed=seed, correlated=2.0)
        problem = Problem(weight, psi)
        for pattern in ((2, 4), (4, 8)):
            swept = best_column_sweep(weight, psi, pattern=pattern)
            assert int((swept != 0).sum()) == solve(problem, "greedy", NByM(*pattern)).kept
            assert solve(problem, "greedy", NByM(*pattern)).error < 0.9 * problem.error_of(swept)
        swept = best_column_sweep(weight, psi, 0.7)
        assert int((swept == 0).sum()) == round(0.7 * weight.numel())
        assert solve(problem, "greedy", Sparsity(0.7)).error < problem.error_of(swept)
