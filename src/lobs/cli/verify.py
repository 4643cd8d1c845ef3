"""`lobs verify`: does a saved result keep its promises?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lobs._system.progress import shown
from lobs.cli.common import JsonOption, TrustOption, print_json, say

if TYPE_CHECKING:
    from lobs.certificate.verify import Finding
    from lobs.storage.checkpoint import Checkpoint


def verify(
    file: Annotated[
        Path, typer.Argument(help="A network saved by `lobs prune --out` or `PruningResult.save`.")
    ],
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights that came out of this file (safetensors): which zeros did they lose?"
        ),
    ] = None,
    recompute: Annotated[
        bool, typer.Option(help="Also recompute every layer's error from the data.")
    ] = True,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Check that masks hold, counts are right, and the recorded errors are what the data says; exit code 1 if not.

    Examples: `lobs verify lobs-demo/lenet300-7pct.safetensors`; `lobs verify pruned.safetensors
    --weights tuned.safetensors`
    """
    from lobs.certificate.verify import verify_masks
    from lobs.cli.subject import require_file
    from lobs.errors import FileError
    from lobs.pruning.result import changed_since
    from lobs.storage import checkpoint

    require_file(file)
    saved = checkpoint.load(file)
    if saved.record.get("shrunk"):
        raise FileError(
            f"'{file}' was shrunk: what was removed is gone, and no zeros are left to check. "
            "Verify what it was made of."
        )
    if not saved.masks:
        raise FileError(
            f"'{file}' holds no masks, so that there are no zeros to check. Give what `lobs prune "
            "--out` or PruningResult.save wrote."
        )
    findings = verify_masks(saved)
    skipped = ""
    if weights is not None:
        findings, skipped = (
            verify_masks(saved, checkpoint.load(weights).state_dict),
            "only zeros and counts were checked",
        )
    elif recompute and (since := changed_since(saved.record)):
        skipped = f"errors not recomputed: {since} since they were recorded"
    elif recompute and "stages" in saved.record:
        skipped = "errors not recomputed: a network pruned in stages has no record of them"
    elif recompute and isinstance(saved.record.get("origin"), str):
        with shown(not json):
            findings += _recompute(file, saved, trust)
    elif recompute:
        skipped = "errors not recomputed: the file does not say where the dense network comes from"
    good = all(f.holds for f in findings)
    if json:
        print_json(
            {
                "file": str(file),
                "holds": good,
                "findings": [asdict(f) for f in findings],
                "skipped": skipped,
            }
        )
    else:
        for finding in findings:
            say(f"{'ok  ' if finding.holds else 'FAIL'}  {finding.check}: {finding.detail}")
        say(
            skipped
            if skipped and good
            else "everything holds"
            if good
            else "something does not hold"
        )
    if not good:
        raise typer.Exit(1)


def _recompute(file: Path, saved: Checkpoint, trust: bool) -> list[Finding]:
    from lobs.certificate.verify import Finding, verify_errors
    from lobs.cli.subject import open_subject, require_trust
    from lobs.storage.run_store import weights_hash

    origin = saved.record["origin"]
    if ":" in origin:  # not the path of a checkpoint, which is asked the same when it is opened
        require_trust(file, origin, trust, otherwise=", or --no-recompute")
    dense = open_subject(origin, saved.record.get("calibration_limit"), trust=trust)
    pruned = open_subject(str(file), trust=trust)
    expected = saved.record.get("origin_weights")
    same = expected is None or expected == weights_hash(dense.model)
    source = Finding(
        "dense network",
        same,
        f"{saved.record['origin']} {'is' if same else 'is not'} the one that was pruned",
    )
    return [source, *verify_errors(saved, dense.model, pruned.model, dense.batches)]
