"""Digests of files that were read before: a file that has not changed since is not read again.

Within a process every file is remembered; large ones also in the cache folder, for the next process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from .digest import canonical_json, sha256_bytes, sha256_file
from .store import cache_folder, write_atomic

SETTLED_NS = 2 * 10**9  # the coarsest step in which file systems count modification times
LARGE = 2**26  # bytes from which a digest is worth a file of its own: smaller ones are hashed in no time

State = tuple[int, int, int, int]  # device, inode, size, modification time

_known: dict[Path, tuple[State, str]] = {}


@dataclass(frozen=True)
class Seen:
    """A file as it was before it was read, and when that was."""

    state: State
    at_ns: int

    @staticmethod
    def of(path: Path) -> Seen:
        now = time.time_ns()
        return Seen(file_state(path), now)


def file_digest(path: Path) -> str:
    """sha256 of a file, which is read once, and again if its inode, size or modification time changes."""
    known = known_digest(path)
    if known is not None:
        return known
    seen = Seen.of(path)
    digest = sha256_file(path)
    remember_digest(path, digest, seen)
    return digest


def known_digest(path: Path) -> str | None:
    """The digest of a file as it was when it was last read, if nothing says that it has changed since."""
    place, state = path.absolute(), file_state(path)
    known = _known.get(place)
    if known is not None and known[0] == state:
        return known[1]
    if state[2] < LARGE:
        return None
    try:
        digest = _note(place, state).read_text("ascii")
    except (OSError, UnicodeError):
        return None
    if len(digest) != 64 or digest.strip("0123456789abcdef"):
        return None
    _known[place] = (state, digest)
    return digest


def remember_digest(path: Path, digest: str, seen: Seen) -> None:
    """Remember the digest of a file that was `seen` before it was read, and is the same now.

    Like git with its index, this remembers no file that was modified within the two seconds before: one changed right
    after it was read could bear the same time.
    """
    if seen.at_ns - seen.state[3] <= SETTLED_NS or file_state(path) != seen.state:
        return
    place = path.absolute()
    _known[place] = (seen.state, digest)
    note = _note(place, seen.state)
    if seen.state[2] < LARGE or note.exists():
        return
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(note, digest.encode())
    except OSError:
        return  # a cache folder that cannot be written: the file is read again next time


def file_state(path: Path) -> State:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def forget() -> None:
    """Know as little as a new process."""
    _known.clear()


def _note(place: Path, state: State) -> Path:
    """Where the digest of a large file is kept; the name says of which file in which state."""
    return cache_folder() / "digests" / sha256_bytes(canonical_json([str(place), *state]))
