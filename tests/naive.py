"""Slow oracles: each does the obvious thing, without any idea from the package."""

from __future__ import annotations

from itertools import combinations

import torch


def quadratic(delta, psi):
    return float(torch.einsum("ri,ij,rj->", delta.double(), psi.double(), delta.double()))


def best_on_support(w, psi, mask):
    """Least squares for every row by solving the full normal equations with the removed columns struck out."""
    out = torch.zeros_like(w, dtype=torch.float64)
    for r in range(len(w)):
        s = mask[r].nonzero().flatten()
        out[r, s] = torch.linalg.lstsq(psi[s][:, s].double(), (w[r].double() @ psi.double())[s], driver="gelsd").solution
    return out


def greedy(w, psi, count, protected=0):
    """Layer-wide greedy OBS that re-solves least squares for every candidate at every step."""
    rows, d = w.shape
    mask = torch.ones(rows, d, dtype=torch.bool)
    row_error = [0.0] * rows
    total, curve = 0.0, [0.0]
    for _ in range(count):
        best = None
        for r in range(rows):
            for q in range(d - protected):
                if not mask[r, q]:
                    continue
                trial = mask[r : r + 1].clone()
                trial[0, q] = False
                v = best_on_support(w[r : r + 1], psi, trial)
                error = quadratic(v - w[r : r + 1].double(), psi)
                if best is None or error - row_error[r] < best[0]:
                    best = (error - row_error[r], r, q, error)
        assert best is not None
        _, r, q, error = best
        total += error - row_error[r]
        row_error[r] = error
        mask[r, q] = False
        curve.append(total)
    return mask, torch.tensor(curve, dtype=torch.float64)


def exhaustive(w, psi, count, protected=0):
    """The least error that any mask with `count` removals can have (tiny problems only)."""
    rows, d = w.shape
    places = [(r, q) for r in range(rows) for q in range(d - protected)]
    best = float("inf")
    for gone in combinations(places, count):
        mask = torch.ones(rows, d, dtype=torch.bool)
        for r, q in gone:
            mask[r, q] = False
        v = best_on_support(w, psi, mask)
        best = min(best, quadratic(v - w.double(), psi))
    return best


def lobs(w, psi, count, protected=0):
    """The published method, one deletion at a time over the whole layer."""
    a = torch.linalg.inv(psi.double())
    v = w.double().clone()
    rows, d = w.shape
    order = sorted((float(w[r, q].double() ** 2 / a[q, q]), r, q) for r in range(rows) for q in range(d - protected))
    mask = torch.ones(rows, d, dtype=torch.bool)
    for _, r, q in order[:count]:
        v[r] -= v[r, q] / a[q, q] * a[q]
        mask[r, q] = False
    return torch.where(mask, v, 0.0), mask
