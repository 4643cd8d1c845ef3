"""Layer: a module seen as a matrix problem, and back.

Every prunable module is brought to one form: weights of shape (groups, rows, columns [+ 1 for the bias]) acting on
input vectors ("patches") of shape (groups, n, columns). The column order is that of the flattened kernel, (channel,
height, width), on both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import NoneType

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.utils import parametrize

from lobs.errors import CalibrationError, UnsupportedLayerError

# Patches are formed in pieces this large, so that memory does not grow with the batch or the image, and so that each
# float32 product sums few enough terms to keep six digits; pieces are then added in float64.
_PIECE_ELEMENTS = 2**21
_PIECE_ROWS = 2**13


@dataclass(frozen=True, eq=False)
class Layer(ABC):
    """One prunable module and its name in the network."""

    name: str
    module: nn.Module
    root: bool = False  # the module is the whole network, so its parameters have no prefix

    @abstractmethod
    def check_input(self, x: Tensor) -> None:
        """Refuse an input that the layer cannot take, before anything is made of it."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """Independent parts, each with its own inputs."""

    @abstractmethod
    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the input vectors of one call, as pieces of shape (groups, n, columns)."""

    @abstractmethod
    def by_unit(self, z: Tensor) -> Tensor:
        """Sum a tensor of the layer's output shape over samples and positions, giving (groups, rows)."""

    @property
    def weight(self) -> Tensor:
        """The module's own weight parameter."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The module's own bias parameter, if it has one."""
        bias = self.module.bias
        return bias if isinstance(bias, Tensor) else None

    @property
    def columns(self) -> int:
        """Inputs of one output unit, without the bias."""
        return self.weight[0].numel()

    @property
    def rows(self) -> int:
        """Output units of one group."""
        return self.weight.shape[0] // self.groups

    def matrix(self) -> Tensor:
        """A copy of the weights as (groups, rows, columns), with the bias as last column where there is one."""
        matrix = self.weight.detach().reshape(self.groups, self.rows, self.columns)
        if self.bias is None:
            return matrix.clone()
        return torch.cat([matrix, self.bias.detach().reshape(self.groups, self.rows, 1)], dim=-1)

    def write(self, matrix: Tensor) -> None:
        """Put a matrix of the shape that `matrix` returns back into the module, in place."""
        with torch.no_grad():
            self.weight.copy_(matrix[..., : self.columns].reshape(self.weight.shape))
            if self.bias is not None:
                self.bias.copy_(matrix[..., self.columns].reshape(self.bias.shape))

    def masks(self, mask: Tensor) -> dict[str, Tensor]:
        """A matrix mask as masks of the module's parameters, under their names in the state dict."""
        prefix = "" if self.root else f"{self.name}."
        out = {f"{prefix}weight": mask[..., : self.columns].reshape(self.weight.shape)}
        if self.bias is not None and not bool(mask[..., self.columns].all()):
            out[f"{prefix}bias"] = mask[..., self.columns].reshape(self.bias.shape)
        return out


class LinearLayer(Layer):
    """`nn.Linear`, with inputs of any leading shape."""

    def check_input(self, x: Tensor) -> None:
        """The last dimension must fit."""
        if x.dim() == 0 or x.shape[-1] != self.columns or not x.is_floating_point():
            raise CalibrationError(
                f"layer '{self.name}' takes floating-point inputs of {self.columns} features, but was given "
                f"{x.dtype} of shape {tuple(x.shape)}. In a tuple the input comes first."
            )

    @property
    def groups(self) -> int:
        """Always one."""
        return 1

    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Rows of the input are the patches."""
        flat = x.reshape(-1, self.columns)
        piece = max(1, min(_PIECE_ROWS, _PIECE_ELEMENTS * 4 // max(1, self.columns)))
        for start in range(0, len(flat), piece):
            yield flat[start : start + piece].unsqueeze(0)

    def by_unit(self, z: Tensor) -> Tensor:
        """Output units are the last dimension."""
        return z.reshape(-1, self.rows).sum(dim=0).unsqueeze(0)


class Conv2dLayer(Layer):
    """`nn.Conv2d` with every stride, padding, padding mode, dilation and group count."""

    module: nn.Conv2d

    def check_input(self, x: Tensor) -> None:
        """Three or four dimensions with the right channels."""
        if x.dim() not in (3, 4) or x.shape[-3] != self.module.in_channels or not x.is_floating_point():
            raise CalibrationError(
                f"layer '{self.name}' takes floating-point images of {self.module.in_channels} channels, but was given "
                f"{x.dtype} of shape {tuple(x.shape)}. In a tuple the input comes first."
            )

    @property
    def groups(self) -> int:
        """The convolution's groups."""
        return self.module.groups

    def windows(self, x: Tensor) -> Tensor:
        """All patches as a view (batch, channels, out height, out width, kernel height, kernel width)."""
        conv = self.module
        x = x if x.dim() == 4 else x.unsqueeze(0)
        pad = _padding(conv)
        if any(pad):
            mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
            x = F.pad(x, pad, mode=mode)
        (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
        seen = x.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)
        return seen[..., ::dh, ::dw]

    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Copy windows out piece by piece: some images at a time, or some rows of one image where it is large."""
        windows = self.windows(x)
        batch, channels, high, wide, kh, kw = windows.shape
        g = self.groups
        by_group = windows.unflatten(1, (g, channels // g))  # type: ignore[no-untyped-call]
        budget = max(1, min(_PIECE_ROWS, _PIECE_ELEMENTS // max(1, channels * kh * kw)))
        images = max(1, budget // max(1, high * wide))
        lines = max(1, min(high, budget // max(1, wide)))
        for b in range(0, batch, images):
            for top in range(0, high, lines):
                piece = by_group[b : b + images, :, :, top : top + lines]
                yield piece.permute(1, 0, 3, 4, 2, 5, 6).reshape(g, -1, self.columns)

    def by_unit(self, z: Tensor) -> Tensor:
        """Output units are the channels."""
        return z.sum(dim=(-2, -1)).reshape(-1, self.groups, self.rows).sum(dim=0)


def _padding(conv: nn.Conv2d) -> list[int]:
    """Padding in F.pad's order, last dimension first."""
    if conv.padding == "valid":
        return [0, 0, 0, 0]
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    assert not isinstance(conv.padding, str)
    return [int(p) for p in reversed(conv.padding) for _ in range(2)]


