"""Digests: two pieces of work are the same if their digests are."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

FileState = tuple[Path, int, int, int]  # absolute path, bytes, modification time in ns, inode
SETTLED_NS = 2 * 10**9  # coarsest step of modification times among file systems

known_digests: dict[FileState, str] = {}  # of the files that this process has hashed


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8, and no NaN: one byte string per value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file. It is hashed once per process, and again if its inode, size or modification time changes."""
    state = file_state(path)
    return known_digests.get(state) or remember_digest(state, sha256_file(path))


def file_state(path: Path) -> FileState:
    found = path.stat()
    return path.absolute(), found.st_size, found.st_mtime_ns, found.st_ino


def remember_digest(state: FileState, digest: str) -> str:
    """Remember a digest of a file whose state was taken before it was read.

    A file modified in the last two seconds is not remembered: a second change could bear the same time.
    """
    if time.time_ns() - state[2] > SETTLED_NS:
        known_digests[state] = digest
    return digest
