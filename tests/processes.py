"""Groups of real processes that run the command line with the variables that torchrun sets.

Everything is loaded once and every process is forked from there: sixty processes need not load
torch sixty times.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import lobs

PROGRAM = """
import json, os, signal, sys, time
import torch
import lobs, lobs.cli, lobs.pruning.api
from torch import distributed

torch.set_num_threads(1)
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
import mine
lobs.prune(*mine.network(), keep=0.3, progress=False)  # now everything is compiled as well


def member(rank, size, port, words):
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        for number, name in ((1, "said"), (2, "error")):
            os.dup2(os.open(f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.argv = ["lobs", *words]
        lobs.cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    order = json.loads(line)
    size, port = order["size"], order["port"]
    members = [member(rank, size, port, order["words"]) for rank in range(size)]
    if order["victim"] is not None:  # nobody was waited for yet, so its number is still its own
        time.sleep(order["after"])
        os.kill(members[order["victim"]], signal.SIGKILL)
    began = time.monotonic()
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in members]
    print(json.dumps([codes, time.monotonic() - began]), flush=True)
"""

# What the commands work on: a file `mine.py` beside them.
NETWORK = """
import torch
from torch import nn

def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (2, 6, 6)), nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 10),
    )
    return model, list(torch.randn(8, 40, 72))

def without_labels():
    def evaluate(model):
        raise RuntimeError("the labels are on another disk")
    return *network(), evaluate
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Commands:
    """Starts groups of processes that run one command."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "mine.py").write_text(NETWORK)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        words = [sys.executable, "-c", PROGRAM, str(folder)]
        self.process = subprocess.Popen(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ended(self, words, *, size=3, victim=None, after=0.0):
        """Codes of a group, and how many seconds it went on after one of it was killed."""
        order = {
            "size": size,
            "port": free_port(),
            "words": words,
            "victim": victim,
            "after": after,
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def prune(self, *, out, resume=None, time_out=60, **how):
        words = [
            "prune",
            "mine:network",
            "--keep",
            "30%",
            "--out",
            out,
            "--time-out",
            str(time_out),
        ]
        return self.ended([*words, *([] if resume is None else ["--resume", resume])], **how)

    def errors(self, ranks):
        return [(self.folder / f"error{rank}").read_text() for rank in ranks]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def content(path):
    """All that a saved result says but for times and memory."""
    saved = lobs.load(path)
    rows = [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in saved.record["layers"]
    ]
    weights, masks = (
        {name: t.numpy().tobytes() for name, t in some.items()}
        for some in (saved.state_dict, saved.masks)
    )
    return weights, masks, rows, saved.record["certificate"]
