"""Digests: how two pieces of work are known to be the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8, and no NaN: one byte string per value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
