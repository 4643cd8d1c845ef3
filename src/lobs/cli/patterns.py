"""Options for patterns, and the target they spell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.common import complement, named_once, parse_fractions
from lobs.errors import TargetError

if TYPE_CHECKING:
    from lobs.targets import Target

PatternOption = Annotated[
    str | None,
    typer.Option(
        help="Keep n of every m weights: 2:4, 4:8, or fc1=2:4,fc*=1:4 with one m for all."
    ),
]
AlongOption = Annotated[
    str | None,
    typer.Option(
        help="With --pattern, what m consecutive ones are: columns as they lie (default), or channels of a convolution."
    ),
]
BlockOption = Annotated[
    str | None,
    typer.Option(help="With --keep or --sparsity: remove whole blocks, such as 1x4 or 4x4."),
]
StructuredOption = Annotated[
    str | None,
    typer.Option(
        help="With --keep or --sparsity: remove whole units, or whole inputs (input channels)."
    ),
]


def pattern_target(
    pattern: str | None,
    along: str | None,
    block: str | None,
    structured: str | None,
    keep: str | None,
    sparsity: str | None,
    scope: str | None,
) -> Target | None:
    """The target that the options ask for; None where they ask for no pattern."""
    from lobs.targets import Block, Structured

    if along is not None and pattern is None:
        raise TargetError("--along goes with --pattern.")
    if pattern is block is structured is None:
        return None
    if (pattern is not None) + (block is not None) + (structured is not None) > 1:
        raise TargetError("give one of --pattern, --block and --structured.")
    if scope == "network":
        raise TargetError("--scope network does not go with patterns; they are each layer's own.")
    if pattern is not None:
        return _n_by_m(pattern, along)
    if keep is None and sparsity is None:
        raise TargetError(
            f"--{'structured' if block is None else 'block'} goes with --keep or --sparsity."
        )
    fraction = (
        complement(parse_fractions(keep, "--keep"))
        if keep
        else parse_fractions(sparsity or "", "--sparsity")
    )
    if block is not None:
        return Block(fraction, _sides(block))
    return Structured(fraction, structured)  # type: ignore[arg-type]  # checked there, with the choices in its message


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
    chosen: Any = (
        {} if along is None else {"along": along}
    )  # checked there, with the choices in its message
    return NByM(kept[""] if set(kept) == {""} else kept, m, **chosen)


def _sides(text: str) -> tuple[int, int]:
    try:
        high, wide = (int(side) for side in text.lower().replace("×", "x").split("x"))
    except ValueError:
        raise TargetError(f"--block {text!r} is not ROWSxCOLUMNS. Examples: 1x4, 4x4.") from None
    return high, wide
