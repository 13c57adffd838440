"""The built-in source: scikit-learn's 1,797 handwritten digits, 8x8, no download. `digits[:1500]` is a part of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...artifacts import UserError
from .sample import Reject, Sample, Unit

LEVELS = 16  # the data set counts ink from 0 to 16; images count to 255
COUNT = 1797
PLACE = re.compile(r"^digits(?:\[(\d*):(\d*)\])?$")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def is_digits(place: str) -> bool:
    """Whether a source is the built-in one, or a part of it."""
    return PLACE.match(place) is not None


@dataclass(frozen=True)
class Digits:
    """The digits from `first` to before `last`, as scikit-learn has them in order."""

    first: int = 0
    last: int = COUNT

    @staticmethod
    def at(place: str) -> Digits:
        """`digits`, or a part of them as Python writes it."""
        found = PLACE.match(place)
        assert found is not None, "asked only for what is_digits"
        first, last = int(found[1] or 0), int(found[2] or COUNT)
        if not first < last <= COUNT:
            raise UserError(
                f"source {place}: there are {COUNT:,} digits, in order; write digits[:1500] or digits[1500:]"
            )
        return Digits(first, last)

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
        whole = (self.first, self.last) == (0, COUNT)
        return [Unit(key="digits" if whole else f"digits[{self.first}:{self.last}]", items=("digits",))]

    def read(self, unit: Unit) -> Iterator[Sample | Reject]:
        from sklearn.datasets import load_digits  # slow to import, and only this source needs it

        images, labels = load_digits(return_X_y=True)
        pixels = np.rint(images.reshape(-1, 8, 8) * (255 / LEVELS)).astype(np.uint8)
        assert len(pixels) == COUNT
        for row, image, label in list(zip(range(COUNT), pixels, labels.tolist(), strict=True))[self.first : self.last]:
            yield Sample(f"digits/{row}", image, (f"a handwritten {NAMES[label]}",), label)
