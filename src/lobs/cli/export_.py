"""`lobs export`: a network as a smaller file, or for another program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lobs.cli.common import (
    JsonOption,
    SubjectArgument,
    TrustOption,
    distinct,
    file_of,
    print_json,
    print_table,
    say,
    unclaimed,
    writable,
)
from lobs.errors import LobsError

if TYPE_CHECKING:
    from lobs.storage.checkpoint import Checkpoint

FORMATS = {"compact": ".compact.safetensors", "onnx": ".onnx", "torch": ".pt2"}


def export(
    network: SubjectArgument,
    form: Annotated[
        str,
        typer.Option(
            "--format", help="compact: small safetensors; onnx; torch: a torch.export program."
        ),
    ] = "compact",
    out: Annotated[
        Path | None, typer.Option(help="The file to write; beside you if not given.")
    ] = None,
    values: Annotated[
        str, typer.Option(help="Kept values in compact files: same, float16, or int8 per channel.")
    ] = "same",
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Write a compact file (every byte accounted for), ONNX (checked in onnxruntime) or a torch.export program.

    Examples: `lobs export small.safetensors --out small.compact.safetensors`; `lobs export
    small.safetensors --format onnx`
    """
    if form not in FORMATS:
        raise LobsError(f"--format {form} is unknown. There are: {', '.join(FORMATS)}.")
    if form != "compact" and values != "same":
        raise LobsError(
            f"--values {values} goes with --format compact; {form} files hold the values as they "
            "are."
        )
    target = unclaimed(out, Path(Path(network.replace(":", "-")).stem + FORMATS[form]))
    distinct(writable(target), "--out", file_of(network))
    if form == "compact":
        _compact(network, target, values, trust, json)
    else:
        _program(network, target, form, trust, json)


def _compact(network: str, target: Path, values: str, trust: bool, json: bool) -> None:
    from dataclasses import asdict
    from typing import cast

    from lobs.deploy.export import dense_sizes
    from lobs.storage.checkpoint import save_compact
    from lobs.storage.compact import Values

    saved = _checkpoint(network, trust)
    record = {
        key: value for key, value in saved.record.items() if key != "preview"
    }  # the report's curves can outweigh a network
    done = save_compact(target, saved.state_dict, saved.masks, record, values=cast(Values, values))
    others = dense_sizes(saved.state_dict)
    if json:
        documents = [{**asdict(t), "stored_bytes": t.stored_bytes} for t in done.tensors]
        sizes = {"file_bytes": done.file_bytes, "header_bytes": done.header_bytes, "others": others}
        print_json({"network": network, "out": str(target), "tensors": documents, **sizes})
        return
    columns = [
        "tensor",
        "shape",
        "kept",
        "code",
        "values",
        "positions B",
        "values B",
        "stored B",
        "dense B",
        "moved by",
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
        say(
            f"{name + ' file with zeros':<24} {size:>12,} bytes; this file is "
            f"{done.file_bytes / size:.1%} of it"
        )


def _checkpoint(network: str, trust: bool) -> Checkpoint:
    """A file's content as it is, so that files whose network is unknown can be made smaller too."""
    from lobs.cli.subject import open_subject
    from lobs.storage import checkpoint

    if Path(network).is_file():
        return checkpoint.load(network)
    subject = open_subject(network, trust=trust)
    return checkpoint.Checkpoint(subject.model.state_dict(), {}, {"network": subject.network})


def _program(network: str, target: Path, form: str, trust: bool, json: bool) -> None:
    from lobs.cli.subject import open_subject
    from lobs.deploy.export import export_onnx, export_program

    subject = open_subject(network, 1, trust=trust)
    example = take(subject.first(), 2)
    facts: dict[str, Any]
    if form == "onnx":
        done = export_onnx(target, subject.model, example)
        facts = {
            "opset": done.opset,
            "inputs": list(done.inputs),
            "largest_difference": done.largest_difference,
        }
        words = f"ONNX opset {done.opset}; onnxruntime differs from torch by {done.largest_difference:.1e} at most"
    else:
        export_program(subject.model, example, target)
        facts, words = {}, "a torch.export program; its answer on an example is the network's"
    if json:
        print_json({"network": network, "out": str(target), "format": form, **facts})
        return
    say(f"{target}: {words}")


def take(batch: Any, count: int) -> Any:
    """A batch of exactly `count` samples out of one: cut, or repeated where it has fewer."""
    import torch

    def fit(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or not len(value):
            return value
        return value.repeat(-(-count // len(value)), *[1] * (value.dim() - 1))[:count].contiguous()

    if isinstance(batch, dict):
        return {key: fit(value) for key, value in batch.items()}
    return fit(batch[0] if isinstance(batch, tuple | list) else batch)
