"""Gather blocks of a matrix, compiled: four times faster than indexing with two tensors."""

from __future__ import annotations

from lobs.solvers.kernels.compiling import compiled


@compiled
def gather(gram, lines, columns, out):
    """Set out[r, i, j] = gram[lines[r, i], columns[r, j]]."""
    for r in range(lines.shape[0]):
        wanted = columns[r]
        for i in range(lines.shape[1]):
            source, target = gram[lines[r, i]], out[r, i]
            for j in range(wanted.shape[0]):
                target[j] = source[wanted[j]]
