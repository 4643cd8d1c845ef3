"""The certificate of a whole network: what the theorem promises, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lobs import chain, ledger
from lobs.calibrate import Calibration, batch_size, call, collect, evaluating, length
from lobs.errors import UnsupportedLayerError
from lobs.layers import find_layers
from lobs.ledger import Certificate
from lobs.problem import Problem
from lobs.progress import track


def certify(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    *,
    held_out: Iterable[Any] | None = None,
    layers: str | Iterable[str] | None = None,
) -> Certificate:
    """Bound how far a pruned network's output moved over `batches`, and measure it there and on held-out inputs.

    Works for any two networks of one architecture, however the second was made: layer errors are measured here, on the dense
    network's inputs. `batches` are run twice, so a list or a DataLoader is needed.
    """
    before, after = ({layer.name: layer for layer in find_layers(m, layers)} for m in (dense, pruned))
    if before.keys() != after.keys():
        raise UnsupportedLayerError("the two networks have different layers; a certificate compares like with like.")
    calibration = collect(dense, batches, list(before.values()))
    largest = {}
    for name, layer in before.items():
        problem = Problem(layer.matrix(), calibration[name].moment.to(layer.weight.device), name=f"layer '{name}'")
        largest[name] = problem.largest_error_of(after[name].matrix())
    return certificate(dense, pruned, calibration, layer_errors(largest, calibration), batches=batches, held_out=held_out)


def layer_errors(largest: Mapping[str, float], calibration: Calibration) -> dict[str, float]:
    """√E by layer, in root mean square over the network's samples.

    E is a mean over a layer's input vectors; a convolution has many of them in each sample.
    """
    return {name: math.sqrt(e * calibration[name].count / calibration.samples) for name, e in largest.items()}


def certificate(
    dense: nn.Module,
    pruned: nn.Module,
    calibration: Calibration,
    errors: dict[str, float],
    *,
    batches: Iterable[Any] | None,
    held_out: Iterable[Any] | None,
    dense_gains: Mapping[str, Tensor] | None = None,
) -> Certificate:
    """Put the bound for known layer errors beside what is measured.

    `dense_gains` are the dense matrices, where errors were measured on the pruned network's inputs.
    """
    try:
        if len(calibration.shapes) > 1:
            raise chain.NotAChainError(f"inputs came in {len(calibration.shapes)} different shapes")
        other = _other_difference(dense, pruned, calibration)
        if other:
            raise chain.NotAChainError(f"'{other}' differs too, beside the layers (re-estimated batch norm, perhaps)")
        found = ledger.compose(chain.links(pruned, calibration.example, errors, dict(dense_gains or {})))
    except chain.NotAChainError as error:
        found = ledger.refuse(str(error))
    measured = None if batches is None else deviation(dense, pruned, batches, calibration.samples)
    return replace(found, measured=measured, held_out=None if held_out is None else deviation(dense, pruned, held_out))


def _other_difference(dense: nn.Module, pruned: nn.Module, layers: Iterable[str]) -> str | None:
    """The first entry of the state that differs though no layer's error accounts for it."""
    known, theirs = set(layers), pruned.state_dict()
    for name, value in dense.state_dict().items():
        owner = name.rpartition(".")[0] or "model"
        if owner not in known and not name.endswith("num_batches_tracked") and not torch.equal(value, theirs[name]):
            return name
    return None


def deviation(model: nn.Module, other: nn.Module, batches: Iterable[Any], expected: int | None = None) -> float | None:
    """Root mean square distance between two networks' outputs over the data.

    None if they do not return one tensor, or if the data yields other than the expected number of samples, as an iterable
    does that can be read only once.
    """
    total, samples = 0.0, 0
    with evaluating(model), evaluating(other), track("measure", length(batches)) as advance:
        for batch in batches:
            a, b = call(model, batch), call(other, batch)
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                return None
            total += float((a.to(torch.float64) - b.to(torch.float64)).square().sum())
            samples += batch_size(batch)
            advance(1)
    if samples == 0 or (expected is not None and samples != expected):
        return None
    return math.sqrt(total / samples)
