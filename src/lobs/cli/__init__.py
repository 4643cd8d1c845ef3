"""The `lobs` command. One file per subcommand; each imports torch only when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lobs import __version__
from lobs.cli import (
    bench,
    compare,
    data,
    demo,
    eval_,
    export_,
    inspect_,
    output,
    prune,
    report_,
    retrain,
    shrink,
    stages,
    sweep,
    train,
    verify,
)
from lobs.cli.help_page import HelpfulCommand, HelpfulGroup
from lobs.errors import LobsError, printable

_EPILOG = """
Start with lobs demo. Every command has --help with an example, and --json for programs. Tab
completion for your shell: lobs --install-completion, once, then open a new shell.
"""

app = typer.Typer(
    name="lobs",
    cls=HelpfulGroup,
    help="Make trained neural networks small and keep their outputs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
)

_PRUNING, _CHECKING, _TRAINING, _DEPLOYING = "Pruning", "Checking", "Training", "Deploying"
_COMMANDS: tuple[tuple[str, str, Any], ...] = (
    ("demo", _PRUNING, demo.demo),
    ("prune", _PRUNING, prune.prune),
    ("sweep", _PRUNING, sweep.sweep),
    ("inspect", _CHECKING, inspect_.inspect),
    ("eval", _CHECKING, eval_.evaluate),
    ("compare", _CHECKING, compare.compare),
    ("verify", _CHECKING, verify.verify),
    ("report", _CHECKING, report_.report),
    ("retrain", _TRAINING, retrain.retrain),
    ("stages", _TRAINING, stages.stages),
    ("train", _TRAINING, train.train),
    ("data", _TRAINING, data.data),
    ("shrink", _DEPLOYING, shrink.shrink),
    ("export", _DEPLOYING, export_.export),
    ("bench", _DEPLOYING, bench.bench),
)
for _name, _panel, _function in _COMMANDS:
    app.command(name=_name, cls=HelpfulCommand, rich_help_panel=_panel)(
        output.with_notes(_function)
    )


@app.callback(invoke_without_command=True)
def _program(
    version: bool = typer.Option(
        False, "--version", is_eager=True, help="Print the version and exit."
    ),
    data_folder: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Folder of data sets and weights; else LOBS_DATA.", metavar="FOLDER"
        ),
    ] = None,
) -> None:
    if data_folder is not None:
        os.environ["LOBS_DATA"] = str(data_folder)
    if version:
        output.say(f"lobs {__version__}")
        raise typer.Exit


# The base class of typer's usage errors. Typer exports only its children.
UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command. An error is one line; exit code 1, or 2 for a mistyped command.

    LOBS_DEBUG=1 shows the traceback.
    """
    if "--json" in sys.argv:  # what the user's code prints must not mix with the document
        output.output, sys.stdout = sys.stdout, sys.stderr
    if os.environ.get("WORLD_SIZE", "1") != "1":  # torch's own lines would bury ours
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        code = app(standalone_mode=False)  # else typer would draw boxes around its errors
        if code == 130:  # typer returns this for Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except UsageError as error:
        if len(sys.argv) == 1:
            error.show()  # no words at all: this prints the help
        else:
            _fail(_usage(error))
        sys.exit(2)
    except Exception as error:
        if os.environ.get("LOBS_DEBUG"):
            raise
        ours = isinstance(error, LobsError)
        plain = " ".join(str(error).split())
        text = str(error) if ours else f"{type(error).__name__}: {plain} (LOBS_DEBUG=1 shows where)"
        _fail(text)
        sys.exit(1)


def _usage(error: Any) -> str:
    """Return typer's complaint about a command line as one line."""
    text = " ".join(error.format_message().split())
    end = "" if text.endswith((".", "?")) else "."
    command = "lobs" if error.ctx is None else error.ctx.command_path
    return f"{text[:1].lower()}{text[1:]}{end} See {command} --help."


def _fail(text: str) -> None:
    sys.stderr.write(f"error: {printable(text)}\n")
    if output.output is not None:
        output.print_json({"error": text})
