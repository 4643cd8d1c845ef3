"""Lay out `--help` so that it reads well at 80 columns.

Typer gives every option a column for its type and one for its negation. That leaves the sentences
about twenty characters. Here an option and its value share one column, and the rest is text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

_GAP = 2  # columns between an option and its sentence
_WIDEST = 26  # columns that an option may take before its sentence moves to the next line
_LONGEST = 100  # columns of a page, however wide the terminal is


class HelpfulCommand(TyperCommand):
    """A command whose `--help` has one panel per subject."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page."""
        del formatter  # typer prints its help itself as well
        print_help(self, ctx)


class HelpfulGroup(TyperGroup):
    """The program itself: its commands by subject."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page."""
        del formatter
        print_help(self, ctx)


def print_help(command: Any, ctx: Any) -> None:
    """Print usage, description, examples, then a panel for every subject."""
    console = Console(highlight=False)
    console.width = min(console.width, _LONGEST)
    words = " ".join(p.metavar or p.name.upper() for p in command.params if _is_argument(p))
    rest = "COMMAND" if isinstance(command, TyperGroup) else words
    console.print(Text(f"Usage: {ctx.command_path} {rest} [OPTIONS]".replace("  ", " "), "bold"))
    console.print()
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        console.print(_paragraph(paragraph))
        console.print()
    for title, rows in _panels(command, ctx).items():
        console.print(Panel(_table(rows), title=title, title_align="left", border_style="dim"))
    if command.epilog:
        console.print(_paragraph(inspect.cleandoc(command.epilog)))


def _panels(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Collect rows (what to type, what it does) by panel, in the order of the signature."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        panel = getattr(param, "rich_help_panel", None)
        title = panel or ("Argument" if _is_argument(param) else "Options")
        panels.setdefault(title, []).append((_typed(param), _sentence(param)))
    for name in command.list_commands(ctx) if isinstance(command, TyperGroup) else ():
        child = command.get_command(ctx, name)
        if child is not None and not child.hidden:
            title = getattr(child, "rich_help_panel", None)
            about = inspect.cleandoc(child.help or "").split("\n\n")[0]
            shown = title if isinstance(title, str) else "Commands"
            panels.setdefault(shown, []).append((name, " ".join(about.split())))
    if [name for name, _ in panels.get("Options", [])] == ["--help"]:
        del panels["Options"]  # whoever reads this page knows it
    last = panels.pop("Options", None)
    return panels if last is None else {**panels, "Options": last}


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _typed(param: Any) -> str:
    """Return what to type for a parameter: `--keep FRACTION`, or `--no-batch-norm` for a switch."""
    if _is_argument(param):
        return str(param.metavar or param.name.upper())
    if param.is_flag:
        # A switch that is on by default is only ever typed to turn it off.
        return str((param.secondary_opts if param.default is True else param.opts)[0])
    return f"{param.opts[0]} {param.metavar or 'VALUE'}"


def _sentence(param: Any) -> str:
    """Return a parameter's help, with its default where that is a plain value."""
    text = " ".join((param.help or "").split())
    default = param.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return f"{text} Default: {default}." if plain and not _is_argument(param) else text


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    """Lay rows out in two columns; a name too long for its column gets a line of its own."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows if len(name) <= _WIDEST), default=0)
    table = Table(box=None, show_header=False, expand=True, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(width=width, no_wrap=True, style="cyan", overflow="ignore")
    table.add_column(ratio=1, overflow="fold")
    for name, text in rows:
        if len(name) > width:
            table.add_row(name)
        table.add_row("" if len(name) > width else name, text)
    return table


def _paragraph(text: str) -> Text:
    """Return a paragraph; lines that are indented (examples) keep their breaks."""
    lines = text.split("\n")
    if any(line.startswith("  ") for line in lines):
        return Text(text.replace("`", ""), overflow="fold")
    return Text(" ".join(line.strip() for line in lines).replace("`", ""))
