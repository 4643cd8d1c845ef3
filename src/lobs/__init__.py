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
    "forecast": "lobs.pipeline",
    "Forecast": "lobs.forecasting",
    "Pruning": "lobs.result",
    "Account": "lobs.result",
    "LayerResult": "lobs.result",
    "Outlook": "lobs.outlook",
    # say what you want
    "Sparsity": "lobs.targets",
    "ErrorBudget": "lobs.targets",
    "Budget": "lobs.targets",
    "NByM": "lobs.targets",
    "Block": "lobs.targets",
    "Structured": "lobs.targets",
    # one layer, bare tensors
    "Problem": "lobs.problem",
    "Solution": "lobs.solution",
    "Solver": "lobs.problem",
    "solve": "lobs.solvers",
    "SOLVERS": "lobs.solvers",
    "LOBS": "lobs.solvers",
    "Exact": "lobs.solvers",
    "Scored": "lobs.solvers",
    "Refine": "lobs.solvers",
    "ADMM": "lobs.solvers",
    "Columns": "lobs.solvers",
    "Auto": "lobs.solvers",
    # what reaches each layer
    "collect": "lobs.calibrate",
    "Calibration": "lobs.calibrate",
    # make it really smaller
    "shrink": "lobs.shrinking",
    "Shrinkage": "lobs.shrinking",
    # files
    "save": "lobs.checkpoint",
    "save_compact": "lobs.checkpoint",
    "load": "lobs.checkpoint",
    "Checkpoint": "lobs.checkpoint",
    # zeros that stay
    "hold": "lobs.holding",
    "Hold": "lobs.holding",
    "apply_masks": "lobs.holding",
    "lightning_callback": "lobs.callbacks",
    "trainer_callback": "lobs.callbacks",
    "merge_lora": "lobs.adapters",
    "merge_adapters": "lobs.adapters",
    # other programs
    "export_onnx": "lobs.export",
    "export_program": "lobs.export",
    "to_semi_structured": "lobs.export",
    "from_torch_prune": "lobs.export",
    "to_torch_prune": "lobs.export",
    # speed
    "accelerate": "lobs.runtime",
    "Acceleration": "lobs.runtime",
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
    "verify_masks": "lobs.verify",
    "verify_errors": "lobs.verify",
    "LobsError": "lobs.errors",
    "NumericalWarning": "lobs.errors",
}

_ROOMS = (
    "bounds",
    "calibrate",
    "checkpoint",
    "compact",
    "curvature",
    "export",
    "holding",
    "kernels",
    "layers",
    "ledger",
    "linalg",
    "masks",
    "outlook",
    "report",
    "retraining",
    "runtime",
    "scores",
    "shrinking",
    "solvers",
    "stages",
    "statistics",
    "surgery",
    "zoo",
)

__all__ = [
    "ADMM",
    "LOBS",
    "SOLVERS",
    "Acceleration",
    "Account",
    "Auto",
    "Block",
    "Budget",
    "Calibration",
    "Certificate",
    "Checkpoint",
    "Columns",
    "ErrorBudget",
    "Exact",
    "Forecast",
    "Hold",
    "LayerResult",
    "LobsError",
    "NByM",
    "NumericalWarning",
    "Outlook",
    "Problem",
    "Pruning",
    "Refine",
    "Retraining",
    "Scored",
    "Shrinkage",
    "Shuffled",
    "Solution",
    "Solver",
    "Sparsity",
    "Stage",
    "Structured",
    "Surgery",
    "__version__",
    "accelerate",
    "apply_masks",
    "certify",
    "collect",
    "distillation",
    "export_onnx",
    "export_program",
    "forecast",
    "from_torch_prune",
    "hold",
    "iterate",
    "lightning_callback",
    "load",
    "merge_adapters",
    "merge_lora",
    "operate",
    "prune",
    "retrain",
    "save",
    "save_compact",
    "sgd",
    "shrink",
    "solve",
    "to_semi_structured",
    "to_torch_prune",
    "trainer_callback",
    "verify_errors",
    "verify_masks",
]

if TYPE_CHECKING:
    from lobs.adapters import merge_adapters, merge_lora
    from lobs.bounds import certify
    from lobs.calibrate import Calibration, collect
    from lobs.callbacks import lightning_callback, trainer_callback
    from lobs.checkpoint import Checkpoint, load, save, save_compact
    from lobs.errors import LobsError, NumericalWarning
    from lobs.export import export_onnx, export_program, from_torch_prune, to_semi_structured, to_torch_prune
    from lobs.forecasting import Forecast
    from lobs.holding import Hold, apply_masks, hold
    from lobs.ledger import Certificate
    from lobs.outlook import Outlook
    from lobs.pipeline import forecast, prune
    from lobs.problem import Problem, Solver
    from lobs.result import Account, LayerResult, Pruning
    from lobs.retraining import Retraining, Shuffled, distillation, retrain, sgd
    from lobs.runtime import Acceleration, accelerate
    from lobs.shrinking import Shrinkage, shrink
    from lobs.solution import Solution
    from lobs.solvers import ADMM, LOBS, SOLVERS, Auto, Columns, Exact, Refine, Scored, solve
    from lobs.stages import Stage, iterate
    from lobs.surgery import Surgery, operate
    from lobs.targets import Block, Budget, ErrorBudget, NByM, Sparsity, Structured
    from lobs.verify import verify_errors, verify_masks


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
