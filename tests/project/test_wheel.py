"""The wheel holds everything it needs and nothing more; the sdist holds the project."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lobs

ROOT = Path(__file__).parents[2]
# Tools of developers and extras of some users. `make demo` installs none of them.
EXTRAS = ["matplotlib", "PIL", "onnx", "onnxscript", "onnxruntime", "zstandard", "pytest"]
DEMO = f"""
import sys
for name in {EXTRAS!r}:
    sys.modules[name] = None  # importing it now fails as if it were not installed
sys.argv = ["lobs", "demo", "--samples", "1000"]
from lobs.cli import main
main()
"""


def built(kind: str, folder: Path) -> Path:
    line = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(line, check=True, capture_output=True)
    (found,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lobs"}
    assert "lobs/py.typed" in names


def test_the_wheel_runs_the_demo_from_any_folder(wheel, tmp_path):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)

    def run(code: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(target)}
        line = [sys.executable, "-c", code]
        return subprocess.run(
            line, env=environment, cwd=elsewhere, check=False, capture_output=True, text=True
        )

    assert run("import lobs; print(lobs.__file__)").stdout.startswith(str(target))
    done = run(DEMO)
    assert done.returncode == 0, done.stderr
    written = {path.name for path in (elsewhere / "lobs-demo").iterdir()}
    assert written == {"report.html", "lenet300-7pct.safetensors"}


def test_the_sdist_holds_the_project(tmp_path):
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "src/lobs/pruning/api.py",
        "tests/golden/golden.json",
        "benchmarks/rivals.py",
        "experiments/dong2017/__main__.py",
        "experiments/dong2017/surgery.py",
        "examples/retrain.py",
        "docs/index.md",
        "Makefile",
        "CONTRIBUTING.md",
        ".ci/run",
    ]
    assert not [name for name in wanted if name not in names]


def test_the_version_stands_in_one_place(wheel):
    assert wheel.name.startswith(f"lobs-{lobs.__version__}-")
    elsewhere = ["pyproject.toml", "CITATION.cff", "mkdocs.yml"]
    assert not [name for name in elsewhere if lobs.__version__ in (ROOT / name).read_text()]


def test_the_changelog_begins_with_this_version():
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert headings[0].split()[1].strip("[]") == lobs.__version__
