from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lobs
from lobs import LobsError

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.5, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.5, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5),
    "adadelta": torch.optim.Adadelta,
    "adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
    "radam": lambda p: torch.optim.RAdam(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=5, line_search_fn="strong_wolfe"),
}


def network():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 6), nn.ReLU(), nn.Linear(6, 2)
    )


def random_masks(model, keep=0.3):
    return {n: torch.rand_like(p) < keep for n, p in model.named_parameters() if p.dim() > 1}


def data(n=16):
    return torch.randn(n, 1, 5, 5), torch.randint(2, (n,))


def loss_of(model, pair):
    return F.cross_entropy(model(pair[0]), pair[1])


def revived(model, masks):
    state = model.state_dict()
    return sum(int((state[n][~m] != 0).sum()) for n, m in masks.items())


def fit(model, optimizer, steps=6):
    for _ in range(steps):
        pair = data()

        def closure(pair=pair):
            optimizer.zero_grad()
            loss = loss_of(model, pair)
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("given", [True, False], ids=["optimizer given", "any optimizer"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_hold_through_any_optimizer(name, given):
    model = network()
    masks, before = random_masks(model), copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    fit(model, optimizer, 2)  # state from before the hold must not push removed weights
    with lobs.hold(model, masks, optimizer if given else None):
        fit(model, optimizer)
    assert revived(model, masks) == 0
    for n, p in model.named_parameters():
        for value in optimizer.state[p].values():
            if isinstance(value, torch.Tensor) and value.shape == p.shape and n in masks:
                assert not (value[~masks[n]] != 0).any()
        assert not torch.equal(p, before.get_parameter(n))  # the kept ones did learn


def test_without_the_hold_momentum_revives_zeros():
    model = network()
    masks = random_masks(model)
    lobs.training.apply_masks(model, masks)
    fit(model, OPTIMIZERS["sgd"](model.parameters()))
    assert revived(model, masks) > 30


def test_an_optimizer_that_mixes_weights_cannot_revive_them():
    class Noisy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p))

    model = network()
    masks = random_masks(model)
    optimizer = Noisy(model.parameters(), 0.1)
    held = lobs.hold(model, masks, optimizer)
    fit(model, optimizer, 3)
    assert revived(model, masks) == 0
    held.remove()
    fit(model, optimizer, 1)
    assert revived(model, masks) > 100


def test_gradient_norms_see_only_kept_weights():
    model = network()
    masks = random_masks(model)
    with lobs.hold(model, masks):
        for _ in range(3):  # accumulated over three batches
            loss_of(model, data()).backward()
        assert all(not (model.get_parameter(n).grad[~m] != 0).any() for n, m in masks.items())


