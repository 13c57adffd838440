"""The state of published orders: who works on which, how far they are, and what is in the inbox."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import Counter
from dataclasses import dataclass

from ..artifacts import Store
from .inbox import INBOX, inbox_of
from .leases import Lease, LeaseFile, Leases
from .published import PublishedCard


@dataclass(frozen=True)
class OrderStatus:
    """One published order. `received` counts contributions, None where the inbox may not be read."""

    order: str
    state: str  # free, taken, expired or sent
    lease: LeaseFile | None
    received: int | None

    @property
    def hours_left(self) -> float | None:
        left = None if self.lease is None or self.state == "expired" else self.lease.seconds_left
        return None if left is None else left / 3600


def lease_status(place: Store, card: PublishedCard) -> list[OrderStatus]:
    """Every order, from its lease and from the inbox."""
    try:
        received = Counter(folder.name.rpartition("-")[0] for folder in inbox_of(place.child(INBOX)))
    except PermissionError:
        received = None
    leases = Leases(place, card.lease_seconds)
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
    return "taken" if lease.held(seconds) else "expired"


def names_by_key(signers: bytes) -> dict[str, str]:
    """Names of an allowed_signers file by the short name of their key, which leases and inboxes use."""
    names = {}
    for line in signers.decode(errors="replace").splitlines():
        name, *parts = line.split() or [""]
        for blob in (part for part in parts if part.startswith("AAAA")):
            try:
                names[hashlib.sha256(base64.b64decode(blob)).hexdigest()[:16]] = name
            except (binascii.Error, ValueError):
                continue
    return names
