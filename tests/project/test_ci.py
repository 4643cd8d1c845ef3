"""What CI runs, what the Makefile offers and what the documents say are the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCAL = (ROOT / ".ci" / "run").read_text()
HOSTED = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
STEPS = re.findall(r"^make ([\w-]+)", LOCAL, flags=re.M)


def test_the_local_steps_are_those_that_must_hold():
    assert STEPS == [
        "lint",
        "types",
        "architecture",
        "voice",
        "docs",
        "audit",
        "coverage",
        "test",
    ]


@pytest.mark.parametrize("step", STEPS)
def test_every_local_step_is_a_hosted_step_and_a_target(step):
    assert re.search(rf"^\s+- run: make {step}$", HOSTED, flags=re.M)
    assert re.search(rf"^{step}:", MAKEFILE, flags=re.M)


def test_every_supported_python_is_tested():
    supported = re.findall(r"Python :: (3\.\d+)", PROJECT)
    tested = re.search(r"python: \[(.*)\]", HOSTED)
    assert tested is not None
    assert re.findall(r"3\.\d+", tested[1]) == supported == ["3.10", "3.11", "3.12", "3.13"]


def test_the_oldest_torch_that_is_allowed_is_tested():
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    assert f'torch: "torch=={oldest}.*"' in HOSTED and 'torch: "--upgrade torch"' in HOSTED


def test_other_systems_and_a_gpu_are_tested():
    assert "macos-latest" in HOSTED and "windows-latest" in HOSTED and "vars.GPU_RUNNER" in HOSTED


def test_paths_that_ci_names_exist():
    named = set(re.findall(r"\b(?:tests|benchmarks)/[\w/.]+", HOSTED + MAKEFILE + LOCAL))
    assert "tests/golden" in named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_modules_that_the_makefile_runs_exist():
    named = re.findall(r"-m (benchmarks\.\w+)", MAKEFILE)
    assert named
    assert not [name for name in named if not (ROOT / f"{name.replace('.', '/')}.py").is_file()]


def test_the_demo_does_not_install_the_tools_of_developers():
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "-e ." in planned and "[dev]" not in planned
