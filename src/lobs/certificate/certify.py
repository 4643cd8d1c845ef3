"""The certificate of a whole network: the theorem's bound beside the measured distance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lobs.calibration.collect import Calibration, collect_moments
from lobs.calibration.comparison import Comparison, compare, side_by_side
from lobs.calibration.forward import (
    batch_size,
    call,
    fitted,
    learn,
    length,
    main_output,
    masks_of,
    padded,
    without_padding,
)
from lobs.certificate import bound, lipschitz
from lobs.certificate.bound import Certificate
from lobs.certificate.guarantee import Guarantee, Tally
from lobs.errors import CalibrationError, UnsupportedLayerError, caution
from lobs.layers import find_layers
from lobs.layers.folding import folded
from lobs.solvers.problem import Problem

ROUNDING = 1e-6  # of float32 outputs, relative to their norm


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
    batches = fitted(dense, batches, again=False)
    calibration = collect_moments(dense, batches, list(before.values()))
    largest, energies = {}, {}
    for name, layer in before.items():
        problem = Problem(
            layer.matrix(), calibration[name].moment.to(layer.weight.device), name=f"layer '{name}'"
        )
        largest[name] = problem.largest_error_of(after[name].matrix())
        energies[name] = problem.energy
    comparison = compare(dense, pruned, batches, expected=calibration.samples)
    errors = layer_errors(largest, energies, calibration)
    return certificate(comparison, calibration, errors, held_out=held_out)


def layer_errors(
    largest: Mapping[str, float], energies: Mapping[str, float], calibration: Calibration
) -> dict[str, float]:
    """Return √E by layer, root mean square over the network's samples.

    E is a mean over a layer's input vectors. A convolution has many of them in each sample. The
    rounding of float32 outputs is added.

    Args:
        largest: the largest possible E of each layer.
        energies: mean squared norm of each layer's dense outputs.
        calibration: what reached the layers.
    """
    scale = {name: calibration.count(name) / calibration.samples for name in largest}
    return {
        name: math.sqrt(e * scale[name])
        + (ROUNDING * math.sqrt(energies[name] * scale[name]) if e > 0 else 0.0)
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
        if comparison.output is None or not comparison.steady:
            raise lipschitz.NotAChainError("the batches were others when they were read again")
        found = _bound(dense, pruned, calibration, errors, dense_gains, absorbed)
    except lipschitz.NotAChainError as error:
        found = bound.refuse(str(error))
    return beside(found, comparison, held_out)


def beside(
    found: Certificate, comparison: Comparison, held_out: Iterable[Any] | None
) -> Certificate:
    """Put the measured distances beside a bound.

    Args:
        found: the bound, or why there is none.
        comparison: the two networks, compared over the calibration data.
        held_out: other inputs to measure the distance on.
    """
    dense, pruned = comparison.dense, comparison.pruned
    moved, guarantee = (None, None) if held_out is None else _held_out(dense, pruned, held_out)
    return replace(
        found,
        measured=comparison.output,
        output_norm=comparison.output_norm,
        held_out=moved,
        guarantee=guarantee,
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
    if reason := uncovered(dense, pruned):
        raise lipschitz.NotAChainError(reason)
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


def uncovered(dense: nn.Module, pruned: nn.Module) -> str:
    """Return why the theorem says nothing about what these networks compute; empty where it does.

    It is about the forward passes that their classes define, in at least single precision.
    """
    for network in (dense, pruned):
        for name, module in network.named_modules():
            if module._forward_hooks or module._forward_pre_hooks:
                return f"'{name}' has a forward hook, which may change what it computes"
            if "forward" in vars(module):
                return f"the forward pass of '{name}' was replaced on the instance"
        for name, value in network.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4:
                return f"'{name}' is {value.dtype}, whose rounding the theorem does not count"
    if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
        return "autocast rounds to half precision, which the theorem does not count"
    return ""


def _held_out(
    dense: nn.Module, pruned: nn.Module, batches: Iterable[Any]
) -> tuple[float | None, Guarantee | None]:
    """Return the distance on held-out inputs and the guarantee that they give.

    Unusable inputs give a warning.
    """
    found, tally = Comparison(dense, pruned), Tally()
    try:
        with side_by_side(dense, pruned, batches) as passing:
            for batch in passing:
                before, after = call(dense, batch), call(pruned, batch)
                with padded(masks_of(batch)):
                    first, second = (_data_of(answer) for answer in (before, after))
                found.add_outputs(first, second, batch_size(batch))
                tally.add(batch, before, after)
    except CalibrationError as error:
        caution(f"held_out could not be measured: {error}")
        return None, None
    found.join()
    tally.join()
    if not found.samples:
        caution("held_out has no samples: nothing was measured on it.")
    elif found.output is not None and not math.isfinite(found.output):
        caution("held_out: the networks' outputs there are not finite; are its inputs?")
    return found.output, tally.guarantee() if tally.finite and tally.samples else None


def _data_of(answer: Any) -> Tensor | None:
    """Return an answer's output without padded positions."""
    out = main_output(answer)
    return None if out is None else without_padding(out)


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
