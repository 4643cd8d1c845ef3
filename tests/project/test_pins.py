"""What we depend on is bounded, explained, and pinned where CI must not drift."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENT = re.compile(
    r'^\s*"(?P<name>[\w\[\],-]+)(?P<bound>[<>=~!][^"]*)?",?\s*(?P<comment>#.*)?$'
)


def requirements():
    text = (ROOT / "pyproject.toml").read_text()
    text = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    return [m for line in text.splitlines() if (m := REQUIREMENT.match(line))]


def test_every_dependency_has_a_lower_bound_and_a_reason():
    found = requirements()
    assert len(found) > 15
    for requirement in found:
        if not requirement["name"].startswith("lobs["):
            assert requirement["bound"] and requirement["bound"].startswith(">="), requirement[0]
            assert requirement["comment"], requirement[0]


def pins():
    lines = [
        line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    return [line for line in lines if line and not line.startswith("-")]


def test_constraints_are_exact():
    assert pins() and all(re.fullmatch(r"[\w.-]+==[\w.+*-]+", line) for line in pins())


@pytest.mark.parametrize("line", pins())
def test_what_is_installed_is_what_is_pinned(line):
    name, _, pinned = line.partition("==")
    assert version(name).split("+")[0] == pinned.split("+")[0]
