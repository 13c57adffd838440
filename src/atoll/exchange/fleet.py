"""Published work at a glance: who works on which order, how far they are, and what has come in."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import Counter
from dataclasses import dataclass

from ..artifacts import MANIFEST, Store
from .inbox import INBOX
from .leases import Lease, Leases
from .published import PublishedCard


@dataclass(frozen=True)
class Work:
    """One published order. `came` is None where nobody may look into the inbox."""

    order: str
    state: str  # free, taken, expired, sent, or beyond what its holder may have, which nobody heeds
    holder: str | None
    share: float | None
    hours_left: float | None
    came: int | None


def fleet(place: Store, card: PublishedCard) -> list[Work]:
    """Every order, from its lease and from the inbox."""
    came = arrived(place)
    leases = Leases(place, card.lease_seconds, card.leases_per_key)
    standing = {} if card.read_only else leases.standing([order.lease for order in card.orders], leases.now())
    rows = []
    for order in card.orders:
        lease = standing.get(order.lease)
        file = None if lease is None else lease.file
        count = None if came is None else came[order.order]
        if lease is None or file is None:
            rows.append(Work(order.order, "free", None, None, None, count))
            continue
        state = state_of(lease, card.lease_seconds)
        share = file.images / file.total if file.total else 0.0
        left = None if file.seconds_left is None or state == "expired" else file.seconds_left / 3600
        rows.append(Work(order.order, state, file.holder, min(1.0, share), left, count))
    return rows


def state_of(lease: Lease, seconds: float) -> str:
    if lease.file is not None and lease.file.done:
        return "sent"
    if lease.beyond:
        return "beyond its key's cap"
    return "taken" if lease.held(seconds) else "expired"


def arrived(place: Store) -> Counter[str] | None:
    """How many finished contributions lie in the inbox, by the order their folder is named after."""
    inbox = place.child(INBOX)
    found: Counter[str] = Counter()
    try:
        for sender in inbox.children():
            for name in inbox.child(sender).children():
                if inbox.child(sender, name).exists(MANIFEST):
                    found[name.rpartition("-")[0]] += 1
    except PermissionError:
        return None
    return found


def names_by_key(signers: bytes) -> dict[str, str]:
    """Names of an allowed_signers file by the short name of their key, which leases and inboxes use."""
    names = {}
    for line in signers.decode(errors="replace").splitlines():
        parts = line.split()
        for blob in parts[1:]:
            if blob.startswith("AAAA"):
                try:
                    key = hashlib.sha256(base64.b64decode(blob)).hexdigest()[:16]
                except (binascii.Error, ValueError):
                    continue
                names[key] = parts[0]
    return names
