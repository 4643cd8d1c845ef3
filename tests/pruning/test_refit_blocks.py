from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.comparison import compare
from lobs.pruning.refit import joint
from lobs.pruning.refit.descent import Schedule


class Part(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def features(self, x):
        h = self.start(x)
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x):
        return self.head(self.features(x))


def tower(kind=torch.float32):
    torch.manual_seed(0)
    return Tower().to(kind).eval()


def data(number=8, kind=torch.float32):
    return [
        torch.randn(50, 5, generator=torch.Generator().manual_seed(s)).to(kind)
        for s in range(number)
    ]


def pruned(model, batches=None, **how):
    how = {"refit": "blocks", **how}
    keep = how.pop("keep", 0.4)
    return lobs.prune(
        model,
        batches or data(),
        lobs.Sparsity(1 - keep, scope="layer"),
        progress=False,
        **how,
    )


def far(model, dense, name="forward"):
    x = torch.randn(500, 5, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float((getattr(model, name)(x) - getattr(dense, name)(x)).square().mean())


def test_blocks_come_nearer_on_new_data_and_zeros_stay():
    dense = tower()
    # A pruned head of 24 weights loses more than all blocks do, by chance more or less.
    layers, blocks = (pruned(dense, refit=refit, skip="head") for refit in ("layers", "blocks"))
    near, distant = (far(x.model, dense, "features") for x in (blocks, layers))
    assert near < 0.5 * distant
    assert far(blocks.model, dense) < far(layers.model, dense)
    state = blocks.model.state_dict()
    for name, mask in blocks.masks.items():
        assert not state[name][~mask].any()
    assert [x.kept for x in layers.layers] == [x.kept for x in blocks.layers]
    assert blocks.settings["refit"].startswith("block by block")


def test_the_report_of_a_block_is_measured_on_held_out_samples(monkeypatch):
    found = []
    from lobs.pruning import run

    whole = run.refit_block

    def spied(*given):
        found.append(whole(*given))
        return found[-1]

    monkeypatch.setattr(run, "refit_block", spied)
    pruned(tower())
    assert [effect.name for effect in found] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(effect.held_out == 50 for effect in found)
    assert all(effect.after < effect.before if effect.moved else True for effect in found)


def test_a_refit_that_does_not_help_on_held_out_samples_changes_nothing(monkeypatch):
    monkeypatch.setattr(
        "lobs.pruning.refit.blocks.SCHEDULE", Schedule(4, 32, 50.0, shorter=1.0)
    )  # every step overshoots
    cut = pruned(tower())
    monkeypatch.setattr("lobs.pruning.refit.blocks.SCHEDULE", Schedule(0, 32, 0.05))
    still = pruned(tower())
    for a, b in zip(cut.model.parameters(), still.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "no block came nearer" in cut.settings["refit"]


def test_the_dense_network_and_frozen_weights_stay_as_they_were():
    dense = tower()
    for parameter in dense.parameters():
        parameter.requires_grad_(False)
    kept = copy.deepcopy(dense.state_dict())
    cut = pruned(dense)
    assert all(torch.equal(kept[n], t) for n, t in dense.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in cut.model.parameters())


def test_half_precision_is_refitted_in_single_and_rounded_once(monkeypatch):
    dense = tower(torch.bfloat16)
    blocks = pruned(dense, data(kind=torch.bfloat16))
    monkeypatch.setattr("lobs.pruning.refit.blocks.SCHEDULE", Schedule(0, 32, 0.05))
    still = pruned(dense, data(kind=torch.bfloat16))
    single = tower()
    single.load_state_dict(dense.state_dict())
    assert all(p.dtype == torch.bfloat16 for p in blocks.model.parameters())
    far_blocks, far_still = (
        far(found.model.float(), single, "features") for found in (blocks, still)
    )
    assert far_blocks < 0.5 * far_still
    after = blocks.settings["blocks"][-1]["after"]
    x = torch.cat(data()[7:])  # the held-out batch; weights were judged as they are stored
    with torch.no_grad():
        a, b = (m.features(x.bfloat16().float()) for m in (blocks.model, single))
    assert float((a - b).square().sum() / b.square().sum()) == pytest.approx(after, rel=0.1)


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, monkeypatch):
    whole = pruned(tower())
    from lobs.pruning import run

    refit_block, seen = run.refit_block, []

    def stops(*given):
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return refit_block(*given)

    how = {"execution": lobs.Execution(resume=tmp_path / "run")}
    monkeypatch.setattr(run, "refit_block", stops)
    with pytest.raises(KeyboardInterrupt):
        pruned(tower(), **how)
    again = pruned(tower(), **how)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(seen) == 4  # two blocks before the stop, the third one twice


def test_large_networks_are_refitted_by_blocks_and_small_ones_as_a_whole(monkeypatch):
    small = pruned(tower(), refit=None)
    assert not small.settings["refit"].startswith("block by block")
    monkeypatch.setattr("lobs.pruning.session.WORK", 1.0)
    assert pruned(tower(), refit=None).settings["refit"].startswith("block by block")
    assert joint.affordable(1e3, 100, None) and not joint.affordable(1e9, 1000, joint.WORK)


class Answer(dict):
    """What `to_tuple` marks as an output of Hugging Face."""

    def __init__(self, logits):
        super().__init__(logits=logits)
        self.logits = logits

    def to_tuple(self):
        return (self.logits,)


class Speaks(Tower):
    def forward(self, x):
        return Answer(super().forward(x))


def divergence(model, dense):
    x = torch.randn(500, 5, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        a, b = (m(x)["logits"].log_softmax(-1) for m in (dense, model))
    return float(nn.functional.kl_div(b, a, log_target=True, reduction="batchmean"))


def test_a_large_network_is_refitted_by_its_outputs_after_its_blocks(monkeypatch):
    monkeypatch.setattr("lobs.pruning.session.WORK", 1.0)
    monkeypatch.setattr("lobs.pruning.refit.whole.SCHEDULE", Schedule(4, 32, 0.01))
    for kind, distance, word in ((Tower, far, "squared"), (Speaks, divergence, "KL")):
        torch.manual_seed(0)
        dense = kind().eval()
        blocks, network = (pruned(dense, refit=refit) for refit in ("blocks", "network"))
        assert distance(network.model, dense) < distance(blocks.model, dense)
        said = network.settings["refit"]
        assert said.startswith("block by block") and "then all layers by the outputs" in said
        assert word in said
        state = network.model.state_dict()
        assert not any(state[name][~mask].any() for name, mask in network.masks.items())


def test_what_the_outputs_refit_did_is_taken_up_from_the_run_store(monkeypatch, tmp_path):
    monkeypatch.setattr("lobs.pruning.session.WORK", 1.0)
    how = {"refit": "network", "execution": lobs.Execution(resume=tmp_path / "run")}
    first = pruned(tower(), **how)
    monkeypatch.setattr("lobs.pruning.run.refit_outputs", None)  # it must not run again
    again = pruned(tower(), **how)
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.settings["refit"] == again.settings["refit"]


def test_the_result_and_its_report_have_a_line_for_every_block(tmp_path):
    found = pruned(tower())
    assert [b["name"] for b in found.settings["blocks"]] == [f"blocks.{i}" for i in range(3)]
    assert all(b["after"] <= b["before"] for b in found.settings["blocks"])
    text = found.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h2>Blocks" in text and "<td>blocks.2</td>" in text


class Common(Tower):
    """All blocks have one norm."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.norm = self.blocks[0].norm


def test_what_blocks_share_and_what_was_not_chosen_stays():
    torch.manual_seed(0)
    for dense, how, same in (
        (Common().eval(), {}, ["blocks.0.norm.weight", "blocks.0.norm.bias"]),
        (tower(), {"layers": "blocks.0.*"}, ["blocks.1.norm.weight", "blocks.2.up.bias"]),
        (tower(), {"layers": "*.up"}, ["blocks.0.down.bias", "head.bias"]),
    ):
        state = pruned(dense, **how).model.state_dict()
        assert all(torch.equal(state[name], dense.state_dict()[name]) for name in same)
        assert not torch.equal(state["blocks.0.up.bias"], dense.state_dict()["blocks.0.up.bias"])


class Closed(Part):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


def test_a_block_that_cannot_be_differentiated_is_left_as_solved():
    torch.manual_seed(0)
    dense = Tower().eval()
    dense.blocks = nn.ModuleList(Closed() for _ in range(3))
    with pytest.warns(lobs.NumericalWarning, match="cannot be differentiated"):
        found = pruned(dense)
    assert found.kept == pruned(tower(), refit="layers").kept


def test_a_caller_in_inference_mode_is_served():
    for refit in ("blocks", "layers"):
        with torch.inference_mode():
            inside = pruned(tower(), refit=refit)
        outside = pruned(tower(), refit=refit)
        assert all(
            torch.equal(a, b)
            for a, b in zip(inside.model.parameters(), outside.model.parameters(), strict=True)
        )


class MixingPart(Part):
    """Rows of a batch see each other, as time steps do where the batch comes second."""

    def forward(self, x):
        return super().forward(x + x.cumsum(0) / len(x))


@pytest.mark.parametrize("number", [1, 3, 9])
def test_batches_whose_rows_depend_on_each_other_are_not_cut(number):
    torch.manual_seed(0)
    dense = Tower().eval()
    dense.blocks = nn.ModuleList(MixingPart() for _ in range(3))
    rows = [b["held_out"] for b in pruned(dense, data(number)).settings.get("blocks", [])]
    assert rows == {1: [0] * 3, 3: [50] * 3, 9: [50] * 3}[number]


def test_one_huge_token_does_not_drown_the_others():
    wanted = torch.randn(2, 9, 4)
    huge = wanted.clone()
    huge[:, 0] *= 1000
    from lobs.pruning.refit.blocks import _by_size, _energy

    moved = 0.1 * torch.ones_like(wanted)
    far, far_huge = (_by_size(moved, x).square()[:, 1:].sum() for x in (wanted, huge))
    torch.testing.assert_close(far, far_huge)
    assert _energy(huge) == pytest.approx(_energy(wanted), rel=1e-5) == pytest.approx(72, rel=1e-5)
    images = torch.randn(2, 4, 3, 3)
    assert _energy(images) == pytest.approx(float(images.square().sum()), rel=1e-5)


def test_a_first_sample_of_zeros_does_not_stop_the_refit():
    dense = tower()
    nn.init.zeros_(dense.start.bias)
    first = pruned(dense, [torch.zeros(50, 5), *data()])
    assert first.settings["refit"].startswith("block by block")


def test_a_forecast_names_the_refit_of_blocks(monkeypatch):
    monkeypatch.setattr("lobs.pruning.forecast.WORK", 1.0)
    for refit, stages in (
        ("layers", set()),
        ("blocks", {"refit blocks"}),
        ("network", {"refit blocks", "refit network"}),
    ):
        ahead = lobs.forecast(tower(), data(), keep=0.4, refit=refit)
        assert {s.name for s in ahead.stages if s.name.startswith("refit")} == stages


def test_a_network_without_blocks_is_one_block():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    cut = pruned(plain, data(30))
    assert "jointly" in cut.settings["refit"] or "joint refit" in cut.settings["refit"]


def test_blocks_need_asymmetric_inputs():
    with pytest.raises(lobs.LobsError, match="refit='blocks'"):
        pruned(tower(), inputs="dense")


def test_a_gpt2_is_refitted():
    """Its blocks get a cache by position, which kept what earlier runs had put there."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    dense = transformers.GPT2LMHeadModel(config).eval()
    ids = [{"input_ids": torch.randint(0, 16, (4, 8))} for _ in range(8)]
    result = pruned(dense, ids, keep=0.5, skip="lm_head")
    assert "2 of 2 blocks" in result.settings["refit"]


def test_steps_are_one_over_the_root_of_the_curvature():
    """For a linear block the curvature of a weight is its input's energy, in every row."""
    from lobs.pruning.refit import descent

    torch.manual_seed(0)
    work, wanted = nn.Linear(6, 4), torch.randn(512, 4)
    x = torch.randn(512, 6) * torch.tensor([100.0, 1.0, 1.0, 1.0, 1.0, 0.0])

    class Distance:
        fit = held = descent.cut([descent.Piece(0, range(512))], 64)
        rows, steps = 64, None

        def far(self, work, piece):
            rows = slice(piece.rows.start, piece.rows.stop)
            return work(x[rows]) - wanted[rows]

        def loss(self, work, piece):
            return self.far(work, piece).square().sum()

        def probe(self, work, piece, generator):
            far = self.far(work, piece)
            return (far * descent.random_signs(far, generator)).sum()

    distance = Distance()
    free = [(name, p, None) for name, p in work.named_parameters()]
    loss = sum(float(distance.loss(work, piece).detach()) for piece in distance.fit)
    (sizes, bias), each = descent._step_sizes(work, free, distance)
    assert each == pytest.approx(loss / 28 / 512)
    curvature = x.square().sum(dim=0) + descent._FLOOR * x.square().sum(dim=0).mean()
    wanted_sizes = (loss / 28 / curvature).sqrt().expand(4, 6)
    torch.testing.assert_close(sizes / wanted_sizes, torch.ones(4, 6), rtol=0, atol=1)
    torch.testing.assert_close(bias, torch.full((4,), (loss / 28 / 512) ** 0.5), rtol=1, atol=0)


def test_weights_without_influence_stay():
    from lobs.pruning.refit.descent import _smoothed

    assert (1 / _smoothed(torch.zeros(3, 4))).eq(0).all()


def test_inputs_of_any_size_are_refitted():
    dense = tower()
    batches = [1e20 * x for x in data()]
    with torch.no_grad():
        dense.start.weight.mul_(1e-20)
        for block in dense.blocks:
            block.norm.weight.mul_(1e20)
            block.up.weight.mul_(1e-20)
    assert pruned(dense, batches).settings["refit"].startswith("block by block")


def test_a_round_that_only_measures_influences_does_not_walk_the_network(monkeypatch):
    from lobs.pruning import run

    walked, whole = [], run.in_blocks
    monkeypatch.setattr(run, "in_blocks", lambda *a, **k: walked.append(1) or whole(*a, **k))
    target = lobs.Sparsity(0.6, rounds=3)
    result = lobs.prune(tower(), data(), target, refit="blocks", progress=False)
    assert len(walked) == 1 and result.settings["rounds"] == 3
    assert sum(layer.kept for layer in result.layers) == target_count(result)
    walked.clear()
    lobs.prune(tower(), data(), target, refit="layers", progress=False)
    assert len(walked) == 3


def target_count(result):
    total = sum(layer.total for layer in result.layers)
    return total - lobs.Sparsity(0.6).count(total)


def test_large_images_are_sampled_and_small_ones_are_not(monkeypatch):
    """The moments of a sampled layer are those of all positions, but for the draw."""
    from lobs.calibration.blocks import base

    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(3))
    dense = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(*parts)).eval()
    batches = [torch.randn(8, 3, 24, 24) for _ in range(8)]
    found = {}
    for enough in (64, 10**9):
        monkeypatch.setattr(base, "ENOUGH", enough)
        found[enough] = pruned(dense, batches, refit="blocks")
    names = [layer.name for layer in found[64].layers]
    few, all_of_them = ({x.name: x.samples for x in found[e].layers} for e in (64, 10**9))
    assert all(64 * 27 <= few[name] < all_of_them[name] for name in names if name != "0")
    # As good on other images, within a tenth.
    other = [torch.randn(8, 3, 24, 24)]
    distances = [compare(dense, found[e].model, other).output for e in (64, 10**9)]
    assert distances[0] < 1.1 * distances[1]


