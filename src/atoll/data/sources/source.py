"""What a data source is, and the registry of sources. A new source is one file:

@source("lmdb", endings=(".lmdb",))
class Lmdb(Source):
    def list(self) -> Items: ...
    def read(self, item: Item) -> Iterator[Example | Skipped]: ...
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ...artifacts import AtollWarning, UserError, sanitize, suggest
from ..captions import Annotation, encodable
from .files import Files

__all__ = ["END", "Annotation", "Example", "Item", "Items", "Skipped", "Source", "SourceConfig"]
__all__ += ["is_built_in", "open_source", "row_items", "source"]

ROWS = 4096  # the most rows of a tar or a table in one item
END = 2**63 - 1  # as `stop` of an item: to the end, whose row is unknown
COMPRESSED_IMAGE = 100_000  # bytes: a guess, where rows are not counted


@dataclass(frozen=True, slots=True)
class Item:
    """One listed piece of a source: an image file, or a range of rows of a tar or a table. Small and picklable."""

    name: str  # path relative to the source's root; not UTF-8 where the file system's is not
    size: int = 0  # bytes of the file, by which a resumed run sees that it has changed
    start: int = 0  # rows start : stop of the file
    stop: int | None = None  # None: one image file; END: to the end
    offset: int = 0  # where `start` is found: a byte of a tar, a row group of a table
    skipped: str = ""  # why there is nothing to read, where the listing shows it
    texts: tuple[str, ...] = ()  # caption files of this image
    note: Annotation = Annotation()  # what else the listing has

    def to_json(self) -> str:
        """One line of ASCII; names that are not UTF-8 survive."""
        fields = {name: value for name, value in asdict(self).items() if value and getattr(self, name) != Annotation()}
        return json.dumps(fields)

    @staticmethod
    def from_json(line: str) -> Item:
        fields: dict[str, Any] = json.loads(line)
        if (note := fields.get("note")) is not None:
            fields["note"] = Annotation(tuple(note["captions"]), note["label"], tuple(note["warnings"]))
        return Item(**{**fields, "texts": tuple(fields.get("texts", ()))})


Items = list[Item]


@dataclass(frozen=True)
class Example:
    """One image as the source holds it: encoded bytes, or a uint8 array [H, W] or [H, W, 3]."""

    name: str
    content: bytes | np.ndarray
    note: Annotation = Annotation()  # its captions and its label


@dataclass(frozen=True)
class Skipped:
    """An image that cannot be used, or a caption or label of one; `reason` is one of a few words to count by."""

    name: str
    reason: str
    detail: str = ""


class SourceConfig(BaseModel):
    """How to read a source."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: str | None = Field(default=None, description="folder, webdataset, ...; None: what most of the files are")
    labels: Literal["given", "folder", "auto"] = Field(
        default="given",
        description="folder: the first folder is the class; auto: the same, if there are several with all the images",
    )
    image_column: str | None = Field(default=None, description="of a table; none: the only one that can be it")


