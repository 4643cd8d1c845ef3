"""Padded positions are no data: padded and unpadded batches of one text are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lobs
from lobs.calibration.blocks import layers_of
from lobs.calibration.blocks.repeated import Repeated, repeated_blocks
from lobs.calibration.blocks.rerun import Rerun
from lobs.calibration.blocks.traced import given_names, traced_steps
from lobs.calibration.collect import collect_moments
from lobs.calibration.comparison import compare
from lobs.calibration.forward import evaluating, masks_of
from lobs.calibration.output_influence import output_influence
from lobs.layers import find_layers
from lobs.pruning.refit.blocks import _BlockDistance
from lobs.pruning.refit.descent import free_parameters

WIDTH = 8


class Part(nn.Module):
    """Attention over the positions that are not masked, and a map of each position."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, bias=None):
        h = self.norm(x)
        scores = self.q(h) @ h.mT
        scores = scores if bias is None else scores + bias
        return x + self.o(torch.tanh(scores.softmax(-1) @ self.v(h)))


class Encoder(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Part() for _ in range(depth))

    def forward(self, input_ids, attention_mask):
        bias = (1.0 - attention_mask.float()).unsqueeze(1) * -1e9
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, bias)
        return x


class Flat(Encoder):
    """Joins samples and positions before the last map, as experts do."""

    def __init__(self):
        super().__init__(2)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, input_ids, attention_mask):
        x = super().forward(input_ids, attention_mask)
        return self.last(x.flatten(0, 1)).view(*x.shape[:2], 5)


LENGTHS = (7, 3, 5, 1, 6, 2, 7, 4, 3, 5, 6, 2)


def texts():
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, 50, (n,), generator=g) for n in LENGTHS]


def alone():
    """One text in each batch, without padding."""
    return [
        {"input_ids": t.unsqueeze(0), "attention_mask": torch.ones(1, len(t), dtype=torch.long)}
        for t in texts()
    ]


def together(rows=1, side="right"):
    """Texts in batches of some rows, padded by a token that is not zero."""
    made = []
    every = texts()
    for start in range(0, len(every), rows):
        some = every[start : start + rows]
        ids = torch.full((len(some), 9), 13)
        mask = torch.zeros(len(some), 9, dtype=torch.long)
        for row, text in enumerate(some):
            place = slice(len(text)) if side == "right" else slice(9 - len(text), 9)
            ids[row, place], mask[row, place] = text, 1
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("build", [Encoder, Flat])
@pytest.mark.parametrize(("rows", "side"), [(1, "right"), (4, "left"), (12, "right")])
def test_padded_and_unpadded_batches_have_the_same_moments(build, rows, side):
    model = build().eval()
    plain, padded = (collect_moments(model, data) for data in (alone(), together(rows, side)))
    for name in plain:
        assert plain.count(name) == padded.count(name) == sum(LENGTHS)
        close(plain[name].moment, padded[name].moment)
        close(plain[name].mean, padded[name].mean)
    counted = collect_moments(model, together(rows, side), counts_only=True)
    assert {counted.count(name) for name in counted} == {sum(LENGTHS)}


def blocks_of(kind, dense, pruned, data):
    pairs = list(zip(find_layers(dense), find_layers(pruned), strict=True))
    if kind == "repeated":
        return repeated_blocks(dense, pruned, data, pairs, hold_out=True)
    if kind == "traced":
        return traced_steps(dense, pruned, data, pairs, given_names(dense, data), hold_out=True)
    return [Rerun(dense, pruned, data, pairs, hold_out=True)]


def paired(kind, data):
    torch.manual_seed(1)
    dense, pruned = Encoder().eval(), Encoder().eval()
    found = {}
    with evaluating(dense), evaluating(pruned):
        blocks = blocks_of(kind, dense, pruned, data)
        assert kind != "repeated" or all(isinstance(block, Repeated) for block in blocks)
        for block in blocks:
            for layer, moments in layers_of(block):
                held = moments.held_out
                found[layer.name] = (
                    moments.pruned.moment,
                    moments.residual(layer.matrix()),
                    held.pruned.moment,
                    held.residual(layer.matrix()),
                )
            block.advance()
    return found


