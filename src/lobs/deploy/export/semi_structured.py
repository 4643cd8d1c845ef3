"""2:4 sparsity: is the pattern there, and can this device use it?"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lobs.solvers.patterns import nbym
from lobs.errors import ExportError
from lobs.targets import NByM


def broken_groups(weight: Tensor, keep: int = 2, group: int = 4) -> int:
    """Groups of four neighbours along a row with more than two non-zeros; convolutions are flattened to rows first."""
    columns = weight[0].numel()
    if columns % group:
        raise ExportError(f"rows of {columns} weights do not split into groups of {group}.")
    return nbym.broken_groups(weight, NByM(keep, group))


def to_semi_structured(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy with every 2:4 Linear weight as torch's semi-structured tensor, and the names of those layers.

    Refused, with the reason, where the pattern is not there or the device has no kernels for it.
    """
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear and _follows(m.weight)]
    if not names:
        raise ExportError(
            "no Linear layer follows the 2:4 pattern: at most two non-zeros in every four "
            "neighbours of a row."
        )
    _check_device(model.get_submodule(names[0]).weight)
    fast = copy.deepcopy(model).eval().requires_grad_(False)
    for name in names:
        layer = fast.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        try:
            sparse = torch.sparse.to_sparse_semi_structured(layer.weight.detach().contiguous())
        except RuntimeError as error:
            raise ExportError(
                f"layer '{name}': torch cannot compress it: {str(error).splitlines()[0]}"
            ) from error
        layer.weight = nn.Parameter(sparse, requires_grad=False)
    return fast, tuple(names)


def _follows(weight: Tensor) -> bool:
    return weight.shape[1] % 4 == 0 and broken_groups(weight) == 0


def _check_device(weight: object) -> None:
    assert isinstance(weight, Tensor)
    if weight.device.type != "cuda":
        raise ExportError(
            f"the pattern is there, but the network is on '{weight.device.type}': torch has 2:4 "
            "kernels only for CUDA devices "
            "of compute capability 8.0 or more. Move it there in float16 or bfloat16; elsewhere "
            "the zeros stay as they are."
        )
    major, minor = torch.cuda.get_device_capability(weight.device)
    if major < 8:
        raise ExportError(
            f"the pattern is there, but this GPU has compute capability {major}.{minor}; 2:4 "
            "kernels need 8.0."
        )
    if weight.dtype not in (torch.float16, torch.bfloat16):
        raise ExportError(
            f"the pattern is there, but the weights are {weight.dtype}; 2:4 kernels take float16 "
            "or bfloat16."
        )
