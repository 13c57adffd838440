"""What killed processes leave behind, and who removes it: the next command that may.

    .NAME.1234abcd.tmp   a file half written; its writer holds a lock on it for as long as it lives
    .tmpAbC123           the same by safetensors, without a lock: removed by whoever holds the lock of its folder
    .NAME.partial/       a draft; one with a `state` is half-done work that the same command goes on with, and stays
    .lock, state/        in a finished artifact: whoever made it died between the last rename and the tidying up

Nothing that a living process holds is touched.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .lock import LOCK, is_file_at, lock_file
from .manifest import NAME, STATE

TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{8}\.tmp$")
OF_SAFETENSORS = re.compile(r"^\.tmp\w{6}$")
DRAFT = re.compile(r"^\..+\.partial$")


def remove_stale(folder: Path, *, deep: bool = True) -> None:
    """Remove what killed processes left in a folder, and with `deep` anywhere below it. Links are not followed."""
    for path in _entries(folder):
        if path.is_symlink():
            continue
        if not path.is_dir():
            if TEMPORARY.match(path.name):
                _remove_file(path)
        elif DRAFT.match(path.name):
            _remove_draft(path)
        elif (path / NAME).is_file():
            cleanup(path)
        elif deep:
            remove_stale(path)


def cleanup(artifact: Path) -> None:
    """Remove the lock and the working folder of a finished artifact, unless its maker is just about to."""
    state = artifact / STATE
    for lock in (artifact / LOCK, state / LOCK):
        if lock.is_file():
            with _held(lock) as ours:
                if ours:
                    shutil.rmtree(state, ignore_errors=True)
                    _unlink(lock)
                return
    if state.is_dir():
        shutil.rmtree(state, ignore_errors=True)


def remove_unfinished(folder: Path, *, everywhere: bool = False) -> None:
    """Remove files half written in a folder, or `everywhere` below it, by whoever holds its lock, or needs none."""
    for path in _entries(folder):
        if everywhere and path.is_dir() and not path.is_symlink():
            remove_unfinished(path, everywhere=True)
        elif TEMPORARY.match(path.name):
            _remove_file(path)
        elif OF_SAFETENSORS.match(path.name):
            _unlink(path)


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, which others may change meanwhile."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _remove_file(path: Path) -> None:
    with _held(path) as ours:
        if ours:
            _unlink(path)


def _unlink(path: Path) -> None:
    with suppress(OSError):  # gone already, or in a folder that is not ours to change
        path.unlink()


def _remove_draft(folder: Path) -> None:
    if (folder / STATE).exists():
        return
    with _held(folder / LOCK) as ours:  # one without a lock is not ours
        if ours:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Hold a file's lock: False where another process has it, or the file has gone, or may not be touched."""
    try:
        stream = path.open("r+b")
    except OSError:
        yield False
        return
    with stream:
        try:
            lock_file(stream.fileno())
        except OSError:
            yield False
            return
        yield is_file_at(stream.fileno(), path)
