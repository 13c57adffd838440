"""Leases without a server: who works on which order just now.

leases/03-1f2e3d4c5b6a/000002.json is the second epoch of order 03's lease. An epoch is created, and never overwritten
by another: who finds the newest one expired creates the next, and of several who try one succeeds. Its holder renews
it by writing it again. Age is the time between two answers of the store, of the lease and of a file just written, so
nobody's own clock counts.

A lease keeps people from doing the same work by chance. It is no lock: an expert that comes in without one, or after
it was lost, is judged like any other.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import Store, UserError

FOLDER = "leases"
CLOCK = "clock"
FILE_NAME = re.compile(r"^(\d{6})\.json$")
HOLDER = r"^[0-9a-f]{16}$"
MOST_BYTES = 4096


class LeaseFile(BaseModel):
    """One epoch: who holds it, and how far the work is."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    holder: str = Field(pattern=HOLDER)
    images: int = Field(0, ge=0, lt=2**62)
    total: int = Field(0, ge=0, lt=2**62)
    seconds_left: float | None = Field(None, ge=0)
    done: bool = False

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


@dataclass(frozen=True)
class Lease:
    """An order's newest epoch as the store has it. `age` is in seconds, by the store's clock."""

    order: str
    epoch: int
    file: LeaseFile | None  # None: somebody wrote something else there
    age: float

    def held(self, seconds: float) -> bool:
        return self.file is not None and not self.file.done and self.age < seconds


@dataclass(frozen=True)
class Leases:
    """The leases of one published place, each good for `seconds` after it was last written."""

    store: Store
    seconds: float
    most: int  # that one key may hold at a time

    def newest(self, order: str, now: float | None = None) -> Lease | None:
        """The newest epoch of an order's lease; None where nobody ever had one."""
        place = self.store.child(FOLDER, order)
        numbers = [int(m[1]) for name in place.children() if (m := FILE_NAME.match(name)) is not None]
        if not numbers:
            return None
        epoch = max(numbers)
        name = f"{epoch:06d}.json"
        now = self.now() if now is None else now
        try:
            content = place.read(name, MOST_BYTES)
            written = place.modified(name)
        except FileNotFoundError:
            return None
        try:
            file = LeaseFile.model_validate_json(content)
        except ValidationError:
            file = None
        return Lease(order, epoch, file, max(0.0, now - (0.0 if written is None else written.timestamp())))

    def take(self, order: str, holder: str, others: Sequence[str] = ()) -> Lease | None:
        """Take an order's lease, or find one's own; None if somebody has it. `others` are all orders there are."""
        now = self.now()
        lease = self.newest(order, now)
        if lease is not None and lease.held(self.seconds):
            return lease if lease.file is not None and lease.file.holder == holder else None
        if lease is not None and lease.file is not None and lease.file.done and lease.file.holder == holder:
            return None  # done already, by us
        held = [o for o in others if o != order and self.is_holders(o, holder, now)]
        if len(held) >= self.most:
            raise UserError(
                f"this key holds {len(held)} leases already ({held[0]}, ...), and {self.most} are allowed "
                "at a time; finish one, or wait until it expires"
            )
        epoch = 1 if lease is None else lease.epoch + 1
        file = LeaseFile(holder=holder)
        if not self.store.child(FOLDER, order).create(f"{epoch:06d}.json", file.to_bytes()):
            return None
        return Lease(order, epoch, file, 0.0)

    def is_holders(self, order: str, holder: str, now: float) -> bool:
        lease = self.newest(order, now)
        return lease is not None and lease.held(self.seconds) and lease.file is not None and lease.file.holder == holder

    def renew(self, lease: Lease, file: LeaseFile) -> bool:
        """Write one's own epoch again; False if it was lost to another meanwhile."""
        place = self.store.child(FOLDER, lease.order)
        numbers = [int(m[1]) for name in place.children() if (m := FILE_NAME.match(name)) is not None]
        if max(numbers, default=0) > lease.epoch:
            return False
        place.write(f"{lease.epoch:06d}.json", file.to_bytes())
        return True

    def now(self) -> float:
        """The store's clock: when it says that a file was written just now, in seconds since 1970."""
        place, name = self.store.child(FOLDER, CLOCK), f"{uuid.uuid4().hex[:2]}.json"
        place.write(name, b"{}\n")
        written = place.modified(name)
        if written is None:
            raise UserError(f"{self.store}: does not say when its files were written, so no lease can expire on it")
        return written.timestamp()
