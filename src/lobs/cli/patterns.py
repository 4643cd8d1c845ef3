"""Options for patterns, and the target they describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.options import PATTERN
from lobs.cli.values import named_once
from lobs.errors import LobsError, TargetError

if TYPE_CHECKING:
    from lobs.cli.budgets import Amount
    from lobs.targets import Target

PatternOption = Annotated[
    str | None,
    typer.Option(
        help="Keep n of every m weights: 2:4, or 'fc1=2:4,fc*=1:4'.",
        metavar="N:M",
        rich_help_panel=PATTERN,
    ),
]
AlongOption = Annotated[
    str | None,
    typer.Option(
        help="How --pattern counts in a convolution: columns (default) or channels.",
        metavar="KIND",
        rich_help_panel=PATTERN,
    ),
]
BlockOption = Annotated[
    str | None,
    typer.Option(
        help="With --keep: remove whole blocks, such as 1x4 or 4x4.",
        metavar="SHAPE",
        rich_help_panel=PATTERN,
    ),
]
StructuredOption = Annotated[
    str | None,
    typer.Option(
        help="With --keep: remove whole units, inputs or experts.",
        metavar="KIND",
        rich_help_panel=PATTERN,
    ),
]


@dataclass(frozen=True)
class PatternChoice:
    """A pattern, as typed."""

    pattern: str | None = None
    along: str | None = None
    block: str | None = None
    structured: str | None = None

    @property
    def takes_experts(self) -> bool:
        """Whether whole experts leave the network."""
        return self.structured == "experts"

    def target(self, amount: Amount) -> Target | None:
        """Return the target; None where no pattern is asked for."""
        from lobs.targets import Block, Structured

        if self.along is not None and self.pattern is None:
            raise TargetError("--along goes with --pattern.")
        if self.pattern is self.block is self.structured is None:
            return None
        self._check(amount)
        if self.pattern is not None:
            return _n_by_m(self.pattern, self.along)
        if amount.keep is None and amount.sparsity is None:
            raise TargetError(
                f"--{'structured' if self.block is None else 'block'} goes with --keep or "
                "--sparsity."
            )
        if self.block is not None:
            return Block(amount.fraction(), _sides(self.block))
        return Structured(amount.fraction(), self.structured)  # type: ignore[arg-type]  # checked there

    def _check(self, amount: Amount) -> None:
        if sum(given is not None for given in (self.pattern, self.block, self.structured)) > 1:
            raise TargetError("give one of --pattern, --block and --structured.")
        if amount.scope == "network":
            raise TargetError(
                "--scope network does not go with patterns; they are each layer's own."
            )
        if amount.at_least is not None or amount.at_most is not None:
            raise LobsError(
                "--at-least and --at-most go with a budget for the whole network, not with a "
                "pattern."
            )
        if amount.rounds is not None:
            raise LobsError(
                "--rounds goes with a budget that the layers share, not with a pattern."
            )

    def words(self, amount: Amount) -> str:
        """Return pattern and amount for file names: 2of4, keep50-units."""
        if self.pattern is not None:
            return "pruned" if "=" in self.pattern else self.pattern.replace(":", "of")
        kind = f"block{self.block}" if self.block is not None else self.structured
        return amount.words() if kind is None else f"{amount.words()}-{kind}"


def _n_by_m(text: str, along: str | None) -> Target:
    from lobs.targets import NByM

    pairs = [part.rpartition("=") for part in text.split(",") if part.strip()]
    named_once([name.strip() for name, _, _ in pairs], "--pattern")
    try:
        parsed = {name.strip(): tuple(int(x) for x in value.split(":")) for name, _, value in pairs}
        (m,) = {m for _, m in parsed.values()}
    except ValueError:
        raise TargetError(
            f"--pattern {text!r} is not n:m, or name=n:m pairs with one m. Examples: 2:4, "
            "fc1=2:4,fc*=1:4."
        ) from None
    kept = {name: n for name, (n, _) in parsed.items()}
    chosen: Any = {} if along is None else {"along": along}  # NByM checks it
    return NByM(kept[""] if set(kept) == {""} else kept, m, **chosen)


def _sides(text: str) -> tuple[int, int]:
    try:
        high, wide = (int(side) for side in text.lower().replace("×", "x").split("x"))
    except ValueError:
        raise TargetError(f"--block {text!r} is not ROWSxCOLUMNS. Examples: 1x4, 4x4.") from None
    return high, wide
