"""Write ONNX files and check them in onnxruntime before they get their name."""

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

from lobs.deploy.export.program import (
    arguments,
    doubled,
    dynamic_shapes,
    first_line,
    largest_difference,
    tensor_leaves,
)
from lobs.errors import ExportError
from lobs.storage.atomic import atomic_write
from lobs.storage.outputs import ONNX, check_order, output_path

_NEEDED = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class OnnxFile:
    """Describe a written file.

    `largest_difference` is between the outputs of onnxruntime and torch, on the example.
    """

    path: Path
    opset: int
    inputs: tuple[str, ...]
    largest_difference: float


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    *,
    dynamic_batch: bool = True,
    tolerance: float = 1e-4,
    opset: int | None = None,
) -> OnnxFile:
    """Write an ONNX file, and keep it only if onnxruntime agrees with torch on the example.

    Zeros stay zeros: runtimes have no sparse layers, so the file is dense. Needs the extra
    `lobs[onnx]`.

    Args:
        model: the network; it is copied, not changed.
        path: the file to write; it must end in `.onnx`.
        example: a batch: a tensor, a tuple whose first item is the input, or a mapping of keyword
            arguments.
        dynamic_batch: let the file take batches of any size.
        tolerance: the largest difference allowed, relative to the outputs where those exceed 1.
        opset: the ONNX opset; by default the one that torch writes today.
    """
    check_order(model, path, "lobs.export_onnx(model, {path}, example)")
    target = output_path(path, ONNX)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ExportError(f"ONNX export needs {', '.join(missing)}: pip install 'lobs[onnx]'.")
    frozen = copy.deepcopy(model).eval()
    args, kwargs = arguments(example)
    with atomic_write(target) as partial, torch.no_grad(), _quiet():
        program = _write(frozen, partial, (args, kwargs), dynamic_batch, opset)
        inputs = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        names, outputs = _run(partial, inputs)
        difference = largest_difference(outputs, tensor_leaves(frozen(*args, **kwargs)))
        if not difference <= tolerance:  # also true for NaN
            raise ExportError(
                f"onnxruntime differs from torch by {difference:.3g} on the example; at most "
                f"{tolerance:g} is allowed."
            )
        written = next(
            int(entry) for domain, entry in program.model.opset_imports.items() if domain == ""
        )
    return OnnxFile(target, written, names, difference)


def _write(
    model: nn.Module,
    path: Path,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    dynamic_batch: bool,
    opset: int | None,
) -> Any:
    """Run torch's exporter; turn its errors into one line with a hint."""
    args, kwargs = given
    try:
        program = torch.onnx.export(
            model,
            doubled(args) if dynamic_batch else args,
            str(path),
            kwargs=doubled(kwargs) if dynamic_batch else kwargs,
            opset_version=opset,
            dynamo=True,
            dynamic_shapes=dynamic_shapes(args, kwargs) if dynamic_batch else None,
            external_data=False,
            verbose=False,
        )
    except Exception as error:  # torch.onnx raises whatever its passes raise
        hint = "; try dynamic_batch=False" if dynamic_batch else ""
        raise ExportError(
            f"torch.onnx cannot follow this network: {first_line(error)}{hint}"
        ) from error
    assert program is not None
    return program


def _run(path: Path, inputs: list[Tensor]) -> tuple[tuple[str, ...], list[Tensor]]:
    """Run the file in onnxruntime; return the names of its inputs and its outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = tuple(entry.name for entry in session.get_inputs())
    if len(names) != len(inputs):
        raise ExportError(
            f"the ONNX file takes {len(names)} inputs, the example has {len(inputs)}: remove the "
            "inputs that the network never uses."
        )
    fed = {name: x.detach().cpu().numpy() for name, x in zip(names, inputs, strict=True)}
    return names, [torch.from_numpy(output) for output in session.run(None, fed)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's notes about its own internals and about optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
