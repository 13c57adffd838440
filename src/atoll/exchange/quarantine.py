"""Where contributions are judged: a copy of our own, made by a reader that nothing can fool, fill or hold up.

RUN/quarantine/03-1f2e3d4c5b6a/
  contribution/   the files the manifest lists, as they were when they were read
  reasons.json    why it was refused; an accepted one leaves the quarantine. Of one that nobody known has signed, or of
                  a sender who had their share, this is all: it was not copied
  sheet.png       what it painted, if it came that far

Only regular files are read, never through a link, and never more bytes than its order allows. What the folder holds
besides is not looked at.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..artifacts import MANIFEST, Artifact, Manifest, Store, UserError, file_lock, sanitize, write_atomic
from ..models.dit import DiT, DiTConfig
from ..models.shapes import as_shapes

FOLDER = "quarantine"
CONTRIBUTION = "contribution"
REASONS = "reasons.json"
SHEET = "sheet.png"
KIB, MIB = 2**10, 2**20
MOST_MANIFEST = MIB
MOST_HEADER = 2 * MIB  # of safetensors: names, shapes and places
TEXTS = {"expert.json": 16 * MIB, "metrics.jsonl": 4 * MIB}  # all an expert consists of, but for its weights
CHUNK = MIB
# what opening something that is no file may say
NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EINVAL})


class Refused(UserError):
    """A contribution that does not come in; the message says why, in words that are safe to print."""


@dataclass(frozen=True)
class Quarantined:
    """One contribution while it is judged: `folder` is ours, `artifact` the copy in it."""

    folder: Path
    artifact: Artifact

    @property
    def files(self) -> Path:
        return self.folder / CONTRIBUTION


def read_manifest(source: Store) -> Manifest:
    """The manifest of a contribution, of a file that is one and not too large."""
    where = f"{source}/{MANIFEST}"
    try:
        with opened(source, MANIFEST) as stream:
            data = stream.read(MOST_MANIFEST + 1)
    except FileNotFoundError as error:
        raise UserError(
            f"{source}: holds no finished expert artifact (no {MANIFEST}); check the path, or wait until it is sent"
        ) from error
    if len(data) > MOST_MANIFEST:
        raise Refused(f"{where}: larger than {MOST_MANIFEST:,} bytes, so no manifest of an expert")
    try:
        manifest = Manifest.parse(data, where)
        manifest.digest()
    except (UnicodeError, ValueError, RecursionError) as error:
        raise Refused(f"{where}: cannot be written as canonical JSON ({sanitize(str(error), 80)})") from error
    return manifest


def caps(architecture: DiTConfig) -> dict[str, int]:
    """The most bytes of each file of an expert of this architecture."""
    with as_shapes():
        weights = sum(4 * value.numel() for value in DiT(architecture).state_dict().values())
    return {**TEXTS, "model.safetensors": weights + MOST_HEADER}


@contextmanager
def quarantined(
    run: Store, name: str, source: Store, manifest: Manifest, most: Mapping[str, int]
) -> Iterator[Quarantined]:
    """A copy of a contribution, ours alone meanwhile: in the run, or for a run on an object store on this machine."""
    folder = local_folder(run, name)
    with file_lock(folder):
        clear(folder)
        files = folder / CONTRIBUTION
        files.mkdir()
        for listed, entry in manifest.files.items():
            if entry.bytes > most[listed]:
                raise Refused(
                    f"{source}: {listed} is said to have {entry.bytes:,} bytes, its order allows {most[listed]:,}"
                )
            digest = copy_bounded(source, listed, files / listed, entry.bytes)
            if digest != entry.sha256:
                raise Refused(
                    f"{source}: {listed} is corrupt, its sha256 is {digest[:12]} but the manifest says "
                    f"{entry.sha256[:12]}"
                )
        write_atomic(files / MANIFEST, manifest.to_bytes())
        yield Quarantined(folder, Artifact(Store.at(files), manifest))


def local_folder(run: Store, name: str) -> Path:
    if run.is_local:
        return run.path / FOLDER / name
    label = "".join(c if c.isalnum() else "-" for c in run.url)
    return Path(tempfile.gettempdir()) / f"atoll-{FOLDER}-{label}" / name


def copy_bounded(source: Store, name: str, target: Path, size: int) -> str:
    """Copy a file of exactly this size; its sha256, of the bytes that were written."""
    digest, seen = hashlib.sha256(), 0
    try:
        with opened(source, name) as stream, target.open("xb") as copy:
            while seen <= size and (part := stream.read(min(CHUNK, size + 1 - seen))):
                digest.update(part)
                copy.write(part)
                seen += len(part)
    except FileNotFoundError as error:
        raise Refused(f"{source}: {name} is missing, though the manifest lists it") from error
    if seen != size:
        more = "more" if seen > size else "fewer"
        raise Refused(f"{source}: {name} is corrupt, it has {more} bytes than the {size:,} the manifest says")
    return digest.hexdigest()


@contextmanager
def opened(source: Store, name: str) -> Iterator[BinaryIO]:
    """A regular file of a contribution, to be read: no link, no pipe, no device, no folder."""
    if not source.is_local:
        with source.opened(name) as stream:
            yield stream
        return
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        handle = os.open(source.path / name, flags)
    except NotADirectoryError as error:
        raise UserError(f"{source}: is no folder; give the folder of an expert") from error
    except OSError as error:
        if error.errno in NO_FILE:
            raise Refused(f"{source}: {name} is a link or no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Refused(f"{source}: {name} is no regular file")
    with os.fdopen(handle, "rb") as stream:
        yield stream


def clear(folder: Path) -> None:
    """Remove what an earlier judgement left, but not the lock that is held."""
    shutil.rmtree(folder / CONTRIBUTION, ignore_errors=True)
    for name in (REASONS, SHEET):
        (folder / name).unlink(missing_ok=True)


def leave(run: Store, name: str) -> None:
    """Take an accepted contribution out of the quarantine."""
    shutil.rmtree(local_folder(run, name), ignore_errors=True)
    if not run.is_local:
        for file in (REASONS, SHEET):
            with suppress(FileNotFoundError):
                run.child(FOLDER, name).remove(file)


def write_reasons(run: Store, name: str, reasons: Mapping[str, Any]) -> None:
    """Leave word why a contribution was refused, where it lies; on an object store the word and the picture go up."""
    data = json.dumps(reasons, indent=2, sort_keys=True).encode() + b"\n"
    folder = local_folder(run, name)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / REASONS, data)
    if not run.is_local:
        run.child(FOLDER, name).write(REASONS, data)
        if (folder / SHEET).is_file():
            run.child(FOLDER, name).write(SHEET, (folder / SHEET).read_bytes())


def read_reasons(run: Store, name: str) -> dict[str, Any] | None:
    """Why a contribution was refused before; None if it was not, or nobody can read it any more."""
    try:
        found = json.loads(run.child(FOLDER, name).read(REASONS, MIB))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
