"""Signatures in OpenSSH's own format, made and checked by ssh-keygen, as git does.

A signature is of a small statement in canonical JSON, in the namespace `atoll`: made for us it means nothing
elsewhere, made elsewhere nothing here. An `allowed_signers` file (man ssh-keygen) lists who may sign, one line each:
a name, then a public key. Names come from that file only.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
from pathlib import Path

from .digest import canonical_json, sha256_bytes
from .errors import UserError, sanitize

NAMESPACE = "atoll"
MOST_SIGNATURE = 16 * 2**10
BEGIN = b"-----BEGIN SSH SIGNATURE-----"


def statement(what: str, **digests: str) -> bytes:
    """What is signed: `what` it is, and the digests it is about."""
    return canonical_json({"atoll": what, **digests})


def sign(data: bytes, key: str | Path) -> bytes:
    """A signature by a private key, or by a public one whose private half an agent has."""
    path = Path(key).expanduser()
    if not path.is_file():
        raise UserError(f"--key {key}: no such file; give an SSH key such as ~/.ssh/id_ed25519")
    return used(key, ssh_keygen("-Y", "sign", "-n", NAMESPACE, "-f", str(path), feed=data))


def signer(data: bytes, signature: bytes, allowed: bytes) -> str | None:
    """The name in an allowed_signers file whose key made this signature of these bytes; None if there is none."""
    if len(signature) > MOST_SIGNATURE or not signature.startswith(BEGIN):
        return None
    with tempfile.TemporaryDirectory(prefix="atoll-") as place:
        names, file = Path(place) / "allowed_signers", Path(place) / "signature"
        names.write_bytes(allowed)
        file.write_bytes(signature)
        files = ("-f", str(names), "-s", str(file))
        found = ssh_keygen("-Y", "find-principals", *files)
        for name in found.stdout.decode(errors="replace").splitlines() if found.returncode == 0 else ():
            if ssh_keygen("-Y", "verify", "-n", NAMESPACE, "-I", name, *files, feed=data).returncode == 0:
                return sanitize(name, 80)
    return None


def public_key(key: str | Path) -> str:
    """The public half of a key, as a line of an allowed_signers file has it after the name."""
    path = Path(key).expanduser()
    public = path if path.suffix == ".pub" else path.with_name(f"{path.name}.pub")
    text = public.read_bytes() if public.is_file() else used(key, ssh_keygen("-y", "-f", str(path)))
    parts = text.decode(errors="replace").split()
    if len(parts) < 2:
        raise UserError(f"--key {key}: has no public half; use a key that ssh-keygen made")
    return f"{parts[0]} {parts[1]}"


def fingerprint(key: str | Path) -> str:
    """A short name of a key: 16 hexadecimal digits of the SHA-256 of its public half."""
    return sha256_bytes(base64.b64decode(public_key(key).split()[1]))[:16]


def allowed_line(name: str, key: str | Path) -> bytes:
    return f'{name} namespaces="{NAMESPACE}" {public_key(key)}\n'.encode()


def ssh_keygen(*arguments: str, feed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise UserError("ssh-keygen: not found, and signatures need it; install OpenSSH (8.2 or newer)")
    return subprocess.run([program, *arguments], input=feed, capture_output=True, check=False)


def used(key: str | Path, done: subprocess.CompletedProcess[bytes]) -> bytes:
    """What ssh-keygen made of a key; UserError if it could not use it."""
    if done.returncode != 0:
        why = (done.stderr.decode(errors="replace").strip() or "no reason given").splitlines()[-1]
        raise UserError(f"--key {key}: ssh-keygen cannot use it ({sanitize(why, 120)}); use another key")
    return done.stdout
