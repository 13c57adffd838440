"""Read and write artifacts: folders whose manifest is written last.

No manifest: not finished. A reader checks every file it opens against the manifest; a writer works in a
temporary folder that becomes the artifact in one rename. An artifact is never rewritten.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .digest import canonical_json, file_digest
from .errors import UserError, sanitize, storage_errors
from .files import LOCK, cleanup, file_lock, fsync_path, write_atomic
from .manifest import MANIFEST, UNLISTED, FileEntry, Manifest
from .store import Store, working_folder

MOST_BYTES = 256 * 2**20  # of a manifest: a million files
MOST_SHOWN = 200  # characters of a value in an error


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: its place and its manifest."""

    store: Store
    manifest: Manifest

    @staticmethod
    def open(place: str | Path | Store, kind: str | None = None) -> Artifact:
        """Open an artifact; UserError if there is none, or one of another kind."""
        artifact = find(place)
        if artifact is None:
            what = f"holds no finished {kind or 'artifact'} (no {MANIFEST})"
            raise UserError(f"{Store.at(place)}: {what}; check the path, or run the stage that makes it")
        if kind is not None and artifact.manifest.kind != kind:
            found = sanitize(artifact.manifest.kind, 40)
            raise UserError(f"{artifact.store}: is a {found} artifact, expected {kind}; pass another folder")
        return artifact

    @property
    def digest(self) -> str:
        return self.manifest.digest()

    @property
    def config(self) -> dict[str, Any]:
        return self.manifest.config

    def names(self, under: str = "") -> list[str]:
        """Listed files, sorted; with `under`, those whose path begins so."""
        return sorted(name for name in self.manifest.files if name.startswith(under))

    def file(self, name: str, *, verify: bool = True) -> Path:
        """A local path to a listed file, its digest verified, unless the caller does so while reading."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise UserError(f"{self.store}: the manifest lists no file {name}; make the artifact again")
        if not self.store.is_local:
            return self.store.download(name, entry.sha256, entry.bytes)
        path = self.store.path / name
        if verify:
            verify_file(path, entry.sha256, entry.bytes)
        return path

    def read(self, name: str) -> bytes:
        return self.file(name).read_bytes()


def find(place: str | Path | Store) -> Artifact | None:
    """The artifact at a place, or None where there is no manifest."""
    store = Store.at(place)
    try:
        data = store.read(MANIFEST, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError, FileExistsError):  # the last: memory:// below a file
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise UserError(f"{store}/{MANIFEST}: {error.strerror}; make the artifact again") from error
    return Artifact(store, Manifest.parse(data, f"{store}/{MANIFEST}"))


def verify_file(path: Path, sha256: str, size: int | None = None) -> None:
    """Refuse a file that is missing, or that differs from its digest or its size in bytes."""
    if not path.is_file():
        raise UserError(f"{path}: file is missing; copy it again or make the artifact again")
    if size is not None and path.stat().st_size != size:
        raise UserError(f"{path}: corrupt, {path.stat().st_size} bytes but the manifest says {size}; copy it again")
    if (found := file_digest(path)) != sha256:
        expected = f"sha256 is {found[:12]} but the manifest says {sha256[:12]}"
        raise UserError(f"{path}: corrupt, {expected}; copy or make it again")


def load_if_same(
    place: str | Path | Store, kind: str, config: Mapping[str, Any], parents: Mapping[str, str]
) -> Artifact | None:
    """The artifact at `place` if it has this config and these parents; None if there is none.

    A repeated command finds its result so. Any other artifact there is an error that names what differs.
    """
    artifact = find(place)
    if artifact is None:
        return None
    if artifact.manifest.kind != kind:
        raise UserError(f"{artifact.store}: holds a {artifact.manifest.kind} artifact; choose another --out")
    changed = differences(artifact.config, dict(config))
    changed += differences(artifact.manifest.parents, dict(parents), "parent")
    if changed:
        raise UserError(
            f"{artifact.store}: already holds a {kind} made with other settings ({', '.join(changed)}); "
            "choose another --out or use the old settings"
        )
    if artifact.store.is_local:
        cleanup(artifact.store.path)  # of a command that was killed at the very end
    return artifact


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """What changed between two JSON values, as lines `a.b: 1 -> 2`."""
    texts = [canonical_json(value).decode() for value in (old, new)]
    if texts[0] == texts[1]:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in dict.fromkeys([*old, *new]):
            found += differences(old.get(key, "none"), new.get(key, "none"), f"{where}.{key}".lstrip("."))
        return found
    if max(map(len, texts)) > MOST_SHOWN:
        return [f"{where or 'value'} differs"]
    return [f"{where or 'value'}: {texts[0]} -> {texts[1]}"]


class ArtifactWriter:
    """An artifact being made. Write files below `folder`, then `commit`; or leave the `with` block to drop it.

        with ArtifactWriter(out, "partition") as draft:
            (draft.folder / "clusters.json").write_bytes(...)
            artifact = draft.commit(config=..., parents=...)

    On a disk the folder is a hidden sibling of `out` that is renamed at the end; for an object store it is a local
    folder that is uploaded, manifest last. With `resumable` the folder of a killed or failed process is kept; the
    caller decides which of its files to trust, and records that in `folder / STATE`, which goes at the end.
    One process at a time: a second one is refused.
    """

    def __init__(self, place: str | Path | Store, kind: str, *, resumable: bool = False) -> None:
        self.store = Store.at(place)
        self.kind = kind
        self.resumable = resumable
        if self.store.is_local:
            self.folder = self.store.path.with_name(f".{self.store.name}.partial")
        else:
            self.folder = working_folder(self.store)
        self._committed = False
        self._held = ExitStack()

    def __enter__(self) -> ArtifactWriter:
        self._check_free()
        self._held.enter_context(storage_errors(self.store.url))
        self._held.enter_context(file_lock(self.folder))
        if not self.resumable:
            self.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not self._committed and not (self.resumable and error is not None):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._held.__exit__(kind, error, trace)

    def commit(
        self,
        *,
        config: Mapping[str, Any],
        parents: Mapping[str, str] | None = None,
        license: str | None = None,
        written: Mapping[str, FileEntry] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Write the manifest last, and put the folder in its place; arguments as in `finalize`."""
        names = []
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if path.is_dir() or name == LOCK or name.split("/")[0] in UNLISTED:
                continue
            if path.name.startswith("."):  # half-written by a killed process
                path.unlink()
            else:
                names.append(name)
        made = finalize(
            self.folder,
            names,
            self.kind,
            config=config,
            parents=parents,
            license=license,
            written=written,
            provenance=provenance,
        )
        self._check_free()  # again: it may have been hours
        if self.store.is_local:
            os.replace(self.folder, self.store.path)
            fsync_path(self.store.path.parent)
            cleanup(self.store.path)
        else:
            for name in [*names, "provenance.json", "log.jsonl"]:
                if (self.folder / name).exists():  # not every stage keeps a log
                    self.store.upload(self.folder / name, name)
            if not self.store.create(MANIFEST, made.manifest.to_bytes()):
                raise UserError(f"{self.store}: another process has just made it; run the same command again")
            shutil.rmtree(self.folder)
        self._committed = True
        return Artifact(self.store, made.manifest)

    def clear(self) -> None:
        """Remove everything in the folder but its lock."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()

    def _check_free(self) -> None:
        """Refuse a place that cannot become this artifact: before the work, and once more at its end."""
        self.store.check_creates()
        if self.store.children() if self.store.is_local else self.store.exists(MANIFEST):
            raise UserError(f"{self.store}: already exists; choose another --out or remove it")


def finalize(
    folder: Path,
    names: Sequence[str],
    kind: str,
    *,
    config: Mapping[str, Any],
    parents: Mapping[str, str] | None = None,
    license: str | None = None,
    written: Mapping[str, FileEntry] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Artifact:
    """Make these files of a folder an artifact: hash and flush them, then write the manifest, last.

    Files in `written` are not hashed: their digests are those of the bytes that went into them. When, where and how
    (`provenance`) the work was done goes to provenance.json, which is never listed, so no part of a digest.
    """
    files = dict(written or {})
    for name in names:
        path = folder / name
        if name not in files:
            files[name] = FileEntry(sha256=file_digest(path), bytes=path.stat().st_size)
        fsync_path(path)
    assert files.keys() == set(names), "written but not there"
    manifest = Manifest(kind=kind, config=dict(config), parents=dict(parents or {}), files=files, license=license)
    record = {
        **(provenance or {}),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "command": sys.argv,
    }
    write_atomic(folder / "provenance.json", canonical_json(record) + b"\n")
    write_atomic(folder / MANIFEST, manifest.to_bytes())
    return Artifact(Store.at(folder), manifest)
