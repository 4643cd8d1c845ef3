"""View convolutions in one, two and three dimensions, with all their options, as layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.modules.conv import _ConvNd

from lobs.errors import CalibrationError
from lobs.layers import base
from lobs.layers.base import Layer

_LEAST_POSITIONS = 8  # of a line, that stay where positions are sampled
_WIDE = 1024  # columns above which larger pieces pay: their products are added to a large moment


class WindowedLayer(Layer):
    """View a module whose patches are windows of an image.

    Columns are ordered by channel, then by kernel position.
    """

    module: _ConvNd
    dimensions: ClassVar[int]

    @property
    def conv(self) -> Any:
        """Return what holds the convolution's settings: the module."""
        return self.module

    @abstractmethod
    def windows(self, x: Tensor) -> Tensor:
        """Return all patches as (batch, channels, output position…, kernel position…)."""

    def check_input(self, x: Tensor) -> None:
        """Accept a batch or a single image with the right number of channels."""
        n, channels = self.dimensions, self.conv.in_channels
        if (
            x.dim() not in (n + 1, n + 2)
            or x.shape[-n - 1] != channels
            or not x.is_floating_point()
        ):
            raise CalibrationError(
                f"layer '{self.name}' takes floating-point inputs of {channels} channels and {n} "
                f"dimension{'s' if n > 1 else ''}, but was given {x.dtype} of shape "
                f"{tuple(x.shape)}. In a tuple the input comes first."
            )

    @property
    def groups(self) -> int:
        """Return the number of groups of the convolution."""
        groups: int = self.conv.groups
        return groups

    @property
    def form(self) -> Hashable:
        """Return all settings that decide what a patch is."""
        conv = self.conv
        return (
            type(self),
            conv.stride,
            conv.padding,
            conv.output_padding,
            conv.dilation,
            conv.groups,
            conv.padding_mode,
        )

    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Copy windows piece by piece: several images, or several lines of a large image."""
        return self.sampled(x, 1, 0)

    def spacing(self, vectors: int, enough: int) -> int:
        """Return the step: neighbouring windows are much alike."""
        return max(1, int((vectors / max(1, enough)) ** (1 / self.dimensions)))

    def sampled(self, x: Tensor, step: int, start: int) -> Iterator[Tensor]:
        """Copy windows at some positions, at least eight of each line where there are as many.

        Images take turns in where they begin, so that rows and columns of all places count alike.
        """
        pieces = self._taken(x, step, start)
        yield from pieces if step == 1 else base.joined(pieces, self._piece_rows)

    @property
    def _piece_rows(self) -> int:
        """Return how many windows are copied at a time."""
        most = base.PIECE_ELEMENTS * (4 if self.columns > _WIDE else 1)
        return max(1, min(base.PIECE_ROWS, most // max(1, self.groups * self.columns)))

    def _taken(self, x: Tensor, step: int, start: int) -> Iterator[Tensor]:
        n = self.dimensions
        windows = self.windows(x if x.dim() == n + 2 else x.unsqueeze(0))
        sizes = windows.shape[2 : 2 + n]
        steps = [min(step, max(1, size // _LEAST_POSITIONS)) for size in sizes]
        turns = max(steps)
        for turn in range(min(turns, len(windows))):
            begins = [(start + (-turn if axis % 2 else turn)) % s for axis, s in enumerate(steps)]
            places = (slice(b, None, s) for b, s in zip(begins, steps, strict=True))
            index: tuple[Any, ...] = (slice(turn, None, turns), slice(None), *places)
            yield from self._pieces(windows[index])

    def _pieces(self, windows: Tensor) -> Iterator[Tensor]:
        n, g = self.dimensions, self.groups
        batch, channels, high = windows.shape[:3]
        wide = windows.shape[3 : 2 + n].numel()
        by_group = windows.unflatten(1, (g, channels // g))  # type: ignore[no-untyped-call]
        order = (1, 0, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
        budget = self._piece_rows
        images = max(1, budget // max(1, high * wide))
        lines = max(1, min(high, budget // max(1, wide)))
        for b in range(0, batch, images):
            for top in range(0, high, lines):
                piece = by_group[b : b + images, :, :, top : top + lines]
                yield piece.permute(order).reshape(g, -1, self.columns)

    def vectors(self, x: Tensor) -> int:
        """Count the windows on the meta device, without making them."""
        shape = torch.empty_like(
            x if x.dim() == self.dimensions + 2 else x.unsqueeze(0), device="meta"
        )
        windows = self.windows(shape)
        return windows.shape[0] * windows.shape[2 : 2 + self.dimensions].numel()

    def by_unit(self, z: Tensor) -> Tensor:
        """Sum by channel: output units are the channels."""
        return (
            z.flatten(-self.dimensions).sum(dim=-1).reshape(-1, self.groups, self.rows).sum(dim=0)
        )


class ConvolutionLayer(WindowedLayer):
    """View a convolution: its patches are strided windows of the padded image."""

    def windows(self, x: Tensor) -> Tensor:
        """Return the windows as a view; only padding copies."""
        conv = self.conv
        pad = padding(conv)
        if any(pad):
            mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
            x = F.pad(x, pad, mode=mode)
        return slide(x, conv.kernel_size, conv.stride, conv.dilation)

    def unfolded(self, weight: Tensor) -> Tensor:
        """Reshape; output channels are in order of groups already."""
        return weight.reshape(self.groups, self.rows, self.columns)

    def folded(self, matrix: Tensor) -> Tensor:
        """Reshape back."""
        return matrix.reshape(self.weight.shape)


class Conv1dLayer(ConvolutionLayer):
    """View an `nn.Conv1d`."""

    module: nn.Conv1d
    dimensions = 1


class Conv2dLayer(ConvolutionLayer):
    """View an `nn.Conv2d`."""

    module: nn.Conv2d
    dimensions = 2


class Conv3dLayer(ConvolutionLayer):
    """View an `nn.Conv3d`."""

    module: nn.Conv3d
    dimensions = 3


def slide(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """Return windows of the last dimensions as (…, output position…, kernel position…).

    Args:
        x: a tensor with any leading dimensions.
        kernel: window size in each dimension.
        stride: step between windows in each dimension.
        dilation: step within a window in each dimension.
    """
    first = x.dim() - len(kernel)
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=first):
        x = x.unfold(axis, d * (k - 1) + 1, s)
    steps: tuple[Any, ...] = (..., *(slice(None, None, d) for d in dilation))
    return x[steps]


def padding(conv: Any) -> list[int]:
    """Return the padding in the order of `F.pad`: last dimension first."""
    if conv.padding == "valid":
        return [0] * (2 * len(conv.kernel_size))
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return [int(p) for p in reversed(conv.padding) for _ in range(2)]
