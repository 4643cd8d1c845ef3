"""Measure the first prune of a small MLP: with an empty kernel cache and with a filled one.

    python -m benchmarks.first_use [--repeat 3]

Each run is a fresh process. The cold runs compile the kernels, the warm ones load them from the
cache. The difference is what a newcomer waits for once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

_RUN = """
import json, sys, time
import torch
import lobs
imported = time.perf_counter()
torch.manual_seed(0)
nn = torch.nn
model = nn.Sequential(
    nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)
)
lobs.prune(model, [torch.randn(512, 64)], lobs.Sparsity(0.9), progress=False)
seconds, dynamo = time.perf_counter() - imported, "torch._dynamo" in sys.modules
print(json.dumps({"seconds": seconds, "cpu": time.process_time(), "dynamo": dynamo}))
"""


def first_use(cache: str) -> dict[str, float]:
    """Prune in a fresh process whose kernel cache is the folder `cache`; return its times."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the seconds of cold and warm runs and their difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="pairs of runs; the fastest counts")
    repeat = parser.parse_args().repeat
    cold, warm = [], []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(first_use(cache))
            warm.append(first_use(cache))
    first, later = (min(run["seconds"] for run in runs) for runs in (cold, warm))
    print(f"cold  {first:6.1f} s   {min(run['cpu'] for run in cold):6.1f} s of CPU in all")
    print(f"warm  {later:6.1f} s   {min(run['cpu'] for run in warm):6.1f} s of CPU in all")
    print(f"more  {first - later:6.1f} s for compiling the kernels, once per machine")
    if any(run["dynamo"] for run in cold + warm):
        print("torch._dynamo was imported: it costs seconds in every process")


if __name__ == "__main__":
    main()
