"""Writing a file: permissions, links, and what a killed process leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import lobs
from lobs.storage.atomic import atomic_write

pytestmark = pytest.mark.skipif(os.name == "nt", reason="permissions and links of Unix")


@pytest.fixture
def umask():
    """Set a umask for one test."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("umask")
def test_a_new_file_obeys_the_umask_and_an_old_one_keeps_its_mode(tmp_path):
    path = lobs.save(nn.Linear(2, 2), tmp_path / "x.safetensors")
    assert mode(path) == 0o640
    path.chmod(0o600)
    lobs.save(nn.Linear(2, 2), path)
    assert mode(path) == 0o600


def test_a_link_is_followed(tmp_path):
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(real)
    for value in (1.0, 2.0):
        lobs.save({"w": torch.full((2,), value)}, link)
        assert link.is_symlink() and torch.equal(
            lobs.load(real).state_dict["w"], torch.full((2,), value)
        )


def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path):
    path = tmp_path / "x[1].json"
    script = (
        "import os, signal, sys\n"
        "from lobs.storage.atomic import atomic_write\n"
        "with atomic_write(sys.argv[1]) as partial:\n"
        "    partial.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code = subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode
    assert code == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 1
    with atomic_write(path) as mine:
        with atomic_write(path) as other:  # of a process that is alive
            other.write_text("{}")
        assert mine.exists()
        mine.write_text("[]")
    assert [p.name for p in tmp_path.iterdir()] == ["x[1].json"] and path.read_text() == "[]"
