"""Engines that compute a layer from its non-zero weights.

An engine runs only in the cases it was measured for. Dense torch computes everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lobs._system.context import workers
from lobs.deploy.accelerate.compiled import chain_of_many, chain_of_one
from lobs.deploy.accelerate.native import PlaneMatrix, add_planes, block_of
from lobs.layers.discovery import as_layer

_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
# What a batch norm computes with in eval mode.
NORM = ("weight", "bias", "running_mean", "running_var")
# An engine runs for inputs up to this factor larger or smaller than the measured one.
_NEAR = 2
_WORTH_A_THREAD = 2_000_000  # multiply-adds
_OFFSET_TABLES = 8  # image sizes whose offsets a convolution remembers


class Engine(ABC):
    """Compute layers from arrays made of their weights, and notice when the weights change."""

    name = "engine"
    norm: Any = None  # a batch norm that the engine computes too, or None

    def __init__(self, layers: Sequence[nn.Module], example: Tensor) -> None:
        self.layers: list[Any] = list(layers)
        self.least, self.most = example.numel() // _NEAR, example.numel() * _NEAR
        self.refresh()

    def takes(self, x: Tensor) -> bool:
        """Return whether the engine may compute this input. If not, dense torch does."""
        if not ordinary(x) or not self.least <= x.numel() <= self.most or not self.fits(x):
            return False
        if torch.is_grad_enabled() and (
            x.requires_grad or any(tensor.requires_grad for _, _, tensor in self.watched)
        ):
            return False
        for layer in self.layers:
            if layer.training:
                return False
        if self.norm is not None and (self.norm.training or self.layers[0]._forward_hooks):
            return False
        changes = 0
        # Dictionaries, because a module's attribute look-up takes longer than a small layer.
        for slots, key, tensor in self.watched:
            if slots[key] is not tensor:
                self.refresh()
                return True
            changes += version(tensor)
        if changes != self.version:
            self.refresh()
        return True

    def fits(self, x: Tensor) -> bool:
        """Return whether an input has the right shape. Others get dense torch's error message."""
        return bool(x.dim() > 0 and x.shape[-1] == self.layers[0].weight.shape[1])

    def refresh(self) -> None:
        """Rebuild the arrays from the layers' weights."""
        self.watched: list[tuple[dict[str, Any], str, Tensor]] = [
            (layer._parameters, key, tensor)
            for layer in self.layers
            for key in ("weight", "bias")
            if (tensor := layer._parameters[key]) is not None
        ]
        if self.norm is not None:
            slots = {**self.norm._parameters, **self.norm._buffers}
            self.watched += [
                (
                    self.norm._parameters if key in self.norm._parameters else self.norm._buffers,
                    key,
                    slots[key],
                )
                for key in NORM
                if slots[key] is not None
            ]
        self.version = sum(version(tensor) for _, _, tensor in self.watched)
        self.prepare()

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the first layer's weight and bias, with the batch norm folded into them."""
        layer = self.layers[0]
        weight, bias = layer.weight.detach(), torch.from_numpy(bias_of(layer))
        if self.norm is None:
            return weight, bias
        norm = self.norm
        factor = (norm.running_var + norm.eps).rsqrt()
        factor = factor if norm.weight is None else factor * norm.weight.detach()
        shift = (bias - norm.running_mean) * factor
        shift = shift if norm.bias is None else shift + norm.bias.detach()
        return weight * factor.view(-1, *[1] * (weight.dim() - 1)), shift

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. Its tensors count their changes anew, so it must refresh."""
        return {**self.__dict__, "version": -1}

    def attach(self, layers: Sequence[nn.Module]) -> None:
        """Watch other modules that hold the same parameters."""
        self.layers = list(layers)
        self.refresh()

    @abstractmethod
    def prepare(self) -> None:
        """Build the arrays that `run` needs from the weights."""

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """Return the layers' output."""


