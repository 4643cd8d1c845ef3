"""Write and read compact files: removed weights take no room, and loading gives the same bits."""

from __future__ import annotations

from lobs.storage.compact.file import (
    FORMAT,
    CompactFile,
    StoredTensor,
    digest_of,
    read_compact,
    write_compact,
)
from lobs.storage.compact.values import VALUES, Values

__all__ = [
    "FORMAT",
    "VALUES",
    "CompactFile",
    "StoredTensor",
    "Values",
    "digest_of",
    "read_compact",
    "write_compact",
]
