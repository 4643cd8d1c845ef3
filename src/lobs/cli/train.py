"""`lobs train`: make a zoo network from scratch."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from lobs.cli.common import JsonOption, print_json, say, unclaimed, writable


def train(
    network: Annotated[str, typer.Argument(help="lenet300, lenet5, cifarnet or cifarnet-wide.")],
    out: Annotated[
        Path | None, typer.Option(help="Checkpoint to write; NETWORK.safetensors by default.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the weights and of the order of the data.")
    ] = 0,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Fewer or more than the recipe's.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="File written after every epoch, to go on from if it is there."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train a zoo network on its data, seeded; half a minute for lenet300, two for lenet5, most of an hour for cifarnet.

    Example: `lobs train lenet300 --seed 1 --out mine.safetensors`
    """
    from lobs import zoo
    from lobs.errors import LobsError
    from lobs.storage import checkpoint
    from lobs.zoo.datasets import sets
    from lobs.zoo.datasets.labelled import LabelledImages
    from lobs.zoo.training import error_rate
    from lobs.zoo.training import train as run

    entry = zoo.entry(network)
    if entry.recipe is None:
        raise LobsError(f"{entry.title} is not trained here: ImageNet takes days. {entry.source}")
    recipe = entry.recipe if epochs is None else replace(entry.recipe, epochs=epochs)
    target = unclaimed(out, Path(f"{network}.safetensors"))
    writable(target)
    data = sets.load(entry.data, "train")
    assert isinstance(data, LabelledImages)
    began = time.perf_counter()
    model = run(
        zoo.fresh(network, seed), data, recipe, seed=seed, progress=not json, state=writable(state)
    )
    seconds = time.perf_counter() - began
    error = error_rate(model, sets.load(entry.data, "test").batches())
    record = {"network": network, "test_error": error, "seed": seed, "recipe": asdict(recipe)}
    path = checkpoint.save(target, model, record=record)
    if json:
        print_json({**record, "seconds": seconds, "path": str(path)})
        return
    say(
        f"{entry.title}: test error {error:.2f} % after {recipe.epochs} epochs in {seconds:.0f} s "
        f"→ {path}"
    )
