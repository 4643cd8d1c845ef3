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
    "prune": "lobs.pruning.api",
    "forecast": "lobs.pruning.api",
    "Forecast": "lobs.pruning.forecast",
    "Pruning": "lobs.pruning.result",
    "Account": "lobs.pruning.result",
    "LayerResult": "lobs.pruning.result",
    "Outlook": "lobs.pruning.preview",
    # say what you want
    "Sparsity": "lobs.targets",
    "ErrorBudget": "lobs.targets",
    "Budget": "lobs.targets",
    "NByM": "lobs.targets",
    "Block": "lobs.targets",
    "Structured": "lobs.targets",
    # one layer, bare tensors
    "Problem": "lobs.solvers.problem",
    "Solution": "lobs.solvers.solution",
    "Solver": "lobs.solvers.problem",
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
    "collect": "lobs.calibration.collect",
    "Calibration": "lobs.calibration.collect",
    # make it really smaller
    "shrink": "lobs.deploy.shrink",
    "Shrinkage": "lobs.deploy.shrink",
    # files
    "save": "lobs.storage.checkpoint",
    "save_compact": "lobs.storage.checkpoint",
    "load": "lobs.storage.checkpoint",
    "Checkpoint": "lobs.storage.checkpoint",
    # zeros that stay
    "hold": "lobs.training.hold",
    "Hold": "lobs.training.hold",
    "apply_masks": "lobs.training.hold",
    "lightning_callback": "lobs.training.callbacks",
    "trainer_callback": "lobs.training.callbacks",
    "merge_lora": "lobs.training.lora",
    "merge_adapters": "lobs.training.lora",
    # other programs
    "export_onnx": "lobs.deploy.export",
    "export_program": "lobs.deploy.export",
    "to_semi_structured": "lobs.deploy.export",
    "from_torch_prune": "lobs.deploy.export",
    "to_torch_prune": "lobs.deploy.export",
    # speed
    "accelerate": "lobs.deploy.accelerate",
    "Acceleration": "lobs.deploy.accelerate",
    # train on
    "retrain": "lobs.training.retrain",
    "Retraining": "lobs.training.retrain",
    "Shuffled": "lobs.training.retrain",
    "distillation": "lobs.training.retrain",
    "sgd": "lobs.training.retrain",
    "iterate": "lobs.training.staged",
    "Stage": "lobs.training.staged",
    "Surgery": "experiments.dong2017.surgery",
    "operate": "experiments.dong2017.surgery",
    # trust
    "Certificate": "lobs.certificate.bound",
    "certify": "lobs.certificate.certify",
    "verify_masks": "lobs.certificate.verify",
    "verify_errors": "lobs.certificate.verify",
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
    from lobs.training.lora import merge_adapters, merge_lora
    from lobs.certificate.certify import certify
    from lobs.calibration.collect import Calibration, collect
    from lobs.training.callbacks import lightning_callback, trainer_callback
    from lobs.storage.checkpoint import Checkpoint, load, save, save_compact
    from lobs.errors import LobsError, NumericalWarning
    from lobs.deploy.export import export_onnx, export_program, from_torch_prune, to_semi_structured, to_torch_prune
    from lobs.pruning.forecast import Forecast
    from lobs.training.hold import Hold, apply_masks, hold
    from lobs.certificate.bound import Certificate
    from lobs.pruning.preview import Outlook
    from lobs.pruning.api import forecast, prune
    from lobs.solvers.problem import Problem, Solver
    from lobs.pruning.result import Account, LayerResult, Pruning
    from lobs.training.retrain import Retraining, Shuffled, distillation, retrain, sgd
    from lobs.deploy.accelerate import Acceleration, accelerate
    from lobs.deploy.shrink import Shrinkage, shrink
    from lobs.solvers.solution import Solution
    from lobs.solvers import ADMM, LOBS, SOLVERS, Auto, Columns, Exact, Refine, Scored, solve
    from lobs.training.staged import Stage, iterate
    from experiments.dong2017.surgery import Surgery, operate
    from lobs.targets import Block, Budget, ErrorBudget, NByM, Sparsity, Structured
    from lobs.certificate.verify import verify_errors, verify_masks


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
