from __future__ import annotations

import itertools

import pytest
import torch

from lobs import (
    ADMM,
    Auto,
    ErrorBudget,
    GreedyOBS,
    LobsError,
    NumericalWarning,
    Problem,
    Refine,
    Scored,
    solve,
)
from lobs.solvers.admm import _sample
from lobs.solvers.least_squares import (
    least_squares,
    on_support,
    typical_independence,
    weighted_error,
)
from lobs.solvers.local_search import swap
from lobs.targets import Sparsity
from tests.conftest import make_moment


def problem(rows=20, d=60, **settings):
    return Problem(
        torch.randn(rows, d, generator=torch.Generator().manual_seed(1)),
        make_moment(d).float(),
        **settings,
    )


def test_swaps_reach_pools_smaller_than_the_layer(monkeypatch):
    monkeypatch.setattr("lobs.solvers.local_search._POOL", 8)
    monkeypatch.setattr("lobs.solvers.local_search._LEAST_POOL", 8)
    p = problem()
    first = solve(p, Scored("magnitude"), Sparsity(0.7))
    one = on_support(p, swap(p, first.mask, rounds=1)[0])
    many = on_support(p, swap(p, first.mask, rounds=12)[0])
    assert many.error <= one.error < on_support(p, first.mask).error
    # What pools find in many rounds is near what a search over everything finds.
    monkeypatch.setattr("lobs.solvers.local_search._POOL", 60)
    monkeypatch.setattr("lobs.solvers.local_search._LEAST_POOL", 60)
    assert many.error <= 1.15 * on_support(p, swap(p, first.mask)[0]).error


def test_a_time_budget_of_nothing_returns_the_start():
    p = problem()
    first = solve(p, Scored("magnitude"), Sparsity(0.5))
    assert torch.equal(swap(p, first.mask, seconds=0.0)[0], first.mask)


def test_conjugate_gradients_agree_with_cholesky_where_it_is_dear(monkeypatch):
    p = problem()
    mask = solve(p, "admm", Sparsity(0.5)).mask
    direct = on_support(p, mask)
    monkeypatch.setattr("lobs.solvers.least_squares._MANY", 0.0)
    iterated = on_support(p, mask)
    assert iterated.error == pytest.approx(direct.error, rel=1e-5)


def test_weights_that_swaps_leave_need_no_second_solve(monkeypatch):
    """The factors of a round of swaps give the best weights on its support."""
    monkeypatch.setattr("lobs.solvers.local_search._POOL", 8)
    monkeypatch.setattr("lobs.solvers.local_search._LEAST_POOL", 8)
    p = problem()
    mask, near, _ = swap(p, solve(p, Scored("magnitude"), Sparsity(0.6)).mask, rounds=2)
    direct = on_support(p, mask)
    monkeypatch.setattr("lobs.solvers.least_squares._FEW", -1.0)
    monkeypatch.setattr("lobs.solvers.least_squares.least_squares", None)  # must not be asked
    assert on_support(p, mask, near).error == pytest.approx(direct.error, rel=1e-6)


def test_swaps_without_room_for_factors_are_as_good(monkeypatch):
    p = problem()
    first = solve(p, Scored("magnitude"), Sparsity(0.6)).mask
    monkeypatch.setattr("lobs.solvers.local_search._POOL", 8)
    monkeypatch.setattr("lobs.solvers.local_search._LEAST_POOL", 8)
    with_room = on_support(p, *swap(p, first)[:2]).error
    monkeypatch.setattr("lobs.solvers.local_search._TOGETHER", 10**9)
    monkeypatch.setattr("lobs.solvers.local_search._BATCH_BYTES", 8 * 16 * 16 * len(first))
    assert on_support(p, *swap(p, first)[:2]).error == pytest.approx(with_room, rel=0.05)


@pytest.mark.parametrize("columns", [24, 576, 4608])
def test_a_threshold_is_taken_from_every_column(columns):
    """A step that divides the number of columns would look at a few positions of a kernel only."""
    values = torch.arange(1000 * columns)
    seen = _sample(values, columns) % columns
    assert len(seen) <= 100_000 and len(seen.unique()) == min(columns, len(seen))


def test_least_squares_of_rows_of_different_sizes_is_that_of_each_alone():
    gram = make_moment(12)
    weight = torch.randn(9, 12, dtype=torch.float64)
    mask = torch.rand(9, 12) < torch.linspace(0, 1, 9).unsqueeze(1)
    together = least_squares(gram, weight, mask)
    for row, kept in enumerate(mask):
        expected = torch.zeros(12, dtype=torch.float64)
        if kept.any():
            expected[kept] = torch.linalg.solve(gram[kept][:, kept], (weight[row] @ gram)[kept])
        torch.testing.assert_close(together[row], expected)


