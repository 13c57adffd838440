"""Signatures in OpenSSH's own format, made and checked by ssh-keygen, as git does.

A signature is of a small statement in canonical JSON, in the namespace `atoll`, so that one made for us means nothing
elsewhere and one made elsewhere nothing here. Who may sign is said by an `allowed_signers` file (man ssh-keygen), one
line each: a name, then a public key. Names come from there and from nowhere else.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from .digest import canonical_json
from .errors import UserError
from .manifest import sanitize

NAMESPACE = "atoll"
MOST_SIGNATURE = 16 * 2**10
BEGIN = b"-----BEGIN SSH SIGNATURE-----"
PATIENCE = 600  # seconds: somebody may have to type a passphrase, or touch a key


def statement(what: str, **digests: str) -> bytes:
    """What is signed: `what` it is, and the digests it is about."""
    return canonical_json({"atoll": what, **digests})


def sign(data: bytes, key: str | Path) -> bytes:
    """A signature by a private key, or by a public one whose private half an agent has."""
    path = Path(key).expanduser()
    if not path.is_file():
        raise UserError(f"--key {key}: no such file; give an SSH key such as ~/.ssh/id_ed25519")
    done = ssh_keygen("-Y", "sign", "-n", NAMESPACE, "-f", str(path), feed=data)
    if done.returncode != 0 or BEGIN not in done.stdout:
        raise UserError(f"--key {key}: ssh-keygen cannot sign with it ({last_line(done.stderr)}); use another key")
    return done.stdout


def signer(data: bytes, signature: bytes, allowed: bytes) -> str | None:
    """The name in an allowed_signers file whose key made this signature of these bytes; None if there is none."""
    if len(signature) > MOST_SIGNATURE or not signature.startswith(BEGIN):
        return None
    with tempfile.TemporaryDirectory(prefix="atoll-") as place:
        names, file = Path(place) / "allowed_signers", Path(place) / "signature"
        names.write_bytes(allowed)
        file.write_bytes(signature)
        found = ssh_keygen("-Y", "find-principals", "-s", str(file), "-f", str(names))
        for name in found.stdout.decode(errors="replace").splitlines() if found.returncode == 0 else ():
            options = ("-n", NAMESPACE, "-I", name, "-f", str(names), "-s", str(file))
            if ssh_keygen("-Y", "verify", *options, feed=data).returncode == 0:
                return sanitize(name, 80)
    return None


def public_key(key: str | Path) -> str:
    """The public half of a key, as one line of an allowed_signers file has it after the name."""
    path = Path(key).expanduser()
    beside = path if path.suffix == ".pub" else path.with_name(f"{path.name}.pub")
    if beside.is_file():
        text = beside.read_text(errors="replace")
    else:
        done = ssh_keygen("-y", "-f", str(path))
        if done.returncode != 0:
            raise UserError(f"--key {key}: ssh-keygen cannot read it ({last_line(done.stderr)}); use another key")
        text = done.stdout.decode(errors="replace")
    parts = text.split()
    if len(parts) < 2:
        raise UserError(f"--key {key}: has no public half; use a key that ssh-keygen made")
    return f"{parts[0]} {parts[1]}"


def fingerprint(key: str | Path) -> str:
    """A short name of a key that everybody computes alike: letters and digits of its SHA-256 fingerprint."""
    blob = base64.b64decode(public_key(key).split()[1])
    return hashlib.sha256(blob).hexdigest()[:16]


def allowed_line(name: str, key: str | Path) -> bytes:
    return f'{name} namespaces="{NAMESPACE}" {public_key(key)}\n'.encode()


def ssh_keygen(*arguments: str, feed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise UserError("ssh-keygen: not found, and signatures need it; install OpenSSH (8.2 or newer)")
    try:
        return subprocess.run([program, *arguments], input=feed, capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError("ssh-keygen: does not answer; is it waiting for a passphrase? use ssh-agent") from error


def last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return sanitize(lines[-1], 120) if lines else "it says nothing"
