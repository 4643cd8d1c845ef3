"""Store a pruning run's finished work in a folder, so that a resumed run does not repeat it.

Each piece of work is one safetensors file: the moments of a pass over the data, or a layer's
solution. Files are written atomically, so after `kill -9` a file is whole or absent. A folder
belongs to one run. It holds the fingerprint of network, data, settings and version, and a run with
another fingerprint is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, nn

from lobs import __version__
from lobs._system.distributed import process_group
from lobs.errors import FileError, LobsError
from lobs.storage import checkpoint
from lobs.storage.atomic import atomic_write, make_folder
from lobs.storage.checkpoint import Checkpoint
from lobs.storage.digest import Digest, digest_of, identified

_IDENTITY = "run.json"
# Raise this when the same settings lead to other numbers: older run stores are then refused.
_METHOD = 10
_LOCK = ".lock"
# A long pass over the data is saved at intervals. Saving takes at most this share of the time, and
# happens at most this often.
_LARGEST_SHARE, _SHORTEST_SECONDS = 0.05, 30.0


class RunStore:
    """Keep finished work by key. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None = None, *, elsewhere: bool = False) -> None:
        self.folder = folder
        self.kept = folder is not None or elsewhere  # elsewhere: rank 0 has the folder
        self._saved, self._cost = time.monotonic(), 0.0

    def has(self, key: str) -> bool:
        """Return whether anything was written under a key."""
        here = self.folder is not None and self._path(key).exists()
        return self.kept and bool(process_group().all_gather(here)[0])

    def read(self, key: str) -> Checkpoint | None:
        """Return what was written under a key, or None."""
        if not self.has(key):
            return None
        group, found = process_group(), Checkpoint({}, {})
        with group.raise_together():
            if self.folder is not None:
                path = self._path(key)
                found = checkpoint.load(path)
                if found.record.get("key") != key:
                    raise FileError(
                        f"'{path}' is not what the run wrote there. Delete it; that work will be "
                        "done again."
                    )
        tensors, record = group.broadcast_object(found.state_dict, found.record)
        return Checkpoint(tensors, {}, record)

    def write(self, key: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Write a finished piece of work under a key."""
        if not self.kept:
            return
        began = time.monotonic()
        with process_group().raise_together():
            if self.folder is not None:
                checkpoint.save(tensors, self._path(key), record={**record, "key": key})
        self._saved = time.monotonic()
        self._cost = self._saved - began

    @property
    def due(self) -> bool:
        """Return whether a long pass should save its intermediate state now."""
        return (
            self.folder is not None
            and process_group().size == 1
            and time.monotonic() - self._saved > max(_SHORTEST_SECONDS, self._cost / _LARGEST_SHARE)
        )

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        # A layer may have any name. Quoted and shortened, it stays a legal name in this folder.
        short = quote(key, safe=" ")
        if len(short) > 120:
            short = f"{short[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        return self.folder / f"{short}.safetensors"


@contextmanager
def open_run_store(
    folder: str | os.PathLike[str] | None, identity: Mapping[str, str]
) -> Iterator[RunStore]:
    """Open the run store of a run with this identity: new, or resumed from its folder.

    Only one process at a time may use a folder.
    """
    if folder is None:
        yield RunStore()
        return
    with ExitStack() as stack:
        with process_group().raise_together():
            if process_group().leads:
                stack.enter_context(_opened(Path(folder), identity))
        yield RunStore(Path(folder)) if process_group().leads else RunStore(elsewhere=True)


@contextmanager
def _opened(path: Path, identity: Mapping[str, str]) -> Iterator[None]:
    make_folder(path)
    with _locked(path):
        for rest in path.glob(".*.safetensors.*"):  # left by a killed run
            rest.unlink(missing_ok=True)
        _same_run(path, identity)
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl, so two runs in one folder are not noticed
        yield
        return
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise FileError(f"cannot write '{folder / _LOCK}': {error.strerror}.") from error
    try:
        # The system releases the lock of a killed process.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise FileError(
            f"another run is using '{folder}'. Wait for it, or give another folder."
        ) from None
    try:
        yield
    finally:
        os.close(handle)


def _same_run(folder: Path, identity: Mapping[str, str]) -> None:
    """Refuse a folder that belongs to another run, and name the differences."""
    path = folder / _IDENTITY
    if not path.exists():
        others = [
            p.name
            for p in folder.iterdir()
            if p.name != _LOCK and not p.name.startswith(f".{_IDENTITY}")
        ]
        if others:
            raise FileError(
                f"'{folder}' holds '{others[0]}' but no run store. Give an empty or a new folder "
                "to resume from."
            )
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(dict(identity), indent=1))
        return
    try:
        before = json.loads(path.read_text())
        assert isinstance(before, dict)
    except (OSError, ValueError, AssertionError, RecursionError) as error:
        raise FileError(
            f"'{path}' is damaged: {error}. Delete the folder to begin anew."
        ) from error
    differing = [key for key in {**before, **identity} if before.get(key) != identity.get(key)]
    if differing:
        differences = "; ".join(
            f"{key} was {before.get(key)}, is {identity.get(key)}" for key in differing[:4]
        )
        raise FileError(
            f"'{folder}' belongs to another run: {differences}. Give another folder, "
            "or delete this one to begin anew."
        )


def fingerprint(
    model: nn.Module,
    batches: Iterable[Any],
    settings: Mapping[str, Any],
    weights_digest: str | None = None,
) -> dict[str, str]:
    """Return what makes two runs the same: network, weights, batches, settings and versions.

    `lobs.storage.digest` says what is not covered.

    Args:
        model: the network; its type, printed form, weights, buffers and attributes count.
        batches: the calibration data; every value counts, and so does the order.
        settings: values by name. Functions count with their code and what they capture.
        weights_digest: a hash of the weights, where they are not in memory.
    """
    data, count = Digest(), 0
    with process_group().raise_together():
        for batch in batches:
            data.add(batch)
            count += 1
    plain = {key: identified(value) for key, value in settings.items()}
    parts = process_group().all_gather([count, data.text[:16]])
    own = weights_hash(model) if weights_digest is None else weights_digest
    weights = {*process_group().all_gather(own[:16])}
    if len(weights) > 1:
        raise LobsError(
            "the processes do not hold the same network. Load or initialise it the same way in all "
            "of them."
        )
    return {
        "lobs": f"{__version__}, method {_METHOD}",
        "torch": str(torch.__version__),
        "network": digest_of([str(model), model])[:16],
        "weights": weights.pop(),
        "data": " and ".join(f"{n} batches {digest}" for n, digest in parts),
        **plain,
    }


def weights_hash(model: nn.Module) -> str:
    """Return a SHA-256 of a network's state dict."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name}:".encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}:{tuple(value.shape)}".encode())
            digest.update(_bytes(value))
        else:  # what `get_extra_state` returned
            digest.update(digest_of(value).encode())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
