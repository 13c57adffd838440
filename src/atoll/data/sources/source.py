"""What a data source is, and the registry of sources. A new source is one file:

@source("lmdb", endings=(".lmdb",))
class Lmdb(Source):
    def list(self) -> Items: ...
    def read(self, item: Item) -> Iterator[Example | Skipped]: ...
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ...artifacts import AtollWarning, UserError, sanitize, suggest
from ..captions import Annotation
from .files import Files, split_ending

ROWS = 4096  # the most rows of a tar or a table in one item
END = 2**63 - 1  # as `stop` of an item: to the end, whose row was not looked up


@dataclass(frozen=True, slots=True)
class Item:
    """One listed piece of a source: a file, or a range of rows of a tar or a table. Small and picklable."""

    name: str  # path relative to the source's root; not UTF-8 where the file system's is not
    stamp: str = ""  # size and modification time or etag: changes when the file or a caption beside it is rewritten
    start: int = 0  # rows start : stop of a tar or a row group
    stop: int | None = None  # None: one image file; END: to the end
    offset: int = 0  # byte of the tar at which row `start` begins
    texts: tuple[str, ...] = ()  # caption files of this image, relative to the root
    annotation: Annotation = Annotation()  # captions and label known from the listing
    skipped: tuple[str, str] | None = None  # (reason, detail) where the listing shows that there is nothing to read

    def to_json(self) -> str:
        """One line of ASCII; names that are not UTF-8 survive."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str | bytes) -> Item:
        fields = json.loads(line)
        note = fields.pop("annotation")
        annotation = Annotation(tuple(note["captions"]), note["label"], tuple(note["warnings"]))
        skipped = None if fields["skipped"] is None else (fields["skipped"][0], fields["skipped"][1])
        return Item(**{**fields, "texts": tuple(fields["texts"]), "skipped": skipped}, annotation=annotation)


Items = list[Item]


@dataclass(frozen=True)
class Example:
    """One image as the source holds it: encoded bytes, or a uint8 array [H, W] or [H, W, 3].

    `name` goes to the log only: an artifact does not depend on names.
    """

    name: str
    content: bytes | np.ndarray
    captions: tuple[str, ...] = ()
    label: int | None = None

    def digest(self) -> bytes:
        """sha256 of the encoded bytes; of dtype, shape and raw bytes for an array."""
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).digest()
        array = np.ascontiguousarray(self.content)
        header = f"{array.dtype.str} {'x'.join(map(str, array.shape))} ".encode()
        return hashlib.sha256(header + array.tobytes()).digest()


@dataclass(frozen=True)
class Skipped:
    """An image that cannot be used, or a caption or label of one. `id` is empty where there were no bytes to hash."""

    name: str
    id: str
    reason: str
    detail: str = ""


class SourceConfig(BaseModel):
    """How to read a source."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: str | None = Field(default=None, description="folder, webdataset, ...; None: what most of the files are")
    labels: Literal["given", "folder"] = Field(default="given", description="folder: the first folder is the class")
    image_column: str | None = Field(default=None, description="of a table; None: the only one that can be it")


class Source:
    """Where images come from. Small and picklable: it travels to worker processes. Override `list` and `read`."""

    format: ClassVar[str]  # set by @source, as is `endings`
    endings: ClassVar[tuple[str, ...]]  # of the files that are read
    options: ClassVar[tuple[str, ...]] = ()  # fields of SourceConfig that mean something here
    kind: ClassVar[str] = "images"  # recorded in the manifest; recipes depend on it
    channels: ClassVar[int] = 3  # 1: grayscale
    default_size: ClassVar[int] = 64  # side of the prepared images
    default_features: ClassVar[str | None] = None  # the extractor to cluster by; None: the best this machine can run
    built_in: ClassVar[bool] = False  # needs no files, and less time than starting a worker process

    def __init__(self, place: str, config: SourceConfig = SourceConfig()) -> None:
        self.place, self.config = place, config

    @classmethod
    def matches(cls, place: str) -> bool:
        """Whether the name of a place alone says that this class reads it."""
        return place.rstrip("/").lower().endswith(cls.endings)

    @cached_property
    def files(self) -> Files:
        """The files at the place, listed once. Not for a source that reads something else."""
        return Files(self.place)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the labels, by number, where the source has them."""
        return None

    @property
    def class_folders(self) -> tuple[str, ...]:
        """The folders that could be classes (`--labels folder`): several, and all images are in one of them."""
        return ()

    def list(self) -> Items:
        """What there is to read, always in the same order. Walks the source once."""
        raise NotImplementedError

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        """The images of one item."""
        raise NotImplementedError

    def count(self, items: Sequence[Item]) -> int:
        """How many images there are, about."""
        return sum(1 if item.stop is None else item.stop - item.start for item in items if item.skipped is None)


