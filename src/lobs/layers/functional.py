"""View a weight that is used through a function as a layer: F.linear, a product, F.conv1d/2d/3d.

Some modules call the function themselves: BEiT adds a bias of its own making, a Mamba block
convolves with another module's weight, experts are slices of one parameter. A `Use` says which part
of which parameter is multiplied, and in which module's forward pass. It is learnt by running the
network once (`lobs.layers.uses`). From then on the calls of that function are observed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from lobs.layers.base import Absent, OnInput, OnOutput, Part
from lobs.layers.convolution import ConvolutionLayer
from lobs.layers.hooks import Undo
from lobs.layers.linear import LinearLayer

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_PRODUCTS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm,
             Tensor.__matmul__}  # fmt: skip
_SUMS = {torch.addmm, torch.baddbmm}
_EXPERTS = "_experts_implementation_internal"  # of a transformers' config


@dataclass(frozen=True)
class Settings:
    """The settings of one convolution, under the names that `nn.Conv2d` gives them."""

    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] = ()
    padding_mode: str = "zeros"


@dataclass(frozen=True)
class Place:
    """A part of a parameter: its name, and the first and last row (exclusive)."""

    key: str
    start: int
    stop: int

    def part(self, whole: int) -> Part:
        """Return the part, which is the parameter itself where it has `whole` rows."""
        every = self.start == 0 and self.stop == whole
        return Part(self.key) if every else Part(self.key, self.start, self.stop)


@dataclass(frozen=True)
class Use:
    """How a part of a parameter is multiplied with inputs.

    Args:
        weight: the part.
        site: path of the module whose forward pass calls the function.
        rows: number of outputs of one group.
        columns: number of inputs of one output.
        groups: matrices that are multiplied in one batched product.
        flipped: the parameter has a row for each input.
        bias: the bias that the function adds, where it is a parameter.
        settings: those of a convolution.
        routed: the parameter's matrices get different inputs, such as the tokens of an expert.
    """

    weight: Place
    site: str
    rows: int
    columns: int
    groups: int = 1
    flipped: bool = False
    bias: Place | None = None
    settings: Settings | None = None
    routed: bool = False


@dataclass(frozen=True)
class Product:
    """One call of a function that multiplies: its input, weight and bias.

    `left` says that the weight is the first factor, so inputs are columns.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    settings: Settings | None = None
    linear: bool = False  # the weight has a row for each output, as in F.linear
    left: bool = False

    def use(self, place: Place, straight: bool, site: str, bias: Place | None, whole: int) -> Use:
        """Return the use of a weight that lies in this place.

        Args:
            place: where the weight lies.
            straight: whether it lies there row by row, not column by column.
            site: path of the module that calls.
            bias: where the bias lies.
            whole: number of dimensions of the parameter.
        """
        w = self.weight
        if self.settings is not None:
            return Use(place, site, w.shape[0], w[0].numel(), self.settings.groups, bias=bias,
                       settings=self.settings)  # fmt: skip
        by_output = self.linear or self.left
        rows, columns = (w.shape[-2], w.shape[-1]) if by_output else (w.shape[-1], w.shape[-2])
        groups = w.shape[0] if w.dim() == 3 else 1
        routed = whole == 3 and w.dim() == 2
        return Use(place, site, rows, columns, groups, by_output != straight, bias, routed=routed)


def products(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Product]:
    """Return a call as products, one for each operand that may be the weight."""
    if func is F.linear or func in _CONVOLUTIONS:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
        x, w, b = given.get("input"), given.get("weight"), given.get("bias")
        if not (isinstance(x, Tensor) and isinstance(w, Tensor)):
            return []
        if func is F.linear:
            return [Product(x, w, b, linear=True)]
        return [Product(x, w, b, _settings(w, _CONVOLUTIONS[func], args[3:], kwargs))]
    if func in _PRODUCTS and len(args) == 2:
        return _factors(args[0], args[1], None)
    if func in _SUMS and len(args) == 3 and not kwargs:
        return _factors(args[1], args[2], args[0])[:1]
    return []


def _factors(a: Any, b: Any, bias: Any) -> list[Product]:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return []
    found = [Product(a, b, bias)] if b.dim() in (2, 3) and a.dim() >= b.dim() - 1 else []
    # W x, for one matrix W and any number of matrices x.
    return found + ([Product(b.mT, a, left=True)] if a.dim() == 2 and b.dim() >= 2 else [])


