"""`lobs export`: write a network as a smaller file, or for another program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.files import default_name, distinct, file_of, unclaimed
from lobs.cli.options import (
    OUTPUT,
    CodeOption,
    ForceOption,
    JsonOption,
    OutOption,
    SubjectArgument,
    TrustOption,
)
from lobs.cli.output import Column, print_json, print_table, say
from lobs.errors import LobsError
from lobs.storage.outputs import output_path

if TYPE_CHECKING:
    from lobs.storage.checkpoint import Checkpoint

FORMATS = {"compact": ".compact.safetensors", "onnx": ".onnx", "torch": ".pt2"}
_BY_ENDING = {".safetensors": "compact", ".onnx": "onnx", ".pt2": "torch"}


def export(
    network: SubjectArgument,
    code: CodeOption = None,
    trust: TrustOption = False,
    out: OutOption = None,
    force: ForceOption = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="compact (small safetensors), onnx, or torch (a torch.export program); from the "
            "ending of --out, or compact, if not given.",
            metavar="KIND",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    values: Annotated[
        str,
        typer.Option(
            help="Kept values in compact files: same, float16, or int8 per channel.",
            metavar="KIND",
            rich_help_panel=OUTPUT,
        ),
    ] = "same",
    json: JsonOption = False,
) -> None:
    """Write a compact file, an ONNX model or a torch.export program.

    Every byte of a compact file is accounted for. ONNX files are run in onnxruntime and compared.

    Examples:
      lobs export small.safetensors
      lobs export small.safetensors --out small.onnx
    """
    form = _format(form, out)
    if form != "compact" and values != "same":
        raise LobsError(
            f"--values {values} goes with --format compact; {form} files hold the values as they "
            "are."
        )
    default = Path(default_name(network, ending=FORMATS[form]))
    target = output_path(unclaimed(out, default, force=force), default.suffix)
    distinct(target, "--out", file_of(network))
    if form == "compact":
        _compact(network, target, values, (trust, code), json)
    else:
        _program(network, target, form, (trust, code), json)


def _format(form: str | None, out: Path | None) -> str:
    """Return the format that `--format` or the ending of `--out` names."""
    if form is not None and form not in FORMATS:
        raise LobsError(f"--format {form} is unknown. There are: {', '.join(FORMATS)}.")
    return form or _BY_ENDING.get("" if out is None else out.suffix.lower(), "compact")


def _compact(
    network: str, target: Path, values: str, access: tuple[bool, str | None], json: bool
) -> None:
    from dataclasses import asdict
    from typing import cast

    from lobs.deploy.export import dense_sizes
    from lobs.storage.checkpoint import save_compact
    from lobs.storage.compact import Values

    trust, code = access
    saved = _checkpoint(network, trust)
    # The report's curves can outweigh a network.
    record = {key: value for key, value in saved.record.items() if key != "preview"}
    record |= {} if code is None else {"network": code}
    done = save_compact(saved.state_dict, target, saved.masks, record, values=cast(Values, values))
    others = dense_sizes(saved.state_dict)
    if json:
        documents = [{**asdict(t), "stored_bytes": t.stored_bytes} for t in done.tensors]
        sizes = {"file_bytes": done.file_bytes, "header_bytes": done.header_bytes, "others": others}
        print_json({"network": network, "out": str(target), "tensors": documents, **sizes})
        return
    columns = [
        Column("tensor"),
        Column("shape", 3),
        Column("kept"),
        Column("code", 1),
        Column("values", 2),
        Column("positions B", 4),
        Column("values B", 4),
        Column("stored B"),
        Column("dense B"),
        Column("rounded by", 4),
    ]
    rows = [
        [
            t.name,
            "×".join(map(str, t.shape)) or "scalar",
            f"{t.kept:,}",
            t.code,
            t.values,
            f"{t.position_bytes:,}",
            f"{t.value_bytes:,}",
            f"{t.stored_bytes:,}",
            f"{t.dense_bytes:,}",
            f"{t.largest_error:.2g}",
        ]
        for t in done.tensors
    ]
    print_table(f"{target}: every byte", columns, rows)
    say(f"header and record {done.header_bytes:,} bytes; file {done.file_bytes:,} bytes")
    for name, size in others.items():
        share = f"{done.file_bytes / size:.1%} of it"
        say(f"{name + ' file with zeros':<24} {size:>12,} bytes; this file is {share}")


def _checkpoint(network: str, trust: bool) -> Checkpoint:
    """Return a file's content as it is: files whose network is unknown can be made smaller too."""
    from lobs.cli.subject import open_subject
    from lobs.storage import checkpoint

    if Path(network).is_file():
        return checkpoint.load(network)
    subject = open_subject(network, trust=trust)
    return checkpoint.Checkpoint(subject.model.state_dict(), {}, {"network": subject.network})


def _program(
    network: str, target: Path, form: str, access: tuple[bool, str | None], json: bool
) -> None:
    from lobs.cli.subject import open_subject
    from lobs.deploy.export import export_onnx, export_program

    trust, code = access
    subject = open_subject(network, 1, trust=trust, network=code)
    example = take(subject.first(), 2)
    facts: dict[str, Any]
    if form == "onnx":
        done = export_onnx(subject.model, target, example)
        facts = {
            "opset": done.opset,
            "inputs": list(done.inputs),
            "largest_difference": done.largest_difference,
        }
        words = (
            f"ONNX opset {done.opset}; onnxruntime differs from torch by "
            f"{done.largest_difference:.1e} at most"
        )
    else:
        export_program(subject.model, target, example)
        facts, words = {}, "a torch.export program; its output on an example is the network's"
    if json:
        print_json({"network": network, "out": str(target), "format": form, **facts})
        return
    say(f"{target}: {words}")


def take(batch: Any, count: int) -> Any:
    """Return a batch of exactly `count` samples: cut, or repeated where it has fewer."""
    import torch

    def fit(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or not len(value):
            return value
        return value.repeat(-(-count // len(value)), *[1] * (value.dim() - 1))[:count].contiguous()

    if isinstance(batch, dict):
        return {key: fit(value) for key, value in batch.items()}
    return fit(batch[0] if isinstance(batch, tuple | list) else batch)
