"""`lobs reproduce`: run the paper's tables and figures again."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lobs.cli.common import JsonOption, notes, print_json, say
from lobs.errors import LobsError

HOME = "experiments.dong2017"


def reproduce(
    what: Annotated[
        list[str] | None, typer.Argument(help="table1, table2, first-layer, …; all if not given.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Only rows whose name contains one of these, comma-separated."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version of everything, in under ten minutes.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Run rows anew that have a result already.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results and pictures; the experiment's own by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    list_only: Annotated[
        bool, typer.Option("--list", help="Say what there is, and run nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Reproduce the tables and figures of Dong, Chen and Pan (2017), from the folder that holds `experiments/`.

    Finished rows are kept as JSON and not run twice. Examples: `lobs reproduce --quick`;
    `lobs reproduce table1 --rows lenet300`
    """
    paper = _experiments()
    if list_only:
        listing = paper.listing()
        print_json(listing) if json else say(
            "\n".join(f"{name}: {', '.join(found)}" for name, found in listing.items())
        )
        return
    chosen = [part.strip() for part in rows.split(",")] if rows else None
    with notes():
        done = paper.run(
            what or None,
            chosen,
            quick=quick,
            again=again,
            out=out,
            seed=seed,
            say=_quiet if json else say,
        )
    if json:
        print_json(done)
        return
    say(f"{len(done)} results → {paper.readme_path(out, quick)}")


def _experiments() -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(HOME)
    except ModuleNotFoundError as error:
        if not HOME.startswith(str(error.name)):
            raise
        raise LobsError(
            "the experiments are not part of the installed package: run `lobs reproduce` in a "
            "checkout of the source, "
            "in the folder that holds experiments/."
        ) from None
    finally:
        sys.path.pop(0)


def _quiet(_: str) -> None:
    """Say nothing: standard output is for JSON."""