def ordinary(x: Tensor) -> bool:
    """Return whether an input is a float32 tensor on the CPU that nothing but a call looks at."""
    return (
        type(x) is Tensor
        and x.dtype is torch.float32
        and x.is_cpu
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not _tracing()
        and not _transformed()
    )


def rows_of(matrix: Tensor) -> tuple[Any, Any, Any]:
    """Return row starts, columns and values of a matrix's non-zeros."""
    dense = matrix.detach().numpy()
    there = dense != 0
    starts = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.uint32)
    return starts, np.nonzero(there)[1].astype(np.uint32), dense[there].astype(np.float32)


def weight_matrix(layer: nn.Module) -> Tensor:
    """Return a layer's weight with a row for each output."""
    view = as_layer("", layer)
    assert view is not None
    return view.unfolded(view.weight.detach()).flatten(0, 1)


def bias_of(layer: nn.Module) -> Any:
    """Return a layer's bias, or zeros if it has none."""
    if layer.bias is None:
        return np.zeros(len(weight_matrix(layer)), np.float32)
    return layer.bias.detach().numpy().copy()  # type: ignore[operator]


class ChainEngine(Engine):
    """Compute a chain of Linear layers, each with or without ReLU, in one compiled call."""

    name = "compiled"

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        relu: Sequence[bool],
        example: Tensor,
        flatten: bool = False,
    ) -> None:
        self.relu, self.flatten = np.array(relu, np.bool_), flatten
        super().__init__(layers, example)

    def prepare(self) -> None:
        """Concatenate the rows of all layers."""
        pieces = [rows_of(layer.weight) for layer in self.layers]
        before = np.cumsum([0] + [len(values) for _, _, values in pieces])
        starts = [s[:-1] + shift for (s, _, _), shift in zip(pieces, before[:-1], strict=True)]
        columns = np.concatenate([c for _, c, _ in pieces])
        values = np.concatenate([v for _, _, v in pieces])
        bias = np.concatenate([bias_of(layer) for layer in self.layers])
        widths = np.array(
            [self.layers[0].weight.shape[1]] + [len(layer.weight) for layer in self.layers]
        )
        self.arrays = (
            np.concatenate([*starts, before[-1:]]).astype(np.uint32),
            columns,
            values,
            bias,
            widths,
            self.relu,
        )
        self.features, self.units = int(widths[0]), int(widths[-1])

    def fits(self, x: Tensor) -> bool:
        """Return whether the features are last or, with `flatten`, in all dimensions but one."""
        if self.flatten:
            return x.dim() > 1 and x.numel() == len(x) * self.features
        return x.dim() > 0 and x.shape[-1] == self.features

    def run(self, x: Tensor) -> Tensor:
        """Compute one input by gathering, a batch in tiles."""
        given = (x.detach() if x.requires_grad else x).numpy()
        if not given.flags.c_contiguous:
            given = np.ascontiguousarray(given)
        if given.size == self.features:
            out = np.empty(self.units, np.float32)
            chain_of_one(given.reshape(-1), *self.arrays, out)
        else:
            out = np.empty((given.size // self.features, self.units), np.float32)
            spread(chain_of_many, given.reshape(-1, self.features), self.arrays, out, step=64)
        return torch.from_numpy(
            out.reshape((*given.shape[: 1 if self.flatten else -1], self.units))
        )


class ConvEngine(Engine):
    """Compute a convolution by its non-zero weights: shifted planes times numbers."""

    name = "compiled"

    def prepare(self) -> None:
        """Collect the rows of weights. Offsets of their planes are computed once per image size."""
        weight, self.bias = self.numbers()
        weight = weight.flatten(1)
        block = block_of(weight) if self.layers[0].groups == 1 else 1
        self.matrix = PlaneMatrix.pack(weight, block)
        self.placed: dict[tuple[int, int], Tensor] = {}

    def fits(self, x: Tensor) -> bool:
        """Return whether the input is one or more images with the right channels, large enough."""
        conv = self.layers[0]
        if x.dim() not in (3, 4) or x.shape[-3] != conv.in_channels or not x.numel():
            return False
        around = conv._reversed_padding_repeated_twice
        reach = [d * (k - 1) + 1 for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        high, wide = x.shape[-2] + sum(around[2:]), x.shape[-1] + sum(around[:2])
        return bool(high >= reach[0] and wide >= reach[1])

    def run(self, x: Tensor) -> Tensor:
        """Pad, split by phase of the stride, and add shifted planes."""
        conv = self.layers[0]
        image = x.detach() if x.dim() == 4 else x.detach().unsqueeze(0)
        around = conv._reversed_padding_repeated_twice
        if any(around):
            mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
            image = nn.functional.pad(image, around, mode=mode)
        (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
        high, wide = (
            (image.shape[2] - dh * (kh - 1) - 1) // sh + 1,
            (image.shape[3] - dw * (kw - 1) - 1) // sw + 1,
        )
        tall, broad = -(-image.shape[2] // sh), -(-image.shape[3] // sw)
        if sh > 1 or sw > 1:
            image = nn.functional.pad(
                image, [0, broad * sw - image.shape[3], 0, tall * sh - image.shape[2]]
            )
            phases = image.reshape(*image.shape[:2], tall, sh, broad, sw)
            image = phases.permute(0, 1, 3, 5, 2, 4)
        image = image.contiguous()
        out = torch.empty(len(image), len(self.bias), high, broad)
        places, span = self._offsets(tall, broad), (high - 1) * broad + wide
        for planes, sums in zip(image, out, strict=True):
            add_planes(
                self.matrix, planes, sums.flatten(1), self.bias, span=span, pitch=1, places=places
            )
        # Pixels at the ends of lines belong to no output.
        answer = out if broad == wide else out[..., :wide].contiguous()
        return answer if x.dim() == 4 else answer.squeeze(0)

    def _offsets(self, tall: int, broad: int) -> Tensor:
        if (tall, broad) not in self.placed:
            if len(self.placed) > _OFFSET_TABLES:  # images of ever new sizes must not fill memory
                self.placed.clear()
            self.placed[tall, broad] = self._place(tall, broad)
        return self.placed[tall, broad]

    def _place(self, tall: int, broad: int) -> Tensor:
        conv = self.layers[0]
        (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
        per = conv.in_channels // conv.groups
        position = self.matrix.columns.numpy().astype(np.int64)
        channel, y, x = position // (kh * kw), position // kw % kh * dh, position % kw * dw
        group = self.matrix.owners() * self.matrix.block // (len(self.bias) // conv.groups)
        plane = ((group * per + channel) * sh + y % sh) * sw + x % sw
        place = plane * tall * broad + y // sh * broad + x // sw
        return torch.from_numpy(place.astype(np.int32))


def version(tensor: Tensor) -> int:
    """Return a tensor's count of in-place changes. Inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def _transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation is active."""
    return (
        torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def spread(
    kernel: Callable[..., None], x: Any, arrays: tuple[Any, ...], out: Any, step: int
) -> None:
    """Run a kernel over slices of the first dimension, in torch's number of threads at most.

    Args:
        kernel: called with a slice of `x`, the arrays, and the same slice of `out`.
        x: the inputs.
        arrays: row starts, positions, values and bias, and what else the kernel takes.
        out: the outputs, written in place.
        step: slices are multiples of this many rows.
    """
    threads = torch.get_num_threads()
    work = len(arrays[2]) * (out.size // max(1, len(arrays[3])))  # multiply-adds
    pieces = min(threads, len(x) // step, int(work // _WORTH_A_THREAD))
    if pieces < 2:
        kernel(x, *arrays, out)
        return
    share = -(-len(x) // pieces // step) * step
    spans = [slice(low, low + share) for low in range(0, len(x), share)]
    jobs = [workers().submit(kernel, x[span], *arrays, out[span]) for span in spans[1:]]
    kernel(x[spans[0]], *arrays, out[spans[0]])
    for job in jobs:
        job.result()