SEEN = []  # whether each input of a `Reads` was channels-last


class Reads(nn.Module):
    """A block that notes the memory format of its input, and may insist on the usual one."""

    def __init__(self, insists):
        super().__init__()
        self.conv, self.more = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.insists = insists

    def forward(self, x):
        SEEN.append(not x.is_contiguous())
        if self.insists:
            x = x.view(len(x), -1).view_as(x)
        return x + self.more(torch.relu(self.conv(x)))


@pytest.mark.parametrize("insists", [False, True])
def test_images_flow_through_blocks_channels_last_where_these_take_it(insists):
    torch.manual_seed(0)
    SEEN.clear()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *(Reads(insists) for _ in range(3))).eval()
    result = pruned(model, [torch.randn(4, 3, 8, 8) for _ in range(8)])
    assert "block by block" in result.settings["refit"]
    assert sum(SEEN) == 1 if insists else sum(SEEN) > 50  # one try
    assert all(w.is_contiguous() for w in result.model.state_dict().values())


def test_the_change_of_a_large_network_is_measured_on_some_of_the_inputs():
    batches = [x.repeat(6, 1) for x in data(40)]  # 40 batches of 300 samples
    result = pruned(tower(), batches, inputs="asymmetric")
    assert result.settings["samples"] == 12_000
    measured = result.settings["measured samples"]
    assert 256 <= measured <= 600
    assert f"{measured:,} calibration samples" in result.summary()
    some = compare(tower(), result.model, batches[:: 12_000 // 256])
    assert result.certificate.measured == pytest.approx(some.output)


@pytest.mark.parametrize("target", [lobs.Sparsity(0.6, scope="layer"), lobs.NByM(2, 4)], ids=repr)
def test_weights_change_places_and_every_layer_keeps_as_many(monkeypatch, target):
    from lobs.pruning.refit import exchange

    def cut():
        return lobs.prune(tower(), data(), target, refit="blocks", skip="start", progress=False)

    monkeypatch.setattr(exchange, "_SHARE", 0.2)
    monkeypatch.setattr(exchange, "_MARGIN", 0.5)
    changed = cut()
    monkeypatch.setattr(exchange, "_SHARE", 0.0)
    monkeypatch.setattr(exchange, "_MARGIN", float("inf"))
    first = cut()
    different = 0
    for name, mask in changed.masks.items():
        weight = changed.model.get_parameter(name)
        assert int(mask.sum()) == int(first.masks[name].sum())
        assert bool((weight[~mask] == 0).all())
        different += int((mask != first.masks[name]).sum())
        if isinstance(target, lobs.NByM):
            assert bool((mask.view(-1, 4).sum(dim=1) == 2).all())
    assert different > 0
    for layer in changed.layers:
        solution = changed.solutions[layer.name]
        mask = changed.masks[f"{layer.name}.weight"]
        assert torch.equal(solution.mask.view(mask.shape[0], -1)[:, : mask.shape[1]], mask)


def test_an_exchange_takes_the_best_pairs_within_reach():
    from lobs.pruning.refit.exchange import _exchanged

    kept = torch.tensor([[[True, False, True, False] * 25]])
    gain, cost = torch.zeros(1, 1, 100), torch.full((1, 1, 100), 5.0)
    gain[..., 1], gain[..., 51], cost[..., 2], cost[..., 98] = 90.0, 60.0, 1.0, 2.0
    cost[..., 50] = 4.0
    anywhere = _exchanged(kept, gain, cost, 0)[0, 0]
    assert (anywhere != kept[0, 0]).nonzero().flatten().tolist() == [1, 2, 51, 98]
    within = _exchanged(kept, gain, cost, 4)[0, 0]
    assert (within != kept[0, 0]).nonzero().flatten().tolist() == [1, 2, 50, 51]


def test_an_exchange_that_leads_away_is_undone(monkeypatch):
    from lobs.pruning import run
    from lobs.pruning.refit import exchange

    monkeypatch.setattr(exchange, "_SHARE", 0.0)
    first = pruned(tower())
    monkeypatch.setattr(exchange, "_SHARE", 1.0)
    monkeypatch.setattr(exchange, "_MARGIN", 1e-30)  # even where nothing is won
    whole, seen = run.refit_block, []

    def spied(*given):
        effect = whole(*given)
        seen.append((effect.before, effect.after))
        return effect

    monkeypatch.setattr(run, "refit_block", spied)
    later = pruned(tower())
    for name, mask in later.masks.items():
        assert bool((later.model.get_parameter(name)[~mask] == 0).all())
        assert int(mask.sum()) == int(first.masks[name].sum())
    assert all(after <= before for before, after in seen)


def test_masks_of_a_named_solver_stay(monkeypatch):
    from lobs.pruning.refit import exchange

    monkeypatch.setattr(exchange, "_MARGIN", 1e-30)
    blocks = pruned(tower(), solver="magnitude")
    monkeypatch.setattr("lobs.pruning.refit.blocks.SCHEDULE", Schedule(0, 32, 0.05))
    layers = pruned(tower(), solver="magnitude")
    for name in ("blocks.0.up.weight", "blocks.0.down.weight"):
        assert torch.equal(layers.masks[name], blocks.masks[name])


def test_steps_in_bfloat16_end_about_as_near(monkeypatch):
    dense, ends = tower(), []
    for fast in (False, True):
        monkeypatch.setattr("lobs.pruning.refit.blocks.fast_bfloat16", lambda _, fast=fast: fast)
        ends.append(far(pruned(dense, skip="head").model, dense, "features"))
    assert ends[0] != ends[1]  # so both ways were taken
    assert ends[1] < 1.2 * ends[0]


def test_a_small_deviation_is_refitted_in_single_precision(monkeypatch):
    # bfloat16 has three digits: it would drown what a block loses with 97 % of its weights.
    ends = []
    for fast in (False, True):
        monkeypatch.setattr("lobs.pruning.refit.blocks.fast_bfloat16", lambda _, fast=fast: fast)
        ends.append(pruned(tower(), keep=0.97).model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(x.values() for x in ends), strict=True))


def test_a_block_that_needs_one_type_is_refitted_in_it(monkeypatch):
    class Strict(Part):
        def forward(self, x):
            hidden = torch.relu(self.up(self.norm(x)))
            if hidden.dtype != torch.float32:
                raise TypeError("float32 only")
            return x + self.down(hidden)

    dense = tower()
    dense.blocks = nn.ModuleList(Strict() for _ in range(3))
    monkeypatch.setattr("lobs.pruning.refit.blocks.fast_bfloat16", lambda _: True)
    assert pruned(dense.eval()).settings["refit"].startswith("block by block")


def test_a_backward_pass_that_refuses_bfloat16_is_run_in_single_precision(monkeypatch):
    class Strict(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            if slope.dtype != torch.float32:
                raise TypeError("float32 only")
            return slope

    class Picky(Part):
        def forward(self, x):
            return x + self.down(Strict.apply(torch.relu(self.up(self.norm(x)))))

    dense = tower()
    dense.blocks = nn.ModuleList(Picky() for _ in range(3))
    monkeypatch.setattr("lobs.pruning.refit.blocks.fast_bfloat16", lambda _: True)
    assert pruned(dense.eval()).settings["refit"].startswith("block by block")


def test_layers_outside_refitted_blocks_are_solved_to_the_end(monkeypatch):
    # The stem and the head belong to no block, so nothing moves their weights afterwards.
    found = {}
    real = lobs.solvers.Auto.__call__

    def call(self, problem, target):
        found[problem.name] = self.swaps
        return real(self, problem, target)

    monkeypatch.setattr(lobs.solvers.Auto, "__call__", call)
    pruned(tower())
    assert {name for name, swaps in found.items() if swaps} == {"layer 'start'", "layer 'head'"}
    assert len(found) == 8


def test_a_refitted_network_names_the_layer_and_batch_of_a_nan(monkeypatch):
    monkeypatch.setattr("lobs.pruning.session.affordable", lambda *_: False)
    batches = data()
    batches[5][3, 2] = torch.nan
    with pytest.raises(lobs.LobsError, match=r"layer '.*': NaN or infinite input in batch 5"):
        pruned(tower(), batches)
