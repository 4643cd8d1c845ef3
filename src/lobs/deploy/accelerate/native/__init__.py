"""Kernels generated as LLVM code for this processor: sparse matrices times few or many inputs."""

from __future__ import annotations

from lobs.deploy.accelerate.native.bitmask import (
    MOST_SAMPLES,
    STORAGES,
    BitMatrix,
    Storage,
    multiply,
    rounded,
)
from lobs.deploy.accelerate.native.machine_code import FORMS, Form, this_form
from lobs.deploy.accelerate.native.planes import PlaneMatrix, add_planes, block_of
from lobs.deploy.accelerate.native.slots import SlotMatrix, multiply_slots
from lobs.deploy.accelerate.native.turn import turned

__all__ = [
    "FORMS",
    "MOST_SAMPLES",
    "STORAGES",
    "BitMatrix",
    "Form",
    "PlaneMatrix",
    "SlotMatrix",
    "Storage",
    "add_planes",
    "block_of",
    "multiply",
    "multiply_slots",
    "rounded",
    "this_form",
    "turned",
]
