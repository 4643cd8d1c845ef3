from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lobs
from lobs.calibration.output_influence import output_influence
from lobs.certificate.verify import verify_errors, verify_masks
from lobs.layers import find_layers

ROLES = ["q_proj", "k_proj", "v_proj", "out_proj"]


class Observed:
    """All four projections of an attention, watched for as long as the context lasts."""

    def __init__(self, module):
        self.layers = {layer.name: layer for layer in find_layers(module)}
        self.inputs = {name: [] for name in self.layers}
        self.outputs = {name: [] for name in self.layers}

    def __enter__(self):
        self.handles = [
            layer.on_input(self.inputs[name].append) for name, layer in self.layers.items()
        ]
        self.handles += [
            layer.on_output(self.outputs[name].append) for name, layer in self.layers.items()
        ]
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


@st.composite
def attentions(draw):
    """An attention and a call of it, in float64, over all of its options."""
    heads, separate, batched = (
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.integers(0, 4)) > 0,
    )
    width, batch, targets = 2 * heads, draw(st.integers(1, 3)), draw(st.integers(1, 4))
    need_weights, causal = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    sources = targets if causal else draw(st.integers(1, 4))
    options = {
        name: draw(st.booleans())
        for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    }
    torch.manual_seed(draw(st.integers(0, 2**16)))
    sizes = {"kdim": 3, "vdim": 5} if separate else {}
    module = nn.MultiheadAttention(width, heads, **options, **sizes).double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))

    def sequence(length, features):
        shape = (batch, length, features) if options["batch_first"] else (length, batch, features)
        return torch.randn(shape if batched else (length, features)).double()

    key = sequence(sources, sizes.get("kdim", width))
    value = (
        sequence(sources, 5) if separate else draw(st.sampled_from([key, sequence(sources, width)]))
    )
    query = (
        key
        if sources == targets and not separate and draw(st.booleans())
        else sequence(targets, width)
    )
    kind = draw(st.sampled_from(["bool", "float"]))

    def mask(*shape):
        hidden = torch.rand(shape) < 0.4
        hidden[..., 0] = False  # nobody looks at nothing
        return (
            hidden
            if kind == "bool"
            else torch.where(hidden, -torch.inf, torch.randn(shape)).double()
        )

    call = {"need_weights": need_weights, "average_attn_weights": draw(st.booleans())}
    if causal:
        call |= {
            "attn_mask": torch.ones(targets, sources, dtype=torch.bool).triu(1),
            "is_causal": True,
        }
        kind = "bool"
    elif draw(st.booleans()):
        each = draw(st.booleans())
        call["attn_mask"] = mask(
            *([(batch if batched else 1) * heads] if each else []), targets, sources
        )
    if draw(st.booleans()):
        call["key_padding_mask"] = mask(*([batch] if batched else []), sources)
    return module, (query, key, value), call


@settings(max_examples=80, deadline=None)
@given(attentions())
def test_observing_an_attention_does_not_change_what_it_computes(case):
    module, given_, call = case
    expected = module(*given_, **call)  # grad is on, so this is torch's own step-by-step path
    with Observed(module) as seen:
        found = module(*given_, **call)
    torch.testing.assert_close(found, expected)
    for name, x in zip(ROLES, given_, strict=False):
        assert len(seen.inputs[name]) == 1 and seen.inputs[name][0] is x
    assert seen.outputs["out_proj"][0] is found[0]
    assert "forward" not in module.__dict__


@settings(max_examples=30, deadline=None)
@given(attentions())
def test_projections_are_linear_on_what_is_observed(case):
    module, given_, call = case
    with Observed(module) as seen, torch.no_grad():
        module(*given_, **call)
    packed = [None] * 3 if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    separate = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    for i, x in enumerate(given_):
        by_hand = F.linear(x, separate[i] if packed[i] is None else packed[i], biases[i])
        torch.testing.assert_close(seen.outputs[ROLES[i]][0], by_hand)
        layer = seen.layers[ROLES[i]]
        patches = torch.cat(list(layer.patches(x)), dim=1)
        matrix = layer.matrix()
        plain = patches @ matrix[..., : layer.columns].mT
        plain = plain if layer.bias is None else plain + matrix[..., -1:].mT
        torch.testing.assert_close(plain.reshape(by_hand.shape), by_hand)


