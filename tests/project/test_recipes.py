"""The four recipes of CONTRIBUTING.md work as they stand there.

The first line of a block names its file. A block for an existing module runs inside that module. A
block for a new one becomes that module. A block for a test is collected and run.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lobs import SOLVERS
from lobs.layers.discovery import VIEWS
from lobs.solvers.kernels import BACKENDS
from tests.conftest import make_moment
from tests.laws import LAWS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r"```python\n# (\S+)\n(.*?)```", flags=re.DOTALL)
RECIPES = {
    part.partition("\n")[0].strip(): BLOCK.findall(part)
    for part in re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
}
TABLES = (SOLVERS, VIEWS, BACKENDS)


def module_name(file: str) -> str:
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def add(file: str, code: str) -> ModuleType:
    """Run a block as the recipe says: add it to its module, or make the module."""
    name = module_name(file)
    if (ROOT / file).exists():
        module = importlib.import_module(name)
    else:
        module = ModuleType(name)
        module.__file__ = str(ROOT / file)
        sys.modules[name] = module
    exec(compile(code, file, "exec"), vars(module))
    return module


@pytest.fixture
def restored() -> Iterator[None]:
    """Take out again what a recipe put in."""
    files = [file for blocks in RECIPES.values() for file, _ in blocks if (ROOT / file).exists()]
    spaces = [vars(importlib.import_module(module_name(file))) for file in files]
    everything = [*spaces, *TABLES]
    before, modules = [dict(space) for space in everything], dict(sys.modules)
    yield
    for space, saved in zip(everything, before, strict=True):
        space.clear()
        space.update(saved)
    for name in [name for name in sys.modules if name not in modules]:
        parent, _, child = name.rpartition(".")
        if name in map(module_name, (f for blocks in RECIPES.values() for f, _ in blocks)):
            del sys.modules[name]
            vars(sys.modules.get(parent, ModuleType(""))).pop(child, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_works(recipe, restored):
    laws = 0
    for file, code in RECIPES[recipe]:
        module = add(file, code)
        for name in [name for name in vars(module) if name.startswith("test_")]:
            if file.startswith("tests/"):
                torch.manual_seed(0)
                getattr(module, name)()
                laws += 1
    assert laws


def test_there_are_four_recipes_and_each_has_new_code_its_place_and_a_test():
    assert list(RECIPES) == [
        "Add a solver",
        "Add a kind of layer",
        "Add a pattern",
        "Add a kernel backend",
    ]
    for blocks in RECIPES.values():
        files = [file for file, _ in blocks]
        assert [f for f in files if f.startswith("src/") and not (ROOT / f).exists()]
        assert [f for f in files if f.startswith("src/") and (ROOT / f).exists()]
        assert files[-1].startswith("tests/") and not (ROOT / files[-1]).exists()


def test_a_solver_of_the_recipe_obeys_the_laws_of_all_solvers(restored):
    from lobs import Problem

    for file, code in RECIPES["Add a solver"]:
        if file.startswith("src/"):
            add(file, code)
    weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    for law in LAWS:
        law("magnitude-refit", Problem(weight, make_moment(6, n=600)))


def test_files_that_contributing_names_exist():
    named = set(re.findall(r"`((?:src|tests|benchmarks|docs|\.ci)/[\w/.-]+)`", TEXT))
    assert len(named) > 8
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]
