"""A new pattern is a target and a module that solves it: nothing else has to know of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import lobs
from lobs import LobsError, Problem, solve
from lobs.errors import TargetError
from lobs.solvers.least_squares import on_support
from lobs.solvers.patterns import PatternSolver, pattern_solver
from lobs.targets import Pattern, for_layer
from tests.conftest import make_moment


@dataclass(frozen=True)
class Alternating(Pattern):
    """Remove every `step`-th column."""

    solved_by: ClassVar[str] = __name__
    by_layer: ClassVar[str] = "step"
    step: int | dict[str, int] = 2

    def check_layer(self, name, groups, rows, columns):
        if columns < self.step:
            raise TargetError(f"layer '{name}' has {columns} columns, fewer than {self.step}.")


def _mask(problem, target):
    mask = torch.ones_like(problem.weight, dtype=torch.bool)
    free = problem.weight.shape[-1] - problem.protected
    mask[..., :free][..., target.step - 1 :: target.step] = False
    return mask


SOLVER = PatternSolver(
    solve=lambda problem, target, backend: on_support(problem, _mask(problem, target)),
    seconds=lambda shape: 1e6,
    mask_by_score=lambda problem, target, scores: _mask(problem, target),
)


@pytest.mark.parametrize("solver", ["auto", "greedy", "greedy+refine", "magnitude"])
def test_solvers_solve_it(solver):
    problem = Problem(torch.randn(5, 9), make_moment(9), bias_column=True)
    found = solve(problem, solver, Alternating(3))
    assert torch.equal(found.mask, _mask(problem, Alternating(3)))
    if solver != "magnitude":
        torch.testing.assert_close(found.weight, on_support(problem, found.mask).weight)


def test_solvers_without_patterns_refuse_it():
    with pytest.raises(LobsError, match="not compatible with Alternating"):
        solve(Problem(torch.randn(5, 9), make_moment(9)), "admm", Alternating())


def test_prune_and_forecast_take_it():
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    batches = [torch.randn(60, 8)]
    cut = lobs.prune(model, batches, Alternating(), progress=False)
    assert bool((cut.model[0].weight[:, 1::2] == 0).all())
    assert bool((cut.model[2].weight[:, ::2] != 0).all())
    assert lobs.forecast(model, batches, Alternating()).seconds >= 2e6
    some = lobs.prune(model, batches, Alternating({"0": 4}), progress=False)
    assert torch.equal(some.model[2].weight, model[2].weight)
    assert [layer.kept for layer in some.layers] == [36, 24]


def test_its_own_checks_and_names_are_respected():
    model, batches = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), [torch.randn(60, 8)]
    with pytest.raises(LobsError, match="layer '1' has 6 columns, fewer than 7"):
        lobs.prune(model, batches, Alternating(7), progress=False)
    with pytest.raises(LobsError, match="'nowhere', which matches no prunable layer"):
        lobs.prune(model, batches, Alternating({"nowhere": 2}), progress=False)
    assert for_layer(Alternating({"a*": 3}), "ab") == Alternating(3)
    assert for_layer(Alternating({"a*": 3}), "b") is None


def test_a_pattern_names_the_module_that_solves_it():
    assert pattern_solver(Alternating()) is SOLVER
    for target in (lobs.NByM(2, 4), lobs.Block(0.5), lobs.Structured(0.5)):
        assert isinstance(pattern_solver(target), PatternSolver)


SOURCE = Path(lobs.__file__).parent


@pytest.mark.parametrize("room", ["solvers", "pruning"])
def test_no_other_file_lists_patterns(room):
    for path in (SOURCE / room).rglob("*.py"):
        if path.parent.name == "patterns":
            continue
        code = "".join(path.read_text(encoding="utf-8").split('"""')[::2])
        named = re.findall(r"(?<!\w)(?:NByM|Block|Structured)\b", code)
        assert not named, f"{path.name} names {named}"
