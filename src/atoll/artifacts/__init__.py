"""Artifacts: manifests, digests and stores. Knows no stage by name and imports nothing of ours."""

from .artifact import Artifact, ArtifactWriter, differences, finalize, find, load_if_same, verify_file
from .digest import canonical_json, sha256_bytes, sha256_file
from .errors import AtollWarning, UserError, suggest
from .known_digests import file_digest
from .leftovers import cleanup, remove_stale, remove_unfinished
from .lock import LOCK, file_lock
from .manifest import NAME as MANIFEST
from .manifest import STATE, UNLISTED, FileEntry, Manifest, complaints_of, explain, sanitize
from .reference import DIGEST, Reference
from .store import Store, atomic_file, check_relative, link, raise_if_disk_full, write_atomic

__all__ = [
    "DIGEST",
    "LOCK",
    "MANIFEST",
    "STATE",
    "UNLISTED",
    "Artifact",
    "ArtifactWriter",
    "AtollWarning",
    "FileEntry",
    "Manifest",
    "Reference",
    "Store",
    "UserError",
    "atomic_file",
    "canonical_json",
    "check_relative",
    "cleanup",
    "complaints_of",
    "differences",
    "explain",
    "file_digest",
    "file_lock",
    "finalize",
    "find",
    "link",
    "load_if_same",
    "raise_if_disk_full",
    "remove_stale",
    "remove_unfinished",
    "sanitize",
    "sha256_bytes",
    "sha256_file",
    "suggest",
    "verify_file",
    "write_atomic",
]
