"""Who made a contribution: a signature next to its manifest, of the manifest's digest together with the order's.

The organizer keeps RUN/allowed_signers. Names come from there; a contribution has no name of its own.
"""

from __future__ import annotations

from pathlib import Path

from ..artifacts import Artifact, Manifest, Store, UserError
from ..artifacts.signing import MOST_SIGNATURE, sign, signer, statement
from ..islands.expert import KIND
from .quarantine import read_bounded

SIGNATURE = "manifest.json.sig"
SIGNERS = "allowed_signers"  # of the run, and only there: it is never published
MOST_SIGNERS = 2**20


def contribution_statement(manifest: Manifest) -> bytes:
    return statement("contribution", manifest=manifest.digest(), order=manifest.parents["order"])


def sign_contribution(folder: Path, key: str | Path) -> None:
    """Leave a signature next to a finished expert's manifest."""
    manifest = Artifact.open(folder, KIND).manifest
    if "order" not in manifest.parents:
        raise UserError(f"{folder}: was trained for no order, so there is nothing to sign for")
    Store.at(folder).write(SIGNATURE, sign(contribution_statement(manifest), key))


def read_signature(source: Store) -> bytes | None:
    return read_bounded(source, SIGNATURE, MOST_SIGNATURE)


def read_signers(run: Store, given: str | Path | None) -> bytes | None:
    """The list that was given, or else the run's; None where there is none."""
    if given is not None:
        try:
            return Path(given).expanduser().read_bytes()
        except OSError as error:
            raise UserError(f"--signers {given}: cannot be read ({(error.strerror or '').lower()})") from error
    try:
        return run.read(SIGNERS, MOST_SIGNERS)
    except FileNotFoundError:
        return None


def signer_of(manifest: Manifest, signature: bytes | None, signers: bytes | None) -> str | None:
    """The name in the organizer's list of who signed a contribution; None if unsigned, or the key is not listed."""
    if signature is None or signers is None:
        return None
    return signer(contribution_statement(manifest), signature, signers)
