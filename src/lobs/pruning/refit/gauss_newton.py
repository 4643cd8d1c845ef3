"""Gauss–Newton steps on a network's output over its free weights, without forming a Jacobian.

With J = ∂f/∂θ and the residual r = f_θ − f_dense, a step δ approaches (JᵀJ + λD) δ = −Jᵀr by
conjugate gradients. A product with JᵀJ is one forward and one backward derivative. D ≈ diag JᵀJ
comes from products with random signs v, since E[(Jᵀv)²] = diag JᵀJ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from lobs._system.distributed import process_group
from lobs.calibration.collect import collect_moments
from lobs.calibration.forward import batch_size, call, main_output, plain_input
from lobs.errors import LobsError, ProcessGroupError
from lobs.layers import Layer, watching
from lobs.layers.hooks import Handle
from lobs.layers.recurrent_forward import RECURRENT, step_by_step
from lobs.pruning.refit.preconditioner import Preconditioner, Vector, affordable
from lobs.solvers.least_squares import conjugate_gradients

INSIDE = 4  # conjugate-gradient steps
PASSES = 6 * INSIDE + 12  # cost of a Gauss–Newton step in forward passes
_DAMPING = 0.1  # λ
_FLOOR = 0.02  # least entry of D, relative to its mean
_HALVINGS = 4  # of a step that does not help
_BLOCKS = 4  # passes that finding a layer's own part of JᵀJ may cost
_TOGETHER = 2**21  # numbers in batches that are joined
_KEPT_BYTES = 2**27  # of forward passes that a step keeps, so that products do not run them again
_CONVERGED = 1e-8  # squared residual, relative to the first, at which conjugate gradients stop


class ImpossibleError(Exception):
    """The reason why a network's weights cannot be refitted jointly."""


class Survivors:
    """The free weights as one vector, and the network's output as a function of them."""

    def __init__(
        self,
        model: nn.Module,
        dense: nn.Module,
        layers: Sequence[Layer],
        free: Mapping[str, Tensor],
    ) -> None:
        self.network, self.dense, self.layers = _Network(model), dense, layers
        self.parameters = parameters_of(model, free)
        self.free = {name: mask.to(self.parameters[name]) for name, mask in free.items()}
        self.at: Vector = {name: t.detach().clone() for name, t in self.parameters.items()}

    def write(self, at: Vector) -> None:
        """Write weights into the network."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(at[name])

    def answer(self, batch: Any) -> Callable[[Vector], Tensor]:
        """Return the network's output on a batch as a function of the weights."""
        return lambda at: self.network.answer(at, batch)

    def outputs(self, batch: Any) -> int:
        """Return the size of the output for a batch."""
        with torch.no_grad():
            return _tensor(call(self.dense, batch)).numel()

    def try_out(self, batch: Any) -> None:
        """Raise where the network is not differentiable."""
        still = {name: torch.zeros_like(t) for name, t in self.at.items()}
        out: Tensor = jvp(self.answer(batch), (self.at,), (still,))[0]
        vjp(self.answer(batch), self.at)[1](torch.zeros_like(out))


