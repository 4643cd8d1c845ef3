"""Slow oracles: each does the obvious thing, without any idea from the package."""

from __future__ import annotations

from itertools import combinations

import torch


def quadratic(delta, psi):
    return float(torch.einsum("ri,ij,rj->", delta.double(), psi.double(), delta.double()))


def best_on_support(w, psi, mask):
    """Least squares for every row: the full normal equations without the removed columns."""
    out = torch.zeros_like(w, dtype=torch.float64)
    for r in range(len(w)):
        s = mask[r].nonzero().flatten()
        out[r, s] = torch.linalg.lstsq(
            psi[s][:, s].double(), (w[r].double() @ psi.double())[s], driver="gelsd"
        ).solution
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
    order = sorted(
        (float(w[r, q].double() ** 2 / a[q, q]), r, q)
        for r in range(rows)
        for q in range(d - protected)
    )
    mask = torch.ones(rows, d, dtype=torch.bool)
    for _, r, q in order[:count]:
        v[r] -= v[r, q] / a[q, q] * a[q]
        mask[r, q] = False
    return torch.where(mask, v, 0.0), mask


def row_errors(w, psi, mask):
    """Error of every row with the best weights on its support."""
    delta = best_on_support(w, psi, mask) - w.double()
    return ((delta @ psi.double()) * delta).sum(1)


def greedy_in_groups(w, psi, quota):
    """Row by row: delete what raises the error least in groups that have not lost their share."""
    mask = torch.ones(w.shape, dtype=torch.bool)
    for r in range(len(w)):
        left = quota.allowed.tolist()
        while any(left):
            trials = []
            for q, g in enumerate(quota.group.tolist()):
                if g >= 0 and left[g] and mask[r, q]:
                    trial = mask[r : r + 1].clone()
                    trial[0, q] = False
                    trials.append((float(row_errors(w[r : r + 1], psi, trial)[0]), q, g))
            _, q, g = min(trials)
            mask[r, q] = False
            left[g] -= 1
    return mask


def best_swap(w, psi, mask, groups):
    """The least error of a row after one swap inside one of the groups."""
    errors = [float("inf")]
    for group in groups:
        for p in group:
            for q in group:
                if mask[p] and not mask[q]:
                    trial = mask.clone().unsqueeze(0)
                    trial[0, p], trial[0, q] = False, True
                    errors.append(float(row_errors(w.unsqueeze(0), psi, trial)[0]))
    return min(errors)


def exhaustive_groups(w, psi, n, m):
    """The least error with n kept of every m columns."""
    from itertools import product

    choices = list(combinations(range(m), n))
    total = 0.0
    for row in w:
        errors = []
        for picks in product(choices, repeat=w.shape[1] // m):
            mask = torch.zeros(1, w.shape[1], dtype=torch.bool)
            for g, pick in enumerate(picks):
                mask[0, [g * m + i for i in pick]] = True
            errors.append(float(row_errors(row.unsqueeze(0), psi, mask)[0]))
        total += min(errors)
    return total


def greedy_blocks(w, psi, shape, count):
    """Layer-wide greedy over blocks that re-solves least squares for every candidate."""
    rows, d = w.shape
    tiles = [
        (slice(r, r + shape[0]), slice(c, c + shape[1]))
        for r in range(0, rows, shape[0])
        for c in range(0, d, shape[1])
    ]
    mask = torch.ones(rows, d, dtype=torch.bool)
    error = 0.0
    for _ in range(count):
        trials = []
        for i, tile in enumerate(tiles):
            if bool(mask[tile].any()):
                trial = mask.clone()
                trial[tile] = False
                trials.append((float(row_errors(w, psi, trial).sum()), i))
        error, i = min(trials)
        mask[tiles[i]] = False
    return mask, error
