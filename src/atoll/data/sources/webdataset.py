"""WebDataset tars, as img2dataset writes them: 000012.jpg, 000012.txt, 000012.json follow each other."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import PurePosixPath

from ...artifacts import UserError, sanitize
from ..captions import Annotation, from_json, from_label, from_text
from .folder import LARGEST_FILE
from .source import END, ROWS, Example, Item, Items, Skipped, Source, source

TEXTS = {"txt": from_text, "text": from_text, "caption": from_text, "json": from_json, "cls": from_label}

Member = tuple[str, tarfile.TarInfo, bytes]  # key of its row, header, content


@source("webdataset", endings=(".tar",))
class WebDataset(Source):
    """Tars of images with captions and labels, plain or compressed."""

    def list(self) -> Items:
        return [item for name in self.files.ending_with(self.endings) for item in self._items(name)]

    def _items(self, name: str) -> Items:
        """A plain local tar is cut at rows, for which its headers are read; any other is one item."""
        offsets, rows, damage = [0], 0, list[str]()
        if self.files.is_local:
            try:
                with tarfile.open(self.files.path_of(name), "r:") as tar:
                    for _, members in groupby(members_of(tar, damage, content=False), lambda member: member[0]):
                        if rows and rows % ROWS == 0:
                            offsets.append(next(members)[1].offset)
                        rows += 1
            except (OSError, tarfile.TarError) as error:
                damage.append(str(error))
        starts = range(0, ROWS * len(offsets), ROWS)
        stops = [*starts[1:], END if damage or not self.files.is_local else rows]
        return [Item(name, self.files.sizes[name], *piece) for piece in zip(starts, stops, offsets, strict=True)]

    def read(self, item: Item) -> Iterator[Example | Skipped]:
        name, damage = sanitize(item.name), list[str]()
        assert item.stop is not None, "rows of a tar"
        try:
            with self.files.open(item.name) as file:
                file.seek(item.offset)
                with tarfile.open(fileobj=file) as tar:
                    rows = groupby(members_of(tar, damage, content=True), lambda member: member[0])
                    for key, members in islice(rows, item.stop - item.start):
                        yield from examples_of(f"{name}/{sanitize(key)}", members)
        except tarfile.TarError as error:
            damage.append(str(error))
        except OSError as error:
            yield Skipped(name, "unreadable", type(error).__name__)
        if damage:
            yield Skipped(name, "broken tar", sanitize(damage[0]))


def members_of(tar: tarfile.TarFile, damage: list[str], *, content: bool) -> Iterator[Member]:
    """What a tar holds, in order, up to damage, which is added to the list."""
    try:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
            path = PurePosixPath(member.name)
            file = tar.extractfile(member) if content and member.isreg() and member.size <= LARGEST_FILE else None
            if not member.isdir():
                yield str(path.parent / path.name.partition(".")[0]), member, b"" if file is None else file.read()
        assert tar.fileobj is not None, "open"
        rest = tar.fileobj.read(2**20)
        if not rest or any(rest):  # tarfile takes a damaged header for the end of the tar
            damage.append(f"no end mark at byte {tar.offset}, what follows is not read")
    except (UserError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001, tarfile and decompressors raise anything on hostile bytes
        damage.append(f"{type(error).__name__}: {error}")


def examples_of(row: str, members: Iterator[Member]) -> Iterator[Example | Skipped]:
    """The image of a row (or several), with what the other members record about it."""
    note, images, texts = Annotation(), list[tuple[str, bytes]](), 0
    for _, member, content in members:
        ending = PurePosixPath(member.name).name.partition(".")[2].lower()
        name = f"{row}.{sanitize(ending)}"
        if not member.isreg():
            yield Skipped(name, "not a file", "a link, a device or a pipe")
        elif member.size > LARGEST_FILE:
            yield Skipped(name, "file too large", f"{member.size} bytes")
        elif ending in TEXTS:
            note, texts = note + TEXTS[ending](content), texts + 1
        else:
            images.append((name, content))
    if texts and not images:
        yield Skipped(row, "caption without image")
    yield from (Example(name, content, note) for name, content in images)
