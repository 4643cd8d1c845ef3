"""Import transformers and timm where they are installed; say one clear line where they are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lobs.errors import LobsError


def library(name: str, extra: str = "hub") -> Any:
    """Return an optional library, or raise one line that says how to install it.

    Args:
        name: the library.
        extra: the extra of lobs that brings it.
    """
    if sys.modules.get(name) is None and (name in sys.modules or find_spec(name) is None):
        raise LobsError(f"this needs {name}, which is not installed: pip install 'lobs[{extra}]'.")
    if name == "transformers":
        _without_broken_torchvision()
    try:
        return import_module(name)
    except Exception as error:  # a library that does not fit torch may raise anything
        text = " ".join(str(error).split())[:300].rstrip(".")
        raise LobsError(
            f"{name} is installed but cannot be imported ({type(error).__name__}: {text}). "
            "Install it anew."
        ) from error


def _without_broken_torchvision() -> None:
    """Treat a torchvision as absent that was built for another torch.

    transformers imports it where it finds it, and would fail with it. Nothing here needs it.
    """
    if "torchvision" in sys.modules or find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except Exception:  # its operators are missing, or anything else
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # Python's mark for "absent"


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the bars and notes of transformers inside this block."""
    logs = library("transformers").utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()
