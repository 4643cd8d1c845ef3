"""Several processes give what one gives; a lost one ends the others, and work can resume."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from lobs._system.distributed import ProcessGroup
from lobs.calibration.collect import Calibration

pytestmark = pytest.mark.xdist_group("yard")
# Everything is loaded once and every group is forked from there: torch need not load sixty times.
PROGRAM = """
import json, os, sys, time
from contextlib import ExitStack
from datetime import timedelta
from unittest.mock import patch
import torch
from torch import distributed, nn
import lobs
from lobs.solvers import local_search
from lobs.solvers import least_squares

torch.set_num_threads(1)
torch.manual_seed(0)
NETWORKS = {
    "chain": nn.Sequential(
        nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4)
    ),
    "norms": nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 1, groups=2), nn.Flatten(), nn.Linear(24, 4),
    ),
    "wide": nn.Sequential(
        nn.Linear(12, 70), nn.ReLU(), nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 4)
    ),
}
BATCHES = list(torch.randn(6, 30, 12)) + [torch.randn(7, 12)]


def run(network, share, options, out, folder=None):
    target = lobs.Sparsity(0.6, rounds=options.pop("rounds", 2))
    how = {name: options.pop(name) for name in ("memory", "distributed") if name in options}
    how = lobs.Execution(resume=folder, **how)
    pieces = options.pop("pieces", None)
    with ExitStack() as stack:
        if pieces is not None:  # so that small layers are shared as large ones are
            for place, name, value in (
                (local_search, "_BATCH_BYTES", 2**15),
                (local_search, "_TOGETHER", pieces),
                (least_squares, "_FEW", 0.0),
                (local_search._Rows, "_batch", counting(local_search._Rows._batch, out)),
                (least_squares, "_solved_rows", counting(least_squares._solved_rows, out)),
            ):
                stack.enter_context(patch.object(place, name, value))
        result = lobs.prune(
            NETWORKS[network], share, target, progress=False, execution=how, **options
        )
    result.save(out)


def counting(function, out):
    # writes down how many rows it is given

    def call(*words):
        with open(f"{out}.{function.__name__}", "a") as file:
            file.write(f"{len(words[1])} ")
        return function(*words)

    return call


def member(rank, size, port, timeout, shares, network, options, out, folder):
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        minute, longest = timedelta(seconds=60), timedelta(seconds=timeout)
        store = distributed.TCPStore("127.0.0.1", port, size, rank == 0, timeout=minute)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=longest
        )
        share = [BATCHES[i] for i in shares[rank]]
        hung = options.pop("hung", None)
        if hung == rank:
            NETWORKS[network].register_forward_pre_hook(lambda *_: time.sleep(3600))
        if options.pop("spoiled", None) == rank:
            share[0] = share[0] * float("nan")
        run(network, share, {**options, "distributed": True}, f"{out}.{rank}", folder)
        code = 0
    except lobs.LobsError as error:
        open(f"{out}.error{rank}", "w").write(str(error))
        code = 3
    except BaseException as error:
        open(f"{out}.crash{rank}", "w").write(repr(error))
    finally:
        os._exit(code)


for line in sys.stdin:
    order = json.loads(line)
    if order["size"] == 1:
        share = [BATCHES[i] for i in order["shares"][0]]
        run(order["network"], share, order["options"], order["out"])
        print(json.dumps([]), flush=True)
    else:
        keys = ("size", "port", "timeout", "shares", "network", "options", "out", "folder")
        words = [order[key] for key in keys]
        members = [member(rank, *words) for rank in range(order["size"])]
        print(json.dumps(members), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in members]
        print(json.dumps(codes), flush=True)
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Yard:
    """Starts groups of processes."""

    def __init__(self):
        words = [sys.executable, "-c", PROGRAM]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, size, shares, out, *, network="chain", folder=None, timeout=60.0, **options):
        folder = None if folder is None else str(folder)
        order = {
            "size": size,
            "port": free_port(),
            "timeout": timeout,
            "shares": shares,
            "network": network,
        }
        order |= {"options": options, "out": str(out), "folder": folder}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def codes(self, *words, **more):
        self.send(*words, **more)
        return self.answer()


@pytest.fixture(scope="module")
def yard():
    yard = Yard()
    yield yard
    yard.process.stdin.close()
    yard.process.wait()
    yard.process.stdout.close()


def masks(path):
    import lobs

    saved = lobs.load(path)
    return saved.masks, saved.state_dict, saved.record


def in_turn(shares):
    """The order in which one process must be given what several are given."""
    longest = max(map(len, shares))
    return [share[turn] for turn in range(longest) for share in shares if turn < len(share)]


