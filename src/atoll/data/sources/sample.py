"""What every source gives: samples as they lie there, not yet decoded, and a list of what could not be read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One image as the source holds it: encoded bytes, or a uint8 array [H, W] or [H, W, 3].

    `name` says where it was found. It goes to the log only: an artifact does not depend on names.
    """

    name: str
    content: bytes | np.ndarray
    captions: tuple[str, ...] = ()
    label: int | None = None

    def identity(self) -> bytes:
        """sha256 of the encoded bytes; of dtype, shape and raw bytes for an array."""
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).digest()
        array = np.ascontiguousarray(self.content)
        header = f"{array.dtype.str} {'x'.join(map(str, array.shape))} ".encode()
        return hashlib.sha256(header + array.tobytes()).digest()


@dataclass(frozen=True)
class Reject:
    """Something that did not become a sample, or not all of it did. `id` is empty where there were no bytes to hash."""

    name: str
    id: str
    reason: str
    detail: str = ""


LARGEST_FILE = 512 * 2**20  # bytes; nothing that large is one image


def sanitize(name: str) -> str:
    """A file's name as text: one that is not UTF-8 cannot be written to a log as it is."""
    return name.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Unit:
    """A part of a source that one worker reads on its own; `key` changes when the part's files change."""

    key: str
    items: tuple[str, ...]
    start: int = 0
    stop: int | None = None


class Source(Protocol):
    """Where images come from. A source is a small frozen object: it travels to worker processes."""

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for color."""
        ...

    @property
    def default_size(self) -> int: ...

    @property
    def default_features(self) -> str | None:
        """The extractor to cluster by when none is named; None: the best this machine can run."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the labels, where the source knows them."""
        ...

    def units(self) -> list[Unit]: ...
    def read(self, unit: Unit) -> Iterator[Sample | Reject]: ...


class ColorImages:
    """What every source of ordinary pictures has in common."""

    channels = 3
    default_size = 64
    default_features = None
