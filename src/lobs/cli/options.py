"""Options that several commands share, with their help and their shell completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Panels of `--help`, in the order in which a newcomer needs them.
TARGET, PATTERN, DATA = "Target (one of the first nine, or --pattern)", "Pattern", "Data"
TRAINING, OUTPUT, MACHINE, EXPERT = "Training", "Output", "Machine", "Expert"

# Listed here because `lobs.zoo` and `lobs.solvers` import torch, which takes seconds.
NETWORKS = (
    "lenet300", "lenet5", "cifarnet", "cifarnet-wide", "alexnet", "vgg16", "resnet50",
    "resnet50-v1",
)  # fmt: skip
SOLVERS = (
    "auto", "greedy", "greedy+refine", "admm", "columns", "lobs", "lobs+refine", "magnitude",
    "magnitude+refine", "obd", "obd-fisher", "apozw", "random",
)  # fmt: skip


def complete_network(incomplete: str) -> list[str]:
    """Return zoo names and safetensors files that begin like this."""
    names = [name for name in NETWORKS if name.startswith(incomplete)]
    folder = Path(incomplete).parent if incomplete else Path()
    return names + complete_file(incomplete) if folder.is_dir() else names


def complete_file(incomplete: str) -> list[str]:
    """Return safetensors files and folders that begin like this."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    if not folder.is_dir():
        return []
    found = sorted(p for p in folder.iterdir() if p.is_dir() or p.suffix == ".safetensors")
    names = [f"{p}/" if p.is_dir() else str(p) for p in found if not p.name.startswith(".")]
    return [name for name in names if name.startswith(incomplete)]


def complete_solver(incomplete: str) -> list[str]:
    """Return solvers that begin like this."""
    return [name for name in SOLVERS if name.startswith(incomplete)]


SubjectArgument = Annotated[
    str,
    typer.Argument(
        help="A zoo network (lenet300, …), a file of lobs, a folder of transformers or timm "
        "with --data, or your own package.module:function that returns (model, batches) or "
        "(model, batches, evaluate).",
        metavar="NETWORK",
        autocompletion=complete_network,
    ),
]
CodeOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        help="For a file saved from Python: the function that builds its network.",
        metavar="MODULE:FUNCTION",
        rich_help_panel=DATA,
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the module:function that a file names.", rich_help_panel=DATA
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Calibration samples; all if not given.", metavar="N", rich_help_panel=DATA
    ),
]
LayersOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Only these layers, by name or glob. Repeatable.",
        metavar="NAME",
        rich_help_panel=DATA,
    ),
]
SkipOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Leave these layers alone. Repeatable.", metavar="NAME", rich_help_panel=DATA
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help="Your evaluate returns a score or an error.",
        metavar="KIND",
        rich_help_panel=DATA,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="File to write; named after the network by default.",
        metavar="FILE",
        rich_help_panel=OUTPUT,
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Overwrite a file of the default name.", rich_help_panel=OUTPUT),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document and nothing else.", rich_help_panel=OUTPUT
    ),
]
SolverOption = Annotated[
    str,
    typer.Option(
        help="How a layer is pruned: auto, greedy, admm, columns, lobs (the paper's), magnitude, "
        "obd, obd-fisher, apozw, random; greedy, lobs and magnitude also with +refine.",
        metavar="NAME",
        autocompletion=complete_solver,
        rich_help_panel=EXPERT,
    ),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        help="What a layer is fitted to: asymmetric (pruned inputs, dense outputs), pruned, dense.",
        metavar="KIND",
        rich_help_panel=EXPERT,
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder that keeps finished work. The same command continues from there.",
        metavar="FOLDER",
        rich_help_panel=MACHINE,
    ),
]
LogOption = Annotated[
    Path | None,
    typer.Option(
        help="Append a JSON line per step, with time and memory.",
        metavar="FILE",
        rich_help_panel=MACHINE,
    ),
]
