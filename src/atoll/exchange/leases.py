"""Leases: which contributor works on which order, without a server.

leases/03-1f2e3d4c5b6a/000002.json is the second epoch of order 03's lease. An epoch is created and never overwritten
by another contributor: who finds the newest one expired creates the next, and of several who try one succeeds. Its
holder renews it by writing it again. Its age is the difference of two of the store's own times, of the lease and of a
file that was just written, so no other clock counts.

A lease saves double work. It is no lock: an expert that was made without one, or after it was lost, is admitted like
any other.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import Store, UserError

FOLDER = "leases"
CLOCK = "clock"
FILE_NAME = re.compile(r"^([0-9]{6,9})\.json$")
HOLDER = r"^[0-9a-f]{16}$"
MOST_BYTES = 4096


class LeaseFile(BaseModel):
    """One epoch: its holder, and the progress of the work."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    holder: str = Field(pattern=HOLDER)
    images: int = Field(0, ge=0, lt=2**62)
    total: int = Field(0, ge=0, lt=2**62)
    seconds_left: float | None = Field(None, ge=0)
    done: bool = False

    @property
    def progress(self) -> float:
        """The fraction of the images that is done."""
        return min(1.0, self.images / self.total) if self.total else 0.0

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


@dataclass(frozen=True)
class Lease:
    """An order's newest epoch. `age` is in seconds, by the store's clock."""

    order: str
    epoch: int
    file: LeaseFile | None  # None: the file is no lease
    age: float

    def held(self, seconds: float) -> bool:
        return self.file is not None and not self.file.done and self.age < seconds

    def is_of(self, holder: str) -> bool:
        return self.file is not None and self.file.holder == holder


@dataclass(frozen=True)
class Leases:
    """The leases of one published place, each valid for `seconds` after it was last written."""

    store: Store
    seconds: float

    def newest(self, order: str, now: float) -> Lease | None:
        """The newest epoch of an order's lease; None where there is none."""
        folder, epoch = self.store.child(FOLDER, order), self.newest_epoch(order)
        if epoch == 0:
            return None
        try:
            content = folder.read(f"{epoch:06d}.json", MOST_BYTES)
            written = folder.modified(f"{epoch:06d}.json")
        except FileNotFoundError:
            return None
        try:
            file = LeaseFile.model_validate_json(content)
        except ValidationError:
            file = None
        return Lease(order, epoch, file, max(0.0, now - (0.0 if written is None else written.timestamp())))

    def newest_epoch(self, order: str) -> int:
        """Its number, 0 where there is none."""
        names = self.store.child(FOLDER, order).children()
        return max((int(found[1]) for name in names if (found := FILE_NAME.match(name)) is not None), default=0)

    def current(self, orders: Iterable[str], now: float) -> dict[str, Lease]:
        """The newest lease of each order that has one."""
        return {order: lease for order in orders if (lease := self.newest(order, now)) is not None}

    def take(self, order: str, holder: str) -> Lease | None:
        """Take an order's lease, or find one's own; None if another key has it, or this key has done the order."""
        lease = self.newest(order, self.now())
        if lease is not None and lease.held(self.seconds):
            return lease if lease.is_of(holder) else None
        if lease is not None and lease.file is not None and lease.file.done and lease.is_of(holder):
            return None
        epoch, file = 1 if lease is None else lease.epoch + 1, LeaseFile(holder=holder)
        created = self.store.child(FOLDER, order).create(f"{epoch:06d}.json", file.to_bytes())
        return Lease(order, epoch, file, 0.0) if created else None

    def renew(self, lease: Lease, file: LeaseFile) -> bool:
        """Write one's own epoch again; False if another key has created the next."""
        if self.newest_epoch(lease.order) > lease.epoch:
            return False
        self.store.child(FOLDER, lease.order).write(f"{lease.epoch:06d}.json", file.to_bytes())
        return True

    def now(self) -> float:
        """The store's clock in seconds since 1970: the time of a file that is written for it."""
        place, name = self.store.child(FOLDER, CLOCK), f"{uuid.uuid4().hex[:2]}.json"
        place.write(name, b"{}\n")
        written = place.modified(name)
        if written is None:
            raise UserError(f"{self.store}: has no times of its files, so no lease can expire on it")
        return written.timestamp()
