from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import lobs
from lobs.certificate.verify import verify_errors, verify_masks
from lobs.errors import FileError


@pytest.mark.parametrize("inputs", ["dense", "pruned"])
def test_a_fresh_result_holds(tmp_path, inputs):
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    x = [torch.randn(100, 10)]
    result = lobs.prune(model, x, lobs.Sparsity(0.6), inputs=inputs, progress=False)
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    findings = verify_masks(saved) + verify_errors(saved, model, result.model, x)
    assert len(findings) == 6 and all(f.holds for f in findings)


def test_revived_weights_are_counted(tmp_path):
    model = nn.Sequential(nn.Linear(10, 8))
    result = lobs.prune(model, [torch.randn(50, 10)], lobs.Sparsity(0.5), progress=False)
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    trained = copy.deepcopy(result.model)
    with torch.no_grad():
        trained[0].weight[~result.masks["0.weight"]] += torch.tensor([1.0] * 3 + [0.0] * 37)
    (finding, *_) = verify_masks(saved, trained)
    assert not finding.holds and "3 removed weights are not zero" in finding.detail


def test_another_dense_network_is_noticed(tmp_path):
    model, other = nn.Sequential(nn.Linear(10, 8)), nn.Sequential(nn.Linear(10, 8))
    x = [torch.randn(50, 10)]
    result = lobs.prune(model, x, lobs.Sparsity(0.5), progress=False)
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    assert not verify_errors(saved, other, result.model, x)[0].holds


@pytest.mark.parametrize("bare", [True, False])
def test_files_that_do_not_say_which_parameters_are_whose_are_counted_by_name(tmp_path, bare):
    model = nn.Linear(10, 8) if bare else nn.Sequential(nn.Linear(10, 8))
    result = lobs.prune(model, [torch.randn(50, 10)], lobs.Sparsity(0.5), progress=False)
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    for row in saved.record["layers"]:
        del row["parameters"]
    assert all(f.holds for f in verify_masks(saved)) and len(verify_masks(saved)) == 2
    saved.record["layers"][0]["kept"] += 1
    assert [f.holds for f in verify_masks(saved)] == [True, False]


@pytest.mark.parametrize(
    "nonsense", ["all", [1], {"0.weight": 3}, {"0.weight": ["a", 2]}, {"0.weight": [1, 2, 3]}]
)
def test_a_damaged_record_of_parameters_is_an_error(tmp_path, nonsense):
    result = lobs.prune(
        nn.Sequential(nn.Linear(10, 8)), [torch.randn(50, 10)], lobs.Sparsity(0.5), progress=False
    )
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    rows = [{**row, "parameters": nonsense} for row in saved.record["layers"]]
    with pytest.raises(FileError, match="damaged"):
        verify_masks(dataclasses.replace(saved, record={**saved.record, "layers": rows}))


def test_a_layer_that_runs_twice_is_verified_on_pruned_inputs(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.between, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(self.fc(self.between(self.fc(x).tanh()).tanh()).tanh())

    model, x = Twice(), [torch.randn(60, 6), torch.randn(30, 6)]
    result = lobs.prune(model, x, lobs.Sparsity(0.5), inputs="pruned", progress=False)
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    assert all(f.holds for f in verify_errors(saved, model, result.model, x))
    with torch.no_grad():
        result.model.fc.weight.mul_(1.5)
    assert not verify_errors(saved, model, result.model, x)[0].holds


def test_lost_zeros_are_told_layer_by_layer(tmp_path):
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 3))
    result = lobs.prune(
        model, [torch.randn(50, 10)], lobs.Sparsity(0.5, scope="layer"), progress=False
    )
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    state = copy.deepcopy(result.model.state_dict())
    place = (~result.masks["2.weight"]).nonzero()[0].tolist()
    state["2.weight"][tuple(place)] = -0.25
    del state["3.weight"]
    state["0.weight"] = state["0.weight"][:, :9]
    findings = {f.check: f for f in verify_masks(saved, state)}
    assert not findings["mask 2.weight"].holds
    assert (
        "1 removed weights are not zero (8.3% of 12); the largest is 0.25, the first at "
        f"{tuple(place)}" in (findings["mask 2.weight"].detail)
    )
    assert (
        "no such tensor" in findings["mask 3.weight"].detail
        and "shape" in findings["mask 0.weight"].detail
    )


@pytest.mark.parametrize("along", ["columns", "channels"])
def test_a_broken_pattern_is_found_though_every_count_is_right(along, tmp_path):
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 6))
    result = lobs.prune(
        model, [torch.randn(40, 8, 6, 6)], lobs.NByM(2, 4, along=along), progress=False
    )
    result.save(tmp_path / "good.safetensors")
    good = verify_masks(lobs.load(tmp_path / "good.safetensors"))
    assert [f.check for f in good if f.check.startswith("pattern")] == ["pattern 0", "pattern 3"]
    assert all(f.holds for f in good)
    # Move one weight of the last layer into a group that has its two already.
    mask, weight = result.masks["3.weight"], result.model[3].weight.detach()
    full = int(mask[0, :4].int().argmin())
    gone = 4 + int(mask[0, 4:8].int().argmax())
    mask[0, full], mask[0, gone] = True, False
    weight[0, full], weight[0, gone] = 1.0, 0.0
    result.save(tmp_path / "bad.safetensors")
    bad = {f.check: f for f in verify_masks(lobs.load(tmp_path / "bad.safetensors"))}
    assert bad["count 3"].holds and bad["mask 3.weight"].holds and bad["pattern 0"].holds
    assert not bad["pattern 3"].holds and "1 groups" in bad["pattern 3"].detail


@pytest.mark.parametrize(
    "settings",
    [
        "NByM",
        ["target"],
        {"target": 5},
        {"target": "NByM(n=(, m=4, along='columns')"},
        {"target": "NByM(n=9, m=4, along='columns')"},
        {"target": "NByM(n=2, m=0, along='columns')"},
        {"target": "NByM(n=2, m=4, along='rows')"},
        {"target": "NByM(n=[], m=4, along='columns')"},
    ],
)
def test_a_record_of_a_pattern_may_say_anything(settings, tmp_path):
    model = nn.Sequential(nn.Linear(8, 4))
    result = lobs.prune(model, [torch.randn(20, 8)], lobs.Sparsity(0.5), progress=False)
    lobs.save(
        result.model,
        tmp_path / "x.safetensors",
        result.masks,
        {**result.record(), "settings": settings},
    )
    try:
        assert all(f.holds for f in verify_masks(lobs.load(tmp_path / "x.safetensors")))
    except FileError as error:
        assert "damaged" in str(error)
