"""A budget in bytes holds for the file, and kept counts are non-zeros or it is said."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

import lobs
from lobs import Budget
from lobs.layers import find_layers
from lobs.pruning.feasibility import header_bytes, prunable


def network(kind, seed):
    torch.manual_seed(seed)
    if kind == "images":
        layers = [nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 60)), torch.randn(40, 2, 6, 6)
    widths = [20 + 7 * seed] * (2 + seed % 3)
    layers = [m for a in widths for m in (nn.Linear(a, a), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(widths[0], 50 + seed))
    if seed == 3:
        model[0].weight = model[2].weight  # written twice
    return model, torch.randn(60, widths[0])


@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_the_compact_file_is_never_larger_than_the_budget(kind, tmp_path):
    counted = 0
    for seed in range(5):
        model, x = network(kind, seed)
        for size in (8_000, 11_000, 14_000, 18_000):
            try:
                result = lobs.prune(
                    model, [x], Budget(bytes=size), held_out=[x], refit="layers", progress=False
                )
            except lobs.LobsError as error:
                assert "what cannot be removed" in str(error)
                continue
            file = result.export(tmp_path / "x.safetensors")
            assert file.file_bytes == (tmp_path / "x.safetensors").stat().st_size
            if "header" in result.settings:
                assert "leaves no room for a compact file's header" in result.summary()
                continue
            counted += 1
            assert file.file_bytes <= size
            if result.kept < result.total and seed != 3:  # there a copy is counted dense
                assert file.file_bytes >= size - 3_500
    assert counted >= 12


def normed(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()


def named(name, count, width):
    return OrderedDict((f"{name}_{i}", nn.Linear(width, width)) for i in range(count))


KINDS = {
    "small": lambda: [nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)],
    "lenet": lambda: [
        *(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 3), nn.Flatten()),
        *(nn.Linear(200, 50), nn.ReLU(), nn.Linear(50, 10)),
    ],
    "norms": lambda: [
        *(*normed(1, 16), *normed(16, 16), *normed(16, 16)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    ],
    "many layers": lambda: [m for _ in range(30) for m in (nn.Linear(20, 20), nn.ReLU())],
    "no biases": lambda: [nn.Linear(20, 20, bias=False) for _ in range(5)],
    "long names": lambda: [nn.Sequential(named("a_layer_with_a_long_name", 12, 20))],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prune_bias", [False, True])
def test_the_header_is_estimated_closely_and_never_below(kind, prune_bias, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*KINDS[kind]())
    x = torch.randn(60, *((1, 12, 12) if kind in ("lenet", "norms") else (20,)))
    layers = find_layers(model.eval())
    header = header_bytes(model, layers, prunable(layers, prune_bias))
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    numerics = lobs.Numerics(prune_bias=prune_bias)
    for share in (0.3, 0.5, 0.7):
        size = round(share * dense) + header
        result = lobs.prune(
            model, [x], Budget(bytes=size), numerics=numerics, refit="layers", progress=False
        )
        file = result.export(tmp_path / "x.safetensors")
        assert result.settings["file bytes"] == size >= file.file_bytes
        assert lobs.load(file.path).record["phases"]  # the record was not shortened
        assert file.header_bytes <= header <= 1.25 * file.header_bytes + 300


def test_nearly_dense_files_hold_their_budget_too(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(200, 200)), torch.randn(400, 200)
    for size in (161_000, 164_000, 167_000):
        result = lobs.prune(model, [x], Budget(bytes=size), refit="layers", progress=False)
        assert result.kept < result.total
        assert result.export(tmp_path / "x.safetensors").file_bytes <= size


def test_a_record_that_is_too_long_is_shortened(tmp_path):
    model, x = network("vectors", 1)
    result = lobs.prune(model, [x], Budget(bytes=9_000), refit="layers", progress=False)
    result.settings["blocks"] = ["a long story"] * 500
    file = result.export(tmp_path / "x.safetensors")
    assert file.file_bytes <= 9_000
    again = lobs.load(file.path)
    assert again.record["kept"] == result.kept and "blocks" not in again.record["settings"]


def test_a_tiny_budget_counts_tensors_and_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    result = lobs.prune(model, [torch.randn(64, 8)], Budget(bytes=200), progress=False)
    assert 4 * result.kept + 36 + 9 <= 200
    assert result.settings["header"] > 1000
    assert "The budget counts tensors alone" in result.summary()


@pytest.mark.parametrize("small", [1.0, 1e-7])
def test_kept_weights_that_underflow_are_said(small):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 20, bias=False), nn.Linear(20, 5, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-1, 0, 40) * small)
    result = lobs.prune(
        model.to(torch.float16), [torch.randn(100, 40, dtype=torch.float16)],
        lobs.Sparsity(0.2, scope="layer"), refit="layers", progress=False,
    )  # fmt: skip
    tensors = result.model.state_dict()
    alive = sum(int((t != 0).sum()) for t in tensors.values())
    lost = result.settings.get("underflow", {})
    assert alive + sum(lost.values()) == result.kept
    said = re.search(r"half precision rounds to zero: 0\.weight \((\d+)\)", result.summary())
    assert bool(lost) == bool(said) and (bool(lost) or small == 1.0)
    if said:
        assert int(said[1]) == lost["0.weight"]
