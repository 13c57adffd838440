"""Artifacts: manifests, digests and stores. Imports nothing of ours."""

from .artifact import Artifact, ArtifactWriter, differences, finalize, find, load_if_same, verify_file
from .digest import canonical_json, file_digest, sha256_bytes, sha256_file
from .errors import AtollWarning, UserError, sanitize, storage_errors, storage_problem, suggest
from .files import LOCK, atomic_file, cleanup, file_lock, link, remove_unfinished, write_atomic
from .manifest import DIGEST, STATE, UNLISTED, FileEntry, Manifest, Reference, check_relative, explain
from .manifest import NAME as MANIFEST
from .store import Store

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
    "differences",
    "explain",
    "file_digest",
    "file_lock",
    "finalize",
    "find",
    "link",
    "load_if_same",
    "remove_unfinished",
    "sanitize",
    "sha256_bytes",
    "sha256_file",
    "storage_errors",
    "storage_problem",
    "suggest",
    "verify_file",
    "write_atomic",
]