def assert_alike(one, other):
    assert all(torch.equal(m, other[0][n]) for n, m in one[0].items())
    for name, tensor in one[1].items():
        torch.testing.assert_close(other[1][name], tensor, rtol=1e-4, atol=1e-5)
    assert one[2]["certificate"]["measured"] == pytest.approx(
        other[2]["certificate"]["measured"], rel=1e-3
    )


SHARES = {
    "even": [[0, 2, 4], [1, 3, 5]],
    "uneven": [[0, 1, 2, 3], [6]],
    "one without": [[], [0, 1, 2]],
    "four": [[0, 4], [1, 5], [2, 6], [3]],
}


CASES = [*((name, "asymmetric", "greedy") for name in SHARES), ("uneven", "dense", "greedy")]


@pytest.mark.parametrize(
    ("share", "inputs", "solver"),
    [*CASES, ("four", "asymmetric", "auto"), ("one without", "dense", "auto")],
)
def test_several_processes_prune_as_one_does(yard, tmp_path, share, inputs, solver):
    shares, options = SHARES[share], {"inputs": inputs, "solver": solver, "refit": "layers"}
    yard.send(1, [in_turn(shares)], tmp_path / "one", **options)
    assert yard.codes(len(shares), shares, tmp_path / "many", **options) == [0] * len(shares)
    one, many = (
        masks(tmp_path / "one"),
        [masks(tmp_path / f"many.{rank}") for rank in range(len(shares))],
    )
    assert_alike(one, many[0])
    for other in many[1:]:
        assert all(torch.equal(t, other[1][n]) for n, t in many[0][1].items())


@pytest.mark.parametrize("share", ["four", "one without"])
def test_several_processes_move_all_weights_together_as_far_as_one_does(yard, tmp_path, share):
    """Each draws random signs for its own samples: weights differ, but not the distance."""
    shares = SHARES[share]
    yard.send(1, [in_turn(shares)], tmp_path / "one", refit="network")
    assert yard.codes(len(shares), shares, tmp_path / "many", refit="network") == [0] * len(shares)
    one, many = (
        masks(tmp_path / "one"),
        [masks(tmp_path / f"many.{rank}") for rank in range(len(shares))],
    )
    kept_back = [said[2]["settings"]["refit"].rpartition(" on ")[2] for said in (one, many[0])]
    assert kept_back[0] == kept_back[1] and "held-out samples" in kept_back[0]
    assert all(torch.equal(m, many[0][0][n]) for n, m in one[0].items())
    assert one[2]["certificate"]["measured"] == pytest.approx(
        many[0][2]["certificate"]["measured"], rel=0.1
    )
    for other in many[1:]:
        assert all(torch.equal(t, other[1][n]) for n, t in many[0][1].items())


@pytest.mark.parametrize("inputs", ["dense", "asymmetric"])
def test_processes_with_a_limit_of_memory_agree_even_if_one_has_no_data(yard, tmp_path, inputs):
    shares, options = SHARES["one without"], {"inputs": inputs, "memory": "50GB"}
    yard.send(1, [in_turn(shares)], tmp_path / "one", **options)
    assert yard.codes(2, shares, tmp_path / "two", **options) == [0, 0]
    assert_alike(masks(tmp_path / "one"), masks(tmp_path / "two.0"))


@pytest.mark.parametrize(
    ("solver", "pieces"), [("auto", 64), ("auto", 1), ("greedy+refine", 1), ("admm", 1)]
)
def test_rows_of_a_layer_are_shared_and_nothing_changes(yard, tmp_path, solver, pieces):
    shares, options = (
        SHARES["even"],
        {"network": "wide", "solver": solver, "pieces": pieces, "rounds": 1},
    )
    yard.send(1, [in_turn(shares)], tmp_path / "one", **options)
    assert yard.codes(2, shares, tmp_path / "two", **options) == [0, 0]
    assert_alike(masks(tmp_path / "one"), masks(tmp_path / "two.0"))
    for work in ["_solved_rows"] if solver == "admm" else ["_solved_rows", "_batch"]:
        one, *two = (rows_of(tmp_path / f"{name}.{work}") for name in ("one", "two.0", "two.1"))
        assert sum(two) == one > 0
        assert min(two) > one // 5


def rows_of(path):
    return sum(map(int, path.read_text().split()))


