"""`lobs shrink`: take emptied units and channels out of a network."""

from __future__ import annotations

from dataclasses import asdict

from lobs.cli.files import default_name, distinct, file_of, output_file
from lobs.cli.options import (
    CodeOption,
    ForceOption,
    JsonOption,
    OutOption,
    SubjectArgument,
    TrustOption,
)
from lobs.cli.output import announce, change, print_json, say


def shrink(
    network: SubjectArgument,
    code: CodeOption = None,
    trust: TrustOption = False,
    out: OutOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Remove units without weights and channels that nothing reads; outputs stay the same.

    The summary names what must stay, with the reason. All other commands open the smaller file.

    Examples:
      lobs prune lenet5 --structured units --keep 50% --out half.safetensors
      lobs shrink half.safetensors --out small.safetensors
    """
    target = output_file(out, default_name(network, "shrunk"), force=force)
    distinct(target, "--out", file_of(network))
    announce(target, json)

    from lobs.cli.export_ import take
    from lobs.cli.subject import open_subject
    from lobs.deploy.shrink import shrink as run
    from lobs.storage import checkpoint

    subject = open_subject(network, trust=trust, network=code)
    smaller, report = run(subject.model, [take(subject.first(), 1)])
    before, after = subject.measure(subject.model), subject.measure(smaller)
    facts = {"shrinkage": asdict(report), "before": before, "after": after}
    checkpoint.save(smaller, target, record={"network": subject.network, "shrunk": True, **facts})
    if json:
        print_json({"metric": subject.metric, **facts, "network": str(target)})
        return
    say(str(report))
    if before is not None:
        say(change(subject.metric, before, after))
    say(f"network: {target}")
