"""What the subcommands share: options, the console, JSON, and warnings turned into notes."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from lobs.errors import FileError, LobsError, NumericalWarning, TargetError

SubjectArgument = Annotated[
    str,
    typer.Argument(
        help="What to work on: a zoo name (lenet300, lenet5, cifarnet, cifarnet-wide, alexnet, vgg16, resnet50, resnet50-v1), "
        "a checkpoint written by lobs, or package.module:function returning (model, batches) or "
        "(model, batches, evaluate).",
        metavar="NETWORK",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, nothing else.")
]
SamplesOption = Annotated[
    int | None, typer.Option(min=1, help="Calibration samples to use; all if not given.")
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the package.module:function that a checkpoint file names as its network.",
    ),
]
SolverOption = Annotated[
    str,
    typer.Option(
        help="auto, exact, exact+refine, admm, columns, lobs (as published), lobs+refine, magnitude, magnitude+refine, obd, "
        "obd-fisher, apozw or random."
    ),
]
LayersOption = Annotated[
    list[str] | None, typer.Option(help="Layer name or glob to prune; repeat for more.")
]
SkipOption = Annotated[
    list[str] | None, typer.Option(help="Layer name or glob to leave alone; repeat for more.")
]


output: TextIO | None = None  # where JSON goes when standard output is kept for it


def print_json(document: Any) -> None:
    """Write JSON to standard output; numbers that JSON has no word for become null."""
    stream = output or sys.stdout
    stream.write(json.dumps(_finite(document), indent=2, ensure_ascii=False) + "\n")


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = ""
) -> None:
    """Draw a table: the first column left, the others right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=note or None, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # A pipe has no width of its own: leave the lines whole for whoever reads them.
    console.print(table) if console.is_terminal else Console(width=160).print(table)


def say(text: str) -> None:
    """A line for people, on standard output."""
    sys.stdout.write(text + "\n")


@contextmanager
def notes() -> Iterator[None]:
    """Show numerical warnings as one-line notes on standard error, each once, whatever its λ."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = str(message)
        kind = re.sub(
            r"= \d[\d.e+-]*", "=", text
        )  # the damping of a later pass over the same layer
        if kind not in seen:
            seen.add(kind)
            sys.stderr.write(
                f"{'note' if issubclass(category, NumericalWarning) else 'warning'}: {text}\n"
            )

    with warnings.catch_warnings():
        warnings.simplefilter("always", NumericalWarning)
        warnings.showwarning = show
        yield


def parse_fractions(text: str, option: str) -> float | dict[str, float]:
    """Read '0.07', '7%' or 'fc1=0.067,fc2=20%'."""
    try:
        if "=" not in text:
            return _fraction(text, option)
        pairs = [part.split("=", 1) for part in text.split(",") if part.strip()]
        names = [name.strip() for name, _ in pairs]
        named_once(names, option)
        return {
            name: _fraction(value, option) for name, (_, value) in zip(names, pairs, strict=True)
        }
    except TargetError:
        raise
    except ValueError:
        raise TargetError(
            f"{option} {text!r} is not a number, a percentage, or name=number pairs. Examples: "
            "0.07, 7%, fc1=0.067,fc*=0.2."
        ) from None


def _fraction(text: str, option: str) -> float:
    text = text.strip()
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if option != "--epsilon" and not 0 <= value <= 1:
        hint = f"; did you mean {text}%?" if 1 < value <= 100 and not text.endswith("%") else ""
        raise TargetError(f"{option} {text} is {100 * value:g} %, not between 0 and 100 %{hint}")
    return value


def named_once(names: Sequence[str], option: str) -> None:
    """Refuse an option that names a layer twice."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise TargetError(f"{option} names '{twice[0]}' twice: give it one number.")


def complement(kept: float | dict[str, float]) -> float | dict[str, float]:
    """Kept fractions as removed fractions."""
    if isinstance(kept, dict):
        return {name: 1 - value for name, value in kept.items()}
    return 1 - kept


def makeable(path: Path) -> Path:
    """Refuse an output folder that could not be made or written to, before any work is done and without making it."""
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise FileError(
            f"cannot make the folder '{path}': '{nearest}' is a file; choose another name."
        )
    if not os.access(nearest, os.W_OK):
        raise FileError(
            f"cannot make the folder '{path}': '{nearest}' is read-only; choose another."
        )
    return path


def writable(path: Path | None) -> Path | None:
    """Refuse an output path whose folder does not exist before any work is done."""
    if path is not None and not path.parent.is_dir():
        raise FileError(
            f"cannot write '{path}': there is no folder '{path.parent}'; make it first."
        )
    if path is not None and path.is_dir():
        raise FileError(f"cannot write '{path}': it is a folder; name a file in it.")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise FileError(
            f"cannot write '{path}': the folder '{path.parent}' is read-only; choose another."
        )
    return path


def unclaimed(out: Path | None, default: Path) -> Path:
    """Where to write: over anything that `--out` names; without it over nothing, for nobody has named what would be lost."""
    if out is None and default.exists():
        raise FileError(
            f"'{default}' is there already: write over it with --out {default}, or give --out "
            "another name."
        )
    return out or default


def distinct(path: Path | None, option: str, *others: Path | None) -> None:
    """Refuse to write over what is read or written by the same command."""
    if path is not None and any(
        other is not None and path.resolve() == other.resolve() for other in others
    ):
        raise FileError(
            f"{option} '{path}' would overwrite what this command reads or writes there; give it "
            "another name."
        )


def file_of(network: str) -> Path | None:
    """The file that a network is read from, if it is one."""
    return Path(network) if Path(network).is_file() else None


def command_line() -> str:
    """The command as typed, for reports."""
    import shlex

    return "lobs " + shlex.join(sys.argv[1:])


def optional(value: float | None, form: str = ".4g") -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def require_one(**options: Any) -> None:
    """Exactly one of several options must be given."""
    spelled = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    given = [name for name, value in spelled.items() if value is not None]
    if len(given) != 1:
        names = ", ".join(spelled)
        raise LobsError(
            f"give exactly one of {names}" + (f", not {' and '.join(given)}." if given else ".")
        )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
