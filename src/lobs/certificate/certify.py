"""The certificate of a whole network: the theorem's bound beside the measured distance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lobs.calibration.collect import Calibration, collect_moments
from lobs.calibration.comparison import Comparison, compare
from lobs.calibration.forward import fitted, length
from lobs.calibration.learning import learn
from lobs.certificate import bound, lipschitz
from lobs.certificate.bound import Certificate
from lobs.errors import CalibrationError, UnsupportedLayerError, caution
from lobs.layers import find_layers
from lobs.layers.folding import folded
from lobs.solvers.problem import Problem


def certify(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    *,
    held_out: Iterable[Any] | None = None,
    layers: str | Iterable[str] | None = None,
) -> Certificate:
    """Bound how far a pruned network's output moved over `batches`, and measure it.

    It works for any two networks of one architecture, however the second was made. Layer errors are
    measured here, on the dense network's inputs.

    Args:
        dense: the network as it was given.
        pruned: the network to compare with it.
        batches: inputs, read twice: a list or a DataLoader.
        held_out: other inputs to measure the distance on.
        layers: names or globs of the layers that may differ; all by default.
    """
    for name, network in (("dense", dense), ("pruned", pruned)):
        if not isinstance(network, nn.Module):
            raise UnsupportedLayerError(
                f"{name} is a {type(network).__name__}: write certify(dense, pruned, batches)."
            )
    dense, pruned = folded(dense), folded(pruned)
    batches = fitted(dense, batches, again=False)
    for network in (dense, pruned) if length(batches) is not None else ():
        learn(network, batches)
    before, after = (
        {layer.name: layer for layer in find_layers(m, layers)} for m in (dense, pruned)
    )
    if before.keys() != after.keys():
        raise UnsupportedLayerError(
            "the two networks have different layers; a certificate compares like with like."
        )
    for name, layer in before.items():
        if layer.weight.shape != after[name].weight.shape:
            here, there = tuple(layer.weight.shape), tuple(after[name].weight.shape)
            raise UnsupportedLayerError(
                f"layer '{name}' is {here} in one network and {there} in the other: was it shrunk?"
            )
    if held_out is not None:
        held_out = fitted(dense, held_out, again=False, name="held_out")
    calibration = collect_moments(dense, batches, list(before.values()))
    largest = {}
    for name, layer in before.items():
        problem = Problem(
            layer.matrix(), calibration[name].moment.to(layer.weight.device), name=f"layer '{name}'"
        )
        largest[name] = problem.largest_error_of(after[name].matrix())
    comparison = compare(dense, pruned, batches, expected=calibration.samples)
    errors = layer_errors(largest, calibration)
    return certificate(comparison, calibration, errors, held_out=held_out)


def layer_errors(largest: Mapping[str, float], calibration: Calibration) -> dict[str, float]:
    """Return √E by layer, root mean square over the network's samples.

    E is a mean over a layer's input vectors. A convolution has many of them in each sample.
    """
    return {
        name: math.sqrt(e * calibration.count(name) / calibration.samples)
        for name, e in largest.items()
    }


def certificate(
    comparison: Comparison,
    calibration: Calibration,
    errors: Mapping[str, float],
    *,
    held_out: Iterable[Any] | None,
    dense_gains: Mapping[str, Tensor] | None = None,
    absorbed: bool = False,
) -> Certificate:
    """Put the bound for known layer errors beside the measured distance.

    Args:
        comparison: the two networks, compared over the calibration data.
        calibration: what reached the layers.
        errors: √E by layer, root mean square over the network's samples.
        held_out: other inputs to measure the distance on.
        dense_gains: dense matrices by layer, where errors were measured on the pruned network's
            inputs.
        absorbed: errors are whole distances between the networks' outputs at each layer, so errors
            of earlier layers do not add to them.
    """
    dense, pruned = comparison.dense, comparison.pruned
    try:
        found = _bound(dense, pruned, calibration, errors, dense_gains, absorbed)
    except lipschitz.NotAChainError as error:
        found = bound.refuse(str(error))
    return replace(
        found,
        measured=comparison.output,
        output_norm=comparison.output_norm,
        held_out=None if held_out is None else _held_out(dense, pruned, held_out),
    )


def _bound(
    dense: nn.Module,
    pruned: nn.Module,
    calibration: Calibration,
    errors: Mapping[str, float],
    dense_gains: Mapping[str, Tensor] | None,
    absorbed: bool,
) -> Certificate:
    """Compose the bound along the chain of layers; refuse where the theorem does not apply."""
    if len(calibration.shapes) > 1:
        raise lipschitz.NotAChainError(f"inputs came in {len(calibration.shapes)} different shapes")
    other = _other_difference(dense, pruned, calibration)
    if other:
        raise lipschitz.NotAChainError(
            f"'{other}' differs too, beside the layers (a norm that was refitted or a batch norm "
            "that was re-estimated? refit='layers' and Numerics(batch_norm=False) leave them alone)"
        )
    links = lipschitz.links(pruned, calibration.example, dict(errors), dict(dense_gains or {}))
    if absorbed:
        links = [
            replace(link, gain=0.0, frobenius_gain=0.0) if link.name in errors else link
            for link in links
        ]
    return bound.compose(links)


def _held_out(dense: nn.Module, pruned: nn.Module, batches: Iterable[Any]) -> float | None:
    """Return the distance on held-out inputs; unusable inputs give a warning and None."""
    try:
        found = compare(dense, pruned, batches)
    except CalibrationError as error:
        caution(f"held_out could not be measured: {error}")
        return None
    if not found.samples:
        caution("held_out has no samples: nothing was measured on it.")
    elif found.output is not None and not math.isfinite(found.output):
        caution("held_out: the networks' outputs there are not finite; are its inputs?")
    return found.output


def _other_difference(dense: nn.Module, pruned: nn.Module, layers: Iterable[str]) -> str | None:
    """Return the first entry of the state that differs outside the given layers."""
    known = {id(tensor) for layer in find_layers(dense, layers) for tensor in layer.tensors()}
    theirs = pruned.state_dict()
    for name, value in dense.state_dict(keep_vars=True).items():
        if (
            id(value) in known
            or name.endswith("num_batches_tracked")
            or not isinstance(value, Tensor)
        ):
            continue
        if not isinstance(theirs.get(name), Tensor) or not torch.equal(value, theirs[name]):
            return name
    return None
