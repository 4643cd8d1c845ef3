from __future__ import annotations

import pytest
import torch

from lobs import LobsError, zoo
from lobs.zoo.datasets.labelled import LabelledImages
from lobs.zoo.training import Recipe, augmented, train


def data(n=96):
    g = torch.Generator().manual_seed(0)
    return LabelledImages(
        torch.rand(n, 1, 28, 28, generator=g), torch.randint(0, 10, (n,), generator=g)
    )


@pytest.mark.parametrize("warm_up", [0, 1])
def test_training_that_was_interrupted_ends_with_the_same_bits(tmp_path, monkeypatch, warm_up):
    recipe = Recipe(
        3, 0.05, 32, weight_decay=1e-3, input_dropout=0.2, warm_up=warm_up, augment=True
    )
    whole = train(zoo.fresh("lenet300"), data(), recipe, progress=False)
    folder = tmp_path / "run"
    import lobs.zoo.training as training

    epochs, real = [], training._epoch

    def interrupted(*args):
        epochs.append(1)
        if len(epochs) == 3:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(training, "_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(zoo.fresh("lenet300"), data(), recipe, progress=False, resume=folder)
    monkeypatch.setattr(training, "_epoch", real)
    again = train(zoo.fresh("lenet300", 5), data(), recipe, progress=False, resume=folder)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True)
    )
    with pytest.raises(LobsError, match=r"belongs to a run with learning_rate = 0.05, not 0.1"):
        train(zoo.fresh("lenet300"), data(), Recipe(3, 0.1, 32), progress=False, resume=folder)


def test_an_augmented_image_is_a_shifted_or_mirrored_one():
    images = torch.rand(40, 3, 8, 8)
    got = augmented(images, torch.Generator().manual_seed(0), shift=2)
    padded = torch.nn.functional.pad(images, [2] * 4)
    mirrored = 0
    for one, source in zip(got, padded, strict=True):
        windows = [source[:, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
        plain = any(torch.equal(one, w) for w in windows)
        mirror = any(torch.equal(one, w.flip(2)) for w in windows)
        assert plain or mirror
        mirrored += mirror
    assert 8 < mirrored < 32
