"""Artifacts: manifests, digests and stores. Knows no stage by name and imports nothing of ours."""

from .artifact import Artifact, Draft, differences, find, reuse, seal, verify_file
from .digest import canonical_json, sha256_bytes, sha256_file
from .errors import Notice, UserError, nearest
from .known_digests import file_digest
from .leftovers import remove_unfinished, sweep, tidy
from .lock import LOCK, only_one
from .manifest import NAME as MANIFEST
from .manifest import STATE, UNLISTED, FileEntry, Manifest, complaints_of, explain, printable
from .reference import DIGEST, Reference
from .store import Store, atomic_file, check_relative, link, raise_if_disk_full, write_atomic

__all__ = [
    "DIGEST",
    "LOCK",
    "MANIFEST",
    "STATE",
    "UNLISTED",
    "Artifact",
    "Draft",
    "FileEntry",
    "Manifest",
    "Notice",
    "Reference",
    "Store",
    "UserError",
    "atomic_file",
    "canonical_json",
    "check_relative",
    "complaints_of",
    "differences",
    "explain",
    "file_digest",
    "find",
    "link",
    "nearest",
    "only_one",
    "printable",
    "raise_if_disk_full",
    "remove_unfinished",
    "reuse",
    "seal",
    "sha256_bytes",
    "sha256_file",
    "sweep",
    "tidy",
    "verify_file",
    "write_atomic",
]
