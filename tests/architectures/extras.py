"""Import timm and transformers, also where torchvision's compiled operators do not load."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_kept: list[torch.library.Library] = []


def extra(name: str) -> ModuleType:
    """Return a module that may need torchvision."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # its operators are unknown: name those that importing asks for
        if not _kept:
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor a, Tensor b, float c) -> Tensor")
            _kept.append(library)
    except ImportError:
        pass
    return importlib.import_module(name)
