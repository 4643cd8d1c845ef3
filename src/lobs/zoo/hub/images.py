"""Turn image files into a network's inputs, by a processor's or timm's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lobs.errors import DataError
from lobs.zoo.hub.libraries import library


def opened(path: Path, mode: str = "RGB") -> Any:
    """Return a decoded image."""
    library("PIL")
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert(mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"'{path}' is no whole image: {error}.") from error


def prepared(paths: Sequence[Path], settings: Mapping[str, Any]) -> Tensor:
    """Resize, crop and scale images as timm does when it evaluates.

    Args:
        paths: the files.
        settings: input_size, mean, std, crop_pct and interpolation.
    """
    library("PIL")
    from PIL import Image

    channels, height, width = settings["input_size"]
    share = float(settings.get("crop_pct") or 1.0)
    method = getattr(Image.Resampling, str(settings.get("interpolation", "bicubic")).upper(), 3)
    mode = "L" if channels == 1 else "RGB"
    made = []
    for path in paths:
        image = opened(path, mode)
        scale = max(height / share / image.height, width / share / image.width)
        sides = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
        image = image.resize(sides, method)
        left, top = (sides[0] - width) // 2, (sides[1] - height) // 2
        pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 255
        made.append(torch.from_numpy(pixels).view(height, width, channels).permute(2, 0, 1))
    mean, std = (torch.tensor(settings[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return (torch.stack(made) - mean) / std
