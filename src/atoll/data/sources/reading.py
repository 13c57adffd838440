"""Reading that tells damaged bytes from a failing read.

Damaged bytes are the same every time: the sample is listed and the run goes on. A failing read (a timeout, a lost
connection, a bad sector, too many open files) says nothing about the data: whatever followed it would be lost for
good if it were listed and the unit marked done. So it is tried again, and then it ends the run; the same command
goes on where it was.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ...artifacts import UserError
from ...artifacts.credentials import credentials_missing

PAUSES = (0.5, 2.0)  # seconds before the second and the third try; object stores try again on their own besides
BUFFER_BYTES = 2**20

Result = TypeVar("Result")


def attempt(read: Callable[[], Result], system: fsspec.AbstractFileSystem, path: str) -> Result:
    """The result of `read`. OSError: this file cannot be had, now or later. UserError: reading fails for now."""
    for pause in (*PAUSES, None):
        try:
            return read()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, MemoryError):
            raise
        except PermissionError as error:
            if isinstance(system, LocalFileSystem):
                raise
            # a key that has expired locks every file that follows, not only this one
            raise UserError(
                f"source {system.unstrip_protocol(path)}: access denied ({error}); "
                "mend that and run the same command again to go on"
            ) from error
        except Exception as error:  # a lost connection has its own error in each storage library, often no OSError
            if (missing := credentials_missing(error)) is not None:
                raise UserError(f"source {system.unstrip_protocol(path)}: {missing}") from error
            if pause is None:
                shown = path if isinstance(system, LocalFileSystem) else system.unstrip_protocol(path)
                raise UserError(
                    f"source {shown}: cannot be read, tried {len(PAUSES) + 1} times "
                    f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
                    "run the same command again to go on"
                ) from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def read_file(system: fsspec.AbstractFileSystem, path: str, start: int | None = None, stop: int | None = None) -> bytes:
    """The bytes start : stop of a file, the whole of it without them."""
    return bytes(attempt(lambda: system.cat_file(path, start, stop), system, path))


def open_file(system: fsspec.AbstractFileSystem, path: str) -> BinaryIO:
    """A file to read by and by. Whatever a parser raises on it is about the bytes: a failing read is a UserError."""
    raw = SteadyFile(system, path)
    return cast(BinaryIO, io.BufferedReader(raw, BUFFER_BYTES))


class SteadyFile(io.RawIOBase):
    """A file of a source whose reads are tried again."""

    def __init__(self, system: fsspec.AbstractFileSystem, path: str) -> None:
        self._system, self._path = system, path
        self._file = attempt(lambda: system.open(path, "rb"), system, path)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = int(self._steady(lambda: self._file.seek(offset, whence)))
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")

        def read() -> bytes:
            if self._file.tell() != self._position:  # a read that failed may have moved it
                self._file.seek(self._position)
            return bytes(self._file.read(len(view)))

        content = self._steady(read)
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _steady(self, read: Callable[[], Result]) -> Result:
        """No OSError comes out of an open file, so that those a parser raises are its own."""
        try:
            return attempt(read, self._system, self._path)
        except OSError as error:
            raise UserError(
                f"source {self._path}: gone while it was read ({type(error).__name__}); "
                "put it back and run the same command again to go on"
            ) from error

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