class Window:
    """Batches with the dense network's outputs on them.

    With `join`, batches are joined to larger ones.
    """

    def __init__(self, survivors: Survivors, batches: list[Any], *, join: bool = False) -> None:
        self.survivors, self.batches = survivors, _merged(batches) if join else batches
        with torch.no_grad(), _running():
            self.wanted = [_tensor(call(survivors.dense, batch)) for batch in self.batches]
        if join:
            self.batches, self.wanted = _joined(self.batches, self.wanted)
        self.samples = round(process_group().sum_numbers(sum(map(batch_size, batches)))[0])
        self.backs: dict[int, Callable[[Tensor], tuple[Vector]]] = {}  # at the present weights

    def distance(self, at: Vector) -> float:
        """Return the root mean square distance of the output from the dense network's."""
        total = 0.0
        with torch.no_grad(), _running():
            for batch, wanted in zip(self.batches, self.wanted, strict=True):
                total += _squares(self.survivors.answer(batch)(at) - wanted)
        return self._mean(total)

    def _mean(self, squares: float) -> float:
        """Return the root mean square of all processes' samples."""
        return math.sqrt(process_group().sum_numbers(squares)[0] / max(1, self.samples))

    def step(self, at: Vector, turn: int) -> Vector:
        """Return the weights after one damped Gauss–Newton step.

        The step is halved until it helps on these batches. If it never does, `at` is returned.
        """
        slope, size, here = self._slope(at, turn)
        delta = self._solve(at, slope, size)
        self.backs.clear()
        for halving in range(_HALVINGS + 1):
            there = {name: t + delta[name] * 0.5**halving for name, t in at.items()}
            if self.distance(there) < here:
                return there
        return at

    def _slope(self, at: Vector, turn: int) -> tuple[Vector, Vector, float]:
        """Return half the gradient, Jᵀr, D ≈ diag JᵀJ, and the distance.

        D comes from products with random signs.
        """
        generator = torch.Generator().manual_seed(1000 * turn + process_group().rank)
        slope, squares = ({name: torch.zeros_like(t) for name, t in at.items()} for _ in range(2))
        kept, total = Saved(), 0.0
        with _running():
            for number, (batch, wanted) in enumerate(zip(self.batches, self.wanted, strict=True)):
                with kept:
                    out, back = vjp(self.survivors.answer(batch), at)
                if kept.count <= _KEPT_BYTES:
                    self.backs[number] = back
                total += _squares(out - wanted)
                signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
                for name, t in back(out - wanted)[0].items():
                    slope[name] += t / self.samples
                for name, t in back(signs)[0].items():
                    squares[name] += t.square() / self.samples
        process_group().all_reduce(*slope.values(), *squares.values())
        size = {name: _smoothed(t) for name, t in squares.items()}
        return self._masked(slope), size, self._mean(total)

    def _metric(self, size: Vector) -> Preconditioner:
        """Return the preconditioner from the inputs of the network's layers as it is now."""
        metric, free = Preconditioner(size), self.survivors.free
        # Multiply-adds of these batches, assuming one use of a weight per sample.
        limits = [
            (layer, _BLOCKS * self.samples * layer.weight.numel())
            for layer in self.survivors.layers
        ]
        chosen = [layer for layer, most in limits if affordable(layer, free, most)]
        try:
            network = self.survivors.network.model
            moments = collect_moments(network, self.batches, chosen) if chosen else {}
            metric.learn(chosen, moments, free)
        except ProcessGroupError:
            raise
        except LobsError:  # these batches may not reach every layer; the diagonal will do
            return Preconditioner(size)
        return metric

    def _solve(self, at: Vector, slope: Vector, size: Vector) -> Vector:
        """Return δ of (JᵀJ + λD) δ = −Jᵀr by preconditioned conjugate gradients."""
        metric, names, group = self._metric(size), list(at), process_group()

        def named(parts: Sequence[Tensor]) -> Vector:
            return dict(zip(names, parts, strict=True))

        def parts(vector: Vector) -> list[Tensor]:
            return [vector[name] for name in names]

        found = conjugate_gradients(
            lambda v: parts(self._curved(at, named(v), size)),
            [-slope[name] for name in names],
            [torch.zeros_like(at[name]) for name in names],
            dot=_dot,
            # Rounding may differ between processes, so the first decides for all.
            done=lambda now, first: bool(group.all_gather(bool(now <= _CONVERGED * first))[0]),
            steps=INSIDE,
            precondition=lambda residual: parts(metric(named(residual))),
        )
        return named(found)

    def _curved(self, at: Vector, v: Vector, size: Vector) -> Vector:
        """Return (JᵀJ + λD) v."""
        image = {name: torch.zeros_like(t) for name, t in at.items()}
        with _running():
            for number, batch in enumerate(self.batches):
                answer = self.survivors.answer(batch)
                moved = jvp(answer, (at,), (v,))[1]
                back = self.backs.get(number) or vjp(answer, at)[1]
                for name, t in back(moved)[0].items():
                    image[name] += t / self.samples
        process_group().all_reduce(*image.values())
        return self._masked(
            {name: t + _DAMPING * size[name] * v[name] for name, t in image.items()}
        )

    def _masked(self, vector: Vector) -> Vector:
        return {name: t * self.survivors.free[name] for name, t in vector.items()}


