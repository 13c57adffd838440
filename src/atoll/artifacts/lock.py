"""One process at a time in a folder: two would undo each other's work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

LOCK = ".lock"


@contextmanager
def file_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock; the system lets go of it when the process ends, however it ends.

    If another process has it: an error, or with `wait`, for work of a moment, the lock when it is free.
    """
    path = folder / LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as stream:
            try:
                lock_file(stream.fileno(), wait=wait)
            except OSError as error:
                raise UserError(f"{folder}: another process is working here; wait for it or stop it") from error
            # whoever had it until now may have moved or removed the folder: then this is the lock of nothing
            if is_file_at(stream.fileno(), path):
                yield
                return


def is_file_at(handle: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(handle))


def lock_file(handle: int, *, wait: bool = False) -> None:
    """Lock an open file until it is closed; OSError if another process has it, or the file system has no locks."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
