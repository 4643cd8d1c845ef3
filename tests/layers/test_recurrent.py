from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lobs
from lobs.errors import UnsupportedLayerError
from lobs.layers import find_layers, watching
from tests.architectures.checks import passes

KINDS = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
LENGTHS = {True: [5, 4, 2, 2, 1, 1, 1], False: [2, 5, 1, 3, 1, 4, 2]}  # by whether they are sorted


def tensors(out):
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, tuple):
        for part in out:
            yield from tensors(part) if part is not None else ()


def check(module, *given):
    """Compare a module with itself under observation; return all observed inputs by layer."""
    module = module.double().eval()
    layers = find_layers(module)
    wanted, inputs, outputs = list(tensors(module(*given))), {}, {}
    handles = [
        *(x.on_input(lambda v, n=x.name: inputs.setdefault(n, []).append(v)) for x in layers),
        *(x.on_output(lambda v, n=x.name: outputs.setdefault(n, []).append(v)) for x in layers),
    ]
    with watching(handles):
        found = list(tensors(module(*given)))
    assert "forward" not in vars(module)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b)
    for layer in layers:  # every output is that of the plain formula, on the noted inputs
        x = torch.cat([v.reshape(-1, layer.columns) for v in inputs[layer.name]])
        z = nn.functional.linear(x, layer.weight, layer.bias)
        seen = torch.cat([v.reshape(-1, layer.rows) for v in outputs[layer.name]])
        order = [rows.detach().round(decimals=9).unique(dim=0) for rows in (z, seen)]
        torch.testing.assert_close(*order)
    return inputs


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *itertools.product(
            KINDS,
            (
                {},
                {"bias": False, "batch_first": True},
                {"bidirectional": True, "num_layers": 2},
            ),
        ),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.LSTM, {"proj_size": 3, "bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"proj_size": 3, "bias": False}),
    ],
)
def test_every_matrix_is_observed_and_nothing_changes(kind, settings):
    torch.manual_seed(0)
    module, x = kind(6, 4, **settings), torch.randn(5, 7, 6, dtype=torch.float64)
    first = settings.get("batch_first", False)
    ways = (2 if settings.get("bidirectional") else 1) * settings.get("num_layers", 1)
    state = [torch.randn(ways, 7, 4, dtype=torch.float64)]
    if kind is nn.LSTM:
        state.insert(0, torch.randn(ways, 7, settings.get("proj_size", 4), dtype=torch.float64))
    given = x.transpose(0, 1) if first else x
    check(module, given, tuple(state) if kind is nn.LSTM else state[0])
    check(module, x[0])
    inputs = check(module, given)
    assert len(inputs) == ways * (3 if "proj_size" in settings else 2)
    own = inputs["hh_l0"][0].transpose(0, 1) if first else inputs["hh_l0"][0]
    assert not own[0].any() and own[1:].all(dim=-1).any()  # it starts from zero
    for in_order, lengths in LENGTHS.items():
        packed = pack_padded_sequence(
            given, torch.tensor(lengths), batch_first=first, enforce_sorted=in_order
        )
        assert isinstance(packed, PackedSequence)
        inputs = check(module, packed)
        assert all(len(v) == sum(lengths) for [v] in inputs.values())  # no padding


@pytest.mark.parametrize("kind", CELLS)
def test_cells_are_observed_at_every_step(kind):
    torch.manual_seed(0)
    x = torch.randn(7, 6, dtype=torch.float64)
    assert [*check(kind(6, 4), x)] == ["ih", "hh"]
    check(kind(6, 4, bias=False), x[0])


class Reader(nn.Module):
    """Read sequences by a recurrent module, or by a cell in a loop."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.kind, self.read = kind, kind(6, 12, **settings)
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        if self.kind in KINDS:
            return self.out(self.read(x)[0][:, -1])
        state = None
        for t in range(x.shape[1]):
            state = self.read(x[:, t], state)
        return self.out(state[0] if self.kind is nn.LSTMCell else state)


def reader(kind, **settings):
    def make():
        torch.manual_seed(0)
        return Reader(kind, **settings).eval(), lambda n: torch.randn(n, 7, 6)

    return make


def test_an_lstm_is_pruned_better_than_by_magnitude(tmp_path):
    result = passes(reader(nn.LSTM, batch_first=True), tmp_path, samples=160)
    names = [layer.name for layer in result.layers]
    assert names == ["read.ih_l0", "read.hh_l0", "out"]
    # Also together, though torch's LSTM has no forward derivative.
    assert "cannot be differentiated" not in str(result.settings["refit"])
    assert result.total == sum(p.numel() for p in result.model.parameters() if p.dim() > 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, *CELLS])
def test_every_kind_is_pruned_better_than_by_magnitude(kind, tmp_path):
    settings = {"batch_first": True} if kind in KINDS else {}
    passes(reader(kind, **settings), tmp_path)


@pytest.mark.parametrize("inputs", ["dense", "pruned"])
def test_other_inputs_and_patterns(inputs):
    model, batch = reader(nn.GRU, batch_first=True)()
    result = lobs.prune(
        model, [batch(64) for _ in range(2)], lobs.NByM(2, 4), inputs=inputs, progress=False
    )
    kept = result.model.read.weight_hh_l0 != 0
    assert (kept.view(36, 3, 4).sum(dim=-1) <= 2).all() and result.masks["read.weight_ih_l0"].any()


def test_zeros_stay_in_training(tmp_path):
    model, batch = reader(nn.LSTM, batch_first=True)()
    result = lobs.prune(model, [batch(64)], keep=0.3, refit="layers", progress=False)
    trained = copy.deepcopy(result.model).train()
    optimizer = torch.optim.Adam(trained.parameters(), 1e-2)
    with lobs.hold(trained, result.masks, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            trained(batch(16)).square().sum().backward()
            optimizer.step()
    state = trained.state_dict()
    assert not any(bool(state[name][~mask].any()) for name, mask in result.masks.items())


def test_a_recurrent_module_with_its_own_forward_is_refused_and_parametrised_ones_are_folded():
    class Own(nn.GRU):
        def forward(self, x):
            return super().forward(x.relu())

    with pytest.raises(UnsupportedLayerError, match="not as GRU does"):
        find_layers(Own(3, 3))
    model, batch = reader(nn.LSTM, batch_first=True)()
    nn.utils.parametrizations.weight_norm(model.read, "weight_hh_l0")
    with pytest.warns(UserWarning, match="folded"):
        result = lobs.prune(model, [batch(64)], keep=0.5, refit="layers", progress=False)
    assert "read.weight_hh_l0" in result.masks


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.up, self.head = nn.LSTM(6, 8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.up(self.rnn(x)[0][-1]).relu())


def test_units_do_not_leave_recurrent_layers_and_the_result_says_so():
    result = lobs.prune(
        Classifier().eval(), [torch.randn(5, 40, 6)], lobs.Structured(0.5), progress=False
    )
    assert not any(name.startswith("rnn") for name in result.masks)
    assert "units cannot leave recurrent layers" in result.summary()
