"""The `lobs` command. One file per subcommand; each imports torch only when it runs, so that `--help` answers at once."""

from __future__ import annotations

import sys

import typer

from lobs.cli import demo, eval_, inspect_, prune, sweep, train, verify
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
app.command()(sweep.sweep)
app.command()(verify.verify)


def main() -> None:
    """Run the command; an error that we raise on purpose is one line and exit code 1."""
    try:
        app()
    except LobsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
