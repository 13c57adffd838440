"""Files of a source, on a disk or anywhere fsspec reaches: listed once, and read so that damage and failure differ.

Damaged bytes are the same every time: the image is skipped and listed. A failing read (a timeout, a lost connection,
a bad sector) says nothing about the data: it is tried again, then ends the run with a UserError.
"""

from __future__ import annotations

import io
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ...artifacts import UserError
from ...artifacts.credentials import credentials_missing

WILDCARDS = re.compile(r"[*?[]")
PAUSES = (0.5, 2.0)  # seconds before the second and the third try

Result = TypeVar("Result")


class Files:
    """The files at a place: all below a folder, one file, or those that fit a pattern (a folder that fits: all below).

    Hidden files and folders are left out. Pickled without the listing.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        try:
            self.system, path = fsspec.core.url_to_fs(place)
        except (ValueError, ImportError) as error:
            raise UserError(f"source {place}: cannot be opened ({error})") from error
        self.path = path.rstrip("/") or "/"
        self.is_local = isinstance(self.system, LocalFileSystem)
        self.is_folder = False
        if with_retries(lambda: self.system.isfile(self.path), place):
            self.root = self.path.rpartition("/")[0]
        elif with_retries(lambda: self.system.isdir(self.path), place):
            self.root, self.is_folder = self.path, True
        elif (wildcard := WILDCARDS.search(self.path)) is not None:
            self.root = self.path[: wildcard.start()].rpartition("/")[0]
        else:
            raise UserError(
                f"source {place}: no such folder or file; use digits, a folder, tars, parquet or a URL of these"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("listing", "siblings")}

    @cached_property
    def listing(self) -> tuple[dict[str, str], dict[str, str]]:
        """({name: stamp}, {name: what it is instead of a file}), names relative to the root and sorted."""
        try:
            found = dict(self._found())
        except (OSError, ValueError, re.error) as error:
            raise UserError(f"source {self.place}: cannot be listed ({error}); check path and permissions") from error
        if not found and not self.is_folder:
            raise UserError(f"source {self.place}: no file fits this pattern; check it, and put it in quotes")
        stamps = {name: stamp for name, (stamp, _) in sorted(found.items()) if stamp}
        return stamps, {name: other for name, (stamp, other) in sorted(found.items()) if not stamp}

    @property
    def stamps(self) -> dict[str, str]:
        return self.listing[0]

    @cached_property
    def siblings(self) -> dict[str, str]:
        """{name: stamp} of these files and, for a pattern, of all others in their folders and those above."""
        if self.is_folder:
            return self.stamps
        folders = {name.rpartition("/")[0] for name in self.stamps}
        folders |= {"/".join(folder.split("/")[:depth]) for folder in folders for depth in range(folder.count("/") + 1)}
        found = dict(self.stamps)
        for folder in sorted(folders):
            path = f"{self.root}/{folder}".rstrip("/")
            for info in with_retries(partial(self.system.ls, path, detail=True), self.place):
                if info["type"] == "file":
                    found[self._name(info["name"])] = stamp_of(info)
        return dict(sorted(found.items()))

    def path_of(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def ending_with(self, endings: tuple[str, ...]) -> list[str]:
        """The files of these endings; of a file or pattern none of which has one, all."""
        found = [name for name in self.stamps if name.lower().endswith(endings)]
        if not found and not self.is_folder:
            found = list(self.stamps)
        if not found:
            raise UserError(f"source {self.place}: no {' or '.join(endings)} files there; check the path")
        return found

    def read(self, name: str) -> bytes:
        """All bytes of a file. OSError: it is gone or may not be read."""
        path = self.path_of(name)
        return bytes(with_retries(lambda: self.system.cat_file(path), self._url(path)))

    def open(self, name: str, buffer: int = 2**20) -> BinaryIO:
        """A file to read in pieces. OSError: as for `read`; afterwards a failing read is a UserError."""
        path = self.path_of(name)
        file = RetryingFile(with_retries(lambda: self.system.open(path, "rb"), self._url(path)), self._url(path))
        return cast(BinaryIO, io.BufferedReader(file, buffer))

    def _url(self, path: str) -> str:
        return path if self.is_local else str(self.system.unstrip_protocol(path))

    def _name(self, path: str) -> str:
        return path[len(self.root) + 1 :] if self.root != "/" else path[1:]

    def _found(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """(name, (stamp, what it is if it is no file)) in any order."""
        if self.is_folder:
            yield from self._below(self.path)
            return
        if with_retries(lambda: self.system.isfile(self.path), self.place):
            info = with_retries(lambda: self.system.info(self.path), self.place)
            yield self._name(self.path), (stamp_of(info), "")
            return
        for path, info in with_retries(lambda: self.system.glob(self.path, detail=True), self.place).items():
            if "/." in f"/{self._name(path)}":
                continue
            if info["type"] == "directory":
                yield from self._below(path)
            else:
                yield self._name(path), (stamp_of(info), "") if info["type"] == "file" else ("", info["type"])

    def _below(self, folder: str) -> Iterator[tuple[str, tuple[str, str]]]:
        if self.is_local:
            for path, found in local_files(folder):
                yield self._name(path), found
            return
        for path, info in with_retries(lambda: self.system.find(folder, detail=True), self.place).items():
            if "/." not in f"/{self._name(path)}":
                yield self._name(path), (stamp_of(info), "")


def local_files(root: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """(path, (stamp, what it is if it is no file)) of all below a folder. Follows links; enters no folder twice.

    By os.scandir: fsspec's own listing keeps 1.7 KB about each file.
    """
    waiting, seen = [root], set[str]()
    while waiting:
        folder = waiting.pop()
        if (place := os.path.realpath(folder)) in seen:
            continue
        seen.add(place)
        with os.scandir(folder) as scanned:
            entries = sorted((entry for entry in scanned if not entry.name.startswith(".")), key=lambda e: e.name)
        inner = []
        for entry in entries:
            path = f"{folder.rstrip('/')}/{entry.name}"
            try:
                found = entry.stat()
            except OSError:
                yield path, ("", "broken link" if entry.is_symlink() else "unreadable")
                continue
            if stat.S_ISDIR(found.st_mode):
                inner.append(path)
            elif stat.S_ISREG(found.st_mode):
                yield path, (f"{found.st_size}-{found.st_mtime_ns}", "")
            else:
                yield path, ("", "no regular file")
        waiting += reversed(inner)


def stamp_of(info: dict[str, Any]) -> str:
    """Size and modification time, or what the file system has instead of it."""
    changed = next((info[key] for key in ("mtime", "ETag", "LastModified", "etag", "blob_id") if key in info), None)
    return f"{info.get('size') or 0}-{changed}"


def size_of(stamp: str) -> int:
    """Bytes of the file with this stamp."""
    return int(stamp.partition("-")[0])


def split_ending(name: str) -> tuple[str, str]:
    """("a/cat", ".jpg") of "a/cat.JPG"; as os.path.splitext, with the ending in lower case."""
    stem, ending = os.path.splitext(name)
    return stem, ending.lower()


def with_retries(read: Callable[[], Result], place: str) -> Result:
    """The result of `read`. OSError: this file cannot be had, now or later. UserError: reading fails for now."""
    for pause in (*PAUSES, None):
        try:
            return read()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, MemoryError, ValueError, UserError):
            raise
        except PermissionError as error:
            if "://" not in place:
                raise
            # an expired key denies every file that follows, not only this one
            raise UserError(f"source {place}: access denied ({error}); run the same command again to resume") from error
        except Exception as error:  # a lost connection has its own error in each storage library, often no OSError
            if (missing := credentials_missing(error)) is not None:
                raise UserError(f"source {place}: {missing}") from error
            if pause is None:
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                raise UserError(
                    f"source {place}: cannot be read, tried {len(PAUSES) + 1} times ({why}); "
                    "run the same command again to resume"
                ) from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


class RetryingFile(io.RawIOBase):
    """A file whose failing reads are repeated, then UserErrors: what a parser raises on it is about the bytes."""

    def __init__(self, file: Any, place: str) -> None:
        self._file, self._place = file, place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start = self.tell()

        def read() -> bytes:
            self._file.seek(start)  # a read that failed may have moved it
            return bytes(self._file.read(len(view)))

        try:
            content = with_retries(read, self._place)
        except OSError as error:
            raise UserError(f"source {self._place}: has gone ({type(error).__name__}); put it back") from error
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()
