"""`lobs report`: write a page about one saved result, or about several side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.files import distinct, output_file
from lobs.cli.options import (
    DATA,
    OUTPUT,
    CodeOption,
    ForceOption,
    JsonOption,
    TrustOption,
    complete_file,
)
from lobs.cli.output import command_line, print_json, say
from lobs.errors import FileError, LobsError

if TYPE_CHECKING:
    from lobs.report import Run


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Networks saved by lobs prune or PruningResult.save; the first leads the page.",
            metavar="FILE...",
            autocompletion=complete_file,
        ),
    ],
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures/--no-pictures",
            help="Do not open the dense network and its data for pictures.",
            rich_help_panel=DATA,
        ),
    ] = True,
    code: CodeOption = None,
    trust: TrustOption = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write; report.html by default.",
            metavar="FILE",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: ForceOption = False,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="A name for each file, in order; file names by default.",
            metavar="TEXT",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    title: Annotated[
        str | None,
        typer.Option(help="Heading of the page.", metavar="TEXT", rich_help_panel=OUTPUT),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about saved results.

    Examples:
      lobs report lenet300-keep7.safetensors
      lobs report small.safetensors smaller.safetensors --out compare.html
    """
    from lobs.cli.subject import require_file

    for path in files:
        require_file(path)
    target = output_file(out, "report.html", force=force, ending=".html")
    distinct(target, "--out", *files)
    if label and len(label) != len(files):
        raise LobsError(
            f"--label was given {len(label)} times for {len(files)} files: give one for each, or "
            "none."
        )
    from lobs.report import read_run, write_report

    names = label or _names(files)
    runs = [read_run(path, name) for path, name in zip(files, names, strict=True)]
    if pictures:
        runs = [_pictured(run, path, trust, code) for run, path in zip(runs, files, strict=True)]
    heading = title or (
        " against ".join(names) if len(names) <= 3 else f"{len(names)} results side by side"
    )
    written = write_report(target, runs, title=heading, command=command_line())
    if json:
        rows = [
            {"label": r.label, "kept_fraction": r.pruning.kept_fraction, "note": r.note}
            for r in runs
        ]
        print_json({"report": str(written), "runs": rows})
        return
    for run in runs:
        if run.note:
            say(f"{run.label}: {run.note}")
    say(f"report: {written}")


def _names(files: list[Path]) -> list[str]:
    """Return file names without their ending, or whole paths where two names are alike."""
    short = [path.name.removesuffix(".safetensors") for path in files]
    return short if len(set(short)) == len(short) else [str(path) for path in files]


def _pictured(run: Run, path: Path, trust: bool, code: str | None) -> Run:
    """Return the run with its dense network and an input, or with a note on why they lack."""
    from lobs.cli.subject import open_subject
    from lobs.storage.checkpoint import load
    from lobs.storage.run_store import weights_hash

    try:
        dense = open_subject(code or _origin(path, trust), 200, trust=trust)
        pruned = open_subject(str(path), 1, trust=trust, network=code)
        example: Any = next(iter(dense.batches), None)
        expected = load(path).record.get("origin_weights")
        if expected is not None and expected != weights_hash(dense.model):
            raise FileError(
                f"{dense.origin} is not the network that was pruned: a function must return the "
                "same network each time"
            )
    except LobsError as error:
        return replace(run, note=f"some pictures are missing, because {str(error).rstrip('.')}.")
    return replace(run, dense=dense.model, pruned=pruned.model, example=example)


def _origin(path: Path, trust: bool) -> str:
    from lobs.cli.subject import require_trust
    from lobs.errors import FileError
    from lobs.storage.checkpoint import load

    origin = load(path).record.get("origin")
    if not isinstance(origin, str):
        raise FileError(f"'{path}' does not say where its dense network comes from.")
    require_trust(path, origin, trust)
    return origin