def test_batch_norms_are_estimated_on_everybodys_data(yard, tmp_path):
    shares = [[0, 2], [1, 3]]
    options = {"network": "norms", "rounds": 1}
    yard.send(1, [in_turn(shares)], tmp_path / "one", **options)
    assert yard.codes(2, shares, tmp_path / "many", **options) == [0, 0]
    one, many = masks(tmp_path / "one"), masks(tmp_path / "many.0")
    assert all(torch.equal(m, many[0][n]) for n, m in one[0].items())
    torch.testing.assert_close(
        many[1]["2.running_mean"], one[1]["2.running_mean"], rtol=1e-3, atol=1e-4
    )


def test_an_error_in_one_process_is_an_error_in_all_with_its_number(yard, tmp_path):
    assert yard.codes(2, SHARES["even"], tmp_path / "x", spoiled=1) == [3, 3]
    for rank in range(2):
        told = (tmp_path / f"x.error{rank}").read_text()
        assert told.startswith("process 1 of 2: layer '0': NaN or infinite input in batch 0")


def test_a_hung_process_is_given_up_on_after_the_time_out(yard, tmp_path):
    members = yard.send(2, SHARES["even"], tmp_path / "x", hung=1, timeout=3.0)
    began = time.monotonic()
    while not (tmp_path / "x.error0").exists() and time.monotonic() - began < 120:
        time.sleep(0.05)
    os.kill(members[1], signal.SIGKILL)
    assert yard.answer() == [3, -signal.SIGKILL]
    assert "has lost another" in (tmp_path / "x.error0").read_text()


def killed_once(yard, tmp_path, turn, rng):
    """Kill one of three when the leader has written a random number of pieces; then run again."""
    folder, shares = tmp_path / f"run_store{turn}", [[0, 3], [1, 4], [2, 5]]
    goal, victim = rng.randrange(1, 14), rng.randrange(3)
    members = yard.send(3, shares, tmp_path / "killed", folder=folder)
    while len(list(folder.glob("[!.]*.safetensors"))) < goal:
        time.sleep(0.002)
    os.kill(members[victim], signal.SIGKILL)
    codes = yard.answer()
    assert codes[victim] == -signal.SIGKILL
    assert all(code == 3 for rank, code in enumerate(codes) if rank != victim), codes
    for rank in {0, 1, 2} - {victim}:
        told = tmp_path / f"killed.error{rank}"
        assert "has lost another" in told.read_text()
        told.unlink()
    assert yard.codes(3, shares, tmp_path / "resumed", folder=folder) == [0, 0, 0]
    return masks(tmp_path / "resumed.0")


def whole(yard, tmp_path):
    assert yard.codes(3, [[0, 3], [1, 4], [2, 5]], tmp_path / "whole") == [0, 0, 0]
    return masks(tmp_path / "whole.0")


def test_after_the_loss_of_one_of_three_a_rerun_ends_the_same(yard, tmp_path):
    truth = whole(yard, tmp_path)
    resumed = killed_once(yard, tmp_path, 0, random.Random(0))
    assert all(torch.equal(t, resumed[1][n]) for n, t in truth[1].items())


@pytest.mark.slow
def test_torchrun_prunes_from_the_shell_and_only_one_process_speaks(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def network():\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)), "
        "list(torch.randn(5, 40, 10))\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["-m", "lobs", "prune", "mine:network", "--keep", "50%"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = lambda *w: subprocess.run(  # noqa: E731
        [sys.executable, *w], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    run(*words, "--out", "one.safetensors")
    said = run(*launch, *words, "--out", "two.safetensors", "--resume", "run_store").stdout
    assert said.count("52 of 104 kept") == 1
    assert_alike(masks(tmp_path / "one.safetensors"), masks(tmp_path / "two.safetensors"))


def test_signs_skipped_are_signs_drawn():
    # Several processes draw the probes of one only if the generator gives the same in pieces.
    whole = torch.randint(0, 2, (1000,), generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(0)
    parts = [
        torch.randint(0, 2, shape, generator=g).flatten() for shape in ((7, 11), (123,), (80, 10))
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_what_the_others_draw_is_counted_in_turns():
    seen = Calibration({}, 0, outputs=((10, 11, 12), (20,), (30, 31)))
    assert seen.drawn_elsewhere(0) == [0, 50, 31]
    assert seen.drawn_elsewhere(1) == [10]
    assert seen.drawn_elsewhere(2) == [30, 11]


def test_work_is_dealt_so_that_nobody_has_much_more():
    owners = ProcessGroup(0, 3).owners([9, 1, 5, 5, 4, 4, 2])
    loads = [
        sum(c for c, o in zip([9, 1, 5, 5, 4, 4, 2], owners, strict=True) if o == rank)
        for rank in range(3)
    ]
    assert max(loads) - min(loads) <= 2
