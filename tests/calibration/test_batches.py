from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lobs
from lobs.errors import CalibrationError


def dense():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 6 * 6, 3)
    )


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids, scale=1.0):
        return self.out(self.embed(ids) * scale)


def refusal(model, batch):
    with pytest.raises(CalibrationError) as refused:
        lobs.prune(model, [batch], lobs.Sparsity(0.5))
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "given", "cast"),
    [
        (torch.float32, torch.float64, "float"),
        (torch.float64, torch.float32, "double"),
        (torch.float32, torch.float16, "float"),
        (torch.float32, torch.uint8, "float"),
    ],
)
@pytest.mark.parametrize(("make", "shape"), [(dense, (20, 6)), (convolutional, (20, 1, 8, 8))])
def test_a_batch_of_another_type_is_refused_with_the_cast_that_runs(make, shape, kind, given, cast):
    said = refusal(make().to(kind), torch.ones(shape).to(given))
    assert said.endswith(f"It runs with x.{cast}(): the batch is {given}, the network {kind}.")


def test_one_image_without_a_dimension_of_samples_is_refused_with_the_way_to_add_it():
    said = refusal(convolutional(), torch.randn(1, 8, 8))
    assert (
        "It runs with x.unsqueeze(0)" in said
        and "of shape (1, 8, 8), lack a dimension of samples?" in said
    )


def test_images_without_a_dimension_of_channels_are_refused_with_the_way_to_add_it():
    said = refusal(convolutional(), (torch.randn(20, 8, 8), torch.zeros(20)))
    assert "It runs with x.unsqueeze(1)" in said and "lack a dimension of channels?" in said


def test_a_wrong_type_and_a_wrong_shape_are_mended_together():
    assert "It runs with x.float().unsqueeze(0)" in refusal(
        convolutional(), torch.randn(1, 8, 8).double()
    )


def test_a_vector_that_the_network_takes_stays_a_batch():
    assert (
        lobs.prune(dense(), [torch.randn(6)], lobs.Sparsity(0.5), solver="magnitude").kept_fraction
        < 1
    )


@pytest.mark.parametrize(
    ("kind", "cast"), [("float32", ""), ("float64", ".float()"), ("int64", "")]
)
def test_a_numpy_array_is_refused_with_its_type_its_shape_and_the_conversion(kind, cast):
    for batch in (np.zeros((20, 6), kind), (np.zeros((20, 6), kind), np.zeros(20))):
        said = refusal(dense(), batch)
        assert (
            f"({kind} of shape (20, 6)) to a network of torch.float32: write "
            f"torch.from_numpy(x){cast}." in said
        )


def test_a_numpy_array_in_place_of_a_list_of_batches_is_refused():
    with pytest.raises(
        CalibrationError,
        match=r"array of float64 of shape \(20, 6\): write \[torch.from_numpy\(x\).float\(\)\]",
    ):
        lobs.prune(dense(), np.zeros((20, 6)), lobs.Sparsity(0.5))


def test_keyword_arguments_are_mended_by_name():
    said = refusal(Named(), {"ids": np.zeros((20, 5), int), "scale": torch.ones(20, 5, 1).double()})
    assert (
        "It runs with torch.from_numpy(ids), scale.float(): 'ids' is a numpy array of int64, "
        "'scale' is torch.float64" in said
    )


def test_a_remedy_that_does_not_run_is_not_given():
    for batch in (
        torch.randn(20, 7),
        torch.randn(20, 7).double(),
        torch.zeros(6, dtype=torch.long),
    ):
        assert "It runs with" not in refusal(dense(), batch)


def test_a_failure_that_does_not_repeat_is_not_put_down_to_the_batch():
    model, calls = dense(), []

    def once(*_):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not today")

    model.register_forward_pre_hook(once)
    assert refusal(model, torch.randn(20, 6)).endswith("raised ValueError: not today")
