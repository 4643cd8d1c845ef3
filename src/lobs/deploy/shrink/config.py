"""Bring a Hugging Face configuration in line with a smaller network."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lobs.calibration.channels import Sizes
from lobs.calibration.forward import call, evaluating, main_output


def fit_config(model: nn.Module, example: Any, sizes: Sizes) -> str:
    """Change the configuration so that a network built from it has the same sizes.

    A field is changed where that makes more tensors of a newly built network fit. The change stays
    only if all fit and the new network gives the same output.

    Args:
        model: the smaller network; its configuration is changed in place.
        example: an input to compare outputs on.
        sizes: the sizes that have changed.

    Returns:
        What is missing, in one line; empty where the configuration fits, or there is none.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not sizes.counts:
        return ""
    best, wrong = copy.deepcopy(config), _misfits(model, config)
    if wrong is None:
        return f"{type(model).__name__} cannot be built from its configuration alone."
    improved = bool(wrong)
    while wrong and improved:
        improved = False
        for trial in _changes(best, sizes):
            found = _misfits(model, trial)
            if found is not None and len(found) < len(wrong):
                best, wrong, improved = trial, found, True
    if not wrong and _same_output(model, best, example):
        for have, new in zip(_parts(config), _parts(best), strict=True):
            own = {k: v for k, v in vars(new).items() if not hasattr(v, "to_dict")}
            vars(have).update(own)
        return ""
    if wrong:
        what = f"has no field for the size of '{wrong[0]}'"
    else:
        what = "describes a network with another output"
    return (
        f"{type(config).__name__} {what}: save with lobs.save or torch.save, since save_pretrained "
        "could not be undone."
    )


def _parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _changes(config: Any, sizes: Sizes) -> Iterator[Any]:
    """Yield copies of a configuration with one field changed, or a number of heads with its size.

    Many architectures divide the width by the number of heads unless `head_dim` is there.
    """
    for place, part in enumerate(_parts(config)):
        for name, value in list(vars(part).items()):
            for new in _candidates(name, value, sizes):
                heads = "head" in name and "head_dim" not in vars(part)
                for width in (None, *sorted(sizes.widths)) if heads else (None,):
                    trial = copy.deepcopy(config)
                    fields = vars(list(_parts(trial))[place])
                    fields[name] = new
                    if width is not None:
                        fields["head_dim"] = width
                    yield trial


def _candidates(name: str, value: Any, sizes: Sizes) -> list[int]:
    """Return what a field may have become."""
    if isinstance(value, int) and not isinstance(value, bool):
        return sizes.candidates(name, value)
    if value is None and any(word in name for word in ("inner", "intermediate", "ffn")):
        return sorted({new for _, new in sizes.lengths})
    return []


def _misfits(model: nn.Module, config: Any) -> list[str] | None:
    """Return the tensors that have other shapes in a new network; None where none can be built."""
    try:
        with torch.device("meta"):
            fresh = type(model)(copy.deepcopy(config)).state_dict()
    except Exception:  # the architecture's own checks of its configuration
        return None
    ours = model.state_dict()
    return [
        name
        for name in {**ours, **fresh}
        if name not in ours or name not in fresh or ours[name].shape != fresh[name].shape
    ]


def _same_output(model: nn.Module, config: Any, example: Any) -> bool:
    """Return whether a new network with the weights of this one gives the same output."""
    try:
        fresh = type(model)(copy.deepcopy(config)).to(next(model.parameters()).dtype)
        fresh.load_state_dict(model.state_dict())
        outputs = []
        for network in (model, fresh):
            with evaluating(network), torch.random.fork_rng():
                torch.manual_seed(0)
                outputs.append(main_output(call(network, example)))
    except Exception:  # the architecture's own code
        return False
    ours, theirs = outputs
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return False
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
