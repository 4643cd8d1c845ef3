from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores already: more threads than cores would mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _complete_torchvision():
    """Declare operators that an installed torchvision lacks if it was built for another torch.

    Without them neither timm nor transformers can be imported. No test calls them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_TORCHVISION = _complete_torchvision()  # the operators live as long as this object


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def make_moment(
    d: int, n: int | None = None, seed: int = 0, *, correlated: float = 0.5
) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    mix = (
        torch.eye(d, dtype=torch.float64)
        + correlated * torch.randn(d, d, generator=g, dtype=torch.float64) / d**0.5
    )
    x = torch.randn(n or 4 * d, d, generator=g, dtype=torch.float64) @ mix
    return x.T @ x / len(x)
