"""What `prune` is asked for: checked here, before any data is read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from torch import nn

from lobs._system import memory as memory_limit
from lobs.calibration.forward import learn
from lobs.errors import LobsError
from lobs.layers import Layer, find_layers
from lobs.layers.recurrent import RecurrentLayer
from lobs.pruning import feasibility
from lobs.pruning.feasibility import left_dense
from lobs.pruning.refit.joint import WORK, Refit
from lobs.solvers import Auto, as_solver
from lobs.solvers.problem import Solver
from lobs.targets import Budget, ErrorBudget, Pattern, Sparsity, Target, wanted

Inputs: TypeAlias = Literal["dense", "pruned", "asymmetric"]


@dataclass(frozen=True)
class Numerics:
    """Choose how the layer problems are posed.

    Args:
        damping: λ added to the diagonal of every input moment Ψ; chosen and reported by default.
        batch_norm: re-estimate batch-norm statistics on the calibration data, where that brings the
            output nearer to the dense one by at least a hundredth.
        prune_bias: let biases be removed too, and count them.
    """

    damping: float | None = None
    batch_norm: bool = True
    prune_bias: bool = False

    def __post_init__(self) -> None:
        given = self.damping
        number = isinstance(given, Real) and not isinstance(given, bool)
        if given is not None and not (number and float(given) >= 0 and math.isfinite(given)):
            raise LobsError(
                f"damping is {given!r}: it must be finite and not negative; leave it out to have "
                "it chosen."
            )
        _check_switches(self, "batch_norm", "prune_bias")


@dataclass(frozen=True)
class Execution:
    """Choose how a run uses the machine and what it records.

    Args:
        resume: a folder in which finished work is stored. If it holds an interrupted run of the
            same network, data and settings, the run continues and ends with the same bits. The
            batches must come in the same order each time.
        memory: resident memory that this process may take in all, such as "8GB". Layers are
            calibrated in groups that fit, the rest goes to temporary files, and wide layers are
            kept in single precision.
        distributed: share the work with the other processes of torch.distributed's process group.
            All of them call with the same network and settings, each with its own batches or none.
            All get the same result; the first one writes.
        log: a file that gets a JSON line whenever a phase begins or ends, with time and memory.
        diagnostics: also record the distribution of sensitivities, for the report.
    """

    resume: str | os.PathLike[str] | None = None
    memory: str | float | None = None
    distributed: bool = False
    log: str | os.PathLike[str] | None = None
    diagnostics: bool = False

    def __post_init__(self) -> None:
        for name, what in (("resume", "folder"), ("log", "file")):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise LobsError(f"{name} is {value!r}: give the path of a {what}.")
        _check_switches(self, "distributed", "diagnostics")
        _ = self.memory_bytes  # which refuses a size that cannot be read

    @cached_property
    def memory_bytes(self) -> int | None:
        """Return the memory limit in bytes; None without one."""
        return None if self.memory is None else memory_limit.parse(self.memory)


class PruneOptions(TypedDict, total=False):
    """Keyword arguments that `prune`, `forecast` and `prune_in_stages` share.

    Args:
        solver: a name from `SOLVERS`, or a solver; "auto" by default.
        inputs: which inputs a layer is solved on. "asymmetric": layers are pruned in the order they
            run. Each sees the inputs that the pruned layers before it give, and must reproduce the
            dense network's output. "pruned": the same inputs, but the layer reproduces its own
            dense weights. "dense": every layer sees the dense network's inputs; one pass over the
            data. The default is "asymmetric", but "dense" for an `ErrorBudget`.
        refit: "layers": every layer's weights are optimal for that layer. "blocks": once the layers
            of a residual or transformer block are solved, all its kept weights, biases and norm
            gains move together toward the dense block's output. "network": as a last step, all
            kept weights of the network move together. Neither needs labels, but both need
            asymmetric inputs. One sample in eight is held out and decides whether a refit stays.
            With the default solver, the default is "network" where that takes about 20 s or less,
            and "blocks" for larger networks.
        layers: names or globs of the layers to prune; by default all of the kinds that lobs knows.
        skip: names or globs of layers to leave alone.
        numerics: damping, batch norms, biases.
        execution: resume, memory, processes, log.
    """

    solver: str | Solver
    inputs: Inputs | None
    refit: Refit | None
    layers: str | Iterable[str] | None
    skip: str | Iterable[str]
    numerics: Numerics
    execution: Execution


@dataclass(frozen=True, eq=False)
class Options:
    """One call's options, checked and completed."""

    target: Target
    solver: Solver
    inputs: Inputs
    refit: Refit | None  # None: the network if that takes no more than `refit_work`, else blocks
    refit_work: float | None  # multiply-adds that the joint refit may take; None: no limit
    layers: tuple[Layer, ...]
    numerics: Numerics
    execution: Execution
    choice: tuple[Any, Any] = (None, ())  # `layers` and `skip` as they were given
    left: Mapping[str, str] = field(default_factory=dict)  # why layers stay dense, by name

    @property
    def named(self) -> bool:
        """Return whether the caller named the layers, so that none of them may be left out."""
        return self.choice[0] is not None

    def looked_up_again(self, model: nn.Module) -> Options:
        """Return the options with the layers that the network is known to have by now."""
        found, left = _found(model, self.choice, self.target)
        feasibility.check(self.target, model, found, self.numerics.prune_bias)
        return replace(self, layers=tuple(found), left=left)

    def without(self, reasons: Mapping[str, str]) -> Options:
        """Return the options without some layers, which stay as they are.

        Args:
            reasons: why each layer is left out, by name.
        """
        layers = tuple(layer for layer in self.layers if layer.name not in reasons)
        return replace(self, layers=layers, left={**self.left, **reasons})

    @property
    def shared(self) -> bool:
        """Return whether one budget is shared among the layers."""
        return _shared(self.target)

    @property
    def rounds(self) -> int:
        """Return the number of allocation rounds."""
        return self.target.rounds if isinstance(self.target, Sparsity | Budget) else 1

    @property
    def names(self) -> list[str]:
        """Return the names of the layers to prune."""
        return [layer.name for layer in self.layers]

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the result, for the run store's fingerprint."""
        known = {
            "target": self.target,
            "solver": self.solver,
            "inputs": self.inputs,
            "layers": self.names,
            "refit": (self.refit, self.refit_work),
            "numerics": self.numerics,
            "diagnostics": self.execution.diagnostics,
        }
        limit = self.execution.memory_bytes
        return known if limit is None else {**known, "memory": limit}


