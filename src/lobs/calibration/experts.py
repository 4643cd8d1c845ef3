"""Choose the experts that a mixture can do without, by what their absence does to its output.

Without an expert, its tokens go to the next best ones. That is computed: the router runs without
the expert, and the difference of the mixture's output counts. Experts go one at a time. Two that
stand in for each other are thus not both taken for superfluous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lobs._system.progress import track
from lobs.calibration.forward import call, evaluating, length
from lobs.errors import CalibrationError
from lobs.layers.hooks import before_forward, watching
from lobs.layers.mixtures import Mixture

TOKENS = 4096  # of each mixture that are looked at, at most


@dataclass
class _Seen:
    """The tokens of one mixture, taken evenly from all batches."""

    each: int  # of a batch, at most
    parts: list[Tensor] = field(default_factory=list)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep some tokens of one call."""
        x = args[0] if args else next(iter(kwargs.values()))
        rows = x.detach().reshape(-1, x.shape[-1])
        step = max(1, -(-len(rows) // self.each))
        self.parts.append(rows[::step].clone())


def tokens_of(
    model: nn.Module, batches: Iterable[Any], found: Sequence[Mixture]
) -> dict[str, Tensor]:
    """Return tokens that reach each mixture, by its name.

    Args:
        model: the network.
        batches: the calibration data.
        found: its mixtures.
    """
    each = max(1, TOKENS // max(1, length(batches) or 1))
    seen = {mixture.name: _Seen(each) for mixture in found}
    hooks = (
        before_forward(mixture.experts, seen[mixture.name].note, with_kwargs=True)
        for mixture in found
    )
    with evaluating(model), watching(hooks), track("experts", length(batches)) as advance:
        for batch in batches:
            call(model, batch)
            advance(1)
    missing = [name for name, own in seen.items() if not own.parts]
    if missing:
        raise CalibrationError(f"no batch reaches the experts '{missing[0]}'. Calibrate on others.")
    return {name: torch.cat(own.parts)[:TOKENS] for name, own in seen.items()}


@dataclass(frozen=True, eq=False)
class Choice:
    """The experts that go, and what that does to the mixture's output.

    `error` and `energy` are mean squared norms over the tokens: of the change, and of the output.
    """

    gone: Tensor
    error: float
    energy: float
    tokens: int


@torch.no_grad()
def superfluous(mixture: Mixture, tokens: Tensor, count: int) -> Choice:
    """Return the experts that cost the mixture's output least.

    Args:
        mixture: the experts and their router.
        tokens: inputs of the mixture.
        count: number of experts that go; where the router has groups, as many from each.
    """
    wanted = _output(mixture, tokens)
    if mixture.groups > 1:
        gone = _from_each_group(mixture, tokens, count)
    else:
        gone = _one_by_one(mixture, tokens, wanted, count)
    change, size = _output(mixture, tokens, gone) - wanted, max(1, len(tokens))
    error, energy = (float(x.square().sum()) / size for x in (change, wanted))
    return Choice(gone.sort().values, error, energy, len(tokens))


def _output(mixture: Mixture, tokens: Tensor, gone: Tensor | None = None) -> Tensor:
    weights, index = mixture.route(tokens, gone)
    return mixture.run(tokens, index, weights).double()


def _one_by_one(mixture: Mixture, tokens: Tensor, wanted: Tensor, count: int) -> Tensor:
    gone = torch.empty(0, dtype=torch.int64)
    weights, index = mixture.route(tokens)
    error = torch.zeros(len(tokens), dtype=torch.float64)  # of each token, without those gone
    for _ in range(count):
        costs, after = {}, partial(_after, mixture, tokens, wanted)
        for expert in range(mixture.size):
            if not bool((gone == expert).any()):
                own = (index == expert).any(dim=-1)
                costs[expert] = float(after(own, torch.cat([gone, torch.tensor([expert])])).sum())
                costs[expert] -= float(error[own.cpu()].sum())
        gone = torch.cat([gone, torch.tensor([min(costs, key=lambda e: (costs[e], e))])])
        weights, index = mixture.route(tokens, gone)
        error = (mixture.run(tokens, index, weights).double() - wanted).square().sum(dim=-1).cpu()
    return gone


def _after(mixture: Mixture, tokens: Tensor, wanted: Tensor, own: Tensor, gone: Tensor) -> Tensor:
    """Return the squared error of some tokens without the experts that are gone."""
    if not bool(own.any()):
        return torch.zeros(1, dtype=torch.float64)
    return (_output(mixture, tokens[own], gone) - wanted[own]).square().sum(dim=-1)


def _from_each_group(mixture: Mixture, tokens: Tensor, count: int) -> Tensor:
    """Return as many experts from each group: those that add least to the output."""
    weights, index = mixture.route(tokens)
    added = torch.zeros(mixture.size, dtype=torch.float64)
    for expert in range(mixture.size):
        rows, places = (index == expert).nonzero(as_tuple=True)
        if len(rows):
            part = mixture.run(tokens[rows], index[rows, places, None], weights[rows, places, None])
            added[expert] = float(part.double().square().sum())
    each = added.view(mixture.groups, -1).argsort(dim=1, stable=True)[:, : count // mixture.groups]
    start = torch.arange(mixture.groups).unsqueeze(1) * (mixture.size // mixture.groups)
    return (start + each).flatten()
