"""`lobs train`: train a zoo network from scratch."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from lobs.cli.files import makeable, output_file
from lobs.cli.options import MACHINE, TRAINING, ForceOption, JsonOption, OutOption
from lobs.cli.output import announce, print_json, say


def train(
    network: Annotated[
        str,
        typer.Argument(help="lenet300, lenet5, cifarnet or cifarnet-wide.", metavar="NETWORK"),
    ],
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Passes over the data; the recipe's if not given.",
            metavar="N",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the weights and of the order of the data.",
            metavar="N",
            rich_help_panel=TRAINING,
        ),
    ] = 0,
    out: OutOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the run. The same command continues from there.",
            metavar="FOLDER",
            rich_help_panel=MACHINE,
        ),
    ] = None,
) -> None:
    """Train a zoo network on its own data, with a seed.

    It takes half a minute for lenet300, two minutes for lenet5, most of an hour for cifarnet.

    Example:
      lobs train lenet300 --seed 1 --out my-lenet.safetensors
    """
    from lobs import zoo
    from lobs.errors import LobsError

    entry = zoo.entry(network)
    if entry.recipe is None:
        raise LobsError(f"{entry.title} is not trained here: ImageNet takes days. {entry.source}")
    recipe = entry.recipe if epochs is None else replace(entry.recipe, epochs=epochs)
    target = output_file(out, f"{network}.safetensors", force=force)
    if resume is not None:
        makeable(resume)

    from lobs.storage import checkpoint
    from lobs.zoo.datasets import sets
    from lobs.zoo.datasets.labelled import LabelledImages
    from lobs.zoo.training import error_rate
    from lobs.zoo.training import train as run

    data = sets.load(entry.data, "train")
    assert isinstance(data, LabelledImages)
    announce(target, json)
    began = time.perf_counter()
    model = run(zoo.fresh(network, seed), data, recipe, seed=seed, progress=not json, resume=resume)
    seconds = time.perf_counter() - began
    error = error_rate(model, sets.load(entry.data, "test").batches())
    record = {"network": network, "test_error": error, "seed": seed, "recipe": asdict(recipe)}
    path = checkpoint.save(model, target, record=record)
    if json:
        print_json({**record, "seconds": seconds, "path": str(path)})
        return
    say(f"{entry.title}: test error {error:.2f} % after {recipe.epochs} epochs in {seconds:.0f} s")
    say(f"network: {path}")
