"""Rules of the source tree. The import ranks stand in pyproject.toml."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import lobs

SOURCE = Path(lobs.__file__).parent
PROJECT = Path(__file__).parents[2]
FILES = sorted(SOURCE.rglob("*.py"))
PLACES_A_HOOK = ("register_", "_hook")
UNPICKLERS = {"pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def every_file(*without: str, under: str = "") -> pytest.MarkDecorator:
    """Parametrise over the source files under a folder, without those that are named."""
    chosen = [p for p in FILES if name_of(p).startswith(under) and name_of(p) not in without]
    return pytest.mark.parametrize("path", chosen, ids=name_of)


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Yield every absolute dotted name that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def dotted(path: Path) -> set[str]:
    """Return every dotted name that a file mentions in code: `torch.nn.functional.relu`."""
    tree = ast.parse(path.read_text())
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def packages() -> list[ModuleType]:
    found = pkgutil.walk_packages(lobs.__path__, "lobs.")
    return [lobs, *(importlib.import_module(each.name) for each in found if each.ispkg)]


def test_imports_point_down_the_ranks():
    # In a process of its own: import-linter reconfigures the loggers of the process it runs in.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


@every_file()
def test_only_subpackages_and_the_version_are_imported_from_the_root(path):
    for name, _ in imports(path):
        assert name != "lobs", f"{name_of(path)} imports the root: import the module that is meant"
        if name.startswith("lobs.") and name.count(".") == 1 and name != "lobs.__version__":
            home = SOURCE / name.removeprefix("lobs.")
            assert home.is_dir() or home.with_suffix(".py").is_file(), f"{name_of(path)}: {name}"


@every_file(under="solvers/")
def test_solvers_never_see_torch_nn(path):
    named = {name for name, _ in imports(path)} | dotted(path)
    assert not [name for name in named if name == "torch.nn" or name.startswith("torch.nn.")]


@every_file("solvers/linalg.py")
def test_only_linalg_calls_torch_linalg(path):
    assert "torch.linalg" not in path.read_text()


@every_file("layers/hooks.py")
def test_only_hooks_places_hooks(path):
    placed = {name.rpartition(".")[2] for name in dotted(path)}
    start, end = PLACES_A_HOOK
    assert not [name for name in placed if name.startswith(start) and name.endswith(end)]


@every_file()
def test_nothing_unpickles(path):
    assert not [name for name, _ in imports(path) if name.split(".")[0] in UNPICKLERS]
    assert "torch.load" not in dotted(path)


def test_the_result_imports_higher_ranks_only_when_a_method_needs_them():
    result = SOURCE / "pruning" / "result.py"
    top = [node for node in ast.parse(result.read_text()).body if isinstance(node, ast.ImportFrom)]
    assert top
    assert not [n for n in top if str(n.module).startswith(("lobs.report", "lobs.deploy"))]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_no_public_name_hides_a_submodule(package):
    """`lobs.training.hold` is a module for everybody, whatever was imported before."""
    for module in pkgutil.iter_modules(package.__path__):
        if module.name in getattr(package, "__all__", ()):
            assert isinstance(getattr(package, module.name), ModuleType), (
                f"{package.__name__}.{module.name} is a submodule and a public name"
            )
