"""Artifacts: manifests, digests and stores. Knows no stage by name and imports nothing of ours."""

from .artifact import STATE, Artifact, Draft, differences, find, reuse, seal, verify_file
from .digest import canonical_json, sha256_bytes, sha256_file
from .errors import UserError
from .known_digests import file_digest
from .lock import LOCK, only_one
from .manifest import FileEntry, Manifest, explain, printable
from .store import Store, atomic_file, check_relative, link, raise_if_disk_full, remove_unfinished, write_atomic

__all__ = [
    "LOCK",
    "STATE",
    "Artifact",
    "Draft",
    "FileEntry",
    "Manifest",
    "Store",
    "UserError",
    "atomic_file",
    "canonical_json",
    "check_relative",
    "differences",
    "explain",
    "file_digest",
    "find",
    "link",
    "only_one",
    "printable",
    "raise_if_disk_full",
    "remove_unfinished",
    "reuse",
    "seal",
    "sha256_bytes",
    "sha256_file",
    "verify_file",
    "write_atomic",
]
