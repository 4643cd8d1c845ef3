"""Export a network with `torch.export`: a graph that runs without its Python code."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lobs.errors import ExportError
from lobs.storage.atomic import atomic_write
from lobs.storage.outputs import PROGRAM, check_order, output_path

_TOLERANCE = 1e-4  # between program and network, relative to the outputs where those exceed 1


def export_program(
    model: nn.Module,
    path: str | os.PathLike[str] | None,
    example: Any,
    *,
    dynamic_batch: bool = True,
) -> torch.export.ExportedProgram:
    """Return the network as an `ExportedProgram`, checked on the example; write it to `path`.

    Accelerated networks are exported as the dense networks they compute: compiled kernels of this
    machine do not run elsewhere.

    Args:
        model: the network; it is copied, not changed.
        path: the file to write; it must end in `.pt2`. None writes no file.
        example: a batch: a tensor, a tuple whose first item is the input, or a mapping of keyword
            arguments.
        dynamic_batch: let the program take batches of any size.
    """
    check_order(
        model,
        "" if path is None else path,
        "lobs.deploy.export_program(model, {path}, example)",
    )
    target = None if path is None else output_path(path, PROGRAM)
    frozen = copy.deepcopy(model).eval()
    args, kwargs = arguments(example)
    shapes = dynamic_shapes(args, kwargs) if dynamic_batch else None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        try:
            given = (args, kwargs) if shapes is None else (doubled(args), doubled(kwargs))
            program = torch.export.export(frozen, *given, dynamic_shapes=shapes)
        except Exception as error:  # torch.export raises whatever its passes raise
            hint = "; try dynamic_batch=False" if dynamic_batch else ""
            raise ExportError(
                f"torch.export cannot follow this network: {first_line(error)}{hint}"
            ) from error
        difference = largest_difference(program.module()(*args, **kwargs), frozen(*args, **kwargs))
        if not difference <= _TOLERANCE:  # also true for NaN
            raise ExportError(
                f"the exported program differs from the network by {difference:.3g} on the example."
            )
        if target is not None:
            with atomic_write(target) as partial, partial.open("wb") as file:
                torch.export.save(program, file)
    return program


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments of the network."""
    if isinstance(example, Mapping):
        return (), dict(example)
    x = example[0] if isinstance(example, tuple | list) and example else example
    if not isinstance(x, Tensor):
        raise ExportError(
            f"cannot export with an example of type {type(x).__name__}: give a tensor, a tuple or "
            "a mapping."
        )
    return (x,), {}


def dynamic_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Declare the first dimension of every tensor as a batch of any size."""
    batch = torch.export.Dim("batch", min=1)

    def of(value: Any) -> Any:
        return {0: batch} if isinstance(value, Tensor) and value.dim() else None

    return tuple(of(v) for v in args) if args else {k: of(v) for k, v in kwargs.items()}


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference between two outputs.

    It is relative to the largest finite value of `other` where that exceeds 1. Equal infinities
    agree, and so do two NaN. An unmatched one makes the difference infinite.
    """
    ours, theirs = (tensor_leaves(output) for output in (one, other))
    if len(ours) != len(theirs) or any(
        a.shape != b.shape for a, b in zip(ours, theirs, strict=True)
    ):
        raise ExportError("the exported network returns tensors of other shapes than the network.")
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max((_distance(a, b) for a, b in pairs), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    if not bool((same | finite).all()):
        return float("inf")
    distance = torch.where(same, 0.0, (a - b).abs())
    return float(distance.max()) / max(1.0, float(torch.where(b.isfinite(), b, 0.0).abs().max()))


def tensor_leaves(output: Any) -> list[Tensor]:
    """Return every tensor of an output on the CPU, whatever containers it is wrapped in."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, Tensor)]


def doubled(values: Any) -> Any:
    """Repeat batches of one sample: torch would take a dimension of 1 for a constant."""

    def twice(value: Any) -> Any:
        alone = isinstance(value, Tensor) and value.dim() > 0 and len(value) == 1
        return torch.cat([value, value]) if alone else value

    return (
        {k: twice(v) for k, v in values.items()}
        if isinstance(values, dict)
        else tuple(twice(v) for v in values)
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
