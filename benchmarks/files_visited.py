"""Count the source files of lobs whose code runs during one `prune` call.

    python -m benchmarks.files_visited

The call is `lobs.prune(model, batches, keep=0.1)` on an MLP of three layers. Files that are only
imported do not count. Code compiled by numba is counted by the Python file that calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import lobs

SOURCE = Path(lobs.__file__).parent
IMPORT = "<module>"  # the name of the code object that runs when a file is imported


def visited(work: Callable[[], Any]) -> list[str]:
    """Run `work` and return the files of lobs whose functions ran, relative to the package."""
    root, found = str(SOURCE), set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != IMPORT and code.co_filename.startswith(root):
            found.add(code.co_filename)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(Path(name).relative_to(SOURCE).as_posix() for name in found)


def first_prune() -> lobs.PruningResult:
    """Make the call that the README shows first."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)
    )
    return lobs.prune(model, list(torch.randn(8, 32, 40)), keep=0.1, progress=False)


def main() -> None:
    first_prune()  # imports, and compiles what a first run compiles
    files = visited(first_prune)
    print(f"{len(files)} files")
    print("\n".join(files))


if __name__ == "__main__":
    main()
