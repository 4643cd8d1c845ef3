"""`lobs` makes trained neural networks small without spoiling them.

Give it a trained PyTorch network, a few hundred unlabelled inputs and a target. It returns the
network with exactly that many weights removed and the others moved to compensate.

    import lobs
    result = lobs.prune(model, batches, keep=0.07)
    print(result.summary())
    result.save("pruned.safetensors")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lobs._system.lazy import lazy_names

__version__ = "0.2.0"

# Public name → its module. Names are imported on first use, so `lobs --help` need not import torch.
_HOMES = {
    "prune": "lobs.pruning.api",
    "forecast": "lobs.pruning.api",
    "prune_folder": "lobs.pruning.folder",
    "PruningResult": "lobs.pruning.result",
    "LayerResult": "lobs.pruning.result",
    "Numerics": "lobs.pruning.options",
    "Execution": "lobs.pruning.options",
    "Sparsity": "lobs.targets",
    "ErrorBudget": "lobs.targets",
    "Budget": "lobs.targets",
    "NByM": "lobs.targets",
    "Block": "lobs.targets",
    "Structured": "lobs.targets",
    "Problem": "lobs.solvers.problem",
    "Solver": "lobs.solvers.problem",
    "Solution": "lobs.solvers.solution",
    "solve": "lobs.solvers",
    "SOLVERS": "lobs.solvers",
    "LOBS": "lobs.solvers",
    "GreedyOBS": "lobs.solvers",
    "Scored": "lobs.solvers",
    "Refine": "lobs.solvers",
    "ADMM": "lobs.solvers",
    "ColumnSweep": "lobs.solvers",
    "Auto": "lobs.solvers",
    "collect_moments": "lobs.calibration.collect",
    "shrink": "lobs.deploy.shrink",
    "accelerate": "lobs.deploy.accelerate",
    "export_onnx": "lobs.deploy.export",
    "save": "lobs.storage.checkpoint",
    "load": "lobs.storage.checkpoint",
    "hold": "lobs.training.hold",
    "retrain": "lobs.training.retrain",
    "prune_in_stages": "lobs.training.staged",
    "Certificate": "lobs.certificate.bound",
    "certify": "lobs.certificate.certify",
    "LobsError": "lobs.errors",
    "NumericalWarning": "lobs.errors",
    "hub": "lobs.zoo.hub",
}
_PACKAGES = (
    "calibration",
    "certificate",
    "deploy",
    "layers",
    "pruning",
    "report",
    "solvers",
    "storage",
    "training",
    "zoo",
)

__all__ = [
    "ADMM",
    "LOBS",
    "SOLVERS",
    "Auto",
    "Block",
    "Budget",
    "Certificate",
    "ColumnSweep",
    "ErrorBudget",
    "Execution",
    "GreedyOBS",
    "LayerResult",
    "LobsError",
    "NByM",
    "NumericalWarning",
    "Numerics",
    "Problem",
    "PruningResult",
    "Refine",
    "Scored",
    "Solution",
    "Solver",
    "Sparsity",
    "Structured",
    "__version__",
    "accelerate",
    "certify",
    "collect_moments",
    "export_onnx",
    "forecast",
    "hold",
    "load",
    "prune",
    "prune_folder",
    "prune_in_stages",
    "retrain",
    "save",
    "shrink",
    "solve",
]

if TYPE_CHECKING:
    from lobs.calibration.collect import collect_moments
    from lobs.certificate.bound import Certificate
    from lobs.certificate.certify import certify
    from lobs.deploy.accelerate import accelerate
    from lobs.deploy.export import export_onnx
    from lobs.deploy.shrink import shrink
    from lobs.errors import LobsError, NumericalWarning
    from lobs.pruning.api import forecast, prune
    from lobs.pruning.folder import prune_folder
    from lobs.pruning.options import Execution, Numerics
    from lobs.pruning.result import LayerResult, PruningResult
    from lobs.solvers import (
        ADMM,
        LOBS,
        SOLVERS,
        Auto,
        ColumnSweep,
        GreedyOBS,
        Refine,
        Scored,
        solve,
    )
    from lobs.solvers.problem import Problem, Solver
    from lobs.solvers.solution import Solution
    from lobs.storage.checkpoint import load, save
    from lobs.targets import Block, Budget, ErrorBudget, NByM, Sparsity, Structured
    from lobs.training.hold import hold
    from lobs.training.retrain import retrain
    from lobs.training.staged import prune_in_stages

__getattr__, _ = lazy_names(__name__, _HOMES | {name: f"lobs.{name}" for name in _PACKAGES})


def __dir__() -> list[str]:
    return sorted(__all__)
