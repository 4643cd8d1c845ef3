"""Options that say how much to keep, and the target they describe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lobs.cli.options import TARGET
from lobs.cli.values import (
    complement,
    parse_drop,
    parse_factor,
    parse_fractions,
    parse_seconds,
    require_one,
)
from lobs.errors import LobsError, TargetError

if TYPE_CHECKING:
    from lobs.cli.subject import Subject
    from lobs.targets import Target

KeepOption = Annotated[
    str | None,
    typer.Option(
        help="Weights to keep: 10%, 0.1, or 'fc1=5%,conv*=20%'.",
        metavar="FRACTION",
        rich_help_panel=TARGET,
    ),
]
DropOption = Annotated[
    str | None,
    typer.Option(
        help="Keep the fewest weights whose score falls by no more than this: 0.5%. "
        "In your score's unit; without a score a fraction: 0.005 is 0.5%.",
        metavar="LOSS",
        rich_help_panel=TARGET,
    ),
]
ParametersOption = Annotated[
    int | None,
    typer.Option(min=0, help="Number of weights to keep.", metavar="N", rich_help_panel=TARGET),
]
FlopsOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Operations of one input in the pruned layers.",
        metavar="N",
        rich_help_panel=TARGET,
    ),
]
BytesOption = Annotated[
    int | None,
    typer.Option(
        "--bytes",
        min=0,
        help="Bytes: kept weights, a bit mask, the rest dense.",
        metavar="N",
        rich_help_panel=TARGET,
    ),
]
SpeedupOption = Annotated[
    str | None,
    typer.Option(
        help="Times as fast on this machine, once accelerated: 2x.",
        metavar="FACTOR",
        rich_help_panel=TARGET,
    ),
]
LatencyOption = Annotated[
    str | None,
    typer.Option(
        help="Time of one input here, once accelerated: 5ms, 0.2s.",
        metavar="TIME",
        rich_help_panel=TARGET,
    ),
]
SparsityOption = Annotated[
    str | None,
    typer.Option(
        help="Weights to remove, in the forms of --keep.",
        metavar="FRACTION",
        rich_help_panel=TARGET,
    ),
]
EpsilonOption = Annotated[
    str | None,
    typer.Option(
        help="Largest error √E of each layer; one number or by layer.",
        metavar="ERROR",
        rich_help_panel=TARGET,
    ),
]
RelativeOption = Annotated[
    bool,
    typer.Option(
        "--relative",
        help="--epsilon is relative to the layer's output.",
        rich_help_panel=TARGET,
    ),
]
ScopeOption = Annotated[
    str | None,
    typer.Option(
        help="network: share one number among the layers (default). layer: the same for each.",
        metavar="KIND",
        rich_help_panel=TARGET,
    ),
]
AtLeastOption = Annotated[
    str | None,
    typer.Option(
        help="Smallest kept fraction of layers: 'fc3=50%,conv*=0.1'.",
        metavar="LAYERS",
        rich_help_panel=TARGET,
    ),
]
AtMostOption = Annotated[
    str | None,
    typer.Option(
        help="Largest kept fraction of layers, in the same form.",
        metavar="LAYERS",
        rich_help_panel=TARGET,
    ),
]


@dataclass(frozen=True)
class Amount:
    """How much to keep, as typed."""

    keep: str | None = None
    drop: str | None = None
    parameters: int | None = None
    flops: float | None = None
    size: int | None = None
    sparsity: str | None = None
    epsilon: str | None = None
    relative: bool = False
    scope: str | None = None
    at_least: str | None = None
    at_most: str | None = None
    rounds: int | None = None
    speedup: str | None = None
    latency: str | None = None

    def check(self, pattern: str | None) -> None:
        """Refuse options that contradict each other."""
        require_one(
            keep=self.keep, drop=self.drop, parameters=self.parameters, flops=self.flops,
            bytes=self.size, sparsity=self.sparsity, epsilon=self.epsilon, speedup=self.speedup,
            latency=self.latency, pattern=pattern,
        )  # fmt: skip
        if self.relative and self.epsilon is None:
            raise LobsError("--relative goes with --epsilon.")

    def fraction(self) -> float | dict[str, float]:
        """Return the fraction to remove, from `--keep` or `--sparsity`."""
        if self.keep is not None:
            return complement(parse_fractions(self.keep, "--keep"))
        return parse_fractions(self.sparsity or "", "--sparsity")

    def limits(self) -> dict[str, dict[str, float]]:
        """Return `keep_at_least` and `keep_at_most` of a budget."""
        found = {}
        for key, option, text in (
            ("keep_at_least", "--at-least", self.at_least),
            ("keep_at_most", "--at-most", self.at_most),
        ):
            if text is not None:
                read = parse_fractions(text, option)
                if not isinstance(read, dict):
                    raise TargetError(
                        f"{option} {text} names no layer. Example: {option} 'fc3=50%,conv*=0.1'."
                    )
                found[key] = read
        return found

    def target(self) -> Target:
        """Return the target; that of `--drop` still lacks its score."""
        from lobs.targets import ErrorBudget, Sparsity

        limits = self.limits()
        if self.epsilon is not None:
            if limits:
                raise TargetError(
                    "--at-least and --at-most go with a budget for the whole network; ε is each "
                    "layer's own."
                )
            if self.scope == "network":
                raise TargetError("--scope goes with --keep or --sparsity; ε is each layer's own.")
            self._no_rounds()
            return ErrorBudget(parse_fractions(self.epsilon, "--epsilon"), relative=self.relative)
        if self.keep is None and self.sparsity is None:
            return self._budget(limits)
        fraction = self.fraction()
        if isinstance(fraction, dict) or self.scope == "layer":
            self._no_rounds()
        more = {} if self.rounds is None else {"rounds": self.rounds}
        return Sparsity(fraction, scope=self.scope, **limits, **more)  # type: ignore[arg-type]  # checked there

    def _budget(self, limits: dict[str, dict[str, float]]) -> Target:
        from lobs.targets import Budget

        if self.scope == "layer":
            raise TargetError(
                "--scope layer does not go with a budget, which is the whole network's."
            )
        if self.drop is not None:
            self._no_rounds()
            more: dict[str, Any] = {"drop": parse_drop(self.drop), "evaluate": _not_yet}
        else:
            more = {"parameters": self.parameters, "flops": self.flops, "bytes": self.size}
            more |= {"speedup": None if self.speedup is None else parse_factor(self.speedup)}
            more |= {"latency": None if self.latency is None else parse_seconds(self.latency)}
            more |= {} if self.rounds is None else {"rounds": self.rounds}
        return Budget(**more, **cast(dict[str, Any], limits))

    def _no_rounds(self) -> None:
        if self.rounds is not None:
            raise LobsError(
                "--rounds goes with a budget that the layers share: one number for --keep, "
                "--parameters, --flops or --bytes."
            )

    def words(self) -> str:
        """Return the amount in a word for file names: keep7, 30000weights."""
        if self.keep is not None or self.sparsity is not None:
            fraction = self.fraction()
            return "pruned" if isinstance(fraction, dict) else f"keep{100 * (1 - fraction):.4g}"
        for value, word in (
            (self.parameters, "weights"),
            (self.flops, "flops"),
            (self.size, "bytes"),
        ):
            if value is not None:
                return f"{value:g}{word}" if value >= 1e6 else f"{value:.0f}{word}"
        for text, word in ((self.speedup, "speedup"), (self.latency, "latency")):
            if text is not None:
                return f"{word}{text.strip().replace(' ', '')}"
        if self.drop is not None:
            return f"drop{self.drop.strip().rstrip('%')}"
        text = self.epsilon or ""
        return "pruned" if "=" in text else f"epsilon{text}"


def _not_yet(model: object) -> float:
    """Stand for the score until the network is open."""
    raise AssertionError("the score was not set")


def scored(target: Target, subject: Subject) -> Target:
    """Give `--drop` the subject's score; other targets need none."""
    from lobs.targets import Budget

    if not isinstance(target, Budget) or target.drop is None:
        return target
    if subject.evaluate is None:
        return replace(target, evaluate=None)
    if subject.in_zoo and target.drop > 1:
        raise TargetError(
            f"--drop {target.drop:g} is {target.drop:.0%} of accuracy; did you mean "
            f"{target.drop:g}%?"
        )
    return replace(target, evaluate=subject.score)
