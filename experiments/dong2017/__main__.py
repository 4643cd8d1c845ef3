"""Run the paper's tables and figures again: `python -m experiments.dong2017 --help`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lobs.errors import LobsError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def reproduce(
    what: Annotated[
        list[str] | None, typer.Argument(help="table1, table2, first-layer, …; all by default.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Only rows whose name contains one of these, comma-separated."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version of everything, in under ten minutes.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Repeat rows that already have a result.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results and pictures; this package's own by default."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of data sets and weights; LOBS_DATA by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    list_only: Annotated[bool, typer.Option("--list", help="List the rows and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output.")
    ] = False,
) -> None:
    """Reproduce the tables and figures of Dong, Chen and Pan (2017).

    Finished rows are kept as JSON files and are not repeated. Examples:
    `python -m experiments.dong2017 --quick`;
    `python -m experiments.dong2017 table1 --rows lenet300`.
    """
    from experiments import dong2017 as paper  # torch, which --help does not need

    if data is not None:
        os.environ["LOBS_DATA"] = str(data)
    if list_only:
        listing = paper.listing()
        lines = [f"{name}: {', '.join(found)}" for name, found in listing.items()]
        typer.echo(json.dumps(listing, indent=2) if as_json else "\n".join(lines))
        return
    chosen = [part.strip() for part in rows.split(",")] if rows else None
    done = paper.run(
        what or None,
        chosen,
        quick=quick,
        again=again,
        out=out,
        seed=seed,
        say=(lambda _: None) if as_json else typer.echo,
    )
    where = paper.readme_path(out, quick)
    typer.echo(
        json.dumps(done, indent=2, ensure_ascii=False)
        if as_json
        else f"{len(done)} results → {where}"
    )


def main() -> None:
    """Run the command. An error of ours is one line and exit code 1."""
    try:
        app()
    except LobsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
