from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn
from torch.func import functional_call
from torch.func import vjp as torch_vjp

from lobs.pruning.refit.gauss_newton import vjp

_SMALL_PRUNE = """
import sys, torch, lobs
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
lobs.prune(model, [torch.randn(64, 12), torch.randn(64, 12)], lobs.Sparsity(0.5), progress=False)
sys.exit("torch._dynamo" in sys.modules)
"""


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.Tanh())
    at = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    x = torch.randn(7, 2, 6, 6)
    return lambda weights: functional_call(model, weights, (x,)), at


def test_products_with_the_transposed_jacobian_are_those_of_torch_func_to_the_bit():
    function, at = network()
    value, transposed = vjp(function, at)
    expected, theirs = torch_vjp(function, at)[:2]
    assert torch.equal(value, expected) and not value.requires_grad
    for v in (torch.randn_like(value), torch.zeros_like(value)):
        for name, product in transposed(v)[0].items():
            assert torch.equal(product, theirs(v)[0][name]), name


def test_a_value_that_does_not_depend_on_a_parameter_gives_it_zeros():
    at = {"used": torch.ones(3), "unused": torch.ones(2)}
    _, transposed = vjp(lambda weights: 2 * weights["used"], at)
    (product,) = transposed(torch.ones(3))
    assert product["used"].tolist() == [2, 2, 2] and product["unused"].tolist() == [0, 0]
    _, transposed = vjp(lambda weights: torch.ones(4), at)
    assert not transposed(torch.ones(4))[0]["used"].any()


def test_pruning_imports_no_compiler_of_torch():
    """Importing torch._dynamo takes seconds in every process; nothing in a prune needs it."""
    assert subprocess.run([sys.executable, "-c", _SMALL_PRUNE], check=False).returncode == 0
