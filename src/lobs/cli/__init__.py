"""The `lobs` command. One file per subcommand; each imports torch only when it runs, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lobs import __version__
from lobs.cli import (
    bench,
    common,
    data,
    demo,
    eval_,
    export_,
    inspect_,
    prune,
    report_,
    reproduce,
    retrain,
    shrink,
    sweep,
    train,
    verify,
)
from lobs.errors import LobsError

app = typer.Typer(
    name="lobs",
    help="Make trained neural networks small without spoiling them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Start with `lobs demo`. Every command has `--help` with an example, and `--json` for machines.",
)
app.command()(demo.demo)
app.command()(train.train)
app.command(name="eval")(eval_.evaluate)
app.command(name="inspect")(inspect_.inspect)
app.command()(prune.prune)
app.command()(shrink.shrink)
app.command()(retrain.retrain)
app.command()(retrain.prune_in_stages)
app.command()(sweep.sweep)
app.command()(verify.verify)
app.command(name="report")(report_.report)
app.command()(export_.export)
app.command()(bench.bench)
app.command()(data.data)
app.command()(reproduce.reproduce)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(
        False, "--version", is_eager=True, help="Print the version and exit."
    ),
    data_folder: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of data sets and weights; LOBS_DATA by default."),
    ] = None,
) -> None:
    if data_folder is not None:
        os.environ["LOBS_DATA"] = str(data_folder)
    if version:
        common.say(f"lobs {__version__}")
        raise typer.Exit


# What typer raises for a command line that is wrong: click's class, of which typer exports a child
# only, and which newer typers keep inside themselves.
UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command; any error is one line and exit code 1, or 2 if it was typed wrong; LOBS_DEBUG=1 shows the traceback."""
    if "--json" in sys.argv:  # whatever the user's own code prints must not mix with the document
        common.output, sys.stdout = sys.stdout, sys.stderr
    if (
        os.environ.get("WORLD_SIZE", "1") != "1"
    ):  # what torch prints of a lost connection would bury our line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        code = app(standalone_mode=False)  # else typer would draw boxes around its errors
        if code == 130:  # typer's word for Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except UsageError as error:
        if len(sys.argv) == 1:
            error.show()  # nothing was asked for: it is the help
        else:
            _fail(_usage(error))
        sys.exit(2)
    except Exception as error:
        if os.environ.get("LOBS_DEBUG"):
            raise
        ours = isinstance(error, LobsError)
        text = (
            str(error)
            if ours
            else f"{type(error).__name__}: {' '.join(str(error).split())} (LOBS_DEBUG=1 shows where)"
        )
        _fail(text)
        sys.exit(1)


def _usage(error: Any) -> str:
    """What typer says of a command line, in a line of our kind."""
    text = " ".join(error.format_message().split())
    end = "" if text.endswith((".", "?")) else "."
    command = "lobs" if error.ctx is None else error.ctx.command_path
    return f"{text[:1].lower()}{text[1:]}{end} See {command} --help."


def _fail(text: str) -> None:
    sys.stderr.write(f"error: {text}\n")
    if common.output is not None:
        common.print_json({"error": text})