def self_attention(**options):
    module = nn.MultiheadAttention(8, 2, batch_first=True, **options).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return module


class Alone(nn.Module):
    """One attention of a sequence to another, as a network of one input."""

    def __init__(self, **options):
        super().__init__()
        self.attention = self_attention(**options)

    def forward(self, x):
        memory = x[:, :3, :]
        return self.attention(
            x,
            memory[..., : self.attention.kdim],
            memory[..., : self.attention.vdim],
            need_weights=False,
        )[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 5, "vdim": 6}, {"add_bias_kv": True, "add_zero_attn": True}],
)
def test_the_running_projections_are_off_by_what_the_solutions_say(options):
    model, x = Alone(**options), torch.randn(30, 5, 8).double()
    result = lobs.prune(model, [x[:10], x[10:]], lobs.Sparsity(0.5), progress=False)
    dense, pruned = model.attention, result.model.attention
    given_ = [x, x[:, :3, : dense.kdim], x[:, :3, : dense.vdim]]
    for i, (role, y) in enumerate(zip(ROLES, given_, strict=False)):

        def project(m, i=i, role=role, y=y):
            weight = (
                getattr(m, f"{role}_weight")
                if m.in_proj_weight is None
                else m.in_proj_weight[8 * i : 8 * i + 8]
            )
            return F.linear(
                y, weight, None if m.in_proj_bias is None else m.in_proj_bias[8 * i : 8 * i + 8]
            )

        off = (project(dense) - project(pruned)).detach().square().sum(dim=-1).mean()
        torch.testing.assert_close(
            result.solutions[f"attention.{role}"].error, float(off), rtol=1e-8, atol=1e-12
        )
    alone = lobs.prune(model, [x], lobs.Sparsity(0.5), layers="*.out_proj", progress=False)
    with torch.no_grad():
        off = (model(x) - alone.model(x)).square().sum(dim=-1).mean()
    torch.testing.assert_close(
        alone.solutions["attention.out_proj"].error, float(off), rtol=1e-8, atol=1e-12
    )


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 6}])
@pytest.mark.parametrize("prune_bias", [False, True])
def test_masks_speak_of_real_parameters_and_hold(tmp_path, options, prune_bias):
    model, x = Alone(**options), [torch.randn(40, 5, 8).double()]
    result = lobs.prune(
        model, x, lobs.Sparsity(0.5), progress=False, numerics=lobs.Numerics(prune_bias=prune_bias)
    )
    state = result.model.state_dict()
    assert {*result.masks} <= {*state}
    assert ("attention.in_proj_weight" in result.masks) == (not options)
    for name, mask in result.masks.items():
        assert mask.shape == state[name].shape and bool((state[name][~mask] == 0).all())
    removed = sum(int((~mask).sum()) for mask in result.masks.values())
    assert removed == result.total - result.kept
    saved = lobs.load(result.save(tmp_path / "x.safetensors"))
    findings = verify_masks(saved) + (
        [] if prune_bias else verify_errors(saved, model, result.model, x)
    )
    assert (
        all(f.holds for f in findings)
        and len([f for f in findings if f.check.startswith("count")]) == 4
    )


def test_one_projection_may_be_pruned_alone():
    model, x = Alone(), [torch.randn(40, 5, 8).double()]
    result = lobs.prune(model, x, lobs.Sparsity(0.5), layers="attention.k_proj", progress=False)
    mask = result.masks["attention.in_proj_weight"]
    assert int((~mask[8:16]).sum()) == 32 and bool(mask[:8].all()) and bool(mask[16:].all())
    before, after = model.attention.in_proj_weight, result.model.attention.in_proj_weight
    assert torch.equal(before[:8], after[:8]) and torch.equal(before[16:], after[16:])


