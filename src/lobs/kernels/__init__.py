"""The hot loop of exact greedy OBS, one function with two backends.

Both take the inverse A of an equilibrated moment and rows of equally scaled weights, and remove from every row, one at a
time, the weight of least w²/A_qq, downdating that row's inverse after each deletion (A ← A − A_:q A_q:/A_qq). This
*is* a pivoted Cholesky factorisation of A. The first `protected` columns are never removed but take part in everything.
They return, per row, the order of deletion (int32) and what each deletion cost (float64).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lobs.errors import SolverError

Backend: TypeAlias = Literal["auto", "torch", "compiled"]
Kernel: TypeAlias = Callable[[Tensor, Tensor, int, str], tuple[Tensor, Tensor]]


def greedy(
    inverse: Tensor, weight: Tensor, protected: int, *, backend: Backend = "auto", label: str = "exact"
) -> tuple[Tensor, Tensor]:
    """Run greedy deletion to the end for every row, in the dtype of `inverse`."""
    # Scaling a row scales its losses; done in float64, so that float32 holds them whatever the layer's units.
    weight = weight.to(torch.float64)
    size = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    rows = (weight / size).to(inverse.dtype)
    order, losses = _backend(backend, inverse)(inverse.contiguous(), rows, protected, label)
    return order, losses.to(torch.float64) * size.square()


def _backend(name: Backend, inverse: Tensor) -> Kernel:
    if name not in ("auto", "torch", "compiled"):
        raise SolverError(f"unknown backend '{name}'. There are: auto, torch, compiled.")
    on_cpu = inverse.device.type == "cpu" and inverse.dtype in (torch.float32, torch.float64)
    has_numba = find_spec("numba") is not None
    if name == "compiled" and not (on_cpu and has_numba):
        raise SolverError("the compiled backend needs numba and CPU tensors in float32 or float64. Use 'torch'.")
    if name == "torch" or not (on_cpu and has_numba):
        from lobs.kernels.torch_greedy import greedy_rows

        return greedy_rows
    from lobs.kernels.compiled_greedy import greedy_rows as compiled_rows

    return compiled_rows
