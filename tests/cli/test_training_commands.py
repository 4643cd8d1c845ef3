from __future__ import annotations

import pytest

import lobs
from lobs import LobsError
from lobs.cli.stages import parse_stages
from lobs.storage import checkpoint
from tests.cli.test_cli import as_json, invoke


def refused(message, *args):
    with pytest.raises(LobsError) as caught:
        invoke(*args)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("net") / "small.safetensors"
    as_json(
        "prune",
        "lenet300",
        "--keep",
        "20%",
        "--samples",
        500,
        "--solver",
        "magnitude",
        "--out",
        out,
    )
    return out


def test_retrain_holds_the_zeros_of_a_file_and_counts(small, tmp_path):
    out = tmp_path / "again.safetensors"
    done = as_json(
        "retrain",
        small,
        "--out",
        out,
        "--iterations",
        20,
        "--every",
        10,
        "--resume",
        tmp_path / "run",
    )
    assert (
        done["iterations"] == 20
        and [i for i, _ in done["history"]] == [0, 10, 20]
        and done["reached"] is None
    )
    before, after = lobs.load(small), lobs.load(out)
    assert after.record["retraining"]["iterations"] == 20 and after.record["network"] == "lenet300"
    for name, mask in before.masks.items():
        assert bool((after.state_dict[name][~mask] == 0).all())
    assert as_json("eval", out)["value"] == done["history"][-1][1]


def test_retrain_stops_at_the_wanted_error_and_can_learn_from_the_dense_network(small, tmp_path):
    out = tmp_path / "again.safetensors"
    options = [
        "--iterations",
        200,
        "--every",
        10,
        "--until",
        50,
        "--distil",
        "--optimizer",
        "adam",
        "--rate",
        0.001,
    ]
    done = as_json("retrain", small, "--out", out, "--decay", "cosine", *options)
    assert done["reached"] and done["iterations"] < 200


def test_retrain_refuses_what_has_no_zeros_and_no_such_optimiser(small, tmp_path):
    from lobs import zoo

    refused(
        "holds no masks", "retrain", zoo.shipped("lenet300"), "--out", tmp_path / "x.safetensors"
    )
    refused(
        "use sgd or adam",
        "retrain",
        small,
        "--out",
        tmp_path / "x.safetensors",
        "--optimizer",
        "magic",
    )


def test_stages_run_its_stages_and_saves_the_last(tmp_path):
    out = tmp_path / "last.safetensors"
    options = [
        "--stages",
        "50%:5;20%:5",
        "--scope",
        "layer",
        "--solver",
        "magnitude",
        "--samples",
        500,
        "--out",
        out,
    ]
    done = as_json("stages", "lenet300", *options)
    assert done["iterations"] == 10 and [round(s["kept_fraction"], 3) for s in done["stages"]] == [
        0.5,
        0.2,
    ]
    saved = checkpoint.load(out)
    assert (
        sum(int(m.sum()) for name, m in saved.masks.items() if name.endswith("weight"))
        == done["stages"][-1]["kept"]
    )


def test_a_retrained_network_keeps_its_zeros_but_not_the_certificate(small, tmp_path):
    out, page = tmp_path / "more.safetensors", tmp_path / "more.html"
    as_json("retrain", small, "--iterations", 2, "--out", out)
    verified = as_json("verify", out)
    assert verified["holds"] and "retrained since" in verified["skipped"]
    assert invoke("report", out, "--out", page, "--no-pictures").exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert (
        "the network was retrained after pruning" in text
        and "cannot have moved by more" not in text
    )
    refused("must end in .html", "report", out, "--out", out)


def test_files_of_stages_are_verified_by_their_zeros(tmp_path):
    out = tmp_path / "last.safetensors"
    as_json(
        "stages",
        "lenet300",
        "--stages",
        "50%:1",
        "--solver",
        "magnitude",
        "--samples",
        200,
        "--out",
        out,
    )
    verified = as_json("verify", out)
    assert verified["holds"] and "no record" in verified["skipped"]
    refused("no record of a pruning by layer", "report", out, "--out", tmp_path / "x.html")


def test_a_shrunk_zoo_network_opens_again(tmp_path):
    half, shrunk = tmp_path / "half.safetensors", tmp_path / "shrunk.safetensors"
    options = ["--keep", "50%", "--structured", "units", "--solver", "greedy", "--samples", 300]
    as_json("prune", "lenet300", *options, "--out", half)
    document = as_json("shrink", half, "--out", shrunk)
    assert as_json("eval", shrunk)["value"] == pytest.approx(document["after"])
    refused("was shrunk", "verify", shrunk)


def test_stages_prune_on_the_inputs_asked_for(monkeypatch):
    seen = {}

    def stop(*args, pruning, **more):
        seen.update(pruning)
        raise LobsError("enough")

    monkeypatch.setattr("lobs.training.staged.prune_in_stages", stop)
    refused(
        "enough",
        "stages",
        "lenet300",
        "--stages",
        "50%:1",
        "--solver",
        "lobs",
        "--inputs",
        "dense",
        "--samples",
        100,
    )
    assert seen == {"solver": "lobs", "inputs": "dense"}


def test_stages_are_read_with_one_number_or_layer_by_layer():
    first, second = parse_stages("5%:200; fc1=1%,fc*=0.04:443")
    assert first.iterations == 200 and first.target.fraction == pytest.approx(0.95)
    assert second.target.fraction == pytest.approx({"fc1": 0.99, "fc*": 0.96})
    with pytest.raises(LobsError, match="is not KEEP:ITERATIONS"):
        parse_stages("5%")


def test_missing_data_and_weights_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("LOBS_DATA", raising=False)
    refused(
        "lobs data cifar10 FOLDER",
        "--data",
        tmp_path,
        "train",
        "cifarnet",
        "--out",
        tmp_path / "x.safetensors",
    )
    refused("Put 'alexnet.safetensors' into a folder", "eval", "alexnet")
    refused("is not trained here", "train", "vgg16")
    refused("only cifar10 can", "data", "imagenet", tmp_path)
