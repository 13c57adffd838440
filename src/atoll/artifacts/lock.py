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
def only_one(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock; the system lets go of it when the process ends, however it ends.

    If another process has it: an error, or with `wait`, for work of a moment, the lock when it is free.
    """
    path = folder / LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as stream:
            try:
                _lock(stream.fileno(), wait)
            except OSError as error:
                raise UserError(f"{folder}: another process is working here; wait for it or stop it") from error
            # whoever had it until now may have moved or removed the folder: then this is the lock of nothing
            if path.exists() and os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                yield
                return


def _lock(handle: int, wait: bool) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