def _settings(w: Tensor, n: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Settings:
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given |= dict(zip(given, args, strict=False))
    given |= {key: value for key, value in kwargs.items() if key in given}
    groups = int(given["groups"])

    def each(value: Any) -> Any:
        if isinstance(value, str):
            return value
        values = (value,) if isinstance(value, int) else tuple(map(int, value))
        return values * n if len(values) == 1 else values

    stride, padding, dilation = (each(given[key]) for key in ("stride", "padding", "dilation"))
    return Settings(w.shape[1] * groups, tuple(w.shape[2:]), stride, padding, dilation, groups)


def placed(tensor: Tensor, whole: Tensor) -> tuple[int, int, bool] | None:
    """Return the rows of a parameter that a tensor is a view of, and whether it lies row by row.

    None where it is another tensor, or a view that no range of rows covers.
    """
    if tensor.device != whole.device or tensor.dtype != whole.dtype or not tensor.numel():
        return None
    if _memory(tensor) != _memory(whole) or not whole.is_contiguous():
        return None
    straight = tensor.is_contiguous()
    if not straight and not (tensor.dim() > 1 and tensor.mT.is_contiguous()):
        return None
    row = whole.stride(0) if whole.dim() > 1 else 1
    offset = tensor.storage_offset() - whole.storage_offset()
    if offset < 0 or offset % row or tensor.numel() % row:
        return None
    start, stop = offset // row, (offset + tensor.numel()) // row
    return (start, stop, straight) if stop <= len(whole) else None


def _memory(tensor: Tensor) -> int:
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, eq=False)
class _Observed:
    """What layers of this file share. Their `module` is the whole network."""

    use: Use = Use(Place("weight", 0, 0), "", 0, 0)

    def _whole(self, place: Place) -> int:
        return len(Part(place.key).parameter(self.module))  # type: ignore[attr-defined]

    @property
    def owner(self) -> nn.Module:
        """Return the module whose forward pass calls the function."""
        return self.module.get_submodule(self.use.site)  # type: ignore[attr-defined,no-any-return]

    @property
    def kind(self) -> str:
        """Return the calling module's class name."""
        return type(self.owner).__name__

    @property
    def weight_part(self) -> Part:
        """Return the place of the weight in the network."""
        return self.use.weight.part(self._whole(self.use.weight))

    @property
    def bias_part(self) -> Part:
        """Return the place of the bias; a part that is None where there is none."""
        bias = self.use.bias
        return Absent("bias") if bias is None else bias.part(self._whole(bias))

    @property
    def routed(self) -> bool:
        """Return whether the layer's inputs are chosen anew in every pass."""
        return self.use.routed

    @property
    def together(self) -> Hashable:
        """Return a key that is equal for layers that do not feed each other."""
        return (self.use.site, self.use.weight.key) if self.use.routed else None

    def _tap_input(self, callback: OnInput) -> Undo:
        return ObservedCalls.of(self.owner).observe(self, callback, None)

    def _tap_output(self, callback: OnOutput) -> Undo:
        return ObservedCalls.of(self.owner).observe(self, None, callback)


