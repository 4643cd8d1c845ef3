"""`torch.export`: a network as a graph that runs without its Python code."""

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


def export_program(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    dynamic_batch: bool = True,
) -> torch.export.ExportedProgram:
    """The network as an ExportedProgram, checked against the network on the example; saved (.pt2) where a path is given.

    Accelerated networks are exported as the dense ones they stand for: a compiled kernel of this
    machine is no use elsewhere.
    """
    frozen = copy.deepcopy(model).eval()
    args, kwargs = arguments(example)
    shapes = dynamic_shapes(args, kwargs) if dynamic_batch else None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about its own insides
        try:
            given = (args, kwargs) if shapes is None else (doubled(args), doubled(kwargs))
            program = torch.export.export(frozen, *given, dynamic_shapes=shapes)
        except Exception as error:  # torch.export raises whatever its passes raise
            first = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            hint = "; try dynamic_batch=False" if dynamic_batch else ""
            raise ExportError(f"torch.export cannot follow this network: {first}{hint}") from error
        difference = largest_difference(program.module()(*args, **kwargs), frozen(*args, **kwargs))
        if not difference <= 1e-4:  # NaN is no agreement
            raise ExportError(
                f"the exported program differs from the network by {difference:.3g} on the example."
            )
        if path is not None:
            with atomic_write(path) as partial, partial.open("wb") as file:
                torch.export.save(program, file)
    return program


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example batch as arguments of the network: a tensor, a tuple whose first item is one, or a mapping."""
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
    """The first dimension of every tensor is the batch and may be anything."""
    batch = torch.export.Dim("batch", min=1)

    def of(value: Any) -> Any:
        return {0: batch} if isinstance(value, Tensor) and value.dim() else None

    return tuple(of(v) for v in args) if args else {k: of(v) for k, v in kwargs.items()}


def largest_difference(one: Any, other: Any) -> float:
    """The largest difference between two answers, relative to their largest finite value where that is above one.

    Infinities of one sign agree, as do NaN; one without its like makes it infinite.
    """
    ours, theirs = (_leaves(answer) for answer in (one, other))
    if len(ours) != len(theirs) or any(
        a.shape != b.shape for a, b in zip(ours, theirs, strict=True)
    ):
        raise ExportError("the exported network answers with other tensors than the network.")
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max((_apart(a, b) for a, b in pairs), default=0.0)


def _apart(a: Tensor, b: Tensor) -> float:
    same = (a == b) | (a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    if not bool((same | finite).all()):
        return float("inf")
    apart = torch.where(same, 0.0, (a - b).abs())
    return float(apart.max()) / max(1.0, float(torch.where(b.isfinite(), b, 0.0).abs().max()))


def _leaves(answer: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(answer)
    return [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, Tensor)]


def doubled(values: Any) -> Any:
    """Arguments with a batch of two where it was one: torch takes a dimension of one for a constant."""

    def twice(value: Any) -> Any:
        alone = isinstance(value, Tensor) and value.dim() > 0 and len(value) == 1
        return torch.cat([value, value]) if alone else value

    return (
        {k: twice(v) for k, v in values.items()}
        if isinstance(values, dict)
        else tuple(twice(v) for v in values)
    )
