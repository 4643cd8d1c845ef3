"""Networks whose outputs, layers or surroundings are not those of the textbook."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.forward import main_output
from lobs.errors import CalibrationError, UnsupportedLayerError


@dataclass
class Answer:
    logits: torch.Tensor
    note: str = ""


class Returning(nn.Module):
    """Return what a function makes of the last layer's output."""

    def __init__(self, made):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 6))
        self.made = made

    def forward(self, x):
        return self.made(self.body(x))


def batches(n=3):
    torch.manual_seed(1)
    return [torch.randn(64, 10) for _ in range(n)]


def pruned(model, **options):
    result = lobs.prune(model, batches(), keep=0.5, progress=False, refit="layers", **options)
    assert result.kept == round(0.5 * result.total)
    assert sum(int((~m).sum()) for m in result.masks.values()) == result.total - result.kept
    return result


@pytest.mark.parametrize(
    "made",
    [
        Answer,
        lambda z: SimpleNamespace(logits=z, rest=None),
        lambda z: {"a": [z, None], "b": 3, "c": Answer(z)},
    ],
)
def test_outputs_in_a_dataclass_or_a_namespace_are_found(made):
    model = Returning(made)
    wanted = model.body(batches()[0])
    found = main_output(made(wanted))
    assert found is not None and found.numel() % wanted.numel() == 0
    assert pruned(model).certificate.measured > 0


@pytest.mark.parametrize("made", [lambda z: z.argmax(dim=-1), lambda z: None])
def test_without_numbers_in_the_output_layers_count_relative_to_their_own_outputs(made):
    model = Returning(made)
    with torch.no_grad():
        model.body[2].weight.mul_(100)  # absolute errors would protect this layer alone
    with pytest.warns(UserWarning, match="count relative to each layer's own output"):
        result = pruned(model)
    assert all(layer.kept > 0.2 * layer.total for layer in result.layers)


def test_layers_without_weights_and_complex_ones_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty, self.after = nn.Linear(10, 0), nn.Linear(0, 8)
            self.wave = nn.Linear(10, 8, dtype=torch.cfloat)
            self.out = nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.wave(x.to(torch.cfloat)).abs() + self.after(self.empty(x)))

    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:  # torch warns too
        warnings.simplefilter("always")
        result = pruned(Model())
    text = " ".join(str(warning.message) for warning in told)
    assert "it has no weights" in text and "its weight is complex" in text
    assert [layer.name for layer in result.layers] == ["out"]


def test_a_scripted_network_and_one_inside_vmap_are_refused_in_one_sentence():
    model = Returning(lambda z: z).body
    with pytest.raises(UnsupportedLayerError, match=r"scripted.*before torch\.jit\.script"):
        pruned(torch.jit.script(model))

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, x):
            return torch.vmap(self.body)(x)

    with pytest.raises(CalibrationError, match=r"layer 'body.0' runs inside torch\.vmap"):
        pruned(Mapped())
