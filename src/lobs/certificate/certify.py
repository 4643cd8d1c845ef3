"""The certificate of a whole network: the theorem's bound beside the measured distance.

It also counts the samples whose answer provably stays. A sample's output moves by at most the sum
of its layers' deviations times the gains behind them. The answer stays where its margin is larger
than √2 times that. Samples must not mix, which is tested with NaN: it must reach the rows of those
samples that hold it, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.distributed import process_group
from lobs.calibration.collect import Calibration, collect_moments
from lobs.calibration.comparison import ROUNDING, Comparison, between, side_by_side
from lobs.calibration.forward import (
    call,
    evaluating,
    fitted,
    learn,
    length,
    main_output,
    plain_input,
)
from lobs.certificate import bound, lipschitz
from lobs.certificate.bound import Certificate, Link
from lobs.certificate.guarantee import Guarantee, Tally
from lobs.errors import CalibrationError, UnsupportedLayerError, caution
from lobs.layers import Layer, find_layers, watching
from lobs.layers.folding import folded
from lobs.solvers.problem import Problem

_SAMPLES = 16  # of the test whether samples mix


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
    pairs = [(layer, after[name]) for name, layer in before.items()]
    comparison = between(dense, pruned, pairs, "dense", calibration.samples).over(batches)
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
    links: list[Link] | None = None
    try:
        if comparison.output is None or not comparison.steady:
            raise lipschitz.NotAChainError("the batches were others when they were read again")
        if comparison.samples != calibration.samples:
            raise lipschitz.NotAChainError(
                f"the networks were compared on {comparison.samples:,} of "
                f"{calibration.samples:,} inputs, which is enough to measure the change"
            )
        links = links_of(comparison, calibration, errors, dense_gains, absorbed)
        found = bound.compose(links)
    except lipschitz.NotAChainError as error:
        found = bound.refuse(str(error))
    gains = None if links is None else gains_of(comparison, links, errors, calibration.example)
    if any(process_group().all_gather(gains is None)):  # what follows must be alike in all
        gains = None
    return beside(found, comparison, held_out, gains, calibration.example)


def beside(
    found: Certificate,
    comparison: Comparison,
    held_out: Iterable[Any] | None,
    gains: Mapping[str, float] | None = None,
    example: Any = None,
) -> Certificate:
    """Put the measured distances beside a bound.

    Args:
        found: the bound, or why there is none.
        comparison: the two networks, compared over the calibration data.
        held_out: other inputs to measure the distance on.
        gains: factors from layers to the output that hold for every sample; None without them.
        example: one sample.
    """
    given = any(process_group().all_gather(held_out is not None))
    shared = () if held_out is None else held_out  # of one process, which may have none
    other, guarantee = (
        _held_out(comparison.like(gains or ()), shared, example) if given else (None, None)
    )
    return replace(
        found,
        measured=comparison.output,
        output_norm=comparison.output_norm,
        held_out=None if other is None else other.output,
        guarantee=guarantee,
        certified=_share(comparison, gains),
        certified_held_out=None if other is None else _share(other, gains),
    )


def links_of(
    comparison: Comparison,
    calibration: Calibration,
    errors: Mapping[str, float],
    dense_gains: Mapping[str, Tensor] | None,
    absorbed: bool,
) -> list[Link]:
    """Return the steps of the network; raise `NotAChainError` where the theorem does not apply.

    Args:
        comparison: the two networks, compared over the calibration data.
        calibration: what reached the layers.
        errors: √E by layer.
        dense_gains: dense matrices by layer, where gains come from them.
        absorbed: errors of earlier layers do not add to those of later ones.
    """
    dense, pruned = comparison.dense, comparison.pruned
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
    if not absorbed:
        return links
    return [
        replace(link, gain=0.0, frobenius_gain=0.0) if link.name in errors else link
        for link in links
    ]


def gains_of(
    comparison: Comparison, links: Sequence[Link], errors: Mapping[str, float], example: Any
) -> dict[str, float] | None:
    """Return the factors from layers to the output that hold for every sample by itself.

    None where samples mix, or where the output is not one row of numbers for each sample.

    Args:
        comparison: the two networks, compared over the calibration data.
        links: the steps of the network.
        errors: √E by layer; only the names count.
        example: one sample.
    """
    names = [link.name for link in links if link.name in errors]
    if not comparison.per_sample.known or len(names) != len(set(names)):
        return None
    found, layers = bound.gains(links, errors.keys()), find_layers(comparison.pruned, names)
    return _usable(found, comparison.pruned, layers, example)


class Sharing:
    """Recompute the share of inputs whose answer provably stays.

    Args:
        dense: the dense network.
        pruned: the pruned one.
        names: names of the layers that were pruned.
        inputs: what each layer was pruned on.
        batches: the calibration data.
    """

    def __init__(
        self,
        dense: nn.Module,
        pruned: nn.Module,
        names: Sequence[str],
        inputs: str,
        batches: Iterable[Any],
    ) -> None:
        before, after = ({x.name: x for x in find_layers(m, names)} for m in (dense, pruned))
        pairs = [(layer, after[name]) for name, layer in before.items()]
        self._calibration = collect_moments(dense, batches, list(before.values()), counts_only=True)
        dense_weights = {name: x.matrix() for name, x in before.items()}
        self._comparison = between(dense, pruned, pairs, inputs).over(batches)
        differs = {name: distance.error > 0 for name, distance in self._comparison.layers.items()}
        for name, weight in dense_weights.items():
            differs.setdefault(name, not torch.equal(weight, after[name].matrix()))
        errors = {name: float(other) for name, other in differs.items()}
        gains_from = dense_weights if inputs == "pruned" else None
        try:
            links = links_of(
                self._comparison, self._calibration, errors, gains_from, inputs == "asymmetric"
            )
        except lipschitz.NotAChainError:
            self._gains = None
        else:
            example = self._calibration.example
            self._gains = gains_of(self._comparison, links, errors, example)

    def share(self, held_out: Iterable[Any] | None = None) -> float | None:
        """Return the share of the calibration samples, or of held-out ones; None without gains."""
        if held_out is None or self._gains is None:
            return _share(self._comparison, self._gains)
        empty = self._comparison.like(self._gains)
        found, _ = _held_out(empty, held_out, self._calibration.example)
        return None if found is None else _share(found, self._gains)


def _share(comparison: Comparison, gains: Mapping[str, float] | None) -> float | None:
    """Return the share of a comparison's samples that are certified, over all processes.

    Args:
        comparison: what was recorded for every sample.
        gains: factors from each layer's deviation to the output; None where there are none.
    """
    found = None if gains is None else comparison.per_sample.certified(gains)
    certified, samples, failed = process_group().sum_numbers(
        *(found or (0, 0)), found is None and comparison.samples > 0
    )
    return None if failed or not samples else certified / samples


def _usable(
    gains: Mapping[str, float], pruned: nn.Module, layers: Iterable[Layer], example: Any
) -> dict[str, float] | None:
    """Return the gains of layers whose samples do not mix; None where some do.

    Args:
        gains: factors from each layer's deviation to the output.
        pruned: the pruned network.
        layers: its layers.
        example: one sample.
    """
    watched = [layer for layer in layers if layer.name in gains]
    if not isinstance(example, Tensor) or not example.is_floating_point():
        return None
    try:
        independent = all(_independent(pruned, example, watched, chosen) for chosen in _patterns())
    except Exception:  # modules of the network may raise anything on another batch size
        return None
    return dict(gains) if independent and len(watched) == len(gains) else None


def _patterns() -> Iterator[Tensor]:
    """Yield choices of samples. For any two samples, one of them has the first alone."""
    numbers = torch.arange(_SAMPLES)
    for bit in range((_SAMPLES - 1).bit_length()):
        chosen = (numbers >> bit) % 2 == 1
        yield from (chosen, ~chosen)


def _independent(
    model: nn.Module, example: Tensor, layers: Sequence[Layer], chosen: Tensor
) -> bool:
    """Return whether NaN in the chosen samples reaches their rows, and no others."""
    x = example[:1].repeat(_SAMPLES, *[1] * (example.dim() - 1))
    x[chosen.to(x.device)] = torch.nan
    seen: list[Tensor | None] = []
    with (
        evaluating(model),
        watching(layer.on_output(partial(_noted, seen)) for layer in layers),
    ):
        seen.append(main_output(call(model, x)))
    return len(seen) == len(layers) + 1 and all(
        z is not None
        and len(z) == _SAMPLES
        and torch.equal(z.isnan().flatten(1).any(dim=1).cpu(), chosen)
        for z in seen
    )


def _noted(seen: list[Tensor | None], z: Tensor) -> None:
    seen.append(z.detach().clone())


def _of_shape(batch: Any, example: Any) -> bool:
    """Return whether a batch holds samples of the example's shape: gains depend on it."""
    x = plain_input(batch)
    return (
        isinstance(x, Tensor) and isinstance(example, Tensor) and x.shape[1:] == example.shape[1:]
    )


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
    found: Comparison, batches: Iterable[Any], example: Any
) -> tuple[Comparison | None, Guarantee | None]:
    """Return the comparison on held-out inputs and the guarantee that they give.

    Unusable inputs give a warning.
    """
    tally = Tally()
    try:
        with side_by_side(found.dense, found.pruned, batches) as passing:
            for batch in passing:
                if not _of_shape(batch, example):
                    found.per_sample.known = False
                tally.add(batch, *found.add(batch))
    except CalibrationError as error:
        caution(f"held_out could not be measured: {error}")
        return None, None
    found.join()
    tally.join()
    if not found.samples:
        caution("held_out has no samples: nothing was measured on it.")
    elif found.output is not None and not math.isfinite(found.output):
        caution("held_out: the networks' outputs there are not finite; are its inputs?")
    return found, tally.guarantee() if tally.finite and tally.samples else None


def _other_difference(dense: nn.Module, pruned: nn.Module, layers: Iterable[str]) -> str | None:
    """Return the first entry of the state that differs outside the given layers."""
    known = {id(tensor) for layer in find_layers(dense, layers) for tensor in layer.tensors()}
    theirs = {**pruned.state_dict(), **dict(pruned.named_buffers())}
    own = {**dense.state_dict(keep_vars=True), **dict(dense.named_buffers())}
    for name, value in own.items():
        if (
            id(value) in known
            or name.endswith("num_batches_tracked")
            or not isinstance(value, Tensor)
        ):
            continue
        if not isinstance(theirs.get(name), Tensor) or not torch.equal(value, theirs[name]):
            return name
    return None