def test_auto_is_never_above_any_start_it_ran():
    for d in (10, 60, 300):
        p = problem(d=d)
        firsts = [ADMM()] if p.weight.numel() * d > 1e6 else [ADMM(), GreedyOBS()]
        for fraction, first in itertools.product((0.3, 0.6, 0.9), firsts):
            assert solve(p, "auto", Sparsity(fraction)).error <= solve(
                p, first, Sparsity(fraction)
            ).error * (1 + 1e-6)


def _correlated(kind, d=160):
    """Inputs whose columns explain each other to different degrees: energy is a poor guide."""
    own = torch.logspace(-1, 1, d)[torch.randperm(d)] * torch.randn(4000, d)
    match kind:
        case "factors":
            return torch.randn(4000, 40) @ torch.randn(40, d) + own
        case "copies":
            x = torch.randn(4000, d)
            x[:, :100] = x[:, :20].repeat(1, 5) + 0.3 * torch.randn(4000, 100)
            return x
        case _:
            walk = torch.randn(4000, d).cumsum(dim=1)[:, : d // 2]
            return torch.cat([walk / walk.std(dim=0), torch.randn(4000, d // 2)], dim=1)


@pytest.mark.parametrize("kind", ["factors", "copies", "walk"])
def test_units_of_equal_cost_find_better_supports(kind, monkeypatch):
    x = _correlated(kind)
    p = Problem(torch.randn(40, 160), x.mT @ x / len(x))
    ours = [solve(p, ADMM(), Sparsity(f)).error for f in (0.5, 0.8, 0.95)]
    monkeypatch.setattr(
        "lobs.solvers.admm._equal", lambda independence: torch.ones_like(independence).unsqueeze(-2)
    )
    plain = [solve(p, ADMM(), Sparsity(f)).error for f in (0.5, 0.8, 0.95)]
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    assert ratios[0] < 0.95 and max(ratios) < 1.1


def _replaceable(kind, d=256):
    """Inputs whose columns nearly replace each other, in several ways."""
    x = torch.randn(4000, d)
    match kind:
        case "pairs":
            x[:, : d // 2] = x[:, d // 2 :] + 0.05 * torch.randn(4000, d // 2)
        case "copies":
            x[:, : d // 4] = x[:, :1] + 0.05 * torch.randn(4000, d // 4)
        case "half":
            x[:, : d // 2] = 3 * (
                torch.randn(4000, d // 16) @ torch.randn(d // 16, d // 2)
                + 0.05 * torch.randn(4000, d // 2)
            )
        case "sums":
            for size in (2, 4, 8, 16, 32, 64, 128, 256):
                x += (torch.randn(4000, d // size) * size**0.5).repeat_interleave(size, dim=1)
        case _:
            x = torch.randn(4000, d // 8) @ torch.randn(d // 8, d) + 0.1 * x
    return x


@pytest.mark.parametrize("kind", ["pairs", "copies", "few directions", "half", "sums"])
@pytest.mark.parametrize("fraction", [0.5, 0.7, 0.9])
def test_columns_that_replace_each_other_do_not_mislead_auto(kind, fraction):
    """ADMM drops such columns together: from its support `auto` ended 13 × above the greedy."""
    x = _replaceable(kind)
    p = Problem(torch.randn(64, 256), x.mT @ x / len(x))
    assert solve(p, "auto", Sparsity(fraction)).error <= solve(
        p, "greedy", Sparsity(fraction)
    ).error * (1 + 1e-3)


def test_columns_that_replace_each_other_do_not_mislead_auto_by_error():
    x = _replaceable("pairs", 384)
    p = Problem(torch.randn(200, 384), x.mT @ x / len(x))
    greedy, admm = (solver.seconds(p.shape) for solver in (GreedyOBS(), ADMM()))
    assert greedy > Auto().patience * admm  # else the start is the greedy anyway
    ours, greedy = (
        solve(p, solver, ErrorBudget(0.1, relative=True)) for solver in ("auto", "greedy")
    )
    assert ours.removed >= greedy.removed and ours.error <= (0.1**2) * ours.energy


def test_rows_that_matter_little_do_not_hide_a_poor_start():
    """Rows trade by importance, so gains and remaining errors must both be weighted by it."""
    x, matters = _replaceable("pairs"), torch.cat([torch.ones(32), torch.zeros(32)])
    p = Problem(torch.randn(64, 256), x.mT @ x / len(x), row_weight=matters)
    ours, greedy = (solve(p, solver, Sparsity(0.7)).weight for solver in ("auto", "greedy"))
    assert weighted_error(p, ours) <= weighted_error(p, greedy) * (1 + 1e-3)


@pytest.mark.parametrize("size", [1e20, 1e-20])
def test_swaps_know_no_units(size):
    p, x = problem(64, 200), _replaceable("pairs", 200)
    plain, scaled = (Problem(p.weight * s, x.mT @ x / len(x)) for s in (1.0, size))
    first = solve(plain, Scored("magnitude"), Sparsity(0.6)).mask
    errors = [on_support(q, *swap(q, first)[:2]).error for q in (plain, scaled)]
    assert errors[1] == pytest.approx(errors[0] * size**2, rel=1e-2)


def test_auto_tries_other_starts_only_where_the_first_was_poor(monkeypatch):
    x = _correlated("factors", 300)
    monkeypatch.setattr("lobs.solvers.auto.GreedyOBS", None)  # must not be asked
    solve(Problem(torch.randn(40, 300), x.mT @ x / len(x)), "auto", Sparsity(0.7))


@pytest.mark.parametrize("solver", ["auto", "admm"])
def test_a_moment_that_rounding_makes_indefinite_is_solved(solver):
    x = torch.randn(10, 200) * torch.logspace(0, -7, 200)
    y = (x + 10 * x[:, :1]).double()
    p = Problem(torch.randn(4, 200), y.T @ y / 10)
    with pytest.warns(NumericalWarning):
        found = solve(p, solver, Sparsity(0.02))
    assert found.removed == 16 and torch.isfinite(found.weight).all()


def test_typical_independence_is_that_of_the_rows_looked_at():
    gram, kept = make_moment(12), torch.rand(5, 12) < 0.5
    found = typical_independence(gram.unsqueeze(0), kept.unsqueeze(0), 2)[0]
    shares = torch.zeros(2, 12, dtype=torch.float64)
    for turn, row in enumerate((0, 4)):
        for q in range(12):
            others = kept[row].clone()
            others[q] = False
            explained = gram[q, others] @ torch.linalg.solve(
                gram[others][:, others], gram[others, q]
            )
            shares[turn, q] = gram[q, q] - explained
    torch.testing.assert_close(found, shares.log().mean(dim=0).exp())


def test_auto_keeps_an_error_budget():
    p = problem()
    for solver in (Auto(patience=0.0), Auto(patience=1e9), ADMM()):
        found = solve(p, solver, ErrorBudget(0.3, relative=True))
        assert found.relative_error <= 0.3 and found.removed > 0


def test_importance_moves_weights_to_rows_that_matter():
    plain = solve(problem(), "auto", Sparsity(0.8))
    for solver in (Auto(patience=0.0), Auto(patience=1e9), Refine(Scored("magnitude"))):
        weighted = solve(
            problem(row_weight=torch.tensor([50.0] + [1.0] * 19)), solver, Sparsity(0.8)
        )
        assert weighted.removed == plain.removed
        assert int(weighted.mask[0].sum()) > int(plain.mask[0].sum())


@pytest.mark.parametrize(
    "settings", [{"penalty": 0.0}, {"growth": 1.0}, {"penalties": 0}, {"steps": 0}]
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(LobsError, match="penalty must be positive"):
        ADMM(**settings)


def test_few_wide_rows_are_searched_too():
    p = problem(rows=3, d=120)
    assert solve(p, "auto", Sparsity(0.5)).error < solve(p, ADMM(), Sparsity(0.5)).error


@pytest.mark.parametrize(("rows", "d", "noise"), [(12, 150, 0.05), (6, 300, 0.02)])
def test_the_law_holds_where_float32_sees_little_of_the_error(rows, d, noise):
    base, mix = (
        torch.randn(3000, d // 8, dtype=torch.float64),
        torch.randn(d // 8, d, dtype=torch.float64),
    )
    x = base @ mix / (d // 8) ** 0.5 + noise * torch.randn(3000, d, dtype=torch.float64)
    p = Problem(torch.randn(rows, d), (x.mT @ x / 3000).float())
    for fraction in (0.01, 0.05, 0.2, 0.5):
        found, first = (
            solve(p, Auto(patience=1e9), Sparsity(fraction)),
            solve(p, "greedy", Sparsity(fraction)),
        )
        assert found.error <= first.error * (1 + 1e-6)
        assert found.error <= on_support(p, found.mask).error * (1 + 1e-5)


@pytest.mark.parametrize(("rows", "d"), [(20, 26), (64, 27), (100, 48)])
def test_narrow_layers_are_searched_too(rows, d):
    p = problem(rows=rows, d=d)
    for fraction in (0.5, 0.9):
        assert (
            solve(p, "auto", Sparsity(fraction)).error
            < 0.999 * solve(p, "greedy", Sparsity(fraction)).error
        )


@pytest.mark.parametrize("scale", [1e-26, 1.0, 1e19])
def test_weights_that_are_not_best_are_solved_whatever_their_size(scale):
    weight = torch.randn(100, 100)
    p = Problem(scale * weight, make_moment(100).float())
    mask = torch.rand(100, 100) < 0.5
    bad = p.metrics[0].scaled(p.weight).unsqueeze(0)
    assert on_support(p, mask, bad).error == pytest.approx(on_support(p, mask).error, rel=1e-5)
