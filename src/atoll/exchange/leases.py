"""Leases without a server: who works on which order just now.

leases/03-1f2e3d4c5b6a/000002.json is the second epoch of order 03's lease. An epoch is created, and never overwritten
by another: who finds the newest one expired creates the next, and of several who try one succeeds. Its holder renews
it by writing it again. Age is the time between two answers of the store, of the lease and of a file just written, so
nobody's own clock counts.

A lease keeps people from doing the same work by chance. It is no lock: an expert that comes in without one, or after
it was lost, is judged like any other.

One key may hold so many at a time. Nobody can be kept from writing more, but the others take no notice of them: of a
key's leases the first ones by name hold, and those beyond may be taken over.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    beyond: bool = False  # its holder has as many as one may without it

    def held(self, seconds: float) -> bool:
        return self.file is not None and not self.file.done and self.age < seconds and not self.beyond

    def is_of(self, holder: str) -> bool:
        return self.file is not None and self.file.holder == holder


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

    def standing(self, orders: Sequence[str], now: float) -> dict[str, Lease]:
        """The newest lease of each order that ever had one; those `beyond` what their key may hold are marked."""
        found = {order: lease for order in orders if (lease := self.newest(order, now)) is not None}
        holding: Counter[str] = Counter()
        for order in sorted(found):
            lease = found[order]
            if lease.file is None or not lease.held(self.seconds):
                continue
            holding[lease.file.holder] += 1
            if holding[lease.file.holder] > self.most:
                found[order] = replace(lease, beyond=True)
        return found

    def take(self, order: str, holder: str, others: Sequence[str] = ()) -> Lease | None:
        """Take an order's lease, or find one's own; None if somebody has it. `others` are all orders there are."""
        now = self.now()
        leases = self.standing(sorted({order, *others}), now)
        lease = leases.get(order)
        if lease is not None and lease.held(self.seconds):
            return lease if lease.is_of(holder) else None
        if lease is not None and lease.file is not None and lease.file.done and lease.is_of(holder):
            return None  # done already, by us
        held = [o for o, other in leases.items() if o != order and other.held(self.seconds) and other.is_of(holder)]
        if len(held) >= self.most:
            raise UserError(
                f"this key holds {len(held)} leases already ({held[0]}, ...), and {self.most} are allowed "
                "at a time; finish one, or wait until it expires"
            )
        epoch = 1 if lease is None else lease.epoch + 1
        file = LeaseFile(holder=holder)
        # whoever published has asked the store whether it keeps its word; contributors could not remove the question
        if not self.store.child(FOLDER, order).create(f"{epoch:06d}.json", file.to_bytes(), asked=False):
            return None
        return Lease(order, epoch, file, 0.0)

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
