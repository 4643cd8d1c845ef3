"""`torchrun … lobs prune FOLDER`: several processes share the samples, and the first one writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import lobs
from lobs.storage.shards import Shards
from lobs.zoo.hub import Reading
from tests.hub.networks import sentences, written
from tests.processes import free_port

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def launched(words, size=2):
    """Run a command in several processes; return their exit codes and what they wrote."""
    env = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}  # fmt: skip
    members = [
        subprocess.Popen(
            [sys.executable, "-m", "lobs", *map(str, words)], env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [member.communicate() for member in members]
    return [member.returncode for member in members], said


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_two_processes_prune_a_folder_as_one_does(tmp_path, architecture):
    big = written(tmp_path / "big", architecture)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(sentences()))
    codes, said = launched(
        ["prune", big, "--keep", "50%", "--data", text, "--samples", 32, "--length", 16,
         "--refit", "layers", "--solver", "columns", "--out", tmp_path / "two"]
    )  # fmt: skip
    assert codes == [0, 0], said
    assert "fewer weights" in said[0][0] and not said[1][0]
    one = lobs.hub.prune(
        big, text, keep=0.5, out=tmp_path / "one", refit="layers", solver="columns",
        reading=Reading(samples=32, length=16), progress=False,
    )  # fmt: skip
    record = json.loads((tmp_path / "two" / "lobs.json").read_text())
    assert record["kept"] == one.kept and record["after"].keys() == one.after.keys()
    assert record["data"] == dict(one.data)  # what all processes saw
    assert all(finding.holds for finding in lobs.hub.verify(tmp_path / "two"))
    found, wanted = (Shards(tmp_path / name) for name in ("two", "one"))
    assert found.entries.keys() == wanted.entries.keys()
    for name, tensor in wanted.read(wanted.entries).items():
        other = found.read([name])[name]
        assert torch.equal(other == 0, tensor == 0), name
        assert (other - tensor).norm() <= 1e-4 * tensor.norm(), name


def test_what_goes_wrong_in_a_group_is_one_line(tmp_path):
    big = written(tmp_path / "big")
    codes, said = launched(
        ["prune", big, "--keep", "50%", "--data", tmp_path / "none.txt", "--out", tmp_path / "x"]
    )
    assert codes == [1, 1] and not (tmp_path / "x").exists()
    assert all("there is no data" in error for _, error in said)
