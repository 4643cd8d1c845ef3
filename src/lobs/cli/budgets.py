"""Options for budgets of the whole network, and the target they spell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.common import parse_fractions
from lobs.errors import LobsError, TargetError

if TYPE_CHECKING:
    from torch import nn

    from lobs.cli.subject import Subject
    from lobs.targets import Target

ParametersOption = Annotated[
    int | None, typer.Option(min=0, help="Weights to keep in all layers together.")
]
FlopsOption = Annotated[
    float | None, typer.Option(min=0, help="Operations one input may cost in the pruned layers.")
]
BytesOption = Annotated[
    int | None,
    typer.Option(
        "--bytes", min=0, help="Size of the network: kept weights, a bit mask, all else dense."
    ),
]
MaxDropOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="The fewest weights with which the metric, an error, rises by no more than this.",
    ),
]
LargerOption = Annotated[
    bool,
    typer.Option(
        "--larger-is-better", help="--max-drop: the metric is a score; it may fall by that."
    ),
]
AtLeastOption = Annotated[
    str | None, typer.Option(help="Least kept fraction of layers in a budget: fc3=50%,conv*=0.1.")
]
AtMostOption = Annotated[
    str | None, typer.Option(help="Largest kept fraction of layers in a budget, in the same form.")
]


def limits(at_least: str | None, at_most: str | None) -> dict[str, dict[str, float]]:
    """What `Sparsity` and `Budget` call floors and ceilings, from the options."""
    found = {}
    for key, option, text in (
        ("keep_at_least", "--at-least", at_least),
        ("keep_at_most", "--at-most", at_most),
    ):
        if text is not None:
            read = parse_fractions(text, option)
            if not isinstance(read, dict):
                raise TargetError(
                    f"{option} {text} names no layer. Example: {option} 'fc3=50%,conv*=0.1'."
                )
            found[key] = read
    return found


def budget_target(
    parameters: int | None,
    flops: float | None,
    size: int | None,
    drop: float | None,
    scope: str | None,
    limits: dict[str, dict[str, float]],
) -> Target | None:
    """The target that the options ask for; None where they ask for no budget."""
    from lobs.targets import Budget

    if parameters is flops is size is drop is None:
        return None
    if scope == "layer":
        raise TargetError("--scope layer does not go with a budget, which is the whole network's.")
    return Budget(parameters=parameters, flops=flops, bytes=size, drop=drop, **limits)


def score_of(
    subject: Subject, drop: float | None, larger_is_better: bool
) -> Callable[[nn.Module], float] | None:
    """A score of which more is better, where `--max-drop` needs one: the metric is an error unless told otherwise."""
    if drop is None:
        if larger_is_better:
            raise LobsError("--larger-is-better goes with --max-drop.")
        return None
    evaluate = subject.evaluate
    if evaluate is None:
        raise LobsError(
            f"--max-drop needs a metric, and '{subject.origin}' has none: return (model, batches, "
            "evaluate)."
        )
    sign = 1 if larger_is_better else -1
    return lambda model: sign * float(evaluate(model))


def in_the_metric(settings: dict[str, Any], larger_is_better: bool) -> None:
    """Let the trials tell the metric as it is, not the score that the search has made of an error."""
    for trial in () if larger_is_better else settings.get("trials", ()):
        trial["score"] = -trial["score"]
