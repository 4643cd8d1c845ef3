"""Main paths on the pretended device; prints one JSON object: what each path raised, or null.

python -m tests.devices.paths [--plant]
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn

import lobs
from lobs import Block, Budget, ErrorBudget, NByM, Numerics, Sparsity, Structured
from lobs.pruning.sweep import sweep
from tests.devices.pretended import DEVICE, NAME, Pretended, Pretending


def images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 4)).to(NAME)


def words():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2)).to(NAME)


IMAGES = list(torch.randn(3, 30, 2, 6, 6, generator=torch.Generator().manual_seed(1)))
WORDS = list(torch.randn(3, 10, 5, 8, generator=torch.Generator().manual_seed(1)))
FOLDER = Path(tempfile.mkdtemp())


def pruned(target=None, make=images, **options):
    data = IMAGES if make is images else WORDS
    target = Sparsity(0.5) if target is None else target
    result = lobs.prune(make(), data, target, progress=False, **options)
    for name, tensor in (*result.model.state_dict().items(), *result.masks.items()):
        assert name.endswith("num_batches_tracked") or tensor.device == DEVICE, (name, tensor)
    assert 0 < result.kept < result.total
    result.summary()
    return result


def score(model):
    return float(model(IMAGES[0].to(NAME)).mean() > 9)


def certified():
    lobs.certify(images(), pruned(refit="layers").model, IMAGES, held_out=IMAGES)


def files():
    result = pruned(held_out=IMAGES)
    saved = lobs.load(result.save(FOLDER / "x.safetensors"))
    findings = lobs.certificate.verify_errors(saved, images(), result.model, IMAGES)
    findings += lobs.certificate.verify_guarantee(saved, images(), result.model, IMAGES)
    findings += lobs.certificate.verify_margins(saved, images(), result.model, IMAGES, IMAGES)
    assert all(finding.holds for finding in findings), findings
    result.export(FOLDER / "y.safetensors")
    result.report(FOLDER / "r.html", dense=images(), example=IMAGES[0])
    again = images()
    again.load_state_dict(lobs.load(FOLDER / "y.safetensors").state_dict)


def resumed():
    how = {"execution": lobs.Execution(resume=FOLDER / "run"), "refit": "layers"}
    first, second = pruned(**how), pruned(**how)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def trained():
    result = pruned(refit="layers")
    model, masks = result.model, result.masks
    optimiser = torch.optim.AdamW(model.parameters(), 0.01)
    with lobs.hold(model, masks, optimiser):
        model(IMAGES[0].to(NAME)).square().mean().backward()
        optimiser.step()
    for name, mask in masks.items():
        assert not model.state_dict()[name][~mask].any()


def retrained():
    result = pruned(refit="layers")
    labelled = [(x, torch.zeros(len(x), dtype=torch.long)) for x in IMAGES]
    lobs.retrain(result.model, result.masks, labelled, iterations=3, progress=False)


PATHS = {
    "defaults": pruned,
    "attention": lambda: pruned(make=words),
    "blocks": lambda: pruned(make=words, refit="blocks"),
    "files and verify": files,
    "resume": resumed,
    "hold": trained,
    "retrain": retrained,
    "structured": lambda: pruned(Structured(0.5)),
    "n:m": lambda: pruned(NByM(2, 4)),
    "block": lambda: pruned(Block(0.5, (2, 2))),
    "error budget": lambda: pruned(ErrorBudget(0.3, relative=True)),
    "operations": lambda: pruned(Budget(flops=3000)),
    "drop by score": lambda: pruned(Budget(drop=0.5, evaluate=score)),
    "drop": lambda: pruned(Budget(drop=0.4)),
    "dense inputs": lambda: pruned(inputs="dense", numerics=Numerics(batch_norm=False)),
    "pruned inputs": lambda: pruned(inputs="pruned", numerics=Numerics(batch_norm=False)),
    "biases": lambda: pruned(numerics=Numerics(prune_bias=True)),
    "certify": certified,
    "forecast": lambda: lobs.forecast(images(), IMAGES, keep=0.5),
    "memory": lambda: pruned(execution=lobs.Execution(memory="4GB")),
    "sweep": lambda: sweep(images(), IMAGES, lambda m: 1.0, [0.5, 0.2], progress=False),
    **{
        f"solver {name}": lambda name=name: pruned(solver=name, refit="layers")
        for name in lobs.SOLVERS
    },
}  # fmt: skip


def plant():
    """Make what is created like a tensor forget its device, as a mistake would."""
    Pretended.new_zeros = lambda self, *size, **how: torch.zeros(
        *size, dtype=how.get("dtype", self.dtype)
    )


def main():
    warnings.simplefilter("ignore")
    if "--plant" in sys.argv:
        plant()
    found = {}
    only = [word for word in sys.argv[1:] if not word.startswith("--")]
    with Pretending():
        for name, path in PATHS.items():
            if only and name not in only:
                continue
            try:
                path()
                found[name] = None
            except BaseException as error:
                own = [x for x in traceback.extract_tb(error.__traceback__) if "lobs" in x.filename]
                where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "test"
                said = (str(error).splitlines() or [""])[0][:300]
                found[name] = f"{type(error).__name__} at {where}: {said}"
    sys.stdout.write(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
