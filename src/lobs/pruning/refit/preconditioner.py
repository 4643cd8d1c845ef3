"""The preconditioner of the joint refit: the network's curvature seen from rows of layers.

For the weights of one output unit i, JᵀJ is about g_i Ψ: Ψ is the second moment of the layer's
inputs, and g_i how strongly the unit affects the network's outputs. On the unit's own support that
is a small matrix, inverted once per step. Wide layers that keep much use only the diagonal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lobs.calibration.moments import Moments
from lobs.layers import Layer
from lobs.solvers import linalg
from lobs.solvers.kernels.rows import blocks, listed

Vector: TypeAlias = dict[str, Tensor]  # a number for every free weight, by parameter

_DAMPING = 0.1  # relative to a block's diagonal
_FLOOR = 0.02  # least entry of a block's diagonal, relative to its mean
_NUMBERS = 5e7  # entries of a layer's blocks, at most


@dataclass(frozen=True)
class _Block:
    """One group of one layer: every row's free columns, and (g Ψ)⁻¹ on them."""

    index: Tensor
    real: Tensor
    inverse: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        own = (rows.gather(1, self.index) * self.real).unsqueeze(2)
        return torch.zeros_like(rows).scatter_add_(
            1, self.index, (self.inverse @ own).squeeze(2) * self.real
        )


class Preconditioner:
    """An approximate inverse of JᵀJ on the free weights: by rows if affordable, else diagonal."""

    def __init__(self, size: Vector) -> None:
        self.size = size  # of JᵀJ's diagonal
        self.layers: list[tuple[Layer, list[_Block]]] = []

    def learn(self, layers: Iterable[Layer], moments: Mapping[str, Moments], free: Vector) -> None:
        """Compute the blocks of some layers from the moments of their inputs.

        Args:
            layers: layers whose blocks are affordable.
            moments: moments of their inputs, by name.
            free: 1 where a weight is free, else 0.
        """
        for layer in layers:
            size, mask = (_matrix(layer, vector) for vector in (self.size, free))
            found = [
                _block(m, s, k > 0)
                for m, s, k in zip(moments[layer.name].moment, size, mask, strict=True)
            ]
            if None not in found:
                self.layers.append((layer, [block for block in found if block is not None]))

    def __call__(self, vector: Vector) -> Vector:
        """Return the preconditioned vector."""
        out = {name: t / self.size[name] for name, t in vector.items()}
        for layer, parts in self.layers:
            solved = [part(rows) for part, rows in zip(parts, _matrix(layer, vector), strict=True)]
            _write(layer, torch.stack(solved), out)
        return out


def affordable(layer: Layer, free: Vector, madds: float) -> bool:
    """Return whether a layer's blocks take at most `madds` multiply-adds, and little memory.

    Args:
        layer: the layer.
        free: 1 where a weight is free, else 0.
        madds: multiply-adds, at most.
    """
    kept = _matrix(layer, free).sum(dim=-1)
    rows, longest = kept.numel(), float(kept.max()) if kept.numel() else 0.0
    return rows * longest**2 <= _NUMBERS and rows * longest**3 / 2 <= madds


def _block(moment: Tensor, size: Tensor, mask: Tensor) -> _Block | None:
    gram = moment.to(size)
    energy = gram.diagonal()
    total = float(energy.sum())
    if not total > 0:
        return None
    reach = size.sum(dim=1) / total
    index, real = listed(mask)
    own = blocks(gram, index, real)
    diagonal = own.diagonal(dim1=1, dim2=2)
    diagonal.copy_(
        torch.where(real, diagonal * (1 + _DAMPING) + _DAMPING * _FLOOR * energy.mean(), 1.0)
    )
    inverse, good = linalg.inverses(own)
    if not bool(good.all()):
        return None
    return _Block(
        index, real, inverse / reach.clamp_min(torch.finfo(size.dtype).tiny).view(-1, 1, 1)
    )


def _matrix(layer: Layer, vector: Mapping[str, Tensor]) -> Tensor:
    """Return a vector's part in one layer, as (groups, rows, columns [+ 1])."""
    (name, span), *bias = layer.parameters().items()
    matrix = layer.unfolded(vector[name][slice(*span)])
    for other, rows in bias:
        last = vector[other][slice(*rows)].reshape(*matrix.shape[:2], 1)
        matrix = torch.cat([matrix, last], dim=-1)
    return matrix


def _write(layer: Layer, matrix: Tensor, vector: Vector) -> None:
    """Write a matrix back into a vector, in place: the inverse of `_matrix`."""
    (name, span), *bias = layer.parameters().items()
    vector[name][slice(*span)] = layer.folded(matrix[..., : layer.columns])
    for other, rows in bias:
        vector[other][slice(*rows)] = matrix[..., layer.columns].flatten()
