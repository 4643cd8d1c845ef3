"""The wheel holds everything it needs: built, unpacked into an empty folder, run from another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_runs_the_demo_from_any_folder(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        target,
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(target)}
    where = subprocess.run(
        [sys.executable, "-c", "import lobs; print(lobs.__file__)"],
        env=environment,
        check=False,
        cwd=elsewhere,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(target))
    done = subprocess.run(
        [sys.executable, "-m", "lobs", "demo", "--samples", "1000"],
        env=environment,
        check=False,
        cwd=elsewhere,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (elsewhere / "lobs-demo").iterdir()} == {
        "report.html",
        "lenet300-7pct.safetensors",
    }
    assert (target / "lobs" / "py.typed").is_file()
