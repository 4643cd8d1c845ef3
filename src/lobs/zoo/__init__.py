"""Networks that ship with `lobs`: how to build, train and load each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import nn

from lobs import checkpoint
from lobs.errors import FileError
from lobs.zoo.lenet import LeNet5, LeNet300
from lobs.zoo.training import Recipe


@dataclass(frozen=True)
class Entry:
    """One network: its builder, its recipe, and the paper's per-layer kept fractions."""

    build: Callable[[], nn.Module]
    recipe: Recipe
    paper_kept: dict[str, float]
    title: str


ZOO: dict[str, Entry] = {
    "lenet300": Entry(
        build=LeNet300,
        recipe=Recipe(epochs=12, learning_rate=0.05, batch_size=64, weight_decay=5e-4, input_dropout=0.2),
        paper_kept={"fc1": 0.067, "fc2": 0.20, "fc3": 0.65},
        title="LeNet-300-100",
    ),
    "lenet5": Entry(
        build=LeNet5,
        recipe=Recipe(epochs=6, learning_rate=0.05, batch_size=128, weight_decay=5e-4),
        paper_kept={"conv1": 0.54, "conv2": 0.43, "fc1": 0.06, "fc2": 0.25},
        title="LeNet-5",
    ),
}


def entry(name: str) -> Entry:
    """Look a network up, with the choices in the error."""
    if name not in ZOO:
        raise FileError(f"there is no network '{name}' in the zoo. There are: {', '.join(ZOO)}.")
    return ZOO[name]


def fresh(name: str, seed: int = 0) -> nn.Module:
    """An untrained network, initialised from a seed without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return entry(name).build()


def shipped(name: str) -> Path:
    """Where the checkpoint that comes with the package lies."""
    path = Path(str(resources.files("lobs.zoo") / "checkpoints" / f"{name}.safetensors"))
    if not path.is_file():
        raise FileError(f"the checkpoint of '{name}' is missing from the installed package. Reinstall lobs.")
    return path


def trained(name: str, path: str | Path | None = None) -> nn.Module:
    """The network with the weights that ship with the package, or with those of a file."""
    model = fresh(name)
    source = shipped(name) if path is None else Path(path)
    try:
        model.load_state_dict(checkpoint.load(source).state_dict)
    except RuntimeError as error:
        raise FileError(f"'{source}' does not fit {entry(name).title}: {str(error).splitlines()[-1].strip()}") from error
    return model.eval()
