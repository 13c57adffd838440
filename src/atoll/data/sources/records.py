"""Lines of .jsonl files beside images: {"file_name": "a/cat.jpg", "text": "..."}, for files at or below them.

Such a file may have as many lines as there are images. It is read once to see where the line of each image lies;
captions are then read by whoever reads the image.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import fsspec
import numpy as np

from ...artifacts import UserError
from ..captions import Said, from_fields
from .reading import open_file, read_file
from .sample import Reject, sanitize


@dataclass(frozen=True)
class Lines:
    """Lines of a .jsonl that follow each other: bytes start : stop of the file at `path`."""

    path: str
    start: int
    stop: int


class Records:
    """Where the lines of the .jsonl files of one folder are, by the image they are about: 32 bytes a line."""

    def __init__(self, system: fsspec.AbstractFileSystem, root: str, folder: str, names: Sequence[str]) -> None:
        self.folder = folder
        self.paths = [f"{folder}/{name}" for name in names]
        self.refused: list[Reject] = []  # lines that are no records, files that cannot be read
        images, files, starts, stops = array("Q"), array("Q"), array("Q"), array("Q")
        for number, path in enumerate(self.paths):
            shown = sanitize(path.removeprefix(root).lstrip("/"))
            try:
                for line, start, stop, content in numbered_lines(system, path):
                    target = target_of(content)
                    if target is None:
                        self.refused.append(Reject(f"{shown}:{line}", "", "bad caption: not a record with file_name"))
                        continue
                    images.append(name_hash(target))
                    files.append(number)
                    starts.append(start)
                    stops.append(stop)
            except OSError as error:
                self.refused.append(Reject(shown, "", "unreadable", type(error).__name__))
        columns = [np.array(column, np.uint64) for column in (images, files, starts, stops)]
        order = np.lexsort((columns[2], columns[1], columns[0]))
        self._images, self._files, self._starts, self._stops = (column[order] for column in columns)
        self._taken = np.zeros(len(order), bool)

    def take(self, images: Iterable[str]) -> list[Lines]:
        """The lines about these images, whose paths begin with this folder."""
        hashes = np.array([name_hash(path[len(self.folder) + 1 :]) for path in images], np.uint64)
        firsts, ends = (np.searchsorted(self._images, hashes, side) for side in ("left", "right"))
        rows = [row for first, end in zip(firsts.tolist(), ends.tolist(), strict=True) for row in range(first, end)]
        self._taken[rows] = True
        return self._lines(rows)

    def left_over(self, most: int) -> Iterator[list[Lines]]:
        """One line about each image that nobody took, at most so many at a time."""
        rows = np.flatnonzero(~self._taken)
        rows = rows[np.unique(self._images[rows], return_index=True)[1]]
        rows = rows[np.lexsort((self._starts[rows], self._files[rows]))]
        return (self._lines(rows[start : start + most].tolist()) for start in range(0, len(rows), most))

    def _lines(self, rows: Iterable[int]) -> list[Lines]:
        """These lines in the order of the files; those that follow each other as one piece."""
        pieces: list[Lines] = []
        for number, start, stop in sorted(
            (int(self._files[row]), int(self._starts[row]), int(self._stops[row])) for row in rows
        ):
            path = self.paths[number]
            if pieces and (pieces[-1].path, pieces[-1].stop) == (path, start):
                pieces[-1] = Lines(path, pieces[-1].start, stop)
            else:
                pieces.append(Lines(path, start, stop))
        return pieces


def read_lines(system: fsspec.AbstractFileSystem, pieces: Iterable[Lines]) -> dict[str, Said]:
    """What these lines say, by the path of the image."""
    said: dict[str, Said] = {}
    for piece in pieces:
        for line in read_file(system, piece.path, piece.start, piece.stop).split(b"\n"):
            if not line.strip():
                continue
            target = target_of(line)
            if target is None:
                raise UserError(f"source {piece.path}: changed while it was read; start again with another --out")
            path = f"{piece.path.rpartition('/')[0]}/{target}"
            said[path] = said.get(path, Said()) + from_fields(json.loads(line))
    return said


def numbered_lines(system: fsspec.AbstractFileSystem, path: str) -> Iterator[tuple[int, int, int, bytes]]:
    """(number from 1, first byte, byte after it, content) of every line that is not blank."""
    start = 0
    with open_file(system, path) as stream:
        for number, line in enumerate(stream, 1):
            stop = start + len(line)
            if line.strip():
                yield number, start, stop, line
            start = stop


def target_of(line: bytes) -> str | None:
    """The image a line is about, relative to the .jsonl; None if the line is no record."""
    try:
        return posixpath.normpath(str(json.loads(line)["file_name"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