def checked(
    model: nn.Module,
    target: Target | None,
    given: PruneOptions,
    keep: float | str | Mapping[str, float | str] | None = None,
    batches: Iterable[Any] = (),
) -> Options:
    """Return the completed options of a call; refuse, before any data is read, what cannot be done.

    Args:
        model: the network to prune.
        target: what is wanted; None where `keep` says it.
        given: the keyword arguments of `prune`.
        keep: the fraction of weights to keep.
        batches: the data, of which one batch is run where a network's code leaves open how it
            uses its weights.
    """
    check_model(model)
    check_options(given)
    target = wanted(target, keep)
    numerics, execution = option_values(given)
    if numerics.prune_bias and isinstance(target, Pattern):
        raise LobsError("prune_bias does not go with patterns, which are made of weights.")
    learn(model, batches)
    choice = given.get("layers"), given.get("skip", ())
    found, left = _found(model, choice, target)
    feasibility.check_named(target, left)
    feasibility.check(target, model, found, numerics.prune_bias)
    solver = as_solver(given.get("solver", "auto"))
    inputs = _inputs(given.get("inputs"), target)
    refit, work = _refit(given.get("refit"), solver, inputs, execution)
    return Options(
        target, solver, inputs, refit, work, tuple(found), numerics, execution, choice, left
    )


