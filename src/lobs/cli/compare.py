"""`lobs compare`: a pruned and a dense network side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lobs.cli.folders import FieldOption, LengthOption
from lobs.cli.options import DATA, JsonOption, SamplesOption
from lobs.cli.output import print_json, say, working

FolderArgument = Annotated[
    Path, typer.Argument(help="A folder of transformers or timm.", metavar="FOLDER")
]


def compare(
    small: FolderArgument,
    dense: FolderArgument,
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            help="Text, JSONL, Parquet, a datasets folder, images, or .npy.",
            metavar="PATH",
            rich_help_panel=DATA,
        ),
    ],
    field: FieldOption = None,
    length: LengthOption = None,
    samples: SamplesOption = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="A text that both continue; five samples' beginnings by default. Repeatable.",
            metavar="TEXT",
            rich_help_panel=DATA,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare two folders: metrics of both, agreement, KL divergence, and what both write.

    Examples:
      lobs compare small/ big/ --data test.txt
      lobs compare small/ big/ --data test.jsonl --field text --length 1024 --json
    """
    from lobs.zoo import hub

    reading = hub.Reading(length=length, samples=samples, field=field)
    with working(json):
        found = hub.compare(small, dense, data, reading=reading, prompts=prompt)
    if json:
        print_json(found)
        return
    for line in _lines(found):
        say(line)


def _lines(found: dict[str, Any]) -> list[str]:
    """Return the comparison as lines for people."""
    both = found["metrics"]
    lines = [
        f"{name}: {both['dense'][name]:.5g} → {both['small'][name]:.5g}"
        for name in ("perplexity", "accuracy")
        if name in both["dense"]
    ]
    if "agreement" in found:
        lines.append(f"agreement: {found['agreement']:.2%} of {found['predictions']:,} predictions")
        lines.append(f"KL(dense ‖ small): {found['kl']:.4g} nats for each prediction")
    if "cosine" in found:
        lines.append(f"cosine: {found['cosine']:.5f}")
    length = f", length {found['length']}" if "length" in found else ""
    lines.append(f"on {found['samples']:,} samples of {found['data']}{length}")
    for row in found["generations"]:
        lines += ["", *(f"{name + ':':8}{' '.join(text.split())}" for name, text in row.items())]
    return lines
