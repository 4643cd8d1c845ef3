"""What `lobs retrain` and `lobs stages` train with: options, data, optimiser, teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.options import TRAINING
from lobs.errors import LobsError

if TYPE_CHECKING:
    from lobs.cli.subject import Subject

OWN_RATE = 0.01  # learning rate for networks without a recipe of the zoo

BatchOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples per batch, zoo networks only; the recipe's if not given.",
        metavar="N",
        rich_help_panel=TRAINING,
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help=f"Learning rate; the zoo recipe's, or {OWN_RATE:g} for your own network.",
        metavar="RATE",
        rich_help_panel=TRAINING,
    ),
]
OptimizerOption = Annotated[
    str,
    typer.Option(help="sgd (Nesterov momentum) or adam.", metavar="NAME", rich_help_panel=TRAINING),
]
DecayOption = Annotated[
    str,
    typer.Option(
        help="Learning rate over time: constant, linear or cosine.",
        metavar="KIND",
        rich_help_panel=TRAINING,
    ),
]
DistilOption = Annotated[
    bool,
    typer.Option(
        "--distil",
        help="Learn the dense network's outputs; needs no labels.",
        rich_help_panel=TRAINING,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(help="Seed of the order of the data.", metavar="N", rich_help_panel=TRAINING),
]


@dataclass(frozen=True)
class Training:
    """How to train, as typed."""

    batch: int | None
    rate: float | None
    optimizer: str
    decay: str
    distil: bool
    seed: int

    def settings(self, subject: Subject) -> dict[str, Any]:
        """Return the data and the arguments of `lobs.retrain`."""
        rate, momentum, decay, data = self._recipe(subject)
        return {
            "data": data,
            "optimizer": self._optimizer(rate, momentum, decay),
            "decay": self.decay,
            "teacher": _dense(subject) if self.distil else None,
            "seed": self.seed,
        }

    def _optimizer(self, rate: float, momentum: float, weight_decay: float) -> Any:
        import torch

        from lobs.training.objectives import sgd

        makers = {
            "sgd": sgd(rate, momentum, weight_decay),
            "adam": lambda parameters: torch.optim.Adam(parameters, rate),
        }
        if self.optimizer not in makers:
            raise LobsError(f"--optimizer {self.optimizer}: use sgd or adam.")
        return makers[self.optimizer]

    def _recipe(self, subject: Subject) -> tuple[float, float, float, Any]:
        """Return rate, momentum, weight decay and data: the zoo's, or the user's own batches."""
        from lobs import zoo
        from lobs.training.objectives import Shuffled
        from lobs.zoo.datasets import sets
        from lobs.zoo.datasets.labelled import LabelledImages

        if not subject.in_zoo:
            return self.rate or OWN_RATE, 0.9, 0.0, self._own(subject)
        entry = zoo.entry(subject.network)
        recipe = entry.recipe
        if recipe is None:
            raise LobsError(
                f"{entry.title} is not trained here: ImageNet takes days. Use lobs.retrain, or "
                "lobs.hold in your own loop."
            )
        images = sets.load(entry.data, "train")
        assert isinstance(images, LabelledImages)
        data = Shuffled(images.images, images.labels, self.batch or recipe.batch_size)
        rate = recipe.learning_rate if self.rate is None else self.rate
        return rate, recipe.momentum, recipe.weight_decay, data

    def _own(self, subject: Subject) -> Any:
        """Return the user's batches where they hold labels or a teacher replaces them."""
        first = subject.first()
        labelled = isinstance(first, tuple | list) and len(first) > 1
        if not (labelled or self.distil):
            raise LobsError(
                f"the batches of '{subject.network}' have no labels: return (input, label) pairs, "
                "or add --distil to learn the dense network's outputs."
            )
        if self.batch is not None:
            raise LobsError(
                f"--batch goes with zoo networks; '{subject.network}' returns its own batches."
            )
        return subject.batches


def _dense(subject: Subject) -> Any:
    """Return the dense network that a subject was pruned from."""
    from lobs import zoo
    from lobs.cli.subject import open_subject

    if subject.in_zoo:
        return zoo.trained(subject.network)
    return open_subject(subject.network, 1).model.eval()
