"""`lobs report`: a page about one saved result, or about several side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.common import (
    JsonOption,
    TrustOption,
    command_line,
    distinct,
    print_json,
    say,
    unclaimed,
    writable,
)
from lobs.errors import LobsError

if TYPE_CHECKING:
    from lobs.report import Run


def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Networks saved by `lobs prune --out`; the first is the main one."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the page; report.html, if there is none, by default."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="What to call each file, in order; file names if not given."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
    pictures: Annotated[
        bool,
        typer.Option(
            help="Open the dense network and its data for pictures of pixels and filters."
        ),
    ] = True,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Write one self-contained page about saved results, side by side if there are several.

    Example: `lobs report small.safetensors smaller.safetensors --out compare.html`
    """
    from lobs.cli.subject import require_file

    for path in files:
        require_file(path)
    target = unclaimed(out, Path("report.html"))
    distinct(writable(target), "--out", *files)
    if label and len(label) != len(files):
        raise LobsError(
            f"--label was given {len(label)} times for {len(files)} files: give one for each, or "
            "none."
        )
    from lobs.report import read_run, write_report

    names = label or _names(files)
    runs = [read_run(path, name) for path, name in zip(files, names, strict=True)]
    if pictures:
        runs = [_pictured(run, path, trust) for run, path in zip(runs, files, strict=True)]
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
    """File names without their ending; with their folder where two are alike."""
    short = [path.name.removesuffix(".safetensors") for path in files]
    return short if len(set(short)) == len(short) else [str(path) for path in files]


def _pictured(run: Run, path: Path, trust: bool) -> Run:
    """The run with its dense network and an input, where they can be had; otherwise with a note that says why not."""
    from lobs.cli.subject import open_subject

    try:
        origin = _origin(path, trust)
        dense = open_subject(origin, 200, trust=trust)
        pruned = open_subject(str(path), 1, trust=trust)
        example: Any = next(iter(dense.batches), None)
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
    if ":" in origin:
        require_trust(path, origin, trust)
    return origin
