"""What the docs show runs, what they name exists, and the house is described as it is."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

import lobs
from tests.project.test_architecture import FLOORS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in [*PAGES, ROOT / "README.md"]}
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.S | re.M)
RUNNING = {
    name: [code for kind, code in FENCE.findall(text) if kind == "python"]
    for name, text in TEXTS.items()
}
COMMANDS = [
    (name, line)
    for name, text in TEXTS.items()
    for kind, block in FENCE.findall(text)
    if kind != "python"
    for line in block.splitlines()
    if line.startswith("lobs ")
]


@pytest.mark.parametrize(
    "name", [name for name, blocks in RUNNING.items() if blocks and name != "README.md"]
)
def test_the_code_of_a_page_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope = {"__name__": "page"}
    for index, block in enumerate(RUNNING[name]):
        exec(compile(block, f"{name}, block {index + 1}", "exec"), scope)


@pytest.mark.parametrize(
    ("page", "line"), COMMANDS, ids=[f"{page}:{line[:40]}" for page, line in COMMANDS]
)
def test_a_command_parses_with_all_its_options(page, line):
    from lobs.cli import app

    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app)
    name, command, rest = group.resolve_command(
        group.make_context("lobs", words, resilient_parsing=False), words
    )
    command.make_context(name, rest)


def test_there_are_commands_and_blocks():
    assert len(COMMANDS) >= 20
    assert {"index.md", "own-model.md", "faq.md", "reading-the-report.md"} <= {
        name for name, code in RUNNING.items() if code
    }


def test_all_of_the_reference_is_an_attribute_as_it_says():
    names = [line.split(".")[-1] for line in TEXTS["api.md"].splitlines() if line.startswith(":::")]
    assert (
        len(names) > 40
        and [name for name in names if not hasattr(lobs, name) and not hasattr(lobs.report, name)]
        == []
    )


def test_every_benchmark_named_exists():
    named = {
        module
        for text in TEXTS.values()
        for module in re.findall(r"python -m (benchmarks\.\w+)", text)
    }
    assert named and all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in named)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_benchmark_can_be_imported(name):
    assert importlib.import_module(f"benchmarks.{name}").__doc__


def test_every_test_named_exists():
    named = {test for text in TEXTS.values() for test in re.findall(r"`(test_\w+)`", text)}
    assert len(named) > 20
    assert not {test for test in named if f"def {test}(" not in TESTS}


def test_every_function_the_mathematics_points_to_exists():
    text = TEXTS["the-mathematics.md"]
    pointed = [
        name
        for part in re.findall(r"→((?:\s*(?:and\s+)?`[^`]+`[,;]?)+)", text)
        for name in re.findall(r"`([^`]+)`", part)
    ]
    functions = [name for name in pointed if not name.startswith("test_")]
    assert len(functions) > 15
    for name in functions:
        assert _exists(name), name


def _exists(name: str) -> bool:
    """A file of the package, or a dotted name in it."""
    if name.endswith(".py"):
        return (Path(lobs.__file__).parent / name).is_file()
    parts = name.split(".")
    for count in range(len(parts), -1, -1):
        try:
            found = importlib.import_module(".".join(["lobs", *parts[:count]]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_architecture_lists_every_room_and_its_floor():
    text = TEXTS["architecture.md"]
    rooms = set().union(*FLOORS) - {"__version__", "__main__"}
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    listed = {
        name
        for cell in re.findall(r"^\|([^|]*)\|", table, flags=re.M)
        for name in re.findall(r"`(\w+)[./]", cell)
    }
    assert rooms <= listed | {"__init__"}, rooms - listed
    block = re.search(r"^    errors <.*?(?=\n\n)", text, flags=re.S | re.M)[0]
    floors = [
        {name.strip() for name in floor.split(",")} for floor in block.replace("\n", " ").split("<")
    ]
    assert floors == [floor - {"__version__"} for floor in FLOORS if floor != {"__main__"}]
