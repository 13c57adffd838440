"""The built-in source: scikit-learn's 1,797 handwritten digits, 8x8, no download. `digits[:1500]` is a part of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...artifacts import UserError
from .source import Annotation, Example, Item, Items, Skipped, Source, SourceConfig, source

LEVELS = 16  # gray levels of the data set; images have 255
COUNT = 1797
PLACE = re.compile(r"^digits(?:\[(\d*):(\d*)\])?$")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@source("digits")
class Digits(Source):
    """The digits, or a range of them written as a Python slice, in scikit-learn's order."""

    kind = "digits"
    channels = 1
    default_size = 8
    default_features = "pixels"
    built_in = True
    classes = NAMES

    def __init__(self, place: str, config: SourceConfig = SourceConfig()) -> None:
        super().__init__(place, config)
        found = PLACE.match(place)
        first, last = (int(found[1] or 0), int(found[2] or COUNT)) if found else (0, 0)
        if not first < last <= COUNT:
            raise UserError(
                f"source {place}: there are {COUNT:,} digits, in order; write digits, digits[:1500] or digits[1500:]"
            )
        self.first, self.last = first, last

    @classmethod
    def matches(cls, place: str) -> bool:
        return PLACE.match(place) is not None

    def list(self) -> Items:
        return [Item("digits", start=self.first, stop=self.last)]

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        from sklearn.datasets import load_digits  # slow to import, and only this source needs it

        images, labels = load_digits(return_X_y=True)
        pixels = np.rint(images.reshape(-1, 8, 8) * (255 / LEVELS)).astype(np.uint8)
        assert len(pixels) == COUNT
        for row in range(item.start, item.stop or COUNT):
            label = int(labels[row])
            yield Example(f"digits/{row}", pixels[row], Annotation((f"a handwritten {NAMES[label]}",), label))
