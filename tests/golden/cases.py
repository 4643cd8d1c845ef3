"""Golden runs: small prunings whose masks and weights are compared bit by bit with a record.

`python -m tests.golden.cases [NAME ...]` prints a record. `test_golden.py` compares with the one in
`golden.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from torch import nn

import lobs
from lobs import (
    Budget,
    ErrorBudget,
    Execution,
    NByM,
    Numerics,
    Sparsity,
    Structured,
    zoo,
)
from lobs.zoo.datasets import mnist

Result = Any


def _images(n: int) -> list[torch.Tensor]:
    images = mnist.load("train").images[:n]
    return list(images.split(100))


def lenet300() -> Result:
    return lobs.prune(zoo.trained("lenet300"), _images(400), keep=0.1, progress=False)


def lenet300_layers() -> Result:
    wanted = Sparsity({"fc1": 0.93, "fc2": 0.8, "fc3": 0.35})
    return lobs.prune(zoo.trained("lenet300"), _images(400), wanted, inputs="dense", progress=False)


def lenet300_exact() -> Result:
    wanted = Sparsity({"fc2": 0.8, "fc3": 0.35})
    return lobs.prune(
        zoo.trained("lenet300"),
        _images(400),
        wanted,
        solver="greedy",
        inputs="pruned",
        progress=False,
    )


def lenet300_published() -> Result:
    wanted = Sparsity({"fc2": 0.8, "fc3": 0.35})
    return lobs.prune(
        zoo.trained("lenet300"), _images(400), wanted, solver="lobs", inputs="dense", progress=False
    )


def lenet5() -> Result:
    return lobs.prune(
        zoo.trained("lenet5"), _images(300), keep="10%", refit="layers", progress=False
    )


def _toy() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 13 * 13, 10),
    )
    return model, list(torch.randn(6, 20, 4, 6, 6))


def grouped_and_transposed() -> Result:
    return lobs.prune(*_toy(), Sparsity(0.7), progress=False)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head((x + self.down(torch.relu(self.up(x)))).mean(1))


def attention() -> Result:
    torch.manual_seed(0)
    model = _Attention()
    return lobs.prune(model, list(torch.randn(6, 20, 9, 16)), Sparsity(0.6), progress=False)


def _mlp() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)
    )
    return model, list(torch.randn(8, 32, 40))


def two_four() -> Result:
    return lobs.prune(*_mlp(), NByM(2, 4), progress=False)


def structured() -> Result:
    return lobs.prune(*_mlp(), Structured(0.5), progress=False)


def error_budget() -> Result:
    return lobs.prune(*_mlp(), ErrorBudget(0.2, relative=True), progress=False)


def kept_count() -> Result:
    return lobs.prune(*_mlp(), Budget(parameters=1500), progress=False)


def damped_with_biases() -> Result:
    return lobs.prune(
        *_mlp(), Sparsity(0.6), numerics=Numerics(damping=1e-2, prune_bias=True), progress=False
    )


def resumed() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        lobs.prune(*_toy(), Sparsity(0.7), execution=Execution(resume=folder), progress=False)
        return lobs.prune(
            *_toy(), Sparsity(0.7), execution=Execution(resume=folder), progress=False
        )


_MEMBER = """
import json
import torch
from torch import distributed
torch.set_num_threads(1)
from tests.golden import cases
distributed.init_process_group("gloo")
model, batches = cases._toy()
rank = distributed.get_rank()
result = cases.shared(model, batches[rank::2])
if rank == 0:
    print(json.dumps(cases.summary(result)))
distributed.barrier()
distributed.destroy_process_group()
"""


def shared(model: nn.Module, batches: list[torch.Tensor]) -> Result:
    """Prune as each of two processes does."""
    return lobs.prune(
        model, batches, Sparsity(0.7), execution=Execution(distributed=True), progress=False
    )


def two_processes() -> dict[str, Any]:
    """Return the summary of a run shared by two processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    members = [
        subprocess.Popen(
            [sys.executable, "-c", _MEMBER],
            env={**common, "RANK": str(rank)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [member.communicate(timeout=300)[0] for member in members]
    if any(member.returncode for member in members):
        raise RuntimeError("a process failed")
    return dict(json.loads(answers[0]))


CASES: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        lenet300,
        lenet300_layers,
        lenet300_exact,
        lenet300_published,
        lenet5,
        grouped_and_transposed,
        attention,
        two_four,
        structured,
        error_budget,
        kept_count,
        damped_with_biases,
        resumed,
        two_processes,
    )
}


def digest(result: Result) -> str:
    """Hash every weight and every mask of a result."""
    hashed = hashlib.sha256()
    tensors = {
        **result.model.state_dict(),
        **{f"mask of {name}": mask for name, mask in result.masks.items()},
    }
    for name in sorted(tensors):
        hashed.update(name.encode())
        hashed.update(tensors[name].detach().contiguous().cpu().numpy().tobytes())
    return hashed.hexdigest()


def arithmetic() -> str:
    """Hash this machine's rounding. Other processors and libraries sum in another order."""
    g = torch.Generator().manual_seed(0)
    hashed = hashlib.sha256()
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(300, 200, generator=g, dtype=dtype)
        moment = x.T @ x
        factor = torch.linalg.cholesky(moment)
        parts = [moment, factor, torch.cholesky_inverse(factor), torch.linalg.eigvalsh(moment)]
        parts.append(
            torch.nn.functional.conv2d(
                x.reshape(1, 4, 100, 150), moment[:8, :36].reshape(8, 4, 3, 3)
            )
        )
        for part in parts:
            hashed.update(part.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def record(names: list[str] | None = None) -> dict[str, Any]:
    """Run cases and return their summaries, with the setting that they were computed in."""
    torch.set_num_threads(1)
    found = {}
    for name in names or CASES:
        result = CASES[name]()
        found[name] = result if isinstance(result, dict) else summary(result)
    return {**setting(), "cases": found}


def setting() -> dict[str, str]:
    """Return what bits depend on: versions and rounding, with one thread."""
    return {
        "torch": torch.__version__,
        "numba": numba.__version__,
        "arithmetic": arithmetic(),
    }


def summary(result: Result) -> dict[str, Any]:
    """Return the digest of a result, and (kept, relative error) of every layer."""
    layers = {layer.name: [layer.kept, layer.relative_error] for layer in result.layers}
    return {"digest": digest(result), "layers": layers}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(record(sys.argv[1:]), indent=1) + "\n")
