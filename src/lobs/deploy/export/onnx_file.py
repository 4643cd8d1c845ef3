"""ONNX files, checked in onnxruntime before they get their name."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lobs.errors import ExportError
from lobs.deploy.export.program import arguments, doubled, dynamic_shapes, largest_difference
from lobs.storage.atomic import atomic_write

_NEEDED = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class OnnxFile:
    """A file just written, and how far onnxruntime's answer was from torch's."""

    path: Path
    opset: int
    inputs: tuple[str, ...]
    largest_difference: float


def export_onnx(
    path: str | os.PathLike[str],
    model: nn.Module,
    example: Any,
    *,
    dynamic_batch: bool = True,
    tolerance: float = 1e-4,
    opset: int | None = None,
) -> OnnxFile:
    """Write an ONNX file with torch's exporter and keep it only if onnxruntime agrees with torch on the example.

    Zeros stay zeros: ONNX has no sparse layers that runtimes support, so the file is dense. Needs
    the extra `lobs[onnx]`. The opset is the one torch writes today unless you name another.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ExportError(f"ONNX export needs {', '.join(missing)}: pip install 'lobs[onnx]'.")
    frozen = copy.deepcopy(model).eval()
    args, kwargs = arguments(example)
    shapes = dynamic_shapes(args, kwargs) if dynamic_batch else None
    with atomic_write(path) as partial, torch.no_grad(), _quiet():
        try:
            program = torch.onnx.export(
                frozen,
                doubled(args) if dynamic_batch else args,
                str(partial),
                kwargs=doubled(kwargs) if dynamic_batch else kwargs,
                opset_version=opset,
                dynamo=True,
                dynamic_shapes=shapes,
                external_data=False,
                verbose=False,
            )
        except Exception as error:  # torch.onnx raises whatever its passes raise
            first = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            hint = "; try dynamic_batch=False" if dynamic_batch else ""
            raise ExportError(f"torch.onnx cannot follow this network: {first}{hint}") from error
        assert program is not None
        names, answers = _run(
            partial, [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        )
        difference = largest_difference(answers, _tensors(frozen(*args, **kwargs)))
        if not difference <= tolerance:  # NaN is no agreement
            raise ExportError(
                f"onnxruntime differs from torch by {difference:.3g} on the example; at most "
                f"{tolerance:g} is allowed."
            )
        written = next(
            int(entry) for domain, entry in program.model.opset_imports.items() if domain == ""
        )
    return OnnxFile(Path(path), written, names, difference)


def _run(path: Path, inputs: list[Tensor]) -> tuple[tuple[str, ...], list[Tensor]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = tuple(entry.name for entry in session.get_inputs())
    if len(names) != len(inputs):
        raise ExportError(
            f"the ONNX file takes {len(names)} inputs, the example has {len(inputs)}: some are "
            "never used."
        )
    fed = {name: x.detach().cpu().numpy() for name, x in zip(names, inputs, strict=True)}
    return names, [torch.from_numpy(answer) for answer in session.run(None, fed)]


def _tensors(answer: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's notes about its own insides, and about packages that are not needed, to itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