def _found(
    model: nn.Module, choice: tuple[Any, Any], target: Target
) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers to prune, and why others stay dense, by name.

    Args:
        model: the network.
        choice: the options `layers` and `skip`.
        target: what is wanted; no units leave recurrent layers, unless these are named.
    """
    found, left = find_layers(model, *choice), dict(left_dense(model, *choice))
    if isinstance(target, Pattern) and target.coupled and target.table is None and not choice[0]:
        gated = [layer.name for layer in found if isinstance(layer, RecurrentLayer)]
        left |= dict.fromkeys(gated, "units cannot leave recurrent layers")
    return [layer for layer in found if layer.name not in left], left


def check_model(model: Any) -> None:
    """Refuse what is no network."""
    if not isinstance(model, nn.Module):
        raise LobsError(
            f"model is a {type(model).__name__}: give a torch.nn.Module first, then the batches."
        )


_MOVED = {
    "damping": "numerics=lobs.Numerics(damping=…)",
    "batch_norm": "numerics=lobs.Numerics(batch_norm=…)",
    "prune_bias": "numerics=lobs.Numerics(prune_bias=…)",
    "resume": "execution=lobs.Execution(resume=…)",
    "memory": "execution=lobs.Execution(memory=…)",
    "distributed": "execution=lobs.Execution(distributed=True)",
    "log": "execution=lobs.Execution(log=…)",
    "diagnostics": "execution=lobs.Execution(diagnostics=True)",
    "evaluate": "lobs.Budget(drop=…, evaluate=…)",
    "rounds": "lobs.Sparsity(…, rounds=…)",
    "sparsity": "lobs.Sparsity(…), or keep=… for the fraction that stays",
    "passes": "lobs.Sparsity(…, rounds=…)",
    "compensate": "refit=…",
    "log_json": "execution=lobs.Execution(log=…)",
}


def check_options(given: PruneOptions) -> None:
    """Refuse an option that does not exist; the message names the right one."""
    known = PruneOptions.__annotations__
    for name in given:
        if name not in known:
            remedy = _MOVED.get(name, f"one of {', '.join(known)}")
            raise TypeError(f"there is no option '{name}': say {remedy}.")


def option_values(given: PruneOptions) -> tuple[Numerics, Execution]:
    """Return numerics and execution, or refuse what is neither."""
    numerics, execution = given.get("numerics", Numerics()), given.get("execution", Execution())
    if not isinstance(numerics, Numerics):
        raise LobsError(f"numerics is {numerics!r}: give lobs.Numerics(damping=…, …).")
    if not isinstance(execution, Execution):
        raise LobsError(f"execution is {execution!r}: give lobs.Execution(resume=…, …).")
    return numerics, execution


def _check_switches(options: Numerics | Execution, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(options, name), bool):
            raise LobsError(f"{name} is {getattr(options, name)!r}: True or False.")


def _inputs(asked: Inputs | None, target: Target) -> Inputs:
    if asked is None:
        return "dense" if isinstance(target, ErrorBudget) else "asymmetric"
    if asked not in get_args(Inputs):
        raise LobsError(f"inputs is '{asked}': use {', '.join(map(repr, get_args(Inputs)))}.")
    if asked == "asymmetric" and isinstance(target, ErrorBudget):
        raise LobsError(
            "ErrorBudget limits the error that a layer adds by itself: use inputs='dense' or "
            "inputs='pruned' with it."
        )
    return asked


def _refit(
    asked: Refit | None, solver: Solver, inputs: Inputs, execution: Execution
) -> tuple[Refit | None, float | None]:
    """Return the kind of refit and its limit in multiply-adds; None where its size decides."""
    if asked is None:
        cheap = isinstance(solver, Auto) and inputs == "asymmetric" and execution.memory is None
        return (None, WORK) if cheap else ("layers", None)
    if asked not in get_args(Refit):
        raise LobsError(f"refit is {asked!r}: use {', '.join(map(repr, get_args(Refit)))}.")
    if asked != "layers" and inputs != "asymmetric":
        raise LobsError(
            f"refit='{asked}' changes weights after their layers' errors on {inputs} inputs were "
            "computed: use inputs='asymmetric', and no ErrorBudget."
        )
    if asked == "network" and execution.memory is not None:
        raise LobsError(
            "refit='network' holds several copies of all weights: leave out memory, or use "
            "refit='blocks' or refit='layers'."
        )
    return asked, WORK if asked == "blocks" else None  # for a network that has no blocks


def _shared(target: Target) -> bool:
    return isinstance(target, Budget) or (
        isinstance(target, Sparsity) and target.scope == "network"
    )
