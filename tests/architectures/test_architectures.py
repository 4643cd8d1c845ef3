"""One call on more than 150 small random networks of plain torch, transformers and timm."""

from __future__ import annotations

import importlib.util

import pytest

from tests.architectures import hugging_face, odd, plain, timm_networks
from tests.architectures.checks import passes

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # third parties deprecate a lot
    pytest.mark.usefixtures("_quiet"),
]
# These run in the default suite: one of each cause. All others are slow.
QUICK = ("stacked-experts", "cached", "dict-with-labels", "old-weight-norm")
# Their random networks have outputs that no calibration of this size pins down.
NEAR = {"one-wide-row": 1.5, "conv3d": 1.2}


@pytest.fixture
def _quiet():
    transformers = importlib.util.find_spec("transformers")
    if transformers is not None:
        import logging

        logging.getLogger("transformers").setLevel(logging.ERROR)


def cases(networks, extra=None):
    missing = extra is not None and importlib.util.find_spec(extra) is None
    for name, make in networks.items():
        marks = [] if name in QUICK and extra is None else [pytest.mark.slow]
        if missing:
            marks.append(
                pytest.mark.skip(
                    reason=f"{extra} is not installed: pip install 'lobs[architectures]'"
                )
            )
        yield pytest.param(name, make, id=name, marks=marks)


@pytest.mark.parametrize(("name", "make"), [*cases(plain.NETWORKS)])
def test_plain_torch(name, make, tmp_path):
    samples = 128 if name in QUICK else 320
    passes(make, tmp_path, samples=samples, worse=NEAR.get(name, 1.0))


@pytest.mark.parametrize(("name", "make"), [*cases(odd.NETWORKS)])
def test_odd_networks(name, make, tmp_path):
    passes(make, tmp_path)


@pytest.mark.parametrize(("name", "make"), [*cases(hugging_face.NETWORKS, "transformers")])
def test_transformers(name, make, tmp_path):
    result = passes(make, tmp_path)
    if name in hugging_face.EXPERTS:
        model = make()[0]
        embedded = sum(
            part.weight.numel() for part in model.modules() if type(part).__name__ == "Embedding"
        )
        assert result.total >= 0.95 * (result.coverage.weights - embedded)


@pytest.mark.parametrize(("name", "make"), [*cases(timm_networks.NETWORKS, "timm")])
def test_timm(name, make, tmp_path):
    passes(make, tmp_path)
