"""Channels of a whole network: which go together, who reads them, and how to cut them out."""

from lobs.calibration.channels.cutting import Cut, Sizes
from lobs.calibration.channels.removal import Removal
from lobs.calibration.channels.watching import Channels, Family, first_samples, observe

__all__ = ["Channels", "Cut", "Family", "Removal", "Sizes", "first_samples", "observe"]
