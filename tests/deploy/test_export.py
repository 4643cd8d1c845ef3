from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import lobs
from lobs import LobsError
from lobs.deploy import export_program, from_torch_prune, to_semi_structured, to_torch_prune
from lobs.deploy.export import broken_groups, dense_sizes, onnx_file


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def pruned():
    model = network().eval()
    return lobs.prune(model, [torch.randn(60, 1, 8, 8)], lobs.Sparsity(0.8), progress=False)


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x, shift):
        return {"logits": self.fc(x) + shift, "hidden": torch.relu(x)}


class Undecided(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_onnx_runs_elsewhere_with_any_batch(tmp_path, batch):
    ort = pytest.importorskip("onnxruntime")
    result = pruned()
    wished = 18 if batch == 1 else None  # torch's own otherwise
    done = lobs.export_onnx(
        result.model, tmp_path / "x.onnx", torch.randn(batch, 1, 8, 8), opset=wished
    )
    assert done.largest_difference <= 1e-4 and (done.opset == 18 if wished else done.opset > 18)
    session = ort.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    x = torch.randn(7, 1, 8, 8)
    (answer,) = session.run(None, {done.inputs[0]: x.numpy()})
    assert torch.allclose(torch.from_numpy(answer), result.model(x), atol=1e-4)
    assert [p.name for p in tmp_path.iterdir()] == ["x.onnx"]


@pytest.mark.slow
def test_onnx_with_keyword_arguments(tmp_path):
    pytest.importorskip("onnxruntime")
    done = lobs.export_onnx(
        Keyword(), tmp_path / "x.onnx", {"x": torch.randn(2, 6), "shift": torch.randn(2, 3)}
    )
    assert done.inputs == ("x", "shift")


def test_a_network_onnx_cannot_follow_leaves_no_file(tmp_path):
    pytest.importorskip("onnxruntime")
    with pytest.raises(LobsError, match=r"torch.onnx cannot follow"):
        lobs.export_onnx(Undecided(), tmp_path / "x.onnx", torch.ones(2, 2))
    assert not list(tmp_path.iterdir())


def test_a_wrong_onnx_answer_leaves_no_file(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnx_file, "_run", lambda *_: (("x",), [torch.zeros(2, 3)]))
    with pytest.raises(LobsError, match="onnxruntime differs from torch"):
        lobs.export_onnx(nn.Linear(4, 3), tmp_path / "x.onnx", torch.ones(2, 4))
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        onnx_file, "find_spec", lambda name: None if name == "onnxscript" else object()
    )
    with pytest.raises(LobsError, match=r"needs onnxscript: pip install 'lobs\[onnx\]'"):
        lobs.export_onnx(nn.Linear(4, 3), tmp_path / "x.onnx", torch.ones(2, 4))


@pytest.mark.parametrize("batch", [1, 4])
def test_torch_export_gives_the_same_for_any_batch(tmp_path, batch):
    result = pruned()
    program = export_program(result.model, tmp_path / "x.pt2", torch.randn(batch, 1, 8, 8))
    x = torch.randn(9, 1, 8, 8)
    assert torch.allclose(program.module()(x), result.model(x), atol=1e-5)
    assert (tmp_path / "x.pt2").stat().st_size > 1000
    assert result.model.training == pruned().model.training


def test_torch_export_says_why_not():
    with pytest.raises(
        LobsError, match=r"torch.export cannot follow this network: .*dynamic_batch=False"
    ):
        export_program(Undecided(), None, torch.ones(2, 2))
    with pytest.raises(LobsError, match="type str"):
        export_program(nn.Linear(2, 2), None, "x")


def two_four(weight):
    with torch.no_grad():
        groups = weight.view(-1, 4)
        groups.scatter_(1, groups.abs().argsort(1)[:, :2], 0)
    return weight


def test_two_four_is_counted_group_by_group():
    weight = two_four(torch.randn(6, 16))
    assert broken_groups(weight) == 0
    weight[2, 4:8] = 1
    weight[5, 0:3] = 1
    assert broken_groups(weight) == 2
    assert broken_groups(torch.randn(4, 2, 2, 2)) == 8
    with pytest.raises(LobsError, match="rows of 6 weights"):
        broken_groups(torch.randn(3, 6))


