"""Commands on folders of transformers and timm: what `prune`, `eval` and `verify` do with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.options import DATA
from lobs.cli.output import announce, command_line, print_json, say, working
from lobs.errors import LobsError

if TYPE_CHECKING:
    from lobs.cli.budgets import Amount
    from lobs.targets import Target
    from lobs.zoo.hub import Reading

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="A folder's data: text, JSONL, images, .npy, …",
        metavar="PATH",
        rich_help_panel=DATA,
    ),
]
FieldOption = Annotated[
    str | None,
    typer.Option(
        help="The field of --data that holds the text.",
        metavar="NAME",
        rich_help_panel=DATA,
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens of a sample of --data; 512 or 128.",
        metavar="N",
        rich_help_panel=DATA,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(min=0, help="With --data: seed of the draw.", metavar="N", rich_help_panel=DATA),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        help="For timm:name: its safetensors file.",
        metavar="FILE",
        rich_help_panel=DATA,
    ),
]
JudgedOption = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        help="Samples to measure on; all if not given.",
        metavar="N",
        rich_help_panel=DATA,
    ),
]
DenseOption = Annotated[
    Path | None,
    typer.Option(
        "--dense",
        help="For a folder: the dense network's, if it has moved.",
        metavar="FOLDER",
        rich_help_panel=DATA,
    ),
]


def is_folder(network: str, data: Path | None) -> bool:
    """Return whether a word names a folder of transformers or timm, or a timm network.

    With data any folder is taken for one, so that its fault is named.
    """
    there = bool(network) and Path(network).is_dir()
    return network.startswith("timm:") or (
        there and (data is not None or (Path(network) / "config.json").is_file())
    )


def need_data(data: Path | None, command: str, network: str) -> Path:
    """Return the data, or refuse a folder without any."""
    if data is None:
        raise LobsError(
            f"'{network}' is a folder, which brings no data: add --data text.txt (text, JSONL, "
            f"Parquet, images or .npy) to lobs {command}."
        )
    return data


def refuse_data(data: Path | None, network: str) -> None:
    """Refuse data for a network that brings its own."""
    if data is not None:
        raise LobsError(f"--data goes with a folder of transformers or timm; '{network}' is none.")


def prune_folder(
    network: str,
    data: Path | None,
    amount: Amount,
    target: Target,
    out: Path | None,
    reading: Reading,
    *,
    words: str,
    weights: Path | None,
    options: dict[str, Any],
    report: Path | None,
    time_out: float,
    json: bool,
) -> None:
    """Prune a folder, or a timm network with its weights; print the result."""
    from dataclasses import replace

    from lobs._system.distributed import launched_group
    from lobs.zoo import hub

    given = need_data(data, "prune", network)
    if report is not None and not Path(network).is_dir():
        raise LobsError(f"--report compares two folders, and '{network}' is none: leave it out.")
    name = f"{Path(network).resolve().name if Path(network).is_dir() else network}-{words}"
    place = out or Path(name.replace(":", "-"))
    announce(place, json)
    single = amount.keep is not None or amount.sparsity is not None
    free = single and amount.scope is None and not amount.limits() and not isinstance(
        amount.fraction(), dict
    )  # fmt: skip
    by_share = free and type(target).__name__ == "Sparsity"
    how: dict[str, Any] = {"keep": 1 - amount.fraction()} if by_share else {"target": target}  # type: ignore[operator]
    with working(json), launched_group(time_out) as group:
        if group.size > 1:
            options["execution"] = replace(options["execution"], distributed=True)
        try:
            result = hub.prune(
                network, given, **how, out=place, weights=weights, reading=reading,
                progress=not json, **options,
            )  # fmt: skip
            if report is not None and group.leads:
                _held_out_page(report, place, Path(network), given, reading)
        except KeyboardInterrupt:
            if place.is_dir():
                sys.stderr.write(
                    f"'{place}' keeps the finished blocks: the same command continues there.\n"
                )
            raise
    if not group.leads:  # the first process speaks for all
        return
    written = {} if report is None else {"report": str(report)}
    if json:
        print_json({**result.record(), **written})
        return
    say(result.summary())
    for what, path in written.items():
        say(f"{what}: {path}")


def _held_out_page(report: Path, small: Path, dense: Path, data: Path, reading: Reading) -> None:
    """Write a page about a pruned folder, measured on the samples that pruning held out.

    Args:
        report: the page.
        small: the pruned folder.
        dense: the dense one.
        data: the data that calibrated.
        reading: how they were read; the same draw is made again.
    """
    from lobs.zoo import hub
    from lobs.zoo.hub.rows import prepare
    from lobs.zoo.hub.source import open_source

    read = prepare(open_source(dense), data, reading)
    found = hub.compare(small, dense, read.held_out or read.calibrate)
    where = "held-out samples" if read.held_out else "calibration samples (none was held out)"
    found |= {"data": f"{read.facts['data']}, {where}"}
    found |= {k: read.facts[k] for k in ("length",) if k in read.facts}
    found["samples"] = read.facts["held_out"] or read.facts["samples"]
    write_page(report, found, small)


def write_page(report: Path, found: dict[str, Any], small: Path) -> None:
    """Write a page about a comparison, with the layers of the pruned folder's record.

    Args:
        report: the page.
        found: what `lobs.hub.compare` returned.
        small: the pruned folder.
    """
    from lobs.report import write_comparison
    from lobs.zoo.hub.record import read_record

    layers = read_record(small).get("layers", [])
    write_comparison(report, found, command=command_line(), layers=layers)


def evaluate_folder(
    network: str, data: Path | None, dense: Path | None, reading: Reading, *, json: bool
) -> None:
    """Measure a folder's network and print its metrics."""
    from lobs.zoo import hub

    with working(json):
        given = need_data(data, "eval", network)
        found = hub.evaluate(network, given, dense=dense, reading=reading)
    if json:
        print_json(found)
        return
    for name in ("perplexity", "accuracy", "agreement", "cosine"):
        if name in found:
            say(f"{network}: {name} {found[name]:.5g}")
    length = f", length {found['length']}" if "length" in found else ""
    tokens = f", {found['tokens']:,} tokens" if "tokens" in found else ""
    say(f"on {found['samples']:,} samples of {found['data']}{tokens}{length}")


def verify_folder(folder: Path, *, json: bool) -> None:
    """Check a pruned folder; exit code 1 if something is wrong."""
    from dataclasses import asdict

    from lobs.zoo import hub

    findings = hub.verify(folder)
    good = all(finding.holds for finding in findings)
    if json:
        rows = [asdict(finding) for finding in findings]
        print_json({"file": str(folder), "holds": good, "findings": rows, "skipped": ""})
    else:
        for finding in findings:
            say(f"{'ok  ' if finding.holds else 'FAIL'}  {finding.check}: {finding.detail}")
        say("everything holds" if good else "something does not hold")
    if not good:
        raise typer.Exit(1)
