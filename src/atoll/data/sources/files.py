"""The files at a place, on a disk or anywhere fsspec reaches.

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
from functools import cached_property
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from ...artifacts import UserError, sanitize, storage_problem

WILDCARDS = re.compile(r"[*?[]")
CHANGES = ("mtime", "ETag", "LastModified", "etag", "blob_id")  # what file systems have to show that a file changed
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
BUFFER_BYTES = 2**20
PAUSES = (0.5, 2.0)  # seconds before the second and the third try

Result = TypeVar("Result")


class Files:
    """All files below a folder, one file, or those that fit a pattern. A folder that fits means all below it.

    Hidden files and folders are left out. Pickled without the listing.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        try:
            self.system, self.path = fsspec.core.url_to_fs(place)
        except (ValueError, ImportError) as error:
            raise UserError(f"source {place}: cannot be opened ({error})") from error
        self.is_local = isinstance(self.system, LocalFileSystem)
        # a web server has files, but no folders to list
        self.is_file = with_retries(lambda: self.system.isfile(self.path), place)
        self.is_folder = not self.is_file and with_retries(lambda: self.system.isdir(self.path), place)
        before = WILDCARDS.split(self.path, maxsplit=1)[0]
        if not self.is_file and not self.is_folder and before == self.path:
            raise UserError(
                f"source {place}: no such folder or file; use digits, a folder, tars, parquet or a URL of these"
            )
        self.root = f"{self.path.rstrip('/')}/" if self.is_folder else before
        self.root = (self.path if self.is_file else self.root).rpartition("/")[0]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("below", "stamps")}

    @cached_property
    def below(self) -> dict[str, str]:
        """{name below the root: stamp} of all files there, sorted. A broken link or a pipe has the stamp ""."""
        try:
            if self.is_file:
                found = {self.path: stamp_of(with_retries(lambda: self.system.info(self.path), self.place))}
            elif self.is_local:
                found = dict(local_files(self.root or "/"))
            else:
                infos = with_retries(lambda: self.system.find(self.root, detail=True), self.place)
                found = {path: stamp_of(info) for path, info in infos.items()}
        except OSError as error:
            raise UserError(f"source {self.place}: cannot be listed ({error}); check its permissions") from error
        names = {path[len(self.root) + 1 :]: stamp for path, stamp in sorted(found.items())}
        return {name: stamp for name, stamp in names.items() if "/." not in f"/{name}"}

    @cached_property
    def stamps(self) -> dict[str, str]:
        """Those that are meant: all, or those that fit the pattern."""
        if self.is_file or self.is_folder:
            return self.below
        try:
            fits = re.compile(glob_translate(self.path[len(self.root) + 1 :]).removesuffix("\\Z") + "(/.*)?\\Z")
        except (ValueError, re.error) as error:
            raise UserError(f"source {self.place}: not a pattern ({error})") from error
        found = {name: stamp for name, stamp in self.below.items() if fits.match(name)}
        if not found:
            raise UserError(f"source {self.place}: no file fits this pattern; check it, and put it in quotes")
        return found

    def ending_with(self, endings: tuple[str, ...]) -> list[str]:
        """The files with these endings; where none has one and they were chosen by name, all."""
        found = [name for name in self.stamps if name.lower().endswith(endings)]
        if not found and self.is_folder:
            raise UserError(f"source {self.place}: no {' or '.join(endings)} files there; check the path")
        return found or list(self.stamps)

    def path_of(self, name: str) -> str:
        """As a path of this machine or a URL."""
        path = f"{self.root}/{name}"
        return path if self.is_local else str(self.system.unstrip_protocol(path))

    def read(self, name: str) -> bytes:
        """All bytes of a file. OSError: it is gone or may not be read."""
        return with_retries(lambda: bytes(self.system.cat_file(f"{self.root}/{name}")), self.path_of(name))

    def open(self, name: str) -> BinaryIO:
        """A file to read in parts. Afterwards a failing read is a UserError: other errors are about the bytes."""
        file = with_retries(lambda: self.system.open(f"{self.root}/{name}", "rb"), self.path_of(name))
        return cast(BinaryIO, io.BufferedReader(RetryingFile(file, self.path_of(name)), BUFFER_BYTES))


def local_files(root: str) -> Iterator[tuple[str, str]]:
    """(path, stamp) of all files below a folder. Follows links, but enters no folder twice.

    fsspec's own listing of a disk keeps 1.7 KB about each file.
    """

    def fail(error: OSError) -> None:
        raise error

    seen = set[str]()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=fail):
        if (place := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = f"{folder.rstrip('/')}/{name}"
            try:
                found = os.stat(path)
            except OSError:
                yield path, ""
            else:
                yield path, f"{found.st_size}-{found.st_mtime_ns}" if stat.S_ISREG(found.st_mode) else ""


def stamp_of(info: dict[str, Any]) -> str:
    """Size and modification time, or what the file system has instead of it."""
    return f"{info.get('size') or 0}-{next((info[key] for key in CHANGES if key in info), None)}"


def size_of(stamp: str) -> int:
    """Bytes of the file with this stamp."""
    return int(stamp.partition("-")[0] or 0)


def split_ending(name: str) -> tuple[str, str]:
    """("a/cat", ".jpg") of "a/cat.JPG"."""
    stem, ending = os.path.splitext(name)
    return stem, ending.lower()


def with_retries(read: Callable[[], Result], place: str) -> Result:
    """The result of `read`. OSError: this file cannot be had, now or later. UserError: reading fails for now."""
    for pause in (*PAUSES, None):
        try:
            return read()
        except (*GONE, MemoryError, UserError):
            raise
        except Exception as error:  # a lost connection has its own error in each storage library, often no OSError
            denied = isinstance(error, PermissionError)
            if denied and "://" not in place:
                raise
            if denied or pause is None:  # an expired key denies every file that follows, not only this one
                why = f"{type(error).__name__}: {sanitize(str(error))}"
                cannot = f"cannot be read ({why}); run the same command again to resume"
                raise UserError(f"source {place}: {storage_problem(error) or cannot}") from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


class RetryingFile(io.RawIOBase):
    """A file that is read by `with_retries`."""

    def __init__(self, file: Any, place: str) -> None:
        self._file, self._place = file, place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        start = self._file.tell()

        def read() -> bytes:
            self._file.seek(start)  # a read that failed may have moved it
            return bytes(self._file.read(len(buffer)))

        content = with_retries(read, self._place)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()
