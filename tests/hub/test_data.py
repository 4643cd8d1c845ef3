"""Text, JSONL, Parquet, datasets folders, images and arrays become batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lobs import LobsError
from lobs.zoo.hub.content import read_content
from lobs.zoo.hub.images import prepared
from lobs.zoo.hub.rows import Reading, prepare
from tests.hub.networks import sentences, written

pytest.importorskip("transformers")
from lobs.zoo.hub.source import open_source


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return open_source(written(tmp_path_factory.mktemp("decoder") / "big"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return open_source(written(tmp_path_factory.mktemp("encoder") / "big", "BertModel"))


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory):
    name = "T5ForConditionalGeneration"
    return open_source(written(tmp_path_factory.mktemp("seq2seq") / "big", name))


def ids(batches):
    return torch.cat([batch["input_ids"] for batch in batches])


def test_text_lists_jsonl_and_parquet_give_the_same_rows(decoder, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = sentences(60)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"id": 1, "body": t}) for t in texts))
    parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet")
    reading = Reading(length=16, samples=10)
    found = [
        prepare(decoder, data, reading)
        for data in (texts, tmp_path / "a.jsonl", tmp_path / "a.parquet")
    ]
    rows = [ids(one.calibrate) for one in found]
    assert rows[0].shape == (10, 16)
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
    assert found[1].facts["data"] == "a.jsonl" and found[1].facts["tokens"] == 160
    assert (rows[0] == 3).any()  # the end of a text stands between texts
    every = prepare(decoder, texts, reading, judge=True)
    assert len(ids(every.held_out)) == 10 and not every.calibrate


def test_a_datasets_folder(decoder, tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = sentences(60)
    made = datasets.Dataset.from_dict({"text": texts, "label": [1] * 60})
    made.save_to_disk(tmp_path / "set")
    content = read_content(tmp_path / "set", None)
    assert list(content.items) == texts and set(content.labels) == {1}
    made.select([1, 5, 9]).save_to_disk(tmp_path / "some")
    assert list(read_content(tmp_path / "some", None).items) == [texts[i] for i in (1, 5, 9)]
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "splits")
    with pytest.raises(LobsError, match=r"several splits \(train\)"):
        prepare(decoder, tmp_path / "splits", Reading())


def test_seed_and_length_decide_the_rows_and_none_is_in_both_parts(decoder, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(sentences(300)))
    one, same, other = (
        prepare(decoder, path, Reading(length=16, samples=40, seed=seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(ids(one.calibrate), ids(same.calibrate))
    assert not torch.equal(ids(one.calibrate), ids(other.calibrate))
    assert len(ids(one.held_out)) == 5
    seen = {tuple(row) for row in ids(one.calibrate).tolist()}
    assert not seen & {tuple(row) for row in ids(one.held_out).tolist()}
    assert one.facts["seed"] == 0 and one.facts["length"] == 16 and one.facts["tokens"] == 640


@pytest.mark.parametrize("count", [1, 2, 3, 9, 100])
def test_few_samples_are_shared_without_loss(encoder, count):
    found = prepare(encoder, sentences(count), Reading())
    parts = [len(ids([b])) for b in (*found.calibrate, *found.held_out)]
    assert sum(parts) == count and found.calibrate
    assert bool(found.held_out) == (count > 1)


def test_encoders_see_padded_texts_with_a_mask(encoder):
    found = prepare(encoder, sentences(40), Reading(length=8))
    batch = found.calibrate[0]
    assert batch["input_ids"].shape[1] <= 8 and batch["attention_mask"].dtype == torch.long
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
    tokens = sum(int(b["attention_mask"].sum()) for b in found.calibrate)
    assert found.facts["tokens"] == tokens


def test_a_decoder_beside_an_encoder_gets_the_text_moved_by_one(seq2seq):
    batch = prepare(seq2seq, sentences(40), Reading()).calibrate[0]
    inner, outer = batch["decoder_input_ids"], batch["input_ids"]
    assert inner.shape[1] == outer.shape[1] - 1 and (inner[:, 0] == 0).all()
    assert torch.equal(inner[:, 1:], outer[:, :-2])
    assert torch.equal(batch["decoder_attention_mask"], batch["attention_mask"][:, :-1])


def test_arrays_of_tokens_and_labels_beside_them(decoder, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((20, 12), dtype=np.int32))
    np.save(tmp_path / "x.labels.npy", np.arange(20))
    found = prepare(decoder, tmp_path / "x.npy", Reading(samples=16))
    assert ids(found.calibrate).shape == (16, 12) and len(found.labels) == len(ids(found.held_out))
    np.save(tmp_path / "y.npy", np.ones((4, 3)))
    with pytest.raises(LobsError, match="takes tokens, not"):
        prepare(decoder, tmp_path / "y.npy", Reading())
    np.save(tmp_path / "z.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(LobsError, match="no array that lobs reads"):
        prepare(decoder, tmp_path / "z.npy", Reading())


def test_a_folder_of_images_with_its_classes(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, value in (("cat", 40), ("dog", 200)):
        (tmp_path / name).mkdir()
        for number in range(2):
            image.new("RGB", (40 + 8 * number, 48), (value, value, value)).save(
                tmp_path / name / f"{number}.png"
            )
    found = read_content(tmp_path, None)
    assert found.kind == "images" and found.labels == ["cat", "cat", "dog", "dog"]
    settings = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 0.9}
    pixels = prepared(found.items, settings)
    assert pixels.shape == (4, 3, 32, 32)
    torch.testing.assert_close(pixels[2], torch.full((3, 32, 32), (200 / 255 - 0.5) / 0.25))
    (tmp_path / "cat" / "broken.png").write_bytes(b"x")
    with pytest.raises(LobsError, match="no whole image"):
        prepared([tmp_path / "cat" / "broken.png"], settings)


def test_what_cannot_be_read_is_one_line(decoder, tmp_path):
    def refused(name, content, *words, field=None):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LobsError) as caught:
            prepare(decoder, tmp_path / name, Reading(field=field))
        assert "\n" not in str(caught.value)
        assert all(word in str(caught.value) for word in words), caught.value

    refused("a.jsonl", b'{"a": "x", "b": "y"}', "fields a, b", "--field")
    refused("b.jsonl", b'{"a": "x"}', "no text in the field 'c'", field="c")
    refused("c.jsonl", b'{"a": "x"}\n{', "line 2", "no JSON")
    refused("d.jsonl", b"[1]", "line 1", "no mapping")
    refused("e.jsonl", b"", "is empty")
    refused("f.txt", b"\xff\xfe\x00", "no UTF-8 text")
    refused("g.parquet", b"PAR1", "no whole Parquet file")
    refused("h.npz", b"x", "no data that lobs reads")
    (tmp_path / "folder").mkdir()
    with pytest.raises(LobsError, match="holds neither images nor text"):
        prepare(decoder, tmp_path / "folder", Reading())