def as_layer(name: str, module: nn.Module) -> Layer | None:
    """The layer view of a module, or None where `lobs` has none for its type; no name stands for the whole network."""
    root, name = name == "", name or "model"
    if isinstance(module, nn.Linear):
        return LinearLayer(name, module, root)
    if isinstance(module, nn.Conv2d):
        return Conv2dLayer(name, module, root)
    return None


def find_layers(model: nn.Module, layers: str | Iterable[str] | None = None, skip: str | Iterable[str] = ()) -> list[Layer]:
    """Prunable layers in the order of the module tree, chosen by name or glob; an empty choice is an error."""
    found = [layer for name, module in model.named_modules() if (layer := as_layer(name, module))]
    names = [layer.name for layer in found]
    wanted, unwanted = _matching(names, layers, "layers"), _matching(names, skip, "skip") or set()
    chosen = [x for x in found if (wanted is None or x.name in wanted) and x.name not in unwanted]
    if not chosen:
        raise UnsupportedLayerError("there is no layer to prune: lobs prunes Linear and Conv2d, less what `skip` names.")
    _check_supported(model, chosen)
    return chosen


def _matching(names: Sequence[str], patterns: str | Iterable[str] | None, what: str) -> set[str] | None:
    if patterns is None:
        return None
    matched: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not hits:
            raise UnsupportedLayerError(
                f"{what} names '{pattern}', which matches no prunable layer. There are: {', '.join(names)}."
            )
        matched |= hits
    return matched


def _check_supported(model: nn.Module, layers: Sequence[Layer]) -> None:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, nn.parameter.UninitializedParameter):
                owners.setdefault(_place(parameter), []).append(f"{name}.{key}" if name else key)
    for layer in layers:
        reason = _unsupported(layer)
        if reason:
            raise UnsupportedLayerError(f"layer '{layer.name}': {reason}, or skip the layer.")
        for what, tensor in (("weight", layer.weight), ("bias", layer.bias)):
            if tensor is not None and len(owners[_place(tensor)]) > 1:
                raise UnsupportedLayerError(
                    f"layer '{layer.name}': its {what} is shared by {', '.join(owners[_place(tensor)])}; pruning it for one "
                    f"would change the others. Untie them, or skip the layer."
                )


def _place(tensor: Tensor) -> int:
    """What identifies a tensor's memory, also where two parameters share it; empty and meta tensors have only themselves."""
    return tensor.data_ptr() or id(tensor)


def _unsupported(layer: Layer) -> str:
    """Why a layer's own kind cannot be pruned, with what to do first; empty if it can."""
    module = layer.module
    if isinstance(getattr(module, "weight", None), nn.parameter.UninitializedParameter):
        return "its weight has no shape yet; run one batch first"
    if parametrize.is_parametrized(module):
        return "its weight is parametrised (weight_norm and the like), so writing it would be undone; remove that first"
    if not isinstance(module.weight, nn.Parameter) or not isinstance(module.bias, nn.Parameter | NoneType):
        return "its weight or bias is not a parameter (torch.nn.utils.prune, perhaps); make it permanent first (prune.remove)"
    if layer.weight.device.type == "meta":
        return "its weight is on the meta device; load weights first"
    plain = nn.Linear if isinstance(module, nn.Linear) else nn.Conv2d
    if any(getattr(type(module), f, None) is not getattr(plain, f, None) for f in ("forward", "_conv_forward")):
        return f"{type(module).__name__} computes its output in its own way, not as {plain.__name__} does; use a plain one"
    return ""
