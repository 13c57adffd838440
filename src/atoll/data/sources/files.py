"""The files at a place, on a disk or anywhere fsspec reaches.

Damaged bytes are the same every time: the image is skipped and listed. A failing read (a timeout, a lost connection,
a bad sector) says nothing about the data: it ends the run with a UserError, and the same command resumes.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from ...artifacts import UserError, sanitize, storage_problem

WILDCARDS = re.compile(r"[*?[]")
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
NO_FILE = -1  # in place of the size of a broken link, a pipe or a device
BUFFER_BYTES = 2**20


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
        with reading(place):  # a web server has files, but no folders to list
            self.is_file = self.system.isfile(self.path)
            self.is_folder = not self.is_file and self.system.isdir(self.path)
        before = WILDCARDS.split(self.path, maxsplit=1)[0]
        if not self.is_file and not self.is_folder and before == self.path:
            raise UserError(
                f"source {place}: no such folder or file; use digits, a folder, tars, parquet or a URL of these"
            )
        inside = self.path if self.is_file else f"{self.path.rstrip('/')}/" if self.is_folder else before
        self.root = inside.rpartition("/")[0]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("below", "sizes")}

    @cached_property
    def below(self) -> dict[str, int]:
        """{name below the root: bytes} of all files there, sorted; NO_FILE for what is no regular file."""
        try:
            with reading(self.place):
                if self.is_local and not self.is_file:
                    found = dict(local_files(self.root or "/"))
                else:
                    infos = self.system.find(self.path if self.is_file else self.root, detail=True)
                    found = {path: int(info.get("size") or 0) for path, info in infos.items()}
        except OSError as error:
            raise UserError(f"source {self.place}: cannot be listed ({error}); check its permissions") from error
        names = {path[len(self.root) + 1 :]: size for path, size in sorted(found.items())}
        return {name: size for name, size in names.items() if "/." not in f"/{name}"}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Those that are meant: all, or those that fit the pattern."""
        if self.is_file or self.is_folder:
            return self.below
        try:
            fits = re.compile(glob_translate(self.path[len(self.root) + 1 :]).removesuffix("\\Z") + "(/.*)?\\Z")
        except (ValueError, re.error) as error:
            raise UserError(f"source {self.place}: not a pattern ({error})") from error
        found = {name: size for name, size in self.below.items() if fits.match(name)}
        if not found:
            raise UserError(f"source {self.place}: no file fits this pattern; check it, and put it in quotes")
        return found

    def ending_with(self, endings: tuple[str, ...]) -> list[str]:
        """The files with these endings; where none has one and they were chosen by name, all."""
        found = [name for name in self.sizes if name.lower().endswith(endings)]
        if not found and self.is_folder:
            raise UserError(f"source {self.place}: no {' or '.join(endings)} files there; check the path")
        return found or list(self.sizes)

    def path_of(self, name: str) -> str:
        """As a path of this machine or a URL."""
        path = f"{self.root}/{name}"
        return path if self.is_local else str(self.system.unstrip_protocol(path))

    def read(self, name: str) -> bytes:
        """All bytes of a file. OSError: it is gone or may not be read."""
        with reading(self.path_of(name)):
            return bytes(self.system.cat_file(f"{self.root}/{name}"))

    def open(self, name: str) -> BinaryIO:
        """A file to read in parts. Afterwards a failing read is a UserError: other errors are about the bytes."""
        with reading(self.path_of(name)):
            file = self.system.open(f"{self.root}/{name}", "rb")
        return io.BufferedReader(SourceFile(file, self.path_of(name)), BUFFER_BYTES)


def local_files(root: str) -> Iterator[tuple[str, int]]:
    """(path, bytes) of all files below a folder. Follows links, but enters no folder twice, unlike fsspec."""

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
            yield path, os.path.getsize(path) if os.path.isfile(path) else NO_FILE


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Errors of a file system as UserErrors, but for an OSError that says that this file cannot be had."""
    try:
        yield
    except (*GONE, MemoryError, UserError):
        raise
    except Exception as error:  # a lost connection has its own error in each storage library, often no OSError
        if isinstance(error, PermissionError) and "://" not in place:
            raise  # far away an expired key denies every file that follows, not only this one
        why = f"{type(error).__name__}: {sanitize(str(error))}"
        cannot = f"cannot be read ({why}); run the same command again to resume"
        raise UserError(f"source {place}: {storage_problem(error) or cannot}") from error


class SourceFile(io.RawIOBase):
    """A file whose reads fail as in `reading`, with a UserError also where it is gone by now."""

    def __init__(self, file: Any, place: str) -> None:
        self._file, self._place = file, place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        with reading(self._place):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()
