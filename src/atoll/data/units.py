"""Adapter: items of a source as the units of work of `gather`. Goes away with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..artifacts import sha256_bytes
from .sources import Example, Item, Skipped, Source

UNIT_FILES = 4096


@dataclass(frozen=True)
class Unit:
    """Items that one worker reads; `key` changes when they do."""

    key: str
    items: tuple[Item, ...]


def units_of(items: Sequence[Item]) -> list[Unit]:
    """Image files 4,096 at a time; every range of rows on its own."""
    files = [item for item in items if item.stop is None]
    groups = [tuple(files[start : start + UNIT_FILES]) for start in range(0, len(files), UNIT_FILES)]
    groups += [(item,) for item in items if item.stop is not None]
    return [Unit(sha256_bytes("\n".join(item.to_json() for item in group).encode()), group) for group in groups]


def read_unit(source: Source, unit: Unit) -> Iterator[Example | Skipped]:
    for item in unit.items:
        yield from source.read(item)