@dataclass(frozen=True, eq=False)
class FunctionalLinearLayer(_Observed, LinearLayer):
    """View a weight that F.linear or a product uses."""

    @property
    def groups(self) -> int:
        """Return the number of matrices in a batched product."""
        return self.use.groups

    @property
    def rows(self) -> int:
        """Return the number of outputs."""
        return self.use.rows

    @property
    def columns(self) -> int:
        """Return the number of inputs."""
        return self.use.columns

    @property
    def form(self) -> Hashable:
        """Return a key that no other part of a parameter has."""
        return "product", self.use

    @property
    def positions(self) -> int:
        """Return 1: every column is an input of its own."""
        return 1

    def unfolded(self, weight: Tensor) -> Tensor:
        """Reshape to (groups, rows, columns)."""
        groups, rows, columns = self.groups, self.rows, self.columns
        if self.use.flipped:
            return weight.reshape(groups, columns, rows).mT
        return weight.reshape(groups, rows, columns)

    def folded(self, matrix: Tensor) -> Tensor:
        """Reshape back."""
        return (matrix.mT if self.use.flipped else matrix).reshape(self.weight.shape)

    def patches(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the rows of the input, of every matrix of a batched product."""
        if self.groups == 1:
            yield from super().patches(x)
        else:
            yield x.movedim(-3, 0).reshape(self.groups, -1, self.columns)

    def vectors(self, x: Tensor) -> int:
        """Return the number of rows for one group."""
        return super().vectors(x) // self.groups

    def by_unit(self, z: Tensor) -> Tensor:
        """Sum all dimensions but the last, and but that of the groups."""
        if self.groups == 1:
            return super().by_unit(z)
        return z.movedim(-3, 0).reshape(self.groups, -1, self.rows).sum(dim=1)


@dataclass(frozen=True, eq=False)
class FunctionalConvolutionLayer(_Observed, ConvolutionLayer):
    """View a weight that F.conv1d, F.conv2d or F.conv3d uses."""

    @property
    def conv(self) -> Any:
        """Return the settings of the call."""
        return self.use.settings

    @property
    def dimensions(self) -> int:  # type: ignore[override]
        """Return the number of dimensions of the image."""
        return len(self.conv.kernel_size)

    @property
    def form(self) -> Hashable:
        """Return a key that no other part of a parameter has."""
        return "convolution", self.use


def functional_layer(model: nn.Module, use: Use, name: str) -> LinearLayer | ConvolutionLayer:
    """Return a use as a layer of a network."""
    view = FunctionalLinearLayer if use.settings is None else FunctionalConvolutionLayer
    return view(name=name, module=model, root=True, use=use)


Callback = Callable[[Tensor], Any]


class ObservedCalls:
    """Replace a module's `forward` by one that observes what it multiplies with its weights."""

    def __init__(self, site: nn.Module) -> None:
        self.site, self.own = site, site.__dict__.get("forward")
        self.forward = site.forward
        self.observers: list[tuple[Any, Callback | None, Callback | None]] = []

    @classmethod
    def of(cls, site: nn.Module) -> ObservedCalls:
        """Return the replacement of a module, and install it where there is none yet."""
        found = site.__dict__.get("forward")
        if not isinstance(found, cls):
            found = cls(site)
            site.__dict__["forward"] = found
        return found

    def observe(self, layer: Any, on_input: Callback | None, on_output: Callback | None) -> Undo:
        """Add observers of one layer; return what removes them."""
        entry = (layer, on_input, on_output)
        self.observers.append(entry)

        def undo() -> None:
            self.observers = [other for other in self.observers if other is not entry]
            if not self.observers:
                self.site.__dict__.pop("forward", None)
                if self.own is not None:
                    self.site.__dict__["forward"] = self.own

        return undo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass; matrices without input are noted as empty."""
        calls = _Calls(self.observers)
        with plain_experts(self.site), calls:
            out = self.forward(*args, **kwargs)
        for layer, on_input, _ in self.observers:
            if on_input is not None and layer.routed and layer.use not in calls.seen:
                on_input(layer.weight.new_zeros(0, layer.columns))
        return out


class _Calls(TorchFunctionMode):
    """Call observers at every product with their layer's weight."""

    def __init__(self, observers: Sequence[tuple[Any, Callback | None, Callback | None]]) -> None:
        super().__init__()
        self.by_use: dict[Use, list[tuple[Any, Callback | None, Callback | None]]] = {}
        for entry in observers:
            self.by_use.setdefault(entry[0].use, []).append(entry)
        self.seen: set[Use] = set()
        self.memory: dict[int, list[Use]] = {}
        for use, entries in self.by_use.items():
            whole = entries[0][0].weight_part.parameter(entries[0][0].module)
            self.memory.setdefault(_memory(whole), []).append(use)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for product in products(func, args, kwargs):
            for use in self.memory.get(_memory(product.weight), ()):
                if self._is(use, product):
                    return self._observed(use, product, func, args, kwargs)
        return func(*args, **kwargs)

    def _is(self, use: Use, product: Product) -> bool:
        """Return whether a product multiplies with this part, in this way."""
        layer = self.by_use[use][0][0]
        whole = Part(use.weight.key).parameter(layer.module)
        found = placed(product.weight, whole)
        if found is None or found[:2] != (use.weight.start, use.weight.stop):
            return False
        made = product.use(use.weight, found[2], use.site, use.bias, whole.dim())
        return made == use

    def _observed(
        self, use: Use, product: Product, func: Any, args: Sequence[Any], kwargs: Any
    ) -> Any:
        self.seen.add(use)
        entries = self.by_use[use]
        for layer, on_input, _ in entries:
            if on_input is not None:
                layer.check_input(product.x)
                on_input(product.x)
        z = func(*args, **kwargs)
        for _, _, on_output in entries:
            replaced = None if on_output is None else on_output(z.mT if product.left else z)
            if replaced is not None:
                z = replaced.mT if product.left else replaced
        return z


@contextmanager
def plain_experts(module: nn.Module) -> Iterator[None]:
    """Let experts of transformers multiply one expert at a time, as their own code does.

    Other implementations gather copies of the weights, which cannot be recognised.
    """
    config = getattr(module, "config", None)
    before = getattr(config, _EXPERTS, None)
    if before is None or before == "eager":
        yield
        return
    setattr(config, _EXPERTS, "eager")
    try:
        yield
    finally:
        setattr(config, _EXPERTS, before)
