"""No certified input changes its answer, and the share is shown, stored and recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.comparison import PerSample, between
from lobs.certificate import bound, certify
from lobs.certificate.verify import verify_margins
from lobs.layers import find_layers
from tests.certificate.test_certify import random_chain

BOTH = ["dense", "pruned", "asymmetric"]


def pruned(model, x, inputs, **more):
    return lobs.prune(
        model, [x[:5], x[5:]], lobs.Sparsity(0.1, scope="layer"), inputs=inputs, refit="layers",
        progress=False, numerics=lobs.Numerics(batch_norm=False), **more,
    )  # fmt: skip


def per_sample(model, result, x, inputs):
    """Limits of every sample, and how far it moved."""
    names = [row.name for row in result.layers]
    before, after = (find_layers(m, names) for m in (model, result.model))
    pairs = list(zip(before, after, strict=True))
    found = between(model, result.model, pairs, inputs).over([x])
    sharing = certify.Sharing(model, result.model, names, inputs, [x])
    record, limits = found.per_sample, torch.zeros(len(x), dtype=torch.float64)
    for name, gain in sharing._gains.items():
        limits += gain * torch.cat(record._moved[name])
    with torch.no_grad():
        y, z = model(x), result.model(x)
    return record, limits, (y - z).norm(dim=1), y.argmax(1) != z.argmax(1)


@pytest.mark.parametrize("inputs", BOTH)
def test_every_samples_limit_holds_and_no_certified_answer_changes(inputs):
    certified = 0
    for seed in range(30):
        model, x = random_chain(seed)
        model.eval()
        result = pruned(model, x, inputs)
        record, limits, moved, changed = per_sample(model, result, x, inputs)
        assert (moved <= limits * (1 + 1e-4) + 1e-6).all()
        sure = torch.cat(record._margins) > 2**0.5 * limits
        assert not (sure & changed).any()
        assert result.certificate.certified == pytest.approx(float(sure.double().mean()))
        certified += int(sure.sum())
    assert certified > 0 or inputs != "asymmetric"


def test_the_constant_is_the_smallest_that_holds():
    """A change of norm margin / √2, against the top number and for the next, makes a tie."""
    record, y = PerSample(), torch.tensor([[3.0, 1.0, 0.0]])
    toward = torch.tensor([[-1.0, 1.0, 0.0]])
    for share, certain in ((0.999, 1), (1.001, 0)):
        record = PerSample()
        record.add_layer("fc", record.sizes("fc", y), share * toward)
        record.end(y, 1)
        assert record.certified({"fc": 1.0}) == (certain, 1)


def test_it_is_shown_stored_and_recomputed(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)).eval()
    x, other = [torch.randn(200, 12)], [torch.randn(100, 12)]
    result = lobs.prune(model, x, keep=0.7, held_out=other, progress=False)
    found = result.certificate
    with torch.no_grad():
        for share, (data,) in ((found.certified, x), (found.certified_held_out, other)):
            same = (model(data).argmax(1) == result.model(data).argmax(1)).double().mean()
            assert 0.3 < share <= float(same)
    text = result.summary()
    assert "of the answers provably stay" in text
    assert text.splitlines()[1] == f"{found.guarantee}."
    assert "provably stay" in result.report(tmp_path / "r.html").read_text()
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    assert saved.record["certificate"]["certified"] == found.certified
    findings = verify_margins(saved, model, result.model, x, other)
    assert [f.holds for f in findings] == [True, True]
    saved.record["certificate"]["certified"] += 0.05
    assert [f.holds for f in verify_margins(saved, model, result.model, x)] == [False]
    saved.record["certificate"]["certified"] = "all"
    assert [f.holds for f in verify_margins(saved, model, result.model, x)] == [False]


class Mixing(nn.Module):
    """Samples lend each other numbers, which a bound on the whole batch allows."""

    def __init__(self, way):
        super().__init__()
        self.way, self.fc, self.out = way, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.fc(x).relu()
        if self.way == "mean":
            h = h + h.mean(0, keepdim=True)
        if self.way == "order":
            h = torch.cat([h[1:], h[:1]])
        return self.out(h).unsqueeze(1) if self.way == "image" else self.out(h)


@pytest.mark.parametrize("way", ["mean", "order", "image"])
def test_samples_that_mix_are_not_certified_one_by_one(way):
    torch.manual_seed(0)
    data = [torch.randn(40, 6)]
    found = lobs.prune(Mixing(way), data, keep=0.8, progress=False).certificate
    assert found.bound is not None and found.certified is None
    assert "provably stay" not in str(found)


def test_gains_take_the_larger_of_what_memory_held():
    links = [
        bound.Link("a", 0, 0, 3.0, key="a", takes=()),
        bound.Link("b", 2, 2, 4.0, key="b", takes=("a",)),
        bound.Link("cat", 1, 1, key="cat", takes=("a", "b"), joined="stack"),
        bound.Link("w", 5, 5, key="w", takes=("b",), overwrites=("cat",)),
        bound.Link("out", 1, 1, key="out", takes=("cat",)),
    ]
    assert bound.gains(links, ("a", "b")) == {"a": 10.0, "b": 5.0}


def test_the_headline_is_relative_or_absent():
    torch.manual_seed(0)
    result = lobs.prune(nn.Linear(12, 6), [torch.randn(50, 12)], keep=0.5, progress=False)
    assert result.summary().splitlines()[1].startswith("Output change: ")
    assert "% measured" in result.summary().splitlines()[1]
