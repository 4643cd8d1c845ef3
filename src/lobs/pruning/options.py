"""What `prune` is asked for: refused here, before any data is read, where it does not go together; else made whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import get_args

from torch import nn

from lobs.pruning import feasibility
from lobs.pruning.refit.joint import WORK, Compensate
from lobs.errors import LobsError
from lobs.pruning.session import Inputs
from lobs.layers import Layer, find_layers
from lobs.solvers.problem import Solver
from lobs.solvers import Auto
from lobs.targets import Budget, ErrorBudget, Pattern, Sparsity, Target, as_target

PASSES = 2  # how often a budget is shared out where nobody says


def check(
    model: nn.Module,
    target: Target | float,
    *,
    inputs: Inputs | None = None,
    layers: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    passes: int = PASSES,
    prune_bias: bool = False,
    damping: float | None = None,
) -> tuple[Target, Inputs, list[Layer]]:
    """Refuse what `prune` cannot do with these arguments, before any data is read; says what is wanted of which layers."""
    if not isinstance(model, nn.Module):
        raise LobsError(f"model is a {type(model).__name__}: give a torch.nn.Module.")
    if not isinstance(passes, Integral) or passes < 1:
        raise LobsError(
            f"passes is {passes}: it is a whole number, and the network must be pruned at least "
            "once."
        )
    wanted = as_target(target)
    if prune_bias and isinstance(wanted, Pattern):
        raise LobsError(
            "prune_bias does not go with patterns, which are made of weights: leave it out."
        )
    found = find_layers(model, layers, skip)
    feasibility.check(wanted, model, found, prune_bias)
    _check_damping(damping)
    return wanted, _chosen_inputs(inputs, wanted), found


def _check_damping(damping: float | None) -> None:
    if damping is not None and not (
        isinstance(damping, Real) and float(damping) >= 0 and math.isfinite(damping)
    ):
        raise LobsError(
            f"damping is {damping!r}: it must be finite and not negative; leave it out to have it "
            "chosen."
        )


def _chosen_inputs(inputs: Inputs | None, wanted: Target) -> Inputs:
    if inputs is None:
        return "dense" if isinstance(wanted, ErrorBudget) else "asymmetric"
    if inputs not in get_args(Inputs):
        raise LobsError(f"inputs is '{inputs}': use {', '.join(map(repr, get_args(Inputs)))}.")
    if inputs == "asymmetric" and isinstance(wanted, ErrorBudget):
        raise LobsError(
            "ErrorBudget limits what a layer itself adds: use inputs='dense' or inputs='pruned' "
            "with it."
        )
    return inputs


def compensation(
    asked: Compensate | None, solver: Solver, inputs: Inputs, memory: str | float | None
) -> tuple[Compensate, float | None]:
    """Whether all weights move together in the end, and how many multiply-adds that may take; no limit where asked for."""
    if asked is None:
        free = isinstance(solver, Auto) and inputs == "asymmetric" and memory is None
        return ("network", WORK) if free else ("layers", None)
    if asked not in get_args(Compensate):
        raise LobsError(
            f"compensate is {asked!r}: use {', '.join(map(repr, get_args(Compensate)))}."
        )
    if asked == "network" and inputs != "asymmetric":
        raise LobsError(
            f"refit='network' moves weights after their layers' errors on {inputs} inputs were "
            "computed: it goes with "
            f"inputs='asymmetric', and so with no ErrorBudget."
        )
    if asked == "network" and memory is not None:
        raise LobsError(
            "refit='network' holds several copies of all weights: leave out memory, or compensate."
        )
    return asked, None


def shared(wanted: Target) -> bool:
    """Is one budget shared out among the layers?"""
    return isinstance(wanted, Budget) or (
        isinstance(wanted, Sparsity) and wanted.scope == "network"
    )
