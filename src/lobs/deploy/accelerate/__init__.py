"""Make sparse networks run faster: time several implementations of every layer, keep the best."""

from __future__ import annotations

from lobs._system.stopwatch import Interval, median, speedup, take_turns
from lobs.deploy.accelerate.acceleration import Acceleration, accelerate
from lobs.deploy.accelerate.layerwise import LayerTiming

__all__ = [
    "Acceleration",
    "Interval",
    "LayerTiming",
    "accelerate",
    "median",
    "speedup",
    "take_turns",
]
