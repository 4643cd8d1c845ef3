"""`lobs` makes trained neural networks small without spoiling them.

Give it a trained PyTorch network, a few hundred unlabelled inputs and a target; it returns the network with exactly that
many weights gone, the rest moved to compensate, and a proof of how far the output can have shifted.

    import lobs
    result = lobs.prune(model, batches, lobs.Sparsity(0.93))
    print(result.summary())
    result.save("pruned.safetensors")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are imported on first use, so that `lobs --help` need not wait for torch.
_HOMES = {
    # prune a network
    "prune": "lobs.pipeline",
    "Pruning": "lobs.result",
    "LayerResult": "lobs.result",
    # say what you want
    "Sparsity": "lobs.targets",
    "ErrorBudget": "lobs.targets",
    # one layer, bare tensors
    "Problem": "lobs.problem",
    "Solution": "lobs.problem",
    "Solver": "lobs.problem",
    "solve": "lobs.solvers",
    "SOLVERS": "lobs.solvers",
    "LOBS": "lobs.solvers",
    "Exact": "lobs.solvers",
    "Scored": "lobs.solvers",
    "Refine": "lobs.solvers",
    # what reaches each layer
    "collect": "lobs.calibrate",
    "Calibration": "lobs.calibrate",
    # files
    "save": "lobs.checkpoint",
    "load": "lobs.checkpoint",
    # zeros that stay
    "hold": "lobs.holding",
    "Hold": "lobs.holding",
    "apply_masks": "lobs.holding",
    # train on
    "retrain": "lobs.retraining",
    "Retraining": "lobs.retraining",
    "Shuffled": "lobs.retraining",
    "distillation": "lobs.retraining",
    "sgd": "lobs.retraining",
    "iterate": "lobs.stages",
    "Stage": "lobs.stages",
    "Surgery": "lobs.surgery",
    "operate": "lobs.surgery",
    # trust
    "Certificate": "lobs.ledger",
    "certify": "lobs.bounds",
    "LobsError": "lobs.errors",
    "NumericalWarning": "lobs.errors",
}

_ROOMS = (
    "bounds",
    "ledger",
    "calibrate",
    "checkpoint",
    "curvature",
    "holding",
    "kernels",
    "layers",
    "linalg",
    "masks",
    "retraining",
    "scores",
    "solvers",
    "stages",
    "statistics",
    "surgery",
    "zoo",
)

__all__ = [
    "LOBS",
    "SOLVERS",
    "Calibration",
    "Certificate",
    "ErrorBudget",
    "Exact",
    "Hold",
    "LayerResult",
    "LobsError",
    "NumericalWarning",
    "Problem",
    "Pruning",
    "Refine",
    "Retraining",
    "Scored",
    "Shuffled",
    "Solution",
    "Solver",
    "Sparsity",
    "Stage",
    "Surgery",
    "__version__",
    "apply_masks",
    "certify",
    "collect",
    "distillation",
    "hold",
    "iterate",
    "load",
    "operate",
    "prune",
    "retrain",
    "save",
    "sgd",
    "solve",
]

if TYPE_CHECKING:
    from lobs.bounds import certify
    from lobs.calibrate import Calibration, collect
    from lobs.checkpoint import load, save
    from lobs.errors import LobsError, NumericalWarning
    from lobs.holding import Hold, apply_masks, hold
    from lobs.ledger import Certificate
    from lobs.pipeline import prune
    from lobs.problem import Problem, Solution, Solver
    from lobs.result import LayerResult, Pruning
    from lobs.retraining import Retraining, Shuffled, distillation, retrain, sgd
    from lobs.solvers import LOBS, SOLVERS, Exact, Refine, Scored, solve
    from lobs.stages import Stage, iterate
    from lobs.surgery import Surgery, operate
    from lobs.targets import ErrorBudget, Sparsity


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return import_module(f"lobs.{name}")
    raise AttributeError(f"module 'lobs' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
