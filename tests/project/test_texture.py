"""Sizes that keep the source readable. Ruff checks complexity and line length."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lobs

SOURCE = Path(lobs.__file__).parent
PROJECT = Path(__file__).parents[2]
MOST_LINES = 60
MOST_PARAMETERS = 10
MOST_MODULES = 4
MOST_PACKAGES = 12
MOST_RANKS = 9


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function of the package outside `cli/`, with where it stands."""
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if place.parts[0] == "cli":
            continue  # a command's parameters are its options, and its body prints tables
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{place.as_posix()}:{node.lineno} {node.name}", node


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the named parameters, without `self` and `cls`."""
    known = function.args
    names = [each.arg for each in known.posonlyargs + known.args + known.kwonlyargs]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_no_function_is_longer_than_a_page():
    long = {place: lines(node) for place, node in functions() if lines(node) > MOST_LINES}
    assert not long


def test_no_function_takes_more_than_ten_parameters():
    wide = {place: n for place, node in functions() if (n := parameters(node)) > MOST_PARAMETERS}
    assert not wide


def test_the_root_is_a_short_table_of_contents():
    modules = [path.name for path in SOURCE.glob("*.py")]
    packages = [path.parent.name for path in SOURCE.glob("*/__init__.py")]
    assert len(modules) <= MOST_MODULES, modules
    assert len(packages) <= MOST_PACKAGES, packages


def test_there_are_at_most_nine_import_ranks():
    text = (PROJECT / "pyproject.toml").read_text()
    ranks = re.search(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert ranks is not None
    assert 1 < len(ranks[1].splitlines()) <= MOST_RANKS