def test_semi_structured_says_what_this_device_lacks():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    with pytest.raises(LobsError, match="no Linear layer follows the 2:4 pattern"):
        to_semi_structured(model)
    two_four(model[0].weight)
    with pytest.raises(LobsError, match="layers are 2:4, but the network is on 'cpu'"):
        to_semi_structured(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="2:4 kernels need a GPU")
def test_semi_structured_gives_the_same():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)).half().cuda()
    two_four(model[0].weight)
    x = torch.randn(64, 128, dtype=torch.float16, device="cuda")
    fast, names = to_semi_structured(model)
    assert names == ("0",) and torch.allclose(fast(x), model(x), atol=1e-2)


def test_our_masks_in_torch_prune_and_back():
    result = pruned()
    model = copy.deepcopy(result.model)
    to_torch_prune(model, result.masks)
    assert torch_prune.is_pruned(model) and isinstance(model[4].weight_orig, nn.Parameter)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(model.eval()(x), result.model(x))
    masks = from_torch_prune(model)
    assert masks.keys() == result.masks.keys() and all(
        torch.equal(masks[n], m) for n, m in result.masks.items()
    )
    assert not torch_prune.is_pruned(model) and isinstance(model[4].weight, nn.Parameter)


def test_a_network_pruned_by_torch_becomes_ours(tmp_path):
    model = network()
    torch_prune.l1_unstructured(model[4], "weight", amount=0.5)
    torch_prune.ln_structured(model[0], "weight", amount=0.25, n=2, dim=0)
    kept = from_torch_prune(model, permanent=False)
    assert torch_prune.is_pruned(model)
    masks = from_torch_prune(model)
    assert set(masks) == {"0.weight", "4.weight"} and all(
        torch.equal(kept[n], m) for n, m in masks.items()
    )
    loaded = lobs.load(lobs.storage.save_compact(model, tmp_path / "x", masks).path)
    assert int((~loaded.masks["4.weight"]).sum()) == 360
    with lobs.hold(model, masks):
        pass
    with pytest.raises(LobsError, match="has pruned nothing here"):
        from_torch_prune(model)
    with pytest.raises(LobsError, match=r"'7.weight' names no parameter"):
        to_torch_prune(model, {"7.weight": masks["4.weight"]})
    with pytest.raises(LobsError, match=r"'4.weight' is .* and fits no parameter"):
        to_torch_prune(model, {"4.weight": masks["0.weight"]})


def test_rivals_are_weighed(monkeypatch):
    state = pruned().model.state_dict()
    sizes = dense_sizes(state)
    assert sizes["dense"] > sizes["gzip -9"] > 0
    monkeypatch.setattr(
        "lobs.deploy.export.sizes.import_module",
        lambda name: (_ for _ in ()).throw(ImportError(name)),
    )
    assert set(dense_sizes(state)) == {"dense", "gzip -9"}


def test_infinities_agree_with_their_like_and_hide_nothing():
    from lobs.deploy.export.program import largest_difference

    a = torch.tensor([1.0, -torch.inf, torch.nan])
    assert largest_difference([a], [a.clone()]) == 0
    assert largest_difference([a], [a + torch.tensor([0.5, 0.0, 0.0])]) == pytest.approx(0.5 / 1.5)
    assert largest_difference([a], [torch.tensor([1.0, 0.0, torch.nan])]) == float("inf")


def test_a_swapped_order_is_answered_with_the_right_line(tmp_path):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    onnx, program = str(tmp_path / "x.onnx"), str(tmp_path / "x.pt2")
    with pytest.raises(LobsError, match=re.escape(f"lobs.export_onnx(model, {onnx!r}, example)")):
        lobs.export_onnx(onnx, model, x)
    with pytest.raises(LobsError, match=re.escape(f"export_program(model, {program!r}, example)")):
        export_program(program, model, x)
    with pytest.raises(LobsError, match=r"path is a Tensor: .*export_program\(model, path, exam"):
        export_program(model, x, program)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("export", "right"), [(lobs.export_onnx, "onnx"), (export_program, "pt2")])
def test_targets_are_refused_before_the_network_is_followed(tmp_path, export, right):
    # `Undecided` cannot be exported: an error about the path shows that nothing was tried.
    with pytest.raises(LobsError, match=f"must end in .{right}: name it 'x.{right}'"):
        export(Undecided(), tmp_path / "x.pt", torch.ones(2, 2))
    with pytest.raises(LobsError, match="there is no folder"):
        export(Undecided(), tmp_path / "missing" / f"x.{right}", torch.ones(2, 2))
    assert not list(tmp_path.iterdir())