class Saved:
    """Count the bytes that forward passes inside this block save for backward passes."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.count += tensor.numel() * tensor.element_size()
        return tensor


@contextmanager
def _running() -> Iterator[None]:
    """Turn an error of the network on any process into an `ImpossibleError` on all."""
    try:
        with process_group().raise_together():
            yield
    except (ProcessGroupError, ImpossibleError):
        raise
    except (LobsError, RuntimeError) as error:
        raise ImpossibleError(" ".join(str(error).split())[:300]) from error


class _Network(nn.Module):
    """A network that takes one of the user's batches, as `call` does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.places: dict[str, list[str]] = {}

    def forward(self, batch: Any) -> Tensor:
        return _tensor(call(self.model, batch))

    def answer(self, at: Vector, batch: Any) -> Tensor:
        """Return the output with these weights in place of the network's own."""
        held = {f"model.{place}": t for name, t in at.items() for place in self._places(name)}
        out: Tensor = functional_call(self, held, (batch,), tie_weights=False)
        return out

    def _places(self, name: str) -> list[str]:
        """Return the names of a parameter, one for each module that holds it.

        Given two names of one module, torch would restore neither.
        """
        if name not in self.places:
            known = dict(self.model.named_parameters(remove_duplicate=False))
            found: dict[tuple[int, str], str] = {}
            for place, parameter in known.items():
                if parameter is known[name]:
                    owner, _, own = place.rpartition(".")
                    found.setdefault((id(self.model.get_submodule(owner)), own), place)
            self.places[name] = list(found.values())
        return self.places[name]


def _tensor(answer: Any) -> Tensor:
    out = main_output(answer)
    if out is None:
        raise ImpossibleError("the network returns no floating-point tensor")
    return out


