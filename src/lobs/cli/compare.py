"""`lobs compare`: a pruned and a dense network side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lobs.cli.folders import FieldOption, JudgedOption, LengthOption, write_page
from lobs.cli.options import DATA, OUTPUT, JsonOption
from lobs.cli.output import change, print_json, say, working
from lobs.storage.outputs import PAGE, output_path

ReportOption = Annotated[
    Path | None,
    typer.Option(help="Also write an HTML page.", metavar="FILE", rich_help_panel=OUTPUT),
]
SmallArgument = Annotated[
    Path, typer.Argument(help="The folder of the pruned network.", metavar="PRUNED")
]
DenseArgument = Annotated[
    Path, typer.Argument(help="The folder of the dense network.", metavar="DENSE")
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        help="Tasks of EleutherAI's harness, such as arc_easy,piqa: pip install 'lobs\\[lm-eval]'.",
        metavar="NAMES",
        rich_help_panel=DATA,
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Samples of each task; all if not given.", metavar="N", rich_help_panel=DATA
    ),
]
OwnTasksOption = Annotated[
    Path | None,
    typer.Option(
        help="A folder with task files of your own.", metavar="FOLDER", rich_help_panel=DATA
    ),
]


def compare(
    small: SmallArgument,
    dense: DenseArgument,
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
    samples: JudgedOption = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="A text that both continue; five samples' beginnings by default. Repeatable.",
            metavar="TEXT",
            rich_help_panel=DATA,
        ),
    ] = None,
    tasks: TasksOption = None,
    limit: LimitOption = None,
    own_tasks: OwnTasksOption = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Compare two folders: metrics of both, agreement, KL divergence, and what both write.

    Examples:
      lobs compare small/ big/ --data test.txt
      lobs compare small/ big/ --data test.jsonl --field text --length 1024 --json
      lobs compare small/ big/ --data test.txt --report page.html --tasks arc_easy,piqa
    """
    from lobs.zoo import hub

    reading = hub.Reading(length=length, samples=samples, field=field)
    if report is not None:
        output_path(report, PAGE)
    named = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    with working(json):
        found = hub.compare(
            small, dense, data, reading=reading, prompts=prompt, tasks=named, limit=limit,
            own_tasks=own_tasks,
        )  # fmt: skip
        if report is not None:
            write_page(report, found, small)
    if json:
        print_json({**found, **({} if report is None else {"report": str(report)})})
        return
    for line in _lines(found):
        say(line)
    if report is not None:
        say(f"report: {report}")


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
    for task, values in found.get("tasks", {}).items():
        for name, value in values["small"].items():
            before = values["dense"].get(name)
            lines.append(f"{task}: {change(name, before, value)}")
    length = f", length {found['length']}" if "length" in found else ""
    lines.append(f"on {found['samples']:,} samples of {found['data']}{length}")
    for row in found["generations"]:
        lines += ["", *(f"{name + ':':8}{' '.join(text.split())}" for name, text in row.items())]
    return lines
