"""Artifacts: manifests, digests and stores. Imports nothing of ours."""

from .artifact import Artifact, ArtifactWriter, differences, finalize, find, load_if_same, verify_file
from .digest import canonical_json, file_digest, sha256_bytes, sha256_file
from .errors import AtollWarning, UserError, sanitize, storage_errors, storage_problem, suggest
from .files import LOCK, STATE, atomic_file, cleanup, file_lock, link, remove_unfinished, write_atomic
from .manifest import DIGEST, MANIFEST, UNLISTED, FileEntry, Manifest, Reference, check_relative, explain
from .store import Store
