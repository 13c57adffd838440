"""Read and write artifacts: folders whose manifest is written last.

No manifest: not there. A reader checks every file it opens against the manifest; a writer works in a
temporary folder that becomes the artifact in one rename. An artifact is never rewritten.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .digest import canonical_json
from .errors import UserError
from .known_digests import file_digest
from .leftovers import cleanup, remove_unfinished
from .lock import LOCK, file_lock
from .manifest import MOST_BYTES, NAME, STATE, UNLISTED, FileEntry, Manifest, sanitize
from .store import Store, check_relative, fsync_path, raise_if_disk_full, write_atomic

NONE_WRITTEN: Mapping[str, FileEntry] = MappingProxyType({})


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: its place and its manifest."""

    store: Store
    manifest: Manifest

    @staticmethod
    def open(place: str | Path | Store, kind: str | None = None) -> Artifact:
        """Open an artifact, or say in one line why it is none."""
        store = Store.at(place)
        artifact = find(store)
        if artifact is None:
            what = f"{kind} artifact" if kind else "artifact"
            state = f"holds no finished {what} (no {NAME})" if store.exists() else "does not exist"
            raise UserError(f"{store}: {state}; check the path, or run the stage that makes it again")
        if kind is not None and artifact.manifest.kind != kind:
            found = sanitize(artifact.manifest.kind, 40)
            raise UserError(f"{store}: is a {found} artifact, expected {kind}; pass another folder")
        return artifact

    @property
    def digest(self) -> str:
        return self.manifest.digest()

    @property
    def config(self) -> dict[str, Any]:
        return self.manifest.config

    def names(self, under: str = "") -> list[str]:
        """Listed files, sorted; with `under`, those below that folder."""
        return sorted(name for name in self.manifest.files if name.startswith(under))

    def file(self, name: str) -> Path:
        """A local path to a listed file whose digest has been checked, once per process and state of the file."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise UserError(f"{self.store}: the manifest lists no file {name}; make the artifact again")
        if not self.store.is_local:
            return self.store.download(name, entry.sha256, entry.bytes)
        path = self.store.path / name
        verify_file(path, entry.sha256, entry.bytes)
        return path

    def unread(self, name: str) -> tuple[Path, FileEntry]:
        """A local path to a listed file and what it must be, for a reader that checks the digest as it reads."""
        entry = self.manifest.files.get(name)
        if entry is None or not self.store.is_local:
            return self.file(name), self.manifest.files[name]
        return self.store.path / name, entry

    def read(self, name: str) -> bytes:
        return self.file(name).read_bytes()


def find(place: str | Path | Store) -> Artifact | None:
    """The artifact at a place, or None where there is no manifest."""
    store = Store.at(place)
    try:
        data = store.read(NAME, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise UserError(f"{store}/{NAME}: {error.strerror}, so no manifest; make the artifact again") from error
    if len(data) > MOST_BYTES:
        raise UserError(f"{store}/{NAME}: larger than {MOST_BYTES:,} bytes, so no manifest; make the artifact again")
    manifest = Manifest.parse(data, f"{store}/{NAME}")
    for name in manifest.files:
        check_relative(name)
    return Artifact(store, manifest)


def verify_file(path: Path, sha256: str, size: int | None = None) -> None:
    """Refuse a file that is missing or differs from its digest, or from its size in bytes where that is known."""
    if not path.is_file():
        raise UserError(f"{path}: file is missing; copy it again or make the artifact again")
    if size is not None and path.stat().st_size != size:
        raise UserError(f"{path}: corrupt, {path.stat().st_size} bytes but the manifest says {size}; copy it again")
    found = file_digest(path)
    if found != sha256:
        raise UserError(
            f"{path}: corrupt, sha256 is {found[:12]} but the manifest says {sha256[:12]}; copy or make it again"
        )


def load_if_same(
    place: str | Path | Store, kind: str, config: Mapping[str, Any], parents: Mapping[str, str]
) -> Artifact | None:
    """The artifact already at `place` if it is the one this work would make; None if there is none.

    This is how a repeated command says "already there", and removes what the one before left if it was killed at the
    very end. Another artifact in that place is an error that names what differs: artifacts are never rewritten.
    """
    artifact = find(place)
    if artifact is None:
        return None
    if artifact.manifest.kind != kind:
        raise UserError(f"{artifact.store}: holds a {artifact.manifest.kind} artifact; choose another --out")
    changed = differences(artifact.manifest.config, dict(config))
    changed += [
        f"parent {name}"
        for name in sorted(artifact.manifest.parents.keys() | parents.keys())
        if artifact.manifest.parents.get(name) != parents.get(name)
    ]
    if changed:
        raise UserError(
            f"{artifact.store}: already holds a {kind} made with other settings ({', '.join(changed)}); "
            "choose another --out or use the old settings"
        )
    if artifact.store.is_local:
        cleanup(artifact.store.path)
    return artifact


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """What changed between two JSON values, as `a.b: 1 -> 2` lines."""
    if canonical_json(old) == canonical_json(new):
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted(old.keys() | new.keys()):
            path = f"{where}.{key}" if where else str(key)
            if key in old and key in new:
                lines += differences(old[key], new[key], path)
            else:
                lines.append(f"{path}: {'new' if key in new else 'gone'}")
        return lines
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line for n, pair in enumerate(zip(old, new, strict=True)) for line in differences(*pair, f"{where}[{n}]")
        ]
    texts = [canonical_json(value).decode() for value in (old, new)]
    # from shortly before the first difference: two long texts may begin alike
    same = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    first = max(0, same - 10) if max(map(len, texts)) > 40 else 0
    short = [
        ("..." if first else "") + (t[first:] if len(t) <= first + 40 else t[first : first + 37] + "...") for t in texts
    ]
    return [f"{where or 'value'}: {short[0]} -> {short[1]}"]


class ArtifactWriter:
    """An artifact being made. Write files below `folder`, then `commit`; or leave the `with` block to drop it.

        with ArtifactWriter(out, "partition") as draft:
            (draft.folder / "sizes.json").write_bytes(...)
            artifact = draft.commit(config=..., parents=...)

    On a disk the folder is a hidden sibling of `out` renamed at the end; for an object store it is a local
    temporary folder that is uploaded, manifest last. With `resumable` a folder left by a killed process is
    kept and found again, and is not removed on failure; the caller decides which of its files to trust, and keeps
    what it needs for that in `folder / STATE`, which goes when the artifact is in its place and not before.
    One process at a time: a second one is refused.
    """

    def __init__(self, place: str | Path | Store, kind: str, *, resumable: bool = False) -> None:
        self.store = Store.at(place)
        self.kind = kind
        self.resumable = resumable
        if self.store.is_local:
            self.folder = self.store.path.with_name(f".{self.store.name}.partial")
        else:
            label = "".join(c if c.isalnum() else "-" for c in self.store.url)
            self.folder = Path(tempfile.gettempdir()) / f"atoll-{label}.partial"
        self._committed = False
        self._held = ExitStack()

    def __enter__(self) -> ArtifactWriter:
        self._check_free()
        try:
            self._held.enter_context(file_lock(self.folder))
        except OSError as error:
            raise UserError(
                f"--out {self.store}: cannot be written ({error.strerror}); choose another --out"
            ) from error
        if self.resumable:
            remove_unfinished(self.folder, everywhere=True)
        else:
            self.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not self._committed and not (self.resumable and error is not None):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._held.close()
        if error is not None:
            raise_if_disk_full(error, self.store.url)

    def commit(
        self,
        *,
        config: Mapping[str, Any],
        parents: Mapping[str, str] | None = None,
        license: str | None = None,
        written: Mapping[str, FileEntry] = NONE_WRITTEN,
        provenance: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Write the manifest last, and put the folder in its place.

        Every file is hashed, but for those in `written`: their digests are those of the bytes that went into them.
        """
        state = self.folder / STATE
        files = [p for p in self.folder.rglob("*") if p.is_file() and state not in p.parents]
        names = [path.relative_to(self.folder).as_posix() for path in files if not path.name.startswith(".")]
        listed = [name for name in names if name.split("/")[0] not in UNLISTED]
        manifest = describe(self.folder, listed, self.kind, config, parents or {}, license, written)
        write_provenance(self.folder, provenance)
        (self.folder / NAME).write_bytes(manifest.to_bytes())
        for path in [*files, self.folder / NAME]:
            fsync_path(path)
        self._check_free()  # again: it may have been hours
        if self.store.is_local:
            final = self.store.path
            os.replace(self.folder, final)
            fsync_path(final.parent)
            (final / LOCK).unlink()
            shutil.rmtree(final / STATE, ignore_errors=True)
        else:
            self._upload(manifest)
        self._committed = True
        return Artifact(self.store, manifest)

    def clear(self) -> None:
        """Remove everything in the folder but its lock."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()

    def _check_free(self) -> None:
        """Refuse a place that cannot become this artifact: before the work, and once more at its end."""
        if not self.store.is_local:
            taken = self.store.exists(NAME)
        elif self.store.path.is_file():
            raise UserError(f"{self.store}: is a file; give a folder that does not exist yet")
        else:
            taken = self.store.path.exists() and any(self.store.path.iterdir())
        if taken:
            raise UserError(f"{self.store}: already exists; choose another --out or remove it")

    def _upload(self, manifest: Manifest) -> None:
        for name in [*manifest.files, "provenance.json", "log.jsonl"]:
            if (self.folder / name).exists():  # not every stage keeps a log
                self.store.upload(self.folder / name, name)
        self.store.write(NAME, manifest.to_bytes())
        shutil.rmtree(self.folder)


def finalize(
    folder: Path,
    names: Sequence[str],
    kind: str,
    *,
    config: Mapping[str, Any],
    parents: Mapping[str, str],
    license: str | None,
    provenance: Mapping[str, Any] | None = None,
) -> Artifact:
    """Make these files of a working folder an artifact: flush them, then write the manifest, last."""
    manifest = describe(folder, names, kind, config, parents, license)
    for name in manifest.files:
        fsync_path(folder / name)
    write_provenance(folder, provenance)
    write_atomic(folder / NAME, manifest.to_bytes())
    return Artifact(Store.at(folder), manifest)


def describe(
    folder: Path,
    names: Sequence[str],
    kind: str,
    config: Mapping[str, Any],
    parents: Mapping[str, str],
    license: str | None,
    written: Mapping[str, FileEntry] = NONE_WRITTEN,
) -> Manifest:
    """The manifest of these files as they lie there, or as they were `written`."""
    assert written.keys() <= set(names), f"written but not there: {sorted(written.keys() - set(names))[:3]}"
    for name, entry in written.items():
        if (size := (folder / name).stat().st_size) != entry.bytes:
            raise UserError(
                f"{folder / name}: has {size} bytes, {entry.bytes} were written; "
                f"remove {folder} and run the same command again"
            )
    files = {
        name: written.get(name) or FileEntry(sha256=file_digest(folder / name), bytes=(folder / name).stat().st_size)
        for name in sorted(names)
    }
    return Manifest(kind=kind, config=dict(config), parents=dict(parents), files=files, license=license)


def write_provenance(folder: Path, more: Mapping[str, Any] | None = None) -> None:
    """When, where and how (`more`) the work was done: useful to people, and so never part of a digest."""
    record = {
        **(more or {}),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "command": sys.argv,
    }
    (folder / "provenance.json").write_bytes(canonical_json(record) + b"\n")