def test_a_bare_attention_is_a_network():
    module, x = self_attention(), torch.randn(20, 4, 8).double()
    result = lobs.prune(
        module, [{"query": x, "key": x, "value": x}], lobs.Sparsity(0.5), progress=False
    )
    assert [row.name for row in result.layers] == ROLES
    assert {*result.masks} == {"in_proj_weight", "out_proj.weight"}
    assert result.certificate.bound is None and result.certificate.reason


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.parametrize("padded", [False, True])
def test_the_fused_encoder_is_seen_through_and_left_as_it_was(padded):
    model, x = encoder(), torch.randn(6, 5, 8)
    padding = torch.zeros(6, 5, dtype=torch.bool)
    padding[:3, 3:] = padded
    batch = {"src": x, "src_key_padding_mask": padding} if padded else x
    assert torch.backends.mha.get_fastpath_enabled()
    calibration = lobs.collect_moments(model, [batch])
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert len(calibration) == 12 and {m.count for m in calibration.moments.values()} == {30}
    with torch.no_grad():  # the first attention sees the input itself
        expected = torch.einsum("bti,btj->ij", x.double(), x.double()) / 30
    torch.testing.assert_close(
        calibration["layers.0.self_attn.q_proj"].moment[0, :8, :8], expected, rtol=1e-5, atol=1e-6
    )


def test_the_fused_and_the_observed_encoder_compute_the_same():
    model, x = encoder(), torch.randn(6, 5, 8)
    with torch.no_grad():
        fused = model(x)
        handles = [layer.on_input(lambda _: None) for layer in find_layers(model)]
        try:
            torch.testing.assert_close(model(x), fused)
        finally:
            for handle in handles:
                handle.remove()


def test_everything_comes_back_when_a_network_raises():
    class Raising(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder()

        def forward(self, x):
            self.encoder(x)
            raise ValueError("no")

    model = Raising()
    with pytest.raises(lobs.LobsError, match="ValueError: no"):
        lobs.collect_moments(model, [torch.randn(2, 3, 8)])
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any("forward" in m.__dict__ or m._forward_pre_hooks for m in model.modules())


def test_a_fast_path_that_the_user_switched_off_stays_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        lobs.collect_moments(encoder(), [torch.randn(2, 3, 8)])
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_influence_of_a_projection_is_the_squared_gradient_of_its_bias():
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = self_attention()

        def forward(self, x):
            out = self.attention(x[:, :1], x, x, need_weights=False)[0]
            return (out * torch.arange(1.0, 9.0).double()).tanh().sum(dim=-1)

    model, x = Scalar(), torch.randn(4, 3, 8).double()
    layers = [layer for layer in find_layers(model) if layer.name.endswith(("q_proj", "out_proj"))]
    found = output_influence(model, [x], layers)
    total = torch.zeros(8).double(), torch.zeros(8).double()
    for sample in x:  # one query each, so that a bias moves as the projection's one output does
        parameters = [model.attention.in_proj_bias, model.attention.out_proj.bias]
        inner, outer = torch.autograd.grad(model(sample[None]).sum(), parameters)
        total[0].add_(inner[:8].square() / 4)
        total[1].add_(outer.square() / 4)
    torch.testing.assert_close(found["attention.q_proj"][0], total[0])
    torch.testing.assert_close(found["attention.out_proj"][0], total[1])


def test_network_wide_budget_reaches_attention():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = encoder(), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.encoder(x).mean(dim=1))

    target = lobs.Sparsity(0.5, scope="network")
    result = lobs.prune(Classifier(), [torch.randn(60, 5, 8)], target, progress=False)
    assert result.kept == result.total - target.count(result.total)
    assert len(result.layers) == 13 and result.certificate.bound is None


def test_an_attention_that_computes_otherwise_is_refused():
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    with pytest.raises(
        lobs.LobsError,
        match="Doubled computes its output in its own way, not as MultiheadAttention",
    ):
        find_layers(nn.Sequential(Doubled(4, 2)))
    module = nn.MultiheadAttention(4, 2)
    module.forward = lambda *args: args[0]
    with pytest.raises(lobs.LobsError, match="in its own way"):
        find_layers(module)