@pytest.mark.parametrize("kind", ["repeated", "traced", "rerun"])
def test_moments_of_both_networks_leave_padding_out(kind):
    plain, padded = paired(kind, alone()), paired(kind, together())
    assert len(plain) == 9
    for name, values in plain.items():
        for a, b in zip(values, padded[name], strict=True):
            close(a, b)


def test_one_batch_that_is_cut_leaves_padding_out_of_both_parts():
    """With few batches the last eighth of the rows is held out."""
    cut = paired("repeated", together(12))
    rerun = paired("rerun", together(12))
    whole = collect_moments(Encoder(), together(12))
    assert whole.samples == 12
    for name, values in cut.items():
        for a, b in zip(values, rerun[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_refits_distance_leaves_padding_out():
    def distances(data):
        torch.manual_seed(2)
        dense, pruned = Encoder().eval(), Encoder().eval()
        pairs = list(zip(find_layers(dense), find_layers(pruned), strict=True))
        with evaluating(dense), evaluating(pruned):
            block = repeated_blocks(dense, pruned, data, pairs, hold_out=True)[0]
            work = block.module
            masks = {
                f"{x.name}.weight": torch.ones(x.weight.shape, dtype=torch.bool)
                for _, x in block.layers
            }
            free = free_parameters(work, [x for _, x in block.layers], masks, f"{block.name}.")
            found = _BlockDistance(work, block.samples(), free)
            losses = [float(found.loss(work, piece)) for piece in found.fit]
            return found.distance(work), found.held_energy, sum(losses)

    assert distances(alone()) == pytest.approx(distances(together()), rel=1e-5)


def test_the_measured_change_of_the_output_leaves_padding_out():
    torch.manual_seed(3)
    dense, pruned = Encoder().eval(), Encoder().eval()
    pairs = list(zip(find_layers(dense), find_layers(pruned), strict=True))
    plain, padded = (compare(dense, pruned, data, pairs) for data in (alone(), together(4)))
    assert padded.samples == 12
    assert (padded.output, padded.output_norm) == pytest.approx((plain.output, plain.output_norm))
    for name, row in plain.layers.items():
        other = padded.layers[name]
        assert (row.count, row.error) == (other.count, pytest.approx(other.error, rel=1e-5))


def test_padded_positions_have_no_influence():
    model = Encoder(1).eval()
    layers = find_layers(model, "blocks.0.o")
    data = together(1)[3:4]  # one token of nine
    found = output_influence(model, data, layers)["blocks.0.o"]
    close(found, torch.ones(1, WIDTH, dtype=torch.float64))  # by the residual connection


def test_padding_changes_nothing_in_the_pruned_network():
    model = Encoder().eval()
    plain, padded = (
        lobs.prune(model, data, lobs.Sparsity(0.5, "layer"), refit="layers", progress=False)
        for data in (alone(), together())
    )
    for name, mask in plain.masks.items():
        assert torch.equal(mask, padded.masks[name])


def test_what_counts_as_a_mask_of_padding():
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masks_of(ids) == () and masks_of({"input_ids": ids}) == ()
    assert masks_of({"attention_mask": torch.ones_like(mask)}) == ()
    assert masks_of({"attention_mask": mask.view(2, 1, 3)}) == ()
    (found,) = masks_of({"attention_mask": mask.bool()})
    assert torch.equal(found, mask != 0)
    other = torch.tensor([[1, 0], [1, 1]])
    assert len(masks_of({"attention_mask": mask, "decoder_attention_mask": other})) == 2
    # A decoder of the same length has its own tokens, and none of them is dropped.
    assert masks_of({"attention_mask": mask, "decoder_input_ids": ids}) == ()
