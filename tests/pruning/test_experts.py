from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs.calibration.experts import superfluous
from lobs.certificate import verify_masks
from lobs.errors import TargetError
from lobs.layers.mixtures import mixtures
from tests.architectures import hugging_face
from tests.architectures.checks import outputs

pytestmark = pytest.mark.filterwarnings("ignore")


class Router(nn.Module):
    def __init__(self, width, count, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = count, top_k
        self.weight = nn.Parameter(torch.randn(count, width) / 2)

    def forward(self, x):
        logits = F.linear(x, self.weight)
        weights, index = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), index


class Experts(nn.Module):
    def __init__(self, width, count, hidden=12):
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, hidden, width) / 3)
        self.down = nn.Parameter(torch.randn(count, width, hidden) / 3)

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            rows, places = (index == number).nonzero(as_tuple=True)
            hidden = F.linear(x[rows], self.up[number]).relu()
            out.index_add_(
                0, rows, F.linear(hidden, self.down[number]) * weights[rows, places, None]
            )
        return out


class Block(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.gate, self.experts = Router(width, count), Experts(width, count)

    def forward(self, x):
        _, weights, index = self.gate(x)
        return x + self.experts(x, index, weights)


def network(count=6, width=8):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(width, count) for _ in range(2))
    return nn.Sequential(nn.Linear(5, width), *blocks, nn.Linear(width, 3)).eval()


def data(n=8):
    torch.manual_seed(1)
    return [torch.randn(32, 5) for _ in range(n)]


def without(model, mixture, gone):
    """Return a mixture's output without some experts: the slow way, by infinite logits."""
    router, experts = mixture.router, mixture.experts

    def run(tokens):
        logits = F.linear(tokens, router.weight).index_fill(-1, gone, -torch.inf)
        weights, index = logits.softmax(dim=-1).topk(router.top_k, dim=-1)
        return experts(tokens, index, weights / weights.sum(dim=-1, keepdim=True))

    return run


def test_the_absence_of_an_expert_is_computed_exactly():
    model, tokens = network(), torch.randn(40, 8)
    (mixture, _) = mixtures(model)
    for gone in (torch.tensor([2]), torch.tensor([0, 5])):
        weights, index = mixture.route(tokens, gone)
        found = mixture.run(tokens, index, weights)
        torch.testing.assert_close(found, without(model, mixture, gone)(tokens))
    costs = []
    wanted = without(model, mixture, torch.tensor([], dtype=torch.int64))(tokens)
    for expert in range(6):
        change = without(model, mixture, torch.tensor([expert]))(tokens) - wanted
        costs.append(float(change.square().sum()))
    chosen = superfluous(mixture, tokens, 1)
    assert chosen.gone.tolist() == [min(range(6), key=costs.__getitem__)]
    assert chosen.error * 40 == pytest.approx(min(costs), rel=1e-4)


def test_of_two_equal_experts_one_stays():
    model, tokens = network(), torch.randn(200, 8)
    mixture = mixtures(model)[0]
    with torch.no_grad():
        for parameter in mixture.parameters().values():
            parameter[4] = parameter[1]
        mixture.experts.down[[1, 4]] *= 5
    gone = superfluous(mixture, tokens, 3).gone.tolist()
    assert len({1, 4} & set(gone)) == 1


def test_experts_leave_the_network_and_the_others_make_up_for_it():
    model, batches = network(), data()
    before = copy.deepcopy(model.state_dict())
    target = lobs.Structured(1 / 3, what="experts")
    plain = lobs.prune(model, batches, target, refit="layers", progress=False)
    result = lobs.prune(model, batches, target, held_out=data(10)[8:], progress=False)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert [m.size for m in mixtures(result.model)] == [4, 4]
    assert result.total - result.kept == 2 * 2 * (2 * 12 * 8 + 8)
    assert result.kept == sum(int(mask.sum()) for mask in result.masks.values())
    assert (
        sum(p.numel() for p in model.parameters()) - result.total
        == sum(p.numel() for p in result.model.parameters()) - result.kept
    )
    held_out = data(12)[8:]
    dense, cut, repaired = (outputs(m, held_out) for m in (model, plain.model, result.model))
    assert (repaired - dense).norm() < 0.9 * (cut - dense).norm()
    assert result.settings["experts"]["before"] == 6
    assert "Experts: 6 → 4 in each of 2 mixtures." in result.summary()
    assert "experts have left" in result.certificate.reason


