"""Convert 2:4 sparse layers to torch's semi-structured tensors, where the device has kernels."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lobs.errors import ExportError
from lobs.solvers.patterns import nbym
from lobs.targets import NByM


def broken_groups(weight: Tensor, keep: int = 2, group: int = 4) -> int:
    """Count groups of `group` neighbours along a row with more than `keep` non-zeros.

    Convolutions are flattened to rows first.

    Args:
        weight: a weight whose first dimension is the rows.
        keep: the most non-zeros allowed in a group.
        group: the size of a group.
    """
    columns = weight[0].numel()
    if columns % group:
        raise ExportError(f"rows of {columns} weights do not split into groups of {group}.")
    return nbym.broken_groups(weight, NByM(keep, group))


def to_semi_structured(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy with 2:4 Linear weights as semi-structured tensors, and those layers' names.

    Raise `ExportError` where no layer follows the pattern or the device has no kernels for it.
    """
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear and _follows(m.weight)]
    if not names:
        raise ExportError(
            "no Linear layer follows the 2:4 pattern, at most two non-zeros in every four "
            "neighbours of a row. Prune with lobs.NByM(2, 4) first."
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
            f"the layers are 2:4, but the network is on '{weight.device.type}': torch has 2:4 "
            "kernels only for CUDA devices of compute capability 8.0 or more. Move it there "
            "in float16 or bfloat16."
        )
    major, minor = torch.cuda.get_device_capability(weight.device)
    if major < 8:
        raise ExportError(
            f"the layers are 2:4, but this GPU has compute capability {major}.{minor}; 2:4 "
            "kernels need 8.0."
        )
    if weight.dtype not in (torch.float16, torch.bfloat16):
        raise ExportError(
            f"the layers are 2:4, but the weights are {weight.dtype}; 2:4 kernels take float16 "
            "or bfloat16."
        )
