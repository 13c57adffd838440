"""Local files: written whole or not at all, and one process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, ENOTSUP
from pathlib import Path
from typing import BinaryIO

from .errors import UserError

LOCK = ".lock"
STATE = "state"  # folder of unfinished work inside the artifact that is being made


@contextmanager
def file_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made; UserError if another process has it. It ends with the process."""
    with locked(folder / LOCK, wait=False):
        yield


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[BinaryIO]:
    """Open a file, which is made with its folder, and hold its lock; no link is followed."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "r+b", opener=lambda p, flags: os.open(p, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise UserError(f"{path.parent}: another process is working here; wait for it or stop it") from error
            if _lies_at(path, stream):  # the process before may have renamed or removed it
                yield stream
                return


def _lies_at(path: Path, stream: BinaryIO) -> bool:
    """Whether an open file is the one at a path now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def atomic_file(target: Path, *, create: bool = False) -> Iterator[BinaryIO]:
    """A file to write: temporary name, fsync, rename, fsync of the folder. It is there whole, or not at all.

    Several processes write it one after the other; with `create` all but the first get a FileExistsError. What a
    killed process leaves under the temporary name is overwritten by the next one that writes this file.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    with locked(temporary, wait=True) as stream:
        try:
            if create and target.exists():
                raise FileExistsError(target)
            stream.truncate()
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync_path(target.parent)


def write_atomic(target: Path, data: bytes) -> None:
    with atomic_file(target) as stream:
        stream.write(data)


def link(source: Path, target: Path) -> None:
    """The same file under another name, unless one is there; a copy where the file system cannot link."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with source.open("rb") as original, atomic_file(target) as copy:
            shutil.copyfileobj(original, copy)


def fsync_path(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename after it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (EINVAL, ENOTSUP) or not path.is_dir():  # network file systems refuse folders
            raise
    finally:
        os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Remove what safetensors left half-written in a folder whose lock is held."""
    for path in folder.glob(".tmp??????"):
        path.unlink()


def cleanup(artifact: Path) -> None:
    """Remove the working state of a finished artifact, which nobody needs now, where the folder may be written."""
    with suppress(OSError):
        (artifact / LOCK).unlink(missing_ok=True)
    shutil.rmtree(artifact / STATE, ignore_errors=True)
