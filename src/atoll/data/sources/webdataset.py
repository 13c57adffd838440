"""WebDataset tars, as img2dataset writes them: 000012.jpg, 000012.txt, 000012.json follow each other."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import PurePosixPath
from typing import Self

from ...artifacts import UserError, sanitize
from ..captions import Annotation, from_json, from_label, from_text
from .files import size_of
from .folder import LARGEST_FILE
from .source import END, ROWS, Example, Item, Items, Skipped, Source, source

TEXTS = {"txt": from_text, "text": from_text, "caption": from_text, "json": from_json, "cls": from_label}
COMPRESSED_IMAGE = 100_000  # bytes: a guess, to count the images of a tar that was not scanned
HEADER_BUFFER = 4096  # bytes read at once where only headers are wanted

Member = tuple[tarfile.TarInfo, bytes]


class Header(tarfile.TarInfo):
    """A tar header whose damage raises ReadError: tarfile takes it for the end of the tar."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        assert isinstance(tar, Tar)
        try:
            header = super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tar.ended = True
            raise
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            if tar.ended:
                raise
            raise tarfile.ReadError("no end mark, members may be missing") from error
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error
        tar.ended = False
        return header


class Tar(tarfile.TarFile):
    """A tar, or several joined with `cat`."""

    tarinfo = Header
    ignore_zeros = True
    encoding = "utf-8"
    ended = False  # the last block was an end mark
    damage = ""  # what ended reading before the end of the file

    def rows(self, *, content: bool) -> Iterator[tuple[str, Iterator[Member]]]:
        """(key, members) of each row: members that follow each other and share folder and name up to the first dot."""
        return groupby(self._members(content), lambda member: key_of(member[0]))

    def _members(self, content: bool) -> Iterator[Member]:
        try:
            while (member := self.next()) is not None:
                self.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
                wanted = content and member.isreg() and member.size <= LARGEST_FILE
                file = self.extractfile(member) if wanted else None
                if not member.isdir():
                    yield member, b"" if file is None else file.read()
        except (UserError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001, tarfile and decompressors raise anything on hostile bytes
            self.damage = sanitize(f"{type(error).__name__}: {error}")


@source("webdataset", endings=(".tar",))
class WebDataset(Source):
    """Tars of images with captions and labels, plain or compressed."""

    def list(self) -> Items:
        names = self.files.ending_with(self.endings)
        return [item for name in names for item in self._items(name, self.files.stamps[name])]

    def _items(self, name: str, stamp: str) -> Items:
        """A local tar is cut at rows, for which its headers are read; a remote or compressed one is one item."""
        offsets, rows, damaged = [0], 0, True
        if self.files.is_local:
            try:
                with self.files.open(name, HEADER_BUFFER) as file, Tar.open(fileobj=file, mode="r:") as tar:
                    for _, members in tar.rows(content=False):
                        if rows and rows % ROWS == 0:
                            offsets.append(next(members)[0].offset)
                        rows += 1
                    damaged = bool(tar.damage)
            except (OSError, tarfile.TarError):  # no plain tar
                damaged = True
        starts = range(0, ROWS * len(offsets), ROWS)
        stops = [*starts[1:], END if damaged else rows]  # where it is damaged, `read` goes on to the damage
        return [Item(name, stamp, *piece) for piece in zip(starts, stops, offsets, strict=True)]

    def count(self, items: Sequence[Item]) -> int:
        known = [item for item in items if item.stop != END]
        rest = sum(size_of(item.stamp) - item.offset for item in items if item.stop == END)
        return super().count(known) + rest // COMPRESSED_IMAGE

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        name = sanitize(item.name)
        assert item.stop is not None, "rows of a tar"
        try:
            with self.files.open(item.name) as file:
                file.seek(item.offset)
                with Tar.open(fileobj=file) as tar:
                    for key, members in islice(tar.rows(content=True), item.stop - item.start):
                        yield from examples_of(f"{name}/{sanitize(key)}", members)
                    if tar.damage:
                        yield Skipped(name, "", "broken tar", f"the rest was not read ({tar.damage})")
        except tarfile.TarError as error:
            yield Skipped(name, "", "broken tar", sanitize(str(error)))
        except OSError as error:
            yield Skipped(name, "", "unreadable", type(error).__name__)


def key_of(member: tarfile.TarInfo) -> str:
    path = PurePosixPath(member.name)
    return str(path.parent / path.name.partition(".")[0])


def examples_of(row: str, members: Iterator[Member]) -> Iterator[Example | Skipped]:
    """The image of a row (or several), with what the other members record about it."""
    note, images, texts = Annotation(), list[Example](), 0
    for member, content in members:
        ending = PurePosixPath(member.name).name.partition(".")[2].lower()
        name = f"{row}.{sanitize(ending)}"
        if not member.isreg():
            yield Skipped(name, "", "not a file", "a link" if member.islnk() or member.issym() else "a device or pipe")
        elif member.size > LARGEST_FILE:
            yield Skipped(name, "", "file too large", f"{member.size} bytes")
        elif ending in TEXTS:
            note, texts = note + TEXTS[ending](content), texts + 1
        else:
            images.append(Example(name, content))
    if texts and not images:
        yield Skipped(row, "", "caption without image")
    for image in images:
        yield replace(image, captions=note.captions, label=note.label)
        yield from (Skipped(image.name, image.digest().hex(), warning) for warning in note.warnings)
