"""`lobs verify`: check that a saved result is what its record says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lobs.cli.folders import is_folder, verify_folder
from lobs.cli.options import DATA, CodeOption, JsonOption, TrustOption, complete_file
from lobs.cli.output import print_json, say, working
from lobs.errors import printable

if TYPE_CHECKING:
    from lobs.certificate.verify import Finding
    from lobs.storage.checkpoint import Checkpoint

FileArgument = Annotated[
    Path,
    typer.Argument(
        help="A network or a folder that lobs prune wrote, or PruningResult.save.",
        metavar="FILE",
        autocompletion=complete_file,
    ),
]


def verify(
    file: FileArgument,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights trained from this file (safetensors): which zeros did they lose?",
            metavar="FILE",
            rich_help_panel=DATA,
        ),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute/--no-recompute",
            help="Do not recompute the layers' errors from the data.",
            rich_help_panel=DATA,
        ),
    ] = True,
    code: CodeOption = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Check masks, counts and recorded errors of a file; exit code 1 if one is wrong.

    Examples:
      lobs verify lenet300-keep7.safetensors
      lobs verify pruned.safetensors --weights tuned.safetensors
      lobs verify small/
    """
    if is_folder(str(file), None):
        verify_folder(file, json=json)
        return
    from lobs.certificate.verify import verify_masks
    from lobs.cli.subject import require_file
    from lobs.storage import checkpoint

    require_file(file)
    saved = checkpoint.load(file)
    _require_zeros(file, saved)
    if weights is not None:
        findings = verify_masks(saved, checkpoint.load(weights).state_dict)
        skipped = "only zeros and counts were checked"
    else:
        findings, skipped = verify_masks(saved), _why_skipped(saved) if recompute else ""
        if recompute and not skipped:
            with working(json):
                findings += _recompute(file, saved, trust, code)
    good = all(finding.holds for finding in findings)
    if json:
        rows = [asdict(finding) for finding in findings]
        print_json({"file": str(file), "holds": good, "findings": rows, "skipped": skipped})
    else:
        for finding in findings:
            line = printable(f"{finding.check}: {finding.detail}")
            say(f"{'ok  ' if finding.holds else 'FAIL'}  {line}")
        verdict = "everything holds" if good else "something does not hold"
        say(skipped if skipped and good else verdict)
    if not good:
        raise typer.Exit(1)


def _require_zeros(file: Path, saved: Checkpoint) -> None:
    from lobs.errors import FileError

    if saved.record.get("shrunk"):
        raise FileError(
            f"'{file}' was shrunk: the removed weights are gone, and no zeros are left to check. "
            "Verify the file it was made from."
        )
    if not saved.masks:
        raise FileError(
            f"'{file}' holds no masks, so there are no zeros to check. Give a file that `lobs "
            "prune --out` or PruningResult.save wrote."
        )


def _why_skipped(saved: Checkpoint) -> str:
    """Return why errors cannot be recomputed; empty where they can."""
    from lobs.pruning.result import changed_since

    if since := changed_since(saved.record):
        return f"errors not recomputed: {since} since they were recorded"
    if "experts" in (saved.record.get("settings") or {}):
        return "errors not recomputed: whole experts have left the network"
    if "stages" in saved.record:
        return "errors not recomputed: a network pruned in stages has no record of them"
    if not isinstance(saved.record.get("origin"), str):
        return "errors not recomputed: a file saved from Python does not name its calibration data"
    return ""


def _recompute(file: Path, saved: Checkpoint, trust: bool, code: str | None) -> list[Finding]:
    from lobs.calibration.forward import fitted
    from lobs.calibration.kept_back import BOTH, KEPT_BACK, divided
    from lobs.certificate.verify import Finding, verify_errors, verify_guarantee, verify_margins
    from lobs.cli.subject import open_subject, require_trust
    from lobs.storage.run_store import weights_hash

    origin = saved.record["origin"]
    if code != origin:
        require_trust(file, origin, trust, otherwise=", or --no-recompute")
    dense = open_subject(origin, saved.record.get("calibration_limit"), trust=trust)
    pruned = open_subject(str(file), trust=trust, network=code)
    expected = saved.record.get("origin_weights")
    same = expected is None or expected == weights_hash(dense.model)
    source = Finding(
        "dense network",
        same,
        f"{saved.record['origin']} {'is' if same else 'is not'} the one that was pruned",
    )
    batches, kept_back = dense.batches, dense.held_out
    settings = saved.record.get("settings")
    parts = settings.get(KEPT_BACK) if isinstance(settings, dict) else None
    if parts is not None:
        batches, _, certifying = divided(fitted(dense.model, batches), certify=parts == BOTH)
        kept_back = certifying or kept_back
    return [
        source,
        *verify_errors(saved, dense.model, pruned.model, batches),
        *verify_margins(saved, dense.model, pruned.model, batches, kept_back),
        *verify_guarantee(saved, dense.model, pruned.model, kept_back),
    ]
