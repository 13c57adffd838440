"""From what a source holds to square uint8 images."""

from __future__ import annotations

import numpy as np

from .sources import Sample


class BadImage(Exception):
    """This image cannot be used. `reason` is one of a few words to count by, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def to_pixels(sample: Sample, size: int, channels: int) -> np.ndarray:
    """The sample's image as uint8 [channels, size, size]."""
    content = sample.content
    assert isinstance(content, np.ndarray), "encoded images are not known yet"
    image = content[None] if content.ndim == 2 else content.transpose(2, 0, 1)
    if image.shape != (channels, size, size):
        raise BadImage("wrong size", f"{image.shape[1]}x{image.shape[2]}, need {size}x{size}")
    return image
