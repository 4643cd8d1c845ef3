"""Prune a network that is larger than the memory it gets, from a folder of shards.

    python -m benchmarks.larger_than_memory [--memory 6GB] [--blocks 16] [--width 2048] [--kill 5]

The network is a synthetic decoder in bfloat16: random weights and tokens, because the cost does not
depend on them. It is written shard by shard, never whole in memory. A process of its own prunes it
to 2:4 within `--memory`. Prints weights, promised and peak memory, and seconds for each block. With
`--kill N` the process is killed by SIGKILL after N blocks and called again. All output files must
then have the bytes of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import lobs
from lobs._system.memory import parse, spelled
from lobs.storage.shards import write_index, write_shard

KIND = torch.bfloat16


class Block(nn.Module):
    """Causal attention and a gated two-layer network, both residual."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.first, self.second = (nn.RMSNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next activations."""
        y = self.first(x)
        q, k, v = (
            p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(-2))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """An embedding, blocks, a norm and a head of its own."""

    def __init__(self, shape: argparse.Namespace) -> None:
        super().__init__()
        heads = max(1, shape.width // 64)
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.inner, heads) for _ in range(shape.blocks)
        )
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(shape: argparse.Namespace) -> Decoder:
    return Decoder(shape).to(KIND)


def write(shape: argparse.Namespace, folder: Path) -> int:
    """Write the network's folder, one shard at a time; return the number of weights."""
    with torch.device("meta"):
        model = build(shape)
    parts: dict[str, list[str]] = {}
    for name in model.state_dict():
        number = name.split(".")[1] if name.startswith("blocks.") else name.split(".")[0]
        parts.setdefault(f"model-{number}.safetensors", []).append(name)
    empty, folder = model.state_dict(), Path(folder)
    folder.mkdir(parents=True)
    for seed, (file, names) in enumerate(parts.items()):
        generator = torch.Generator().manual_seed(seed)
        write_shard(folder / file, {n: filled(empty[n], generator) for n in names})
    places = {name: file for file, names in parts.items() for name in names}
    count = sum(t.numel() for t in empty.values())
    write_index(folder, places, 2 * count)
    (folder / "config.json").write_text(json.dumps({"blocks": shape.blocks}))
    return count


def filled(like: Tensor, generator: torch.Generator) -> Tensor:
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=KIND)
    scale = like.shape[1] ** -0.5
    return torch.empty(like.shape, dtype=KIND).normal_(0.0, scale, generator=generator)


def batches(shape: argparse.Namespace) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = max(1, shape.tokens // shape.length)
    ids = torch.randint(shape.vocabulary, (rows, shape.length), generator=generator)
    return list(ids.split(1))


def child(shape: argparse.Namespace) -> None:
    """Prune in this process, and print the result's numbers as JSON."""
    result = lobs.prune_folder(
        lambda: build(shape),
        shape.folder / "big",
        batches(shape),
        lobs.NByM(2, 4),
        out=shape.folder / shape.out,
        solver=shape.solver,
        refit=shape.refit,
        execution=lobs.Execution(memory=shape.memory, log=shape.log),
        progress=False,
    )
    numbers = {
        "peak": result.peak_bytes,
        "seconds": result.seconds,
        "kept": result.kept,
        "total": result.total,
        "found": result.found,
        "phases": result.phases,
        "layers": sum(layer.seconds for layer in result.layers),
    }
    print(json.dumps(numbers), flush=True)


def run(shape: argparse.Namespace, out: str, kill: int | None = None) -> dict[str, float] | None:
    """Run a child; kill it once it has written `kill` blocks."""
    given = [f"--{name}={getattr(shape, name)}" for name in SETTINGS if getattr(shape, name)]
    command = [sys.executable, "-m", "benchmarks.larger_than_memory", *given, f"--out={out}"]
    process = subprocess.Popen([*command, "--child"], stdout=subprocess.PIPE, text=True)
    while kill is not None and process.poll() is None:
        if len(list((shape.folder / out).glob("model-*-of-*.safetensors"))) >= kill:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return None
        time.sleep(0.05)
    text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the child ended with {process.returncode}.")
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def same_files(one: Path, other: Path) -> bool:
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    return names[0] == names[1] and not any(
        filecmp.cmpfiles(one, other, names[0], shallow=False)[1:]
    )


def show(shape: argparse.Namespace, found: dict[str, float]) -> None:
    done = shape.blocks - found["found"]
    print(
        f"kept {found['kept']:,} of {found['total']:,} weights in {found['seconds']:,.1f} s, "
        f"{found['seconds'] / max(1, done):,.1f} s for each of {done} blocks; peak "
        f"{spelled(found['peak'])} of {shape.memory} promised "
        f"({100 * found['peak'] / parse(shape.memory):.0f} %)",
        flush=True,
    )


SETTINGS = [
    "folder",
    "memory",
    "blocks",
    "width",
    "inner",
    "vocabulary",
    "tokens",
    "length",
    "solver",
    "refit",
    "log",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", default="6GB")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=5632)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--length", type=int, default=512, help="tokens of one batch")
    parser.add_argument("--solver", default="columns")
    parser.add_argument("--refit", default="layers")
    parser.add_argument("--kill", type=int, help="kill the process after this many blocks")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--log", type=Path, help="where to write what happened when")
    parser.add_argument("--out", default="small", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given)
        return
    with tempfile.TemporaryDirectory() as temporary:
        given.folder = (given.folder or Path(temporary)).resolve()
        began = time.perf_counter()
        weights = write(given, given.folder / "big")
        print(
            f"{weights:,} weights, {spelled(2 * weights)} on disk, written in "
            f"{time.perf_counter() - began:,.1f} s; memory promised {given.memory}",
            flush=True,
        )
        whole = run(given, "small")
        assert whole is not None
        show(given, whole)
        if given.kill is not None:
            assert run(given, "resumed", given.kill) is None, "it ended before it could be killed"
            again = run(given, "resumed")
            assert again is not None
            print(f"killed after {given.kill} blocks, {again['found']} of them taken from disk")
            show(given, again)
            same = same_files(given.folder / "small", given.folder / "resumed")
            print(f"all files of both runs have the same bytes: {same}")
            assert same


if __name__ == "__main__":
    main()