SourceClass = TypeVar("SourceClass", bound=type[Source])
SOURCES: dict[str, type[Source]] = {}


def source(name: str, endings: tuple[str, ...] = ()) -> Callable[[SourceClass], SourceClass]:
    """Register a class of sources as `--format NAME`. Files with these endings (lower case) are read by it."""

    def register(cls: SourceClass) -> SourceClass:
        if name in SOURCES:
            raise UserError(f"source {name}: is registered already; choose another name")
        cls.format, cls.endings, SOURCES[name] = name, endings, cls
        return cls

    return register


def open_source(place: str, config: SourceConfig = SourceConfig()) -> Source:
    """The source at a place: `digits`, a folder, a file, a pattern of files, or a URL of any of these."""
    try:
        place.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"source {sanitize(place)}: the path is not UTF-8; rename it") from error
    known: dict[str, Any] = {}
    if config.format is not None:
        if config.format not in SOURCES:
            raise UserError(f"--format {config.format}: no such format; {suggest(config.format, list(SOURCES))}")
        chosen = SOURCES[config.format]
    elif (named := next((cls for cls in SOURCES.values() if cls.matches(place)), None)) is not None:
        chosen = named
    else:
        known["files"] = files = Files(place)
        chosen = most_frequent(place, files)
    for option in ("labels", "image_column"):
        value = getattr(config, option)
        if option not in chosen.options and value != SourceConfig.model_fields[option].default:
            flag = option.replace("_", "-")
            raise UserError(f"--{flag} {value}: {place} is read as {chosen.format}, which has no {flag}; leave it out")
    opened = chosen(place, config)
    vars(opened).update(known)  # the listing, if it was needed to decide
    return opened


def is_built_in(place: str) -> bool:
    """Whether a place is the name of a source that needs no files, such as `digits`."""
    return any(cls.built_in and cls.matches(place) for cls in SOURCES.values())


def most_frequent(place: str, files: Files) -> type[Source]:
    """The class that reads the most files, the first registered of several; prints what is left out.

    Of files that share a stem only the first class counts: img2dataset writes a .parquet beside each .tar.
    """
    ranks = {ending: rank for rank, cls in enumerate(SOURCES.values()) for ending in cls.endings}
    first: dict[str, int] = {}
    for name in files.stamps:
        stem, ending = split_ending(name)
        if ending in ranks:
            first[stem] = min(ranks[ending], first.get(stem, ranks[ending]))
    counts = Counter(first.values())
    names = list(SOURCES)
    chosen = min(counts, key=lambda rank: (-counts[rank], rank), default=names.index("folder"))
    if others := sorted(rank for rank in counts if rank != chosen):
        left_out = ", ".join(f"{counts[r]:,} of {'/'.join(SOURCES[names[r]].endings[:2])}" for r in others)
        warnings.warn(
            f"source {place}: {counts[chosen]:,} files are read as {names[chosen]}; left out: {left_out} files; "
            f"--format {names[others[0]]} reads those instead",
            AtollWarning,
            stacklevel=1,  # one place: printed once
        )
    return SOURCES[names[chosen]]


def row_items(name: str, stamp: str, count: int, start: int = 0) -> Items:
    """Items of at most ROWS rows for the rows start : start + count of a file."""
    stop = start + count
    return [Item(name, stamp, first, min(first + ROWS, stop)) for first in range(start, stop, ROWS)]
