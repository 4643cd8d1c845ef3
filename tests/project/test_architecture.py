"""Imports point one way, the math bank never sees torch.nn, and only linalg.py calls torch.linalg."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lobs

ROOT = Path(lobs.__file__).parent
FLOORS = [
    {"errors", "__version__"},
    {"distributed", "observe", "memory"},
    {"progress"},
    {"linalg", "targets", "solution", "holding", "files", "batches"},
    {"metric", "running"},
    {"problem", "layers", "compact", "callbacks", "adapters"},
    {"scores", "masks", "statistics", "ledger", "checkpoint", "kernels"},
    {"solvers", "run_store", "resume"},
    {"calibrate", "wide"},
    {"gather", "preconditioning"},
    {"gauss_newton"},
    {"splitting"},
    {
        "chain",
        "allocate",
        "influence",
        "streams",
        "batchnorm",
        "compensation",
        "shrinking",
        "curvature",
        "retraining",
    },
    {"bounds", "preview", "surgery", "forecasting"},
    {"result"},
    {"finished", "bridge", "demands"},
    {"job"},
    {"outcome"},
    {"trials", "arguments"},
    {"pipeline"},
    {"sweep", "verify", "report", "runtime", "export", "stages"},
    {"data"},
    {"zoo"},
    {"cli"},
    {"__main__"},
]
MATH_BANK = {
    "linalg",
    "targets",
    "solution",
    "metric",
    "problem",
    "scores",
    "masks",
    "ledger",
    "kernels",
    "solvers",
    "allocate",
    "preview",
}
FLOOR_OF = {room: index for index, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every absolute dotted name that a file imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = room_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "lobs" and len(parts) > 1 and parts[1] != here:
            assert FLOOR_OF[parts[1]] < FLOOR_OF[here], (
                f"{here} (floor {FLOOR_OF[here]}) imports {name}"
            )


@pytest.mark.parametrize(
    "path", [p for p in FILES if room_of(p) in MATH_BANK], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_math_bank_never_imports_torch_nn(path):
    assert not [name for name in imports(path) if name.startswith("torch.nn")]


@pytest.mark.parametrize(
    "path", [p for p in FILES if room_of(p) != "linalg"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_only_linalg_calls_torch_linalg(path):
    assert "torch.linalg" not in path.read_text()


def test_every_room_has_a_floor():
    assert {room_of(path) for path in FILES} <= set(FLOOR_OF)


def test_nothing_unpickles():
    for path in FILES:
        assert not any(name.split(".")[0] in ("pickle", "dill", "joblib") for name in imports(path))
        assert "torch.load(" not in path.read_text()
