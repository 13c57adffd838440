"""The state of published orders: who works on which, how far they are, and what is in the inbox."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import Counter
from dataclasses import dataclass

from ..artifacts import MANIFEST, Store
from .inbox import INBOX
from .leases import Lease, LeaseFile, Leases
from .published import PublishedCard


@dataclass(frozen=True)
class OrderStatus:
    """One published order. `received` counts contributions, None where the inbox may not be read."""

    order: str
    state: str  # free, taken, expired, sent, or over its key's limit
    lease: LeaseFile | None
    received: int | None

    @property
    def hours_left(self) -> float | None:
        left = None if self.lease is None or self.state == "expired" else self.lease.seconds_left
        return None if left is None else left / 3600


def lease_status(place: Store, card: PublishedCard) -> list[OrderStatus]:
    """Every order, from its lease and from the inbox."""
    received = received_by_order(place)
    leases = Leases(place, card.lease_seconds, card.leases_per_key)
    current = {} if card.read_only else leases.current([order.lease for order in card.orders], leases.now())
    rows = []
    for order in card.orders:
        lease = current.get(order.lease)
        file = None if lease is None else lease.file
        state = "free" if lease is None or file is None else state_of(lease, file, card.lease_seconds)
        rows.append(OrderStatus(order.order, state, file, None if received is None else received[order.order]))
    return rows


def state_of(lease: Lease, file: LeaseFile, seconds: float) -> str:
    if file.done:
        return "sent"
    if lease.over_limit:
        return "over its key's limit"
    return "taken" if lease.held(seconds) else "expired"


def received_by_order(place: Store) -> Counter[str] | None:
    """How many finished contributions lie in the inbox, by the order their folder is named after."""
    inbox = place.child(INBOX)
    try:
        folders = [inbox.child(sender, name) for sender in inbox.children() for name in inbox.child(sender).children()]
        return Counter(folder.name.rpartition("-")[0] for folder in folders if folder.exists(MANIFEST))
    except PermissionError:
        return None


def names_by_key(signers: bytes) -> dict[str, str]:
    """Names of an allowed_signers file by the short name of their key, which leases and inboxes use."""
    names = {}
    for line in signers.decode(errors="replace").splitlines():
        parts = line.split()
        for blob in (part for part in parts[1:] if part.startswith("AAAA")):
            try:
                names[hashlib.sha256(base64.b64decode(blob)).hexdigest()[:16]] = parts[0]
            except (binascii.Error, ValueError):
                continue
    return names