class Source:
    """Where images come from. Small and picklable: it travels to worker processes. Override `list` and `read`."""

    format: ClassVar[str]  # set by @source, as is `endings`
    endings: ClassVar[tuple[str, ...]]  # of the files that are read
    options: ClassVar[tuple[str, ...]] = ()  # fields of SourceConfig that mean something here
    kind: ClassVar[str] = "images"  # recorded in the manifest; recipes depend on it
    built_in: ClassVar[bool] = False  # needs no files, and less time than starting a worker process
    channels: ClassVar[int] = 3  # 1: grayscale
    default_size: ClassVar[int] = 64  # side of the prepared images
    default_features: ClassVar[str | None] = None  # the extractor to cluster by; None: the best this machine can run

    def __init__(self, place: str, config: SourceConfig = SourceConfig()) -> None:
        self.place, self.config = place, config

    @classmethod
    def matches(cls, place: str) -> bool:
        """Whether the name of a place alone shows that this class reads it."""
        return place.rstrip("/").lower().endswith(cls.endings)

    @property
    def full_place(self) -> str:
        """The place as seen from any folder."""
        return self.place if self.built_in or "://" in self.place else os.path.abspath(self.place)

    @cached_property
    def files(self) -> Files:
        """The files at the place, listed once."""
        return Files(self.place)

    @cached_property
    def items(self) -> Items:
        """What `list` returns, called once. Workers have no need of it."""
        return self.list()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "items"}

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the labels, by number, where the source has them."""
        return None

    def list(self) -> Items:
        """What there is to read, always in the same order. Walks the source once."""
        raise NotImplementedError

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        """The images of one item."""
        raise NotImplementedError

    def count(self) -> int:
        """How many images there are, about."""
        unknown = sum(item.size - item.offset for item in self.items if item.stop == END)
        ranges = [item for item in self.items if item.stop != END and not item.skipped]
        return sum(1 if r.stop is None else r.stop - r.start for r in ranges) + unknown // COMPRESSED_IMAGE


SourceClass = TypeVar("SourceClass", bound=type[Source])
SOURCES: dict[str, type[Source]] = {}


def source(name: str, endings: tuple[str, ...] = ()) -> Callable[[SourceClass], SourceClass]:
    """Register a class of sources as `--format NAME`. It reads files with these endings (lower case)."""

    def register(cls: SourceClass) -> SourceClass:
        if name in SOURCES:
            raise UserError(f"source {name}: is registered already; choose another name")
        cls.format, cls.endings, SOURCES[name] = name, endings, cls
        return cls

    return register


def open_source(place: str, config: SourceConfig = SourceConfig()) -> Source:
    """The source at a place: `digits`, a folder, a file, a pattern of files, or a URL of any of these."""
    if not encodable(place):
        raise UserError(f"source {sanitize(place)}: the path is not UTF-8; rename it")
    files = None
    name = config.format or next((name for name, cls in SOURCES.items() if cls.matches(place)), None)
    if name is None:
        files = Files(place)
        name = most_frequent(files)
    if name not in SOURCES:
        raise UserError(f"--format {name}: no such format; {suggest(name, list(SOURCES))}")
    wanted = {"labels": config.labels == "folder", "image_column": config.image_column is not None}
    for option, given in wanted.items():
        if given and option not in SOURCES[name].options:
            flag = f"--{option.replace('_', '-')} {getattr(config, option)}"
            raise UserError(f"{flag}: {place} is read as {name}, which has no such option; leave it out")
    opened = SOURCES[name](place, config)
    if files is not None:
        opened.files = files
    return opened


def is_built_in(place: str) -> bool:
    """Whether a place is the name of a source that needs no files, such as `digits`."""
    return any(cls.built_in and cls.matches(place) for cls in SOURCES.values())


def most_frequent(files: Files) -> str:
    """The format of the most files, the first registered of several; prints what is left out.

    Of files that share a stem only the first format counts: img2dataset writes a .parquet beside each .tar.
    """
    formats = list(SOURCES)
    ranks = {ending: rank for rank, name in enumerate(formats) for ending in SOURCES[name].endings}
    first: dict[str, int] = {}
    for stem, ending in map(os.path.splitext, files.sizes):
        if (rank := ranks.get(ending.lower())) is not None:
            first[stem] = min(rank, first.get(stem, rank))
    counts = Counter(formats[rank] for rank in sorted(first.values()))
    (chosen, _), *others = counts.most_common() or [("folder", 0)]
    if others:
        left_out = ", ".join(f"{count:,} (--format {name})" for name, count in others)
        # one place for all, so that it is printed once
        warnings.warn(f"source {files.place}: read as {chosen}; files left out: {left_out}", AtollWarning, stacklevel=1)
    return chosen


def row_items(name: str, size: int, count: int, start: int = 0, offset: int = 0) -> Items:
    """Items of at most ROWS rows for the rows start : start + count of a file of `size` bytes."""
    stop = start + count
    return [Item(name, size, first, min(first + ROWS, stop), offset) for first in range(start, stop, ROWS)]
