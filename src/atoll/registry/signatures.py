"""Versions signed by their organizers, for runs that have a file `organizers`: their names and public keys.

RUN/ensemble/signatures/<digest>.sig is of the version with that digest, and is written before the version is: there
is no moment at which a version counts and is not signed. The environment names the key, ATOLL_KEY, since every command
that changes a model writes a version.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..artifacts import Store, UserError
from ..artifacts.signing import MOST_SIGNATURE, allowed_line, sign, signer, statement
from .versions import FOLDER, Version, open_ensemble

KEY = "ATOLL_KEY"
ORGANIZERS = "organizers"  # an allowed_signers file
SIGNATURES = "signatures"


def organizers_of(run: Store) -> bytes | None:
    """Who signs the versions of a run; None where nobody does."""
    try:
        return run.read(ORGANIZERS, 2**20)
    except FileNotFoundError:
        return None


def sign_version(run: Store, version: Version) -> None:
    """Leave a signature of a version that is about to be created, if the run's versions are signed."""
    organizers = organizers_of(run)
    if organizers is None:
        return
    key = os.environ.get(KEY)
    if key is None:
        raise UserError(f"{run}: its versions are signed; say with which key: {KEY}=~/.ssh/id_ed25519 atoll ...")
    put_signature(run, version, key, organizers)


def put_signature(run: Store, version: Version, key: str | Path, organizers: bytes) -> None:
    content = statement("version", version=version.digest())
    signature = sign(content, key)
    if signer(content, signature, organizers) is None:
        raise UserError(f"{KEY} {key}: is no key of {run}/{ORGANIZERS}; use one that is, or add it there")
    run.child(FOLDER, SIGNATURES).write(f"{version.digest()}.sig", signature)


def begin_signing(run: Store, key: str | Path, name: str = "organizer") -> Version:
    """Make this key an organizer's of the run, and sign the newest version with it."""
    version = open_ensemble(run)
    known, line = organizers_of(run) or b"", allowed_line(name, key)
    known = known if line in known else known + line
    put_signature(run, version, key, known)
    run.write(ORGANIZERS, known)
    return version


def check_signed(run: Store, version: Version, organizers: bytes | None = None) -> str | None:
    """The organizer who signed a version. Refused if nobody did whose key is given, or else in the run's own file."""
    known = organizers_of(run) if organizers is None else organizers
    if known is None:
        return None
    try:
        signature = run.child(FOLDER, SIGNATURES).read(f"{version.digest()}.sig", MOST_SIGNATURE)
    except FileNotFoundError:
        signature = b""
    name = signer(statement("version", version=version.digest()), signature, known)
    if name is None:
        raise UserError(
            f"{run}: version {version.version} of its model is signed by no organizer it names; ask them, or look at "
            f"`atoll ensemble {run}`"
        )
    return name
