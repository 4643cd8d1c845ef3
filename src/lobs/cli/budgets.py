"""Options for budgets of the whole network, and the target they spell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from lobs.errors import LobsError, TargetError

if TYPE_CHECKING:
    from torch import nn

    from lobs.cli.subject import Subject
    from lobs.targets import Target

ParametersOption = Annotated[int | None, typer.Option(min=0, help="Weights to keep in all layers together.")]
FlopsOption = Annotated[float | None, typer.Option(min=0, help="Operations one input may cost in the pruned layers.")]
BytesOption = Annotated[
    int | None, typer.Option("--bytes", min=0, help="Size of the network: kept weights, a bit mask, all else dense.")
]
MaxDropOption = Annotated[
    float | None, typer.Option(min=0, help="The fewest weights with which the metric, an error, rises by no more than this.")
]


def budget_target(
    parameters: int | None, flops: float | None, size: int | None, max_drop: float | None, scope: str | None
) -> Target | None:
    """The target that the options ask for; None where they ask for no budget."""
    from lobs.targets import Budget

    if parameters is flops is size is max_drop is None:
        return None
    if scope == "layer":
        raise TargetError("--scope layer does not go with a budget, which is the whole network's.")
    return Budget(parameters=parameters, flops=flops, bytes=size, max_drop=max_drop)


def score_of(subject: Subject, max_drop: float | None) -> Callable[[nn.Module], float] | None:
    """A score of which more is better, where `--max-drop` needs one: the metric is an error, of which less is better."""
    if max_drop is None:
        return None
    evaluate = subject.evaluate
    if evaluate is None:
        raise LobsError(f"--max-drop needs a metric, and '{subject.origin}' has none: return (model, batches, evaluate).")
    return lambda model: -float(evaluate(model))
