from __future__ import annotations

import pytest
import torch

from lobs.errors import DataError
from lobs.zoo.datasets import mnist


def test_mnist_is_the_real_one():
    train, test = mnist.load("train"), mnist.load("test")
    assert train.images.shape == (60_000, 1, 28, 28) and test.images.shape == (10_000, 1, 28, 28)
    assert torch.bincount(test.labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert float(train.images.min()) == 0 and float(train.images.max()) == 1


def test_batches_cover_the_first_samples_in_order():
    batches = mnist.load("test").batches(300, 1000)
    assert [len(y) for _, y in batches] == [300, 300, 300, 100]


def test_a_damaged_file_is_noticed(monkeypatch):
    files = dict(mnist._FILES)
    (images, _), labels = files["test"]
    monkeypatch.setitem(mnist._FILES, "test", ((images, "0" * 64), labels))
    with pytest.raises(DataError, match="is damaged"):
        mnist.load("test")
