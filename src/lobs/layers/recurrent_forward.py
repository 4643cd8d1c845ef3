"""Compute recurrent modules step by step, so that each of their matrices can be observed.

Torch computes all steps of an LSTM in one function. While a layer is observed, the module's own
`forward` runs as ever, and only that function is computed here: `ObservedRecurrence` replaces the
instance's `forward` to see to it. It is removed with the last observer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from lobs.layers.hooks import Undo

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
State = tuple[Tensor, ...]  # hidden; an LSTM has a cell state, too


class ObservedRecurrence:
    """Replace a recurrent module's `forward` by one that calls observers at every matrix."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, module.forward
        self.inputs: dict[str, list[Any]] = {}
        self.outputs: dict[str, list[Any]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> ObservedRecurrence:
        """Return the replacement of a module, and install it where there is none yet."""
        found = module.__dict__.get("forward")
        if not isinstance(found, cls):
            found = cls(module)
            module.__dict__["forward"] = found
        return found

    def observe(self, what: str, role: str, callback: Any) -> Undo:
        """Add an observer of one matrix's `inputs` or `outputs`; return what removes it."""
        listed = getattr(self, what).setdefault(role, [])
        listed.append(callback)

        def undo() -> None:
            listed.remove(callback)
            if not any(self.inputs.values()) and not any(self.outputs.values()):
                self.module.__dict__.pop("forward", None)

        return undo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass with every product observed."""
        with _StepByStep(self):
            return self.forward(*args, **kwargs)

    def note(self, role: str, x: Callable[[], Tensor]) -> None:
        """Call the observers of a matrix's input, which is made only where there are any."""
        listed = list(self.inputs.get(role, ()))
        made = x() if listed else None
        for observer in listed:
            observer(made)

    def product(self, role: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return a matrix's output, or what its observers make of it."""
        z = F.linear(x, weight, bias)
        for observer in list(self.outputs.get(role, ())):
            replaced = observer(z)
            z = z if replaced is None else replaced
        return z


class _StepByStep(TorchFunctionMode):
    """Compute torch's recurrent functions here; all other functions as they are."""

    def __init__(self, observed: ObservedRecurrence) -> None:
        super().__init__()
        self.observed = observed

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _KINDS:
            return _sequence(self.observed, name, args)
        if name.removesuffix("_cell") in _KINDS:
            return _one_step(self.observed, name.removesuffix("_cell"), args)
        return func(*args, **(kwargs or {}))


@contextmanager
def step_by_step() -> Iterator[None]:
    """Let recurrent modules run step by step: torch's functions have no forward derivative."""
    with _StepByStep(ObservedRecurrence(nn.Identity())):
        yield


def _one_step(observed: ObservedRecurrence, kind: str, args: Sequence[Any]) -> Any:
    x, given, w_ih, w_hh, b_ih, b_hh = args
    state = tuple(given) if kind == "lstm" else (given,)
    observed.note("ih", lambda: x)
    gates = observed.product("ih", x, w_ih, b_ih)
    observed.note("hh", lambda: state[0])
    after = _STEPS[kind](gates, observed.product("hh", state[0], w_hh, b_hh), state)
    return after if kind == "lstm" else after[0]


@dataclass(frozen=True)
class _Layout:
    """Know how samples and steps lie in a sequence.

    Args:
        sizes: samples at each step.
        batch_first: whether samples come before steps; None in a packed sequence.
    """

    sizes: list[int]
    batch_first: bool | None

    def flat(self, x: Tensor) -> Tensor:
        """Return the vectors of all steps, one step after the other."""
        if self.batch_first is None:
            return x
        return (x.transpose(0, 1) if self.batch_first else x).flatten(0, 1)

    def back(self, flat: Tensor) -> Tensor:
        """Invert `flat`."""
        if self.batch_first is None:
            return flat
        x = flat.view(len(self.sizes), self.sizes[0], flat.shape[-1])
        return x.transpose(0, 1) if self.batch_first else x


def _sequence(observed: ObservedRecurrence, kind: str, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute what `torch.lstm`, `torch.gru` and `torch.rnn_*` compute."""
    packed = not isinstance(args[2], list)
    x, given, weights, biased, levels, dropout, training, both = (
        (args[0], *args[2:9]) if packed else args[:8]
    )
    if packed:
        layout = _Layout(args[1].tolist(), None)
    else:
        first = bool(args[8])
        samples, steps = x.shape[:2] if first else x.shape[1::-1]
        layout = _Layout([samples] * steps, first)
    start = tuple(given) if kind == "lstm" else (given,)
    ways = ("", "_reverse") if both else ("",)
    size = len(weights) // (levels * len(ways))
    finals: list[State] = []
    for level in range(levels):
        names = [f"l{level}{way}" for way in ways]
        own = [weights[(level * len(ways) + i) * size :][:size] for i in range(len(ways))]
        x = F.dropout(x, dropout, training and level > 0)
        gates = []
        for name, part in zip(names, own, strict=True):
            observed.note(f"ih_{name}", partial(_same, x))
            gates.append(observed.product(f"ih_{name}", x, part[0], part[2] if biased else None))
        outputs = []
        for i, (name, part) in enumerate(zip(names, own, strict=True)):
            place = level * len(ways) + i
            scan = _Scan(observed, kind, name, part, biased)
            out, final = scan.run(
                layout.flat(gates[i]), tuple(s[place] for s in start), layout, i == 1
            )
            outputs.append(out)
            finals.append(final)
        x = layout.back(torch.cat(outputs, dim=-1) if both else outputs[0])
    return (x, *(torch.stack(parts) for parts in zip(*finals, strict=True)))


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class _Scan:
    """Run one level in one direction.

    Args:
        observed: whose matrices these are.
        kind: the recurrent function.
        name: level and direction, as in the names of parameters.
        weights: of the input, of the hidden state, their biases, of the projection.
        biased: whether there are biases.
    """

    observed: ObservedRecurrence
    kind: str
    name: str
    weights: Sequence[Tensor]
    biased: bool

    def run(
        self, gates: Tensor, start: State, layout: _Layout, reverse: bool
    ) -> tuple[Tensor, State]:
        """Return the outputs of all steps, and the last state of every sample.

        Args:
            gates: what the input adds to each gate, at all steps.
            start: the state before the first step.
            layout: samples at each step.
            reverse: go from the last step to the first.
        """
        bias = self.weights[3] if self.biased else None
        projection = self.weights[-1] if len(self.weights) in (3, 5) else None
        steps = range(len(layout.sizes))
        pieces = torch.split(gates, layout.sizes)
        outs: list[Tensor] = [gates] * len(steps)
        before, wide = list(outs), list(outs)
        state, ended = tuple(s[:0] for s in start), list[State]()
        for t in reversed(steps) if reverse else steps:
            n, many = layout.sizes[t], len(state[0])
            if n < many:  # some sequences have ended
                ended.append(tuple(s[n:] for s in state))
                state = tuple(s[:n] for s in state)
            elif n > many:  # some begin
                state = tuple(
                    torch.cat([s, s0[many:n]]) for s, s0 in zip(state, start, strict=True)
                )
            before[t] = state[0]
            hidden = self.observed.product(f"hh_{self.name}", state[0], self.weights[1], bias)
            state = _STEPS[self.kind](pieces[t], hidden, state)
            if projection is not None:
                wide[t] = state[0]
                narrow = self.observed.product(f"hr_{self.name}", state[0], projection, None)
                state = (narrow, *state[1:])
            outs[t] = state[0]
        self.observed.note(f"hh_{self.name}", lambda: layout.back(torch.cat(before)))
        if projection is not None:
            self.observed.note(f"hr_{self.name}", lambda: layout.back(torch.cat(wide)))
        parts = [state, *reversed(ended)]
        return torch.cat(outs), tuple(torch.cat(same) for same in zip(*parts, strict=True))


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=-1), h.chunk(3, dim=-1)
    z, n = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + z * (state[0] - n),)


_STEPS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda x, h, _: ((x + h).tanh(),),
    "rnn_relu": lambda x, h, _: ((x + h).relu(),),
}
