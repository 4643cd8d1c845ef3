"""One context holds the processes and the memory of a run; problems carry it to solvers."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lobs
from lobs import Problem, Sparsity, solve
from lobs._system import context, memory
from lobs._system.context import Context
from lobs._system.distributed import SINGLE_PROCESS, ProcessGroup, process_group, use_group
from lobs._system.memory import MemoryLimit
from lobs.calibration.collect import collect_moments
from lobs.calibration.layer_problem import layer_problem
from lobs.layers import find_layers
from tests.conftest import make_moment

SOURCE = Path(lobs.__file__).parent
LIMIT = MemoryLimit(total=2**40, per_layer=2**39)


def test_by_default_work_has_one_process_and_no_limit():
    assert context.current() == Context() == Context(SINGLE_PROCESS, None)
    assert Context().affords(1e18) and Context().fits(1e18)
    with pytest.raises(FrozenInstanceError):
        Context().memory = LIMIT


def test_group_and_limit_are_parts_of_one_context():
    group = ProcessGroup(0, 2)
    with memory.limited(2**40, taken=5):
        with use_group(group):
            assert context.current().group is process_group() is group
            assert context.current().memory.total == memory.limit() == 2**40
        assert process_group() is SINGLE_PROCESS and memory.limit() == 2**40
        with memory.limited(None):
            assert memory.limit() is None and memory.room() is None
    assert context.current() == Context()


def test_an_error_restores_the_context():
    with pytest.raises(ValueError, match="stop"), context.use(Context(memory=LIMIT)):
        raise ValueError("stop")
    assert context.current() == Context()


def test_there_is_one_variable_for_group_and_memory():
    texts = {
        name: (SOURCE / "_system" / f"{name}.py").read_text(encoding="utf-8")
        for name in ("context", "distributed", "memory")
    }
    assert {name: text.count("ContextVar(") for name, text in texts.items()} == {
        "context": 1,
        "distributed": 0,
        "memory": 0,
    }


@pytest.mark.parametrize("path", sorted((SOURCE / "solvers").rglob("*.py")), ids=lambda p: p.stem)
def test_no_solver_asks_for_the_current_context(path):
    text = path.read_text(encoding="utf-8")
    for asked in ("process_group(", "memory.limit(", "memory.room(", "context.current("):
        assert re.search(rf"(?<![\w.]){re.escape(asked)}", text) is None


def test_a_layers_problem_carries_the_current_context_and_keeps_it():
    layer = find_layers(nn.Sequential(nn.Linear(6, 4)))[0]
    moments = collect_moments(nn.Sequential(layer.module), [torch.randn(80, 6)])["0"]
    for kind in (Context(), Context(memory=LIMIT)):
        with context.use(kind):
            problem = layer_problem(layer, layer.matrix(), moments)
        assert problem.context == kind
        assert replace(problem, damping=0.1).context == kind
        assert problem.some_rows(torch.tensor([1])).context == kind


def test_the_problems_context_decides_not_the_current_one():
    # With this group in force every collective would fail: none is initialised.
    problem = Problem(torch.randn(12, 30), make_moment(30).float())
    alone = {name: solve(problem, name, Sparsity(0.6)) for name in ("auto", "greedy", "admm")}
    with context.use(Context(ProcessGroup(0, 2), MemoryLimit(total=1, per_layer=0))):
        for name, expected in alone.items():
            assert torch.equal(solve(problem, name, Sparsity(0.6)).weight, expected.weight)


def test_a_problem_with_little_memory_is_solved_in_little():
    problem = Problem(torch.randn(12, 30), make_moment(30).float())
    short = replace(problem, context=Context(memory=MemoryLimit(total=2**30, per_layer=0)))
    swept = solve(problem, "columns", Sparsity(0.6))
    assert torch.equal(solve(short, "auto", Sparsity(0.6)).weight, swept.weight)
    assert not torch.equal(solve(problem, "auto", Sparsity(0.6)).weight, swept.weight)