def parameters_of(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return a network's parameters of these names; several names may share one."""
    known = dict(model.named_parameters(remove_duplicate=False))
    return {name: known[name] for name in names}


def separable(network: nn.Module, batches: Sequence[Any]) -> bool:
    """Return whether the output for joined batches is that for each batch, joined.

    It is not where samples are not the first dimension, or depend on each other.
    """
    plain = [x for batch in batches if (x := _rows(batch)) is not None]
    if len(plain) < 2 or len(plain) < len(batches) or not _alike(plain):
        return False
    try:
        with torch.no_grad():
            separate = torch.cat([_tensor(call(network, x)) for x in plain])
            joined = _tensor(call(network, _cat(plain)))
    except (ImpossibleError, LobsError, RuntimeError):
        return False
    if joined.shape != separate.shape or not bool(torch.isfinite(separate).all()):
        return False
    size = float(separate.abs().max()) if separate.numel() else 0.0
    return bool(torch.allclose(joined, separate, rtol=1e-3, atol=1e-4 * size))


def _rows(batch: Any) -> Tensor | Mapping[str, Tensor] | None:
    """Return a batch's input, or its arguments where each is a tensor with a row per sample."""
    if not isinstance(batch, Mapping):
        return plain_input(batch)
    sizes = {x.shape[0] if isinstance(x, Tensor) and x.dim() else -1 for x in batch.values()}
    return batch if len(sizes) == 1 and -1 not in sizes else None


def _alike(parts: Sequence[Tensor | Mapping[str, Tensor]]) -> bool:
    """Return whether inputs can be joined: they have the same names."""
    names = {tuple(part) if isinstance(part, Mapping) else None for part in parts}
    return len(names) == 1


def _cat(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    return {key: torch.cat([part[key] for part in parts]) for key in first}


def _joined(batches: list[Any], wanted: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """Join batches of named arguments, with the dense outputs, up to a size of both."""
    groups: list[list[int]] = []
    shapes: Any = None
    size = 0
    for number, (batch, out) in enumerate(zip(batches, wanted, strict=True)):
        named = _rows(batch)
        own, each = None, out.numel()
        if isinstance(named, Mapping):
            own = {key: (x.shape[1:], x.dtype) for key, x in named.items()}
            each += sum(x.numel() for x in named.values())
        if own is None or own != shapes or size + each > _TOGETHER:
            groups.append([])
            size = 0
        groups[-1].append(number)
        shapes, size = own, size + each
    return (
        [_cat([batches[n] for n in g]) if len(g) > 1 else batches[g[0]] for g in groups],
        [torch.cat([wanted[n] for n in g]) if len(g) > 1 else wanted[g[0]] for g in groups],
    )


def _merged(batches: list[Any]) -> list[Any]:
    """Join batches of plain tensors: the overhead of a call counts a hundred times here."""
    merged: list[Any] = []
    for batch in batches:
        x = plain_input(batch)
        last = merged[-1] if merged else None
        if x is None:
            merged.append(batch)
        elif (
            isinstance(last, Tensor)
            and last.shape[1:] == x.shape[1:]
            and last.numel() + x.numel() <= _TOGETHER
        ):
            merged[-1] = torch.cat([last, x])
        else:
            merged.append(x)
    return merged


def _smoothed(squares: Tensor) -> Tensor:
    """Replace noisy squares by row mean × column mean, bounded from below."""
    if squares.dim() > 1:
        lines = squares.flatten(1)
        total = lines.sum().clamp_min(torch.finfo(lines.dtype).tiny)
        squares = (
            lines.sum(dim=1, keepdim=True) * (lines.sum(dim=0, keepdim=True) / total)
        ).view_as(squares)
    mean = squares.mean()
    return squares + _FLOOR * mean if mean > 0 else torch.ones_like(squares)


def _squares(x: Tensor) -> float:
    return float(x.to(torch.float64).square().sum())


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    pairs = zip(a, b, strict=True)
    return sum(
        ((x.to(torch.float64) * y).sum() for x, y in pairs), torch.zeros((), dtype=torch.float64)
    )


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Disable fused kernels, which have no forward derivative, and torch's warnings."""
    recurrent = any(isinstance(m, RECURRENT) for m in model.modules())
    with (
        watching([Handle.of()]),
        sdpa_kernel(SDPBackend.MATH),
        step_by_step() if recurrent else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", DeprecationWarning)
        yield


def vjp(
    function: Callable[[Vector], Tensor], at: Vector
) -> tuple[Tensor, Callable[[Tensor], tuple[Vector]]]:
    """Evaluate `function`, and return its value and the map v ↦ (Jᵀv,).

    `torch.func.vjp` gives the same numbers, but its first call imports `torch._dynamo`, which takes
    seconds. The map may be called several times. Parameters without influence get zeros.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
    with torch.enable_grad():
        value = function(leaves)

    def transposed(v: Tensor) -> tuple[Vector]:
        if not value.requires_grad:
            return ({name: torch.zeros_like(tensor) for name, tensor in at.items()},)
        # The gradient of a scalar: torch imports sympy to compare shapes where it is given v.
        with torch.enable_grad():
            product = (value * v.detach()).sum()
        found = torch.autograd.grad(
            product, list(leaves.values()), retain_graph=True, allow_unused=True
        )
        return (
            {
                name: torch.zeros_like(leaf) if gradient is None else gradient
                for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
            },
        )

    return value.detach(), transposed
