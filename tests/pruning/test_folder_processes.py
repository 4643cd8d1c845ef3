"""Several processes prune one folder: as one process would, with one writer, and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from lobs.errors import BlocksError
from tests.processes import free_port
from tests.pruning.test_folder import Decoder, Fickle, data, equal, pruned, state, written

pytestmark = pytest.mark.xdist_group("yard")

PROGRAM = """
import json, os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch
from torch import distributed
import lobs
from lobs.pruning import folder_walk
from tests.pruning import test_folder
from tests.pruning.test_folder import data

torch.set_num_threads(1)
layer = torch.nn.Linear(8, 4)
lobs.prune(layer, [torch.randn(9, 8)], keep=0.5, progress=False)  # compiles, before any fork


def work(rank, size, port, folder, name, share, refit, dies, build):
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )
    write, calls = folder_walk.write_shard, []

    def dying(*given):
        calls.append(given)
        if len(calls) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*given)

    folder_walk.write_shard = dying
    batches = [data(8)[i] for i in share[rank]]
    result = lobs.prune_folder(
        getattr(test_folder, build), Path(folder) / "big", batches, keep=0.5,
        out=Path(folder) / name, refit=refit, progress=False,
        execution=lobs.Execution(distributed=True),
    )
    found = [result.kept, result.found, len(calls), [r.after for r in result.refits]]
    (Path(folder) / f"{name}.{rank}").write_text(json.dumps(found))


for line in sys.stdin:
    order, members = json.loads(line), []
    for rank in range(len(order["share"])):
        process = os.fork()
        if process:
            members.append(process)
            continue
        code = 1
        try:
            work(rank, len(order["share"]), **order)
            code = 0
        except lobs.LobsError as error:
            text = f"{type(error).__name__}: {error}"
            (Path(order["folder"]) / f"error.{rank}").write_text(text)
            code = 3
        finally:
            os._exit(code)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in members]), flush=True)
"""


@pytest.fixture(scope="module")
def group():
    """Return a function that runs a group of processes, and returns their exit codes."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"},
    )  # fmt: skip

    def ended(folder, name, *, share=((0, 1, 2, 3), (4, 5, 6, 7)), **how):
        order = {"refit": "blocks", "dies": 0, "build": "Decoder", "share": share, **how}
        order |= {"folder": str(folder), "name": name, "port": free_port()}
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ended
    process.stdin.close()
    process.wait()
    process.stdout.close()


def said(folder, name):
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in (0, 1)]


def test_two_processes_give_the_network_of_one(tmp_path, group):
    written(tmp_path / "big")
    assert group(tmp_path, "two", refit="layers") == [0, 0]
    one = pruned(tmp_path, name="one", batches=data(8))
    found, wanted = state(tmp_path / "two"), state(tmp_path / "one")
    leader, other = said(tmp_path, "two")
    assert leader[2] > 4 and other[2] == 0  # one writer
    assert leader[0] == other[0] == one.kept
    for name, tensor in wanted.items():
        assert torch.equal(tensor == 0, found[name] == 0), name
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    assert {p.name for p in (tmp_path / "two").iterdir()} == {
        p.name for p in (tmp_path / "one").iterdir()
    }


@pytest.mark.slow
def test_a_group_that_lost_its_writer_resumes_to_the_same_bits(tmp_path, group):
    written(tmp_path / "big")
    assert group(tmp_path, "whole") == [0, 0]
    assert group(tmp_path, "small", dies=3) == [-9, 3]
    assert "has lost another" in (tmp_path / "error.1").read_text()
    assert group(tmp_path, "small") == [0, 0]
    assert [found[1] for found in said(tmp_path, "small")] == [2, 2]
    assert equal(state(tmp_path / "small"), state(tmp_path / "whole"))
    # Blocks come as near as with one process. Steps differ: each process draws its own samples.
    one = pruned(tmp_path, name="one", batches=data(8), refit="blocks")
    leader, other = said(tmp_path, "whole")
    assert leader[3] == other[3]
    assert all(a < 1.2 * b.after for a, b in zip(leader[3], one.refits, strict=True))


@pytest.mark.slow
def test_a_process_without_data_follows_and_none_with_data_is_one_line(tmp_path, group):
    written(tmp_path / "big")
    assert group(tmp_path, "two", share=(tuple(range(8)), ()), refit="layers") == [0, 0]
    pruned(tmp_path, name="one", batches=data(8))
    assert equal(state(tmp_path / "two"), state(tmp_path / "one"))
    assert group(tmp_path, "none", share=((), ())) == [3, 3]
    assert "batches is empty" in (tmp_path / "error.1").read_text()


def test_blocks_that_fail_in_one_process_fail_alike_in_all(tmp_path, group):
    written(tmp_path / "big", Fickle)
    with pytest.raises(BlocksError) as alone:
        pruned(tmp_path, Fickle, batches=data(8))
    assert "block 'blocks.2' is not called with a tensor first" in str(alone.value)
    assert group(tmp_path, "two", refit="layers", build="Fickle") == [3, 3]
    texts = {(tmp_path / f"error.{rank}").read_text() for rank in (0, 1)}
    assert texts == {f"BlocksError: {alone.value}"}


def test_without_a_group_one_line_says_how_to_get_one(tmp_path):
    from lobs import Execution, LobsError

    written(tmp_path / "big")
    with pytest.raises(LobsError, match="no process group is set up"):
        pruned(tmp_path, Decoder, execution=Execution(distributed=True))
    assert not (tmp_path / "small").exists()
