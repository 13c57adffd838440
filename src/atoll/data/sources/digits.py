"""The built-in source: scikit-learn's 1,797 handwritten digits, 8x8, no download."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .sample import Reject, Sample, Unit

LEVELS = 16  # the data set counts ink from 0 to 16; images count to 255
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Digits:
    @property
    def channels(self) -> int:
        return 1

    @property
    def default_size(self) -> int:
        return 8

    @property
    def default_features(self) -> str:
        return "pixels"

    @property
    def classes(self) -> tuple[str, ...]:
        return NAMES

    def units(self) -> list[Unit]:
        return [Unit(key="digits", items=("digits",))]

    def read(self, unit: Unit) -> Iterator[Sample | Reject]:
        from sklearn.datasets import load_digits  # slow to import, and only this source needs it

        images, labels = load_digits(return_X_y=True)
        pixels = np.rint(images.reshape(-1, 8, 8) * (255 / LEVELS)).astype(np.uint8)
        for row, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
            yield Sample(f"digits/{row}", image, (f"a handwritten {NAMES[label]}",), label)
