"""The copy of a contribution that is checked. What its sender changes later has no effect.

RUN/quarantine/03-1f2e3d4c5b6a/
  contribution/   the files the manifest lists, as they were when they were read
  reasons.json    why it was refused; an accepted one leaves the quarantine. Where the signature was not accepted this
                  is all: nothing is copied
  sheet.png       its samples, if the checks came that far

Only regular files are read, never through a link, and never more bytes than the order allows. Other files in the
folder are ignored. For a run on an object store the copy is made on this machine, and reasons and sheet are uploaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..artifacts import MANIFEST, Manifest, Store, UserError, file_lock, sanitize, write_atomic
from ..artifacts.store import working_folder

FOLDER = "quarantine"
CONTRIBUTION = "contribution"
REASONS = "reasons.json"
SHEET = "sheet.png"
MIB = 2**20
# what opening something that is not a regular file may raise
NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EINVAL})


class Refused(UserError):
    """A contribution that is not admitted; the message is the reason."""


@contextmanager
def opened(source: Store, name: str, most: int) -> Iterator[BinaryIO]:
    """A regular file of a contribution, of which at most `most` bytes will be read: no link, pipe, device or folder."""
    if not source.is_local:
        with source.opened(name, most) as stream:
            yield stream
        return
    try:
        handle = os.open(source.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise UserError(f"{source}: is no folder; give the folder of an expert") from error
    except OSError as error:
        if error.errno in NOT_A_FILE:
            raise Refused(f"{name} is a link or no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Refused(f"{name} is no regular file")
    with os.fdopen(handle, "rb") as stream:
        yield stream


def read_bounded(source: Store, name: str, most: int) -> bytes | None:
    """A small file, or its first `most` + 1 bytes; None where it is missing."""
    try:
        with opened(source, name, most + 1) as stream:
            return stream.read(most + 1)
    except FileNotFoundError:
        return None


def read_manifest(source: Store) -> Manifest:
    """The manifest of a contribution, if it is a regular file of a reasonable size."""
    data = read_bounded(source, MANIFEST, MIB)
    if data is None:
        raise UserError(
            f"{source}: holds no finished expert artifact (no {MANIFEST}); check the path, or wait until it is sent"
        )
    if len(data) > MIB:
        raise Refused(f"its {MANIFEST} is larger than {MIB:,} bytes")
    try:
        manifest = Manifest.parse(data, f"{source}/{MANIFEST}")
        manifest.digest()
    except (UnicodeError, ValueError, RecursionError) as error:
        raise Refused(f"its {MANIFEST} cannot be written as canonical JSON ({sanitize(str(error), 80)})") from error
    return manifest


@contextmanager
def quarantined(run: Store, name: str) -> Iterator[Path]:
    """An empty folder for one copy, locked; what an earlier admission left in it is removed."""
    folder = local_folder(run, name)
    with file_lock(folder):
        shutil.rmtree(folder / CONTRIBUTION, ignore_errors=True)
        for file in (REASONS, SHEET):
            (folder / file).unlink(missing_ok=True)
        yield folder


def local_folder(run: Store, name: str) -> Path:
    return run.path / FOLDER / name if run.is_local else working_folder(run.child(FOLDER)) / name


def copy_contribution(source: Store, manifest: Manifest, target: Path, most: Mapping[str, int]) -> None:
    """Copy the listed files; Refused if one is larger than allowed, or is not what the manifest says."""
    target.mkdir()
    for name, entry in manifest.files.items():
        if entry.bytes > most[name]:
            raise Refused(f"{name} is listed with {entry.bytes:,} bytes, its order allows {most[name]:,}")
        digest, left = hashlib.sha256(), entry.bytes + 1
        try:
            with opened(source, name, left) as stream, (target / name).open("xb") as copy:
                while part := stream.read(min(MIB, left)):
                    digest.update(part)
                    copy.write(part)
                    left -= len(part)
        except FileNotFoundError as error:
            raise Refused(f"{name} is missing, though the manifest lists it") from error
        if left != 1:
            more = "more" if left == 0 else "fewer"
            raise Refused(f"{name} is corrupt, it has {more} bytes than the {entry.bytes:,} the manifest says")
        if (found := digest.hexdigest()) != entry.sha256:
            raise Refused(f"{name} is corrupt, its sha256 is {found[:12]} but the manifest says {entry.sha256[:12]}")
    write_atomic(target / MANIFEST, manifest.to_bytes())


def leave(run: Store, name: str) -> None:
    """Remove an admitted contribution from the quarantine."""
    shutil.rmtree(local_folder(run, name), ignore_errors=True)
    for file in (REASONS, SHEET):
        with suppress(FileNotFoundError):
            run.child(FOLDER, name).remove(file)


def write_reasons(run: Store, name: str, reasons: Mapping[str, Any]) -> None:
    """Leave the reasons of a refusal in the run; of a run on an object store the sheet is uploaded, too."""
    place, sheet = run.child(FOLDER, name), local_folder(run, name) / SHEET
    place.write(REASONS, json.dumps(reasons, indent=2, sort_keys=True).encode() + b"\n")
    if not run.is_local and sheet.is_file():
        place.write(SHEET, sheet.read_bytes())


def read_reasons(run: Store, name: str) -> dict[str, Any]:
    """Why a contribution was refused before; empty if it was not, or the file is unreadable."""
    try:
        found = json.loads(run.child(FOLDER, name).read(REASONS, MIB))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