def test_gradient_accumulation_and_gradients_set_by_hand():
    model = network()
    masks = random_masks(model)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with lobs.hold(model, masks, optimizer):
        for _ in range(3):
            for _ in range(4):
                (loss_of(model, data()) / 4).backward()
            for p in model.parameters():
                p.grad += 1.0
            optimizer.step()
            optimizer.zero_grad()
    assert revived(model, masks) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_grad_scaler_with_overflow(dtype):
    model = network()
    masks = random_masks(model)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**40, growth_interval=2
    )  # begins with steps that overflow
    scales = []
    with lobs.hold(model, masks, optimizer):
        for _ in range(40):
            x, y = data()
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
            assert revived(model, masks) == 0
    if dtype == torch.float16:
        assert min(scales) < 2.0**40  # some steps were skipped
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_loaded_optimizer_state_is_cleaned():
    model = network()
    masks = random_masks(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    fit(model, optimizer, 2)
    stale = copy.deepcopy(optimizer.state_dict())
    with lobs.hold(model, masks, optimizer):
        fit(model, optimizer, 1)
        optimizer.load_state_dict(stale)
        fit(model, optimizer, 1)
        for n, m in masks.items():
            assert not (optimizer.state[model.get_parameter(n)]["momentum_buffer"][~m] != 0).any()
    assert revived(model, masks) == 0


def test_a_deepcopy_keeps_zeros_and_can_be_held_itself(tmp_path):
    model = network()
    masks = random_masks(model)
    with lobs.hold(model, masks):
        twin = copy.deepcopy(model)
    assert revived(twin, masks) == 0
    with lobs.hold(twin, masks):
        fit(twin, OPTIMIZERS["sgd"](twin.parameters()))
    saved = lobs.load(lobs.save(twin, tmp_path / "x.safetensors", masks))
    assert revived(twin, saved.masks) == 0 and all(
        torch.equal(saved.masks[n], m) for n, m in masks.items()
    )


def test_moving_averages_stay_sparse():
    model = network()
    masks = random_masks(model)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with lobs.hold(model, masks, optimizer):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for _ in range(4):
            fit(model, optimizer, 1)
            average.update_parameters(model)
    assert revived(average.module, masks) == 0
    assert lobs.training.apply_masks(average, masks) == dict.fromkeys(
        masks, 0
    )  # names are found inside the wrapper


def test_other_networks_are_left_alone():
    model, other = network(), network()
    with lobs.hold(model, random_masks(model)):
        fit(other, OPTIMIZERS["sgd"](other.parameters()))
    assert all((p != 0).float().mean() > 0.9 for p in other.parameters() if p.dim() > 1)


def test_two_holds_and_removal_twice():
    model = network()
    masks = random_masks(model)
    one, two = lobs.hold(model, masks), lobs.hold(model, masks)
    one.remove()
    one.remove()
    fit(model, OPTIMIZERS["sgd"](model.parameters()))
    assert revived(model, masks) == 0
    two.remove()


def test_masks_of_another_network_are_refused():
    model = network()
    with pytest.raises(LobsError, match=r"'9.weight' names no parameter"):
        lobs.hold(model, {"9.weight": torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(
        LobsError, match=r"'3.weight' is torch.bool \(2, 2\); it must be bool \(6, 27\)"
    ):
        lobs.hold(model, {"3.weight": torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(LobsError, match="must be bool"):
        lobs.hold(model, {"3.weight": torch.ones(6, 27)})


def test_names_are_found_behind_wrappers():
    model = network()
    masks = random_masks(model)
    wrapped = torch.compile(model, backend="eager")
    lobs.hold(wrapped, masks).remove()
    assert revived(model, masks) == 0
    model = network()
    lobs.hold(nn.DataParallel(model), masks).remove()
    assert revived(model, masks) == 0
    bare = nn.Linear(3, 2)
    lobs.hold(bare, {"weight": torch.zeros(2, 3, dtype=torch.bool)}).remove()
    assert not bare.weight.any()


def test_a_part_named_as_a_wrapper_names_things_is_not_taken_for_another():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.a = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.Linear(2, 2)

    model = Own()
    lobs.training.apply_masks(model, {"a.weight": torch.zeros(2, 2, dtype=torch.bool)})
    assert not model.a.weight.any() and model.module["a"].weight.any()


def test_an_optimiser_inside_another_is_found():
    class Prepared(torch.optim.Optimizer):
        """A wrapper as training libraries make it: itself never initialised as an optimiser."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.step()

    layer = nn.Linear(3, 2)
    optimizer = Prepared(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))
    mask = torch.tensor([[True, False, True], [False, True, True]])
    lobs.hold(layer, {"weight": mask}, optimizer)
    for _ in range(3):
        layer(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    assert not layer.weight[~mask].any() and layer.weight[mask].all()


def test_a_transposed_update_is_refused():
    mask = torch.ones(4, 6, dtype=torch.bool)
    with pytest.raises(lobs.LobsError, match="transposed"):
        lobs.training.merge_lora(torch.randn(4, 6), torch.randn(2, 4), torch.randn(6, 2), mask)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimiser_of_another_network_is_refused(kind):
    dense, small = nn.Linear(3, 2), nn.Linear(3, 2)
    masks = {"weight": torch.zeros(2, 3, dtype=torch.bool)}
    before = small.weight.detach().clone()
    right = rf"such as torch\.optim\.{kind.__name__}\(model\.parameters\(\), …\)"
    with pytest.raises(LobsError, match=f"none of the masked parameters.*{right}"):
        lobs.hold(small, masks, kind(dense.parameters(), 0.1))
    assert torch.equal(small.weight, before)
    with pytest.raises(LobsError, match=r"optimizer is a list: give a torch\.optim optimiser"):
        lobs.hold(small, masks, list(small.parameters()))


def test_an_optimiser_beside_frozen_pruned_layers_is_taken():
    # Frozen weights cannot change, so training the other layers alone is no mistake.
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    mask = torch.zeros(3, 3, dtype=torch.bool)
    with lobs.hold(model, {"0.weight": mask}, torch.optim.SGD(model[1].parameters(), 0.1)) as held:
        assert not model[0].weight.any()
        assert repr(held) == "Hold(9 weights of 1 tensors at zero)"
    assert repr(held) == "Hold(9 weights of 1 tensors at zero, hooks removed)"