def test_the_least_harm_is_done(tmp_path):
    """The chosen experts cost less than those that the last numbers name."""
    model, batches = network(), data()
    target = lobs.Structured(0.5, what="experts")
    result = lobs.prune(model, batches, target, refit="layers", progress=False)
    other = copy.deepcopy(model)
    from lobs.layers.mixtures import remove

    remove(other, {m.name: torch.tensor([3, 4, 5]) for m in mixtures(other)})
    dense = outputs(model, batches)
    change = (outputs(result.model, batches) - dense).norm()
    assert change < (outputs(other, batches) - dense).norm()
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    other.load_state_dict(saved.state_dict)
    assert torch.equal(outputs(other, batches), outputs(result.model, batches))


def test_what_cannot_be_done_is_refused():
    model, batches = network(), data()
    refused = {
        "remove more": lobs.Structured(0.05, what="experts"),
        "keep 1 at least": lobs.Structured(1.0, what="experts"),
        "not a mapping": lobs.Structured({"*": 0.5}, what="experts"),
    }
    for message, target in refused.items():
        with pytest.raises(TargetError, match=message):
            lobs.prune(model, batches, target, progress=False)
    target = lobs.Structured(0.5, what="experts")
    with pytest.raises(TargetError, match="no experts that lobs can take out"):
        lobs.prune(nn.Sequential(nn.Linear(5, 5)), batches, target, progress=False)
    with pytest.raises(TargetError, match="skip does not go with"):
        lobs.prune(model, batches, target, skip="0", progress=False)
    with pytest.raises(lobs.LobsError, match="use inplace=False"):
        lobs.prune(model, batches, target, inplace=True, progress=False)
    with pytest.raises(TargetError, match=r"call lobs\.prune"):
        lobs.forecast(model, batches, target)
    with pytest.raises(TargetError, match="both target and keep"):
        lobs.prune(model, batches, target, keep=0.5, progress=False)


DEEPSEEK = hugging_face.named(
    "DeepseekV3ForCausalLM", first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
    qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=1,
    num_key_value_heads=4, num_experts_per_tok=2, n_routed_experts=8, moe_intermediate_size=48,
)  # fmt: skip
TRANSFORMERS = {name: hugging_face.NETWORKS[name] for name in hugging_face.EXPERTS}
TRANSFORMERS["deepseek-v3"] = DEEPSEEK
LEFT = {"deepseek-v3": 4}  # of eight: two of each group go


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "mixtral" else pytest.mark.slow)
        for name in TRANSFORMERS
    ],
)
def test_a_language_model_loads_again_with_fewer_experts(name, tmp_path):
    pytest.importorskip("transformers")
    model, batch = TRANSFORMERS[name]()
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 3 or key.endswith(("gate.weight", "router.weight")):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    batches, held_out = [batch(32) for _ in range(6)], [batch(32)]
    share = 0.5 if name == "deepseek-v3" else 0.25
    target = lobs.Structured(share, what="experts")
    plain = lobs.prune(model, batches, target, refit="layers", progress=False)
    result = lobs.prune(model, batches, target, progress=False)
    assert {m.size for m in mixtures(result.model)} == {LEFT.get(name, 3)}
    dense, cut, repaired = (outputs(m, held_out) for m in (model, plain.model, result.model))
    assert (repaired - dense).norm() < (cut - dense).norm()
    result.model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(outputs(again, held_out), repaired)
    small, left = lobs.shrink(result.model, batches)
    assert (
        left.after
        == left.before
        == result.kept + sum(p.numel() for p in model.parameters()) - result.total
    )
    assert torch.equal(outputs(small, held_out), repaired)


def test_the_file_of_a_network_with_fewer_experts_is_verified(tmp_path):
    result = lobs.prune(network(), data(), lobs.Structured(0.5, what="experts"), progress=False)
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    assert len(result.layers) == 2
    assert all(finding.holds for finding in verify_masks(saved))
