"""View transposed convolutions as layers, by writing them as correlations.

A transposed convolution adds x[i]·W[k] to output position i·stride + k·dilation − padding. Seen
from the output, position p receives one element through kernel position k. It is element
p + padding − k·dilation of the input, stretched by `stride` with zeros in between.

So the patches are windows of the stretched input, with stride 1 and reversed kernel positions.
That is exact for every stride, padding, output padding, dilation and group count. An output
position meets only every stride-th kernel position. The other entries of its patch are zeros.
Multiplying by them costs time, but no exactness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.modules.conv import _ConvTransposeNd

from lobs.errors import CalibrationError
from lobs.layers.convolution import WindowedLayer, slide


class TransposedConvolutionLayer(WindowedLayer):
    """View a transposed convolution.

    Its weight has shape (input channels, output channels of one group, kernel…).
    """

    module: _ConvTransposeNd

    @property
    def columns(self) -> int:
        """Return input channels of one group times kernel positions."""
        return self.weight[:, 0].numel() // self.groups

    @property
    def rows(self) -> int:
        """Return the number of output channels of one group."""
        return self.weight.shape[1]

    @property
    def uses_per_patch(self) -> float:
        """Return one over the strides: a kernel position meets every stride-th output position."""
        return 1.0 / math.prod(self.module.stride)

    def unfolded(self, weight: Tensor) -> Tensor:
        """Bring output channels to the front; input channels are in order of groups."""
        return self._by_group(weight).transpose(1, 2).flatten(2)

    def folded(self, matrix: Tensor) -> Tensor:
        """Bring input channels back to the front."""
        shape = self._by_group(self.weight).shape
        return (
            matrix.reshape(self.groups, self.rows, shape[1], *shape[3:])
            .transpose(1, 2)
            .flatten(0, 1)
        )

    def _by_group(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, -1, *weight.shape[1:])

    def windows(self, x: Tensor) -> Tensor:
        """Stretch, pad or crop, slide, and reverse the kernel positions."""
        conv = self.module
        n = self.dimensions
        size = [(length - 1) * s + 1 for length, s in zip(x.shape[-n:], conv.stride, strict=True)]
        stretched = x.new_zeros(*x.shape[:-n], *size)
        places: tuple[Any, ...] = (..., *(slice(None, None, s) for s in conv.stride))
        stretched[places] = x
        windows = slide(
            F.pad(stretched, self._margins()), conv.kernel_size, (1,) * n, conv.dilation
        )
        return windows.flip(tuple(range(-n, 0)))

    def _margins(self) -> list[int]:
        conv = self.module
        assert not isinstance(conv.padding, str)
        margins: list[int] = []
        for k, d, p, more in zip(
            conv.kernel_size, conv.dilation, conv.padding, conv.output_padding, strict=True
        ):
            reach = d * (k - 1) - p
            margins = [reach, reach + more, *margins]  # last dimension first, as F.pad wants it
        return margins

    def called_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Refuse a call that overrides the module's own output padding."""
        x = super().called_with(args, kwargs)
        asked = args[1] if len(args) > 1 else kwargs.get("output_size")
        if asked is not None and tuple(asked)[-self.dimensions :] != self._output_size(x):
            raise CalibrationError(
                f"layer '{self.name}' was called with output_size={tuple(asked)}, but its own "
                f"output_padding gives {self._output_size(x)}. Set output_padding on the module, "
                "or skip the layer."
            )
        return x

    def _output_size(self, x: Tensor) -> tuple[int, ...]:
        conv, n = self.module, self.dimensions
        assert not isinstance(conv.padding, str)
        settings = zip(
            x.shape[-n:],
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.kernel_size,
            conv.output_padding,
            strict=True,
        )
        return tuple(
            (length - 1) * s - 2 * p + d * (k - 1) + more + 1
            for length, s, p, d, k, more in settings
        )


class ConvTranspose1dLayer(TransposedConvolutionLayer):
    """View an `nn.ConvTranspose1d`."""

    module: nn.ConvTranspose1d
    dimensions = 1


class ConvTranspose2dLayer(TransposedConvolutionLayer):
    """View an `nn.ConvTranspose2d`."""

    module: nn.ConvTranspose2d
    dimensions = 2


class ConvTranspose3dLayer(TransposedConvolutionLayer):
    """View an `nn.ConvTranspose3d`."""

    module: nn.ConvTranspose3d
    dimensions = 3
