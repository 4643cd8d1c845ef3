"""Every solver brings its own estimates of time and memory, and nothing asks for its type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lobs
from lobs import ADMM, LOBS, SOLVERS, Auto, GreedyOBS, NByM, Problem, Scored, Sparsity
from lobs._system.context import Context
from lobs._system.memory import MemoryLimit
from lobs.solvers.auto import bytes_of, seconds_of
from lobs.solvers.costs import COSTS, ProblemShape
from tests.conftest import make_moment

SHAPE = ProblemShape(groups=2, rows=30, columns=200, protected=1)


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_brings_its_time_and_memory(name):
    solver = SOLVERS[name]
    assert solver.seconds(SHAPE) >= 0 and isinstance(solver.seconds(SHAPE), float)
    # Less than one copy of moments and weights cannot be solved.
    assert solver.bytes(SHAPE) > 4 * (2 * 200**2 + 2 * 30 * 200)
    assert seconds_of(solver, SHAPE) == solver.seconds(SHAPE)
    assert bytes_of(solver, SHAPE) == solver.bytes(SHAPE)


@pytest.mark.parametrize(
    "name", [name for name in SOLVERS if not isinstance(SOLVERS[name], Scored)]
)
def test_larger_problems_take_longer_and_more(name):
    solver = SOLVERS[name]
    for larger in ({"groups": 3}, {"rows": 40}, {"columns": 300}):
        other = ProblemShape(**{"groups": 2, "rows": 30, "columns": 200, "protected": 1} | larger)
        assert solver.seconds(other) > solver.seconds(SHAPE)
        assert solver.bytes(other) > solver.bytes(SHAPE)


class Foreign:
    """A user's solver without estimates."""

    needs = frozenset()

    def __call__(self, problem, target):
        return GreedyOBS()(problem, target)


def test_a_solver_without_estimates_counts_as_auto():
    assert seconds_of(Foreign(), SHAPE) == Auto().seconds(SHAPE)
    assert bytes_of(Foreign(), SHAPE) == Auto().bytes(SHAPE)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    assert lobs.forecast(model, [torch.randn(50, 8)], keep=0.5, solver=Foreign()).seconds > 0


def test_the_dominant_terms_are_those_of_the_algorithms():
    d, rows = 1000, 50
    shape = ProblemShape(1, rows, d)
    assert GreedyOBS().seconds(shape) == pytest.approx(COSTS.greedy * rows * d**3 / 3 / 1e9)
    assert ADMM(penalties=14).seconds(shape) == pytest.approx(2 * ADMM().seconds(shape))
    products = ADMM(steps=16).seconds(shape) - ADMM().seconds(shape)
    assert products == pytest.approx(7 * 8 * COSTS.product * rows * d**2 / 1e9)


def test_a_pattern_costs_what_its_own_solver_takes():
    free, pattern = (ProblemShape(1, 30, 200, target=t) for t in (Sparsity(0.5), NByM(2, 4)))
    for solver in (GreedyOBS(), Auto(), SOLVERS["greedy+refine"]):
        assert solver.seconds(pattern) != solver.seconds(free)
        assert solver.seconds(pattern) == GreedyOBS().seconds(pattern)
    assert Scored().seconds(pattern) == 0


def test_a_single_copy_takes_less_than_double_precision():
    plain, single = (ProblemShape(1, 300, 9001, 1, single_copy=one) for one in (False, True))
    for solver in SOLVERS.values():
        assert solver.bytes(single) < solver.bytes(plain) / 3
    assert LOBS().bytes(single) > SOLVERS["columns"].bytes(single)


def test_auto_counts_as_the_sweep_where_memory_leaves_nothing_else():
    short = Context(memory=MemoryLimit(total=2**30, per_layer=2**20))
    shape = ProblemShape(1, 300, 9001, 1, single_copy=True, context=short)
    columns = SOLVERS["columns"]
    assert Auto().bytes(shape) == columns.bytes(shape)
    assert Auto().seconds(shape) == columns.seconds(shape)


def test_a_problem_knows_its_shape():
    problem = Problem(torch.randn(3, 4, 6), torch.stack([make_moment(6)] * 3), bias_column=True)
    shape = problem.shape
    assert (shape.groups, shape.rows, shape.columns, shape.protected) == (3, 4, 6, 1)
    assert shape.weights == problem.prunable


SOURCE = Path(lobs.__file__).parent
SOLVER_TYPES = ("ADMM", "Auto", "ColumnSweep", "GreedyOBS", "LOBS", "Refine", "Scored")


@pytest.mark.parametrize("path", ["pruning/forecast.py", "solvers/auto.py"])
def test_nothing_asks_for_the_type_of_a_solver(path):
    text = (SOURCE / path).read_text(encoding="utf-8")
    for kind in SOLVER_TYPES:
        assert f", {kind})" not in text and f"case {kind}(" not in text
