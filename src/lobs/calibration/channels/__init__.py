"""Channels of a whole network: which go together, who reads them, and how to cut them out."""

from lobs.calibration.channels.cutting import Cut, Sizes
from lobs.calibration.channels.observe import Channels, Family, first_samples, observe
from lobs.calibration.channels.removal import Removal

__all__ = ["Channels", "Cut", "Family", "Removal", "Sizes", "first_samples", "observe"]
