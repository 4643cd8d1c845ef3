"""A run store of a pruning run: what has been done is on disk, and is not done again.

Every finished piece of work (the moments of a pass over the data, a layer's solution) is one
safetensors file with its record in the header, written beside its place and renamed into it: after
`kill -9` it is there whole or not at all. The folder belongs to one run: the fingerprint of
network, data, settings and version lies in it, and anything else is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, nn

from lobs import __version__

from lobs.storage import checkpoint
from lobs.storage.checkpoint import Checkpoint
from lobs._system.distributed import process_group
from lobs.errors import FileError, LobsError
from lobs.storage.atomic import atomic_write, make_folder

_IDENTITY = "run.json"
# to be raised when the same settings lead to other numbers: what an older form left is not taken up
_METHOD = 7
_LOCK = ".lock"
# A pass over the data is saved in between when that takes less than this share of the time, and not
# more often than this.
_SHARE, _SECONDS = 0.05, 30.0


class RunStore:
    """What a run has finished, by key; without a folder it remembers nothing."""

    def __init__(self, folder: Path | None = None, *, elsewhere: bool = False) -> None:
        self.folder = folder
        self.kept = folder is not None or elsewhere  # elsewhere: by the process that leads
        self._saved, self._cost = time.monotonic(), 0.0

    def has(self, key: str) -> bool:
        """Was anything written under a key?"""
        here = self.folder is not None and self._path(key).exists()
        return self.kept and bool(process_group().all_gather(here)[0])

    def read(self, key: str) -> Checkpoint | None:
        """What was written under a key, or None."""
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
        """Keep a finished piece of work."""
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
        """Is it time to save what a long pass has reached?"""
        return (
            self.folder is not None
            and process_group().size == 1
            and time.monotonic() - self._saved > max(_SECONDS, self._cost / _SHARE)
        )

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        # Layers may bear any name; quoted, no name leaves the folder or is too long for it.
        short = quote(key, safe=" ")
        if len(short) > 120:
            short = f"{short[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        return self.folder / f"{short}.safetensors"


@contextmanager
def open_run_store(
    folder: str | os.PathLike[str] | None, identity: Mapping[str, str]
) -> Iterator[RunStore]:
    """The run store of a run with this identity: begun here, or taken up where it was left; one process at a time."""
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
        for rest in path.glob(".*.safetensors.*"):  # what a killed run was about to write
            rest.unlink(missing_ok=True)
        _same_run(path, identity)
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows: the user must see to it
        yield
        return
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise FileError(f"cannot write '{folder / _LOCK}': {error.strerror}.") from error
    try:
        # The system drops the lock of a process that is killed.
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
    """Refuse a folder that belongs to another run, and say how that differs."""
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
        told = "; ".join(
            f"{key} was {before.get(key)}, is {identity.get(key)}" for key in differing[:4]
        )
        raise FileError(
            f"'{folder}' belongs to another run: {told}. Give another folder, or delete this one "
            "to begin anew."
        )


def fingerprint(
    model: nn.Module, batches: Iterable[Any], settings: Mapping[str, Any]
) -> dict[str, str]:
    """What makes two runs the same: the network's form and numbers, every batch, all settings, and who computes."""
    data, count = hashlib.sha256(), 0
    with process_group().raise_together():
        for batch in batches:
            _feed(data, batch)
            count += 1
    plain = {key: _words(value) for key, value in settings.items()}
    parts = process_group().all_gather([count, _short(data)])
    weights = {*process_group().all_gather(weights_hash(model)[:16])}
    if len(weights) > 1:
        raise LobsError(
            "the processes do not hold the same network. Load or initialise it the same way in all "
            "of them."
        )
    return {
        "lobs": f"{__version__}, method {_METHOD}",
        "torch": str(torch.__version__),
        "network": _short(hashlib.sha256(f"{type(model)} {model}".encode())),
        "weights": weights.pop(),
        "data": " and ".join(f"{n} batches {digest}" for n, digest in parts),
        **plain,
    }


def weights_hash(model: nn.Module) -> str:
    """A fingerprint of a network's weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name}:".encode())
        _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    match value:
        case Tensor():
            digest.update(f"{value.dtype}:{tuple(value.shape)}".encode())
            digest.update(_bytes(value))
        case Mapping():
            digest.update(f"{len(value)}:".encode())
            for key, item in value.items():
                digest.update(f"{key}=".encode())
                _feed(digest, item)
        case tuple() | list():
            digest.update(f"{len(value)}:".encode())
            for item in value:
                _feed(digest, item)
        case _:
            digest.update(_words(value).encode())


def _words(value: object) -> str:
    """What an object says of itself, but not where it lies, which changes from process to process."""
    return re.sub(
        r" at 0x[0-9a-f]+",
        "",
        repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value),
    )


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:16])
