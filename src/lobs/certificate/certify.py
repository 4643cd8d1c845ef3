"""The certificate of a whole network: what the theorem promises, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs.certificate import lipschitz

from lobs.certificate import bound

from lobs.solvers import linalg
from lobs.calibration.batches import guarded
from lobs.calibration.collect import Calibration, collect_moments
from lobs._system.distributed import process_group
from lobs.errors import CalibrationError, UnsupportedLayerError, caution
from lobs.layers import Layer, find_layers, watching
from lobs.certificate.bound import Certificate
from lobs.solvers.problem import Problem
from lobs._system.progress import track
from lobs.calibration.forward import batch_size, call, evaluating, length, main_output


def certify(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Iterable[Any],
    *,
    held_out: Iterable[Any] | None = None,
    layers: str | Iterable[str] | None = None,
) -> Certificate:
    """Bound how far a pruned network's output moved over `batches`, and measure it there and on held-out inputs.

    Works for any two networks of one architecture, however the second was made: layer errors are
    measured here, on the dense network's inputs. `batches` are run twice, so a list or a DataLoader
    is needed.
    """
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
    held_out = None if held_out is None else guarded(held_out, again=False, name="held_out")
    calibration = collect_moments(dense, batches, list(before.values()))
    largest = {}
    for name, layer in before.items():
        problem = Problem(
            layer.matrix(), calibration[name].moment.to(layer.weight.device), name=f"layer '{name}'"
        )
        largest[name] = problem.largest_error_of(after[name].matrix())
    apart = distances(dense, pruned, batches, (), calibration.samples)
    return certificate(
        dense, pruned, calibration, layer_errors(largest, calibration), apart, held_out=held_out
    )


def layer_errors(largest: Mapping[str, float], calibration: Calibration) -> dict[str, float]:
    """√E by layer, in root mean square over the network's samples.

    E is a mean over a layer's input vectors; a convolution has many of them in each sample.
    """
    return {
        name: math.sqrt(e * calibration.count(name) / calibration.samples)
        for name, e in largest.items()
    }


def certificate(
    dense: nn.Module,
    pruned: nn.Module,
    calibration: Calibration,
    errors: dict[str, float],
    apart: Distances,
    *,
    held_out: Iterable[Any] | None,
    dense_gains: Mapping[str, Tensor] | None = None,
    absorbed: bool = False,
) -> Certificate:
    """Put the bound for known layer errors beside what is measured.

    `dense_gains` are the dense matrices, where errors were measured on the pruned network's inputs.
    `absorbed` says that errors are whole distances between the networks' outputs at each layer, so
    that a layer forgets what came before it.
    """
    try:
        if len(calibration.shapes) > 1:
            raise lipschitz.NotAChainError(
                f"inputs came in {len(calibration.shapes)} different shapes"
            )
        other = _other_difference(dense, pruned, calibration)
        if other:
            raise lipschitz.NotAChainError(
                f"'{other}' differs too, beside the layers (re-estimated batch norms? "
                "batch_norm=False leaves them alone)"
            )
        links = lipschitz.links(pruned, calibration.example, errors, dict(dense_gains or {}))
        if absorbed:
            links = [
                replace(link, gain=0.0, frobenius_gain=0.0) if link.name in errors else link
                for link in links
            ]
        found = bound.compose(links)
    except lipschitz.NotAChainError as error:
        found = bound.refuse(str(error))
    return replace(
        found,
        measured=apart.output,
        held_out=None if held_out is None else _held_out(dense, pruned, held_out),
    )


def _held_out(dense: nn.Module, pruned: nn.Module, batches: Iterable[Any]) -> float | None:
    """The distance on inputs kept back; what is wrong with these does not undo the pruning, but is said."""
    try:
        found = distances(dense, pruned, batches, ())
    except CalibrationError as error:
        caution(f"held_out could not be measured: {error}")
        return None
    if not found.samples:
        caution("held_out has no samples: nothing was measured on it.")
    elif found.output is not None and not math.isfinite(found.output):
        caution("held_out: the networks' outputs there are not finite; are its inputs?")
    return found.output


def _other_difference(dense: nn.Module, pruned: nn.Module, layers: Iterable[str]) -> str | None:
    """The first entry of the state that differs though no layer's error accounts for it."""
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


def deviation(
    model: nn.Module, other: nn.Module, batches: Iterable[Any], expected: int | None = None
) -> float | None:
    """Root mean square distance between two networks' outputs over the data; see `distances`."""
    return distances(model, other, batches, (), expected).output


@dataclass(frozen=True)
class Distances:
    """How far two networks are apart: their outputs, root mean square by sample, and their layers' outputs; samples seen.

    `layers[name]` is Σ‖ẑ − z‖², Σ‖z‖² and the number of output vectors z over all samples and
    positions.
    """

    output: float | None
    layers: dict[str, tuple[float, float, int]]
    samples: int


def distances(
    model: nn.Module,
    other: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[tuple[Layer, Layer]],
    expected: int | None = None,
    each: Callable[[Any], None] | None = None,
) -> Distances:
    """Run two networks on the same data and compare. What else is to be done with a batch, `each` does after them.

    `output` is None if they do not return a tensor, or if the data yields other than the expected
    number of samples, as an iterable does that can be read only once.
    """
    total, samples, single = 0.0, 0, True
    sums = {before.name: [0.0, 0.0] for before, _ in layers}
    elements = dict.fromkeys(sums, 0)
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str, z: Tensor) -> None:
        kept.setdefault(name, []).append(
            z.detach().clone()
        )  # a step after the layer may work in place on what it gave

    def compare(name: str, z_hat: Tensor) -> None:
        z = kept[name].pop(0)
        kind = torch.promote_types(z.dtype, torch.float32)
        sums[name][1] += linalg.energy(z)
        sums[name][0] += linalg.energy(z.to(kind).sub_(z_hat.detach().to(kind)))
        elements[name] += z.numel()

    label = "measure" if each is None else "batch norm"
    with (
        process_group().raise_together(),
        evaluating(model),
        evaluating(other),
        track(label, length(batches)) as advance,
    ):
        for batch in batches:
            first = _run(model, batch, [(before, keep) for before, _ in layers])
            second = _run(other, batch, [(after, compare) for _, after in layers])
            if first is None or second is None:
                single = False
            else:
                total += float((first.to(torch.float64) - second.to(torch.float64)).square().sum())
            samples += batch_size(batch)
            if each is not None:
                each(batch)
            advance(1)
    total, several, *rest = process_group().sum_numbers(
        total, not single, samples, *(x for n in sums for x in (*sums[n], elements[n]))
    )
    samples = round(rest.pop(0))
    known = several == 0 and samples > 0 and expected in (None, samples)
    by_layer = {}
    for index, (before, _) in enumerate(layers):
        error, energy, count = rest[3 * index : 3 * index + 3]
        by_layer[before.name] = (error, energy, round(count) // max(1, before.groups * before.rows))
    return Distances(math.sqrt(total / samples) if known else None, by_layer, samples)


def _run(
    model: nn.Module, batch: Any, watched: Sequence[tuple[Layer, Callable[[str, Tensor], None]]]
) -> Tensor | None:
    with watching(layer.on_output(partial(callback, layer.name)) for layer, callback in watched):
        return main_output(call(model, batch))
