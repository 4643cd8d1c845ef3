"""Encoder-decoders are rows of blocks too: one for the encoder and one for the decoder."""

from __future__ import annotations

import pytest
import torch

from lobs.calibration.blocks.rows import candidates, look
from lobs.layers.discovery import choose_layers
from lobs.zoo.hub import Reading
from lobs.zoo.hub.rows import prepare
from lobs.zoo.hub.source import open_source
from tests.hub.networks import data_for, written

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "architecture",
    [
        "T5ForConditionalGeneration",
        pytest.param("BartForConditionalGeneration", marks=pytest.mark.slow),
        pytest.param("WhisperForConditionalGeneration", marks=pytest.mark.slow),
    ],
)
def test_an_encoder_decoder_has_two_rows(tmp_path, architecture):
    source = open_source(written(tmp_path / "big", architecture))
    data = prepare(source, data_for(architecture, tmp_path), Reading(samples=8, length=16))
    model = source.load()
    source.set_cache(model, False)
    layers = choose_layers(model, None, ["lm_head"] if hasattr(model, "lm_head") else [])
    with torch.no_grad():
        found = look(model, data.calibrate[0], layers, candidates(model))
    rows = [blocks for blocks, _, _ in found if blocks]
    assert len(rows) == 2 and "encoder" in rows[0][0] and "decoder" in rows[1][0]
