"""Digests of files that this process has read: a file that has not changed since is not read again."""

from __future__ import annotations

import time
from pathlib import Path

from .digest import sha256_file

SETTLED_NS = 2 * 10**9  # the coarsest step in which file systems count modification times

_known: dict[Path, tuple[tuple[int, int, int, int], str]] = {}


def file_digest(path: Path) -> str:
    """sha256 of a file, which is read once per process, and again if its inode, size or modification time changes.

    Like git with its index, this remembers no file that was modified within the last two seconds: one changed right
    after it was read could bear the same time.
    """
    place, now, found = path.absolute(), time.time_ns(), path.stat()
    state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    known = _known.get(place)
    if known is not None and known[0] == state:
        return known[1]
    digest = sha256_file(path)
    if now - found.st_mtime_ns > SETTLED_NS:
        _known[place] = (state, digest)
    return digest


def forget() -> None:
    """Know as little as a new process."""
    _known.clear()
