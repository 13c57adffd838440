"""Take part: take a free order, train it, sign the expert and send it. The same command resumes after any stop.

FOLDER/
  joined.json   the order, the contributor, and the organizer's keys as they were when the order was taken
  expert/       the result of `atoll train`, and its state while it trains
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import (
    DIGEST,
    MANIFEST,
    Artifact,
    Store,
    UserError,
    find,
    sanitize,
    storage_errors,
    storage_problem,
    write_atomic,
)
from ..artifacts.signing import fingerprint
from ..artifacts.store import cache_folder
from ..islands.expert import KIND
from ..islands.order import Order
from ..islands.train import shards_of, train
from ..models.accounting import account
from ..models.text_encoders import is_here
from ..training.compute import best_device
from ..training.loop import Progress, Watch
from ..training.memory import fits, this_machine
from ..training.resources import Resources
from .card_checks import largest_files
from .inbox import INBOX
from .leases import HOLDER, Lease, LeaseFile, Leases
from .published import ORGANIZERS, PublishedOrder, check_order, open_card
from .signed import SIGNATURE, sign_contribution
from .thresholds import AdmissionThresholds

JOINED = "joined.json"
RENEWALS = 4  # of a lease while it is valid


class Joined(BaseModel):
    """joined.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    url: str
    holder: str = Field(pattern=HOLDER)
    order: str | None = Field(None, pattern=DIGEST)
    organizers: str | None = None
    sent: str | None = Field(None, pattern=DIGEST, description="the expert that was sent; the inbox cannot be read")


@dataclass(frozen=True)
class Offer:
    """An order, its lease, and the hours it takes on this machine; None: it does not fit."""

    order: PublishedOrder
    lease: Lease | None
    free: bool
    hours: float | None
    parameters: int


@dataclass(frozen=True)
class Sent:
    """The expert, and the place it was sent to; None: it is to be sent by hand."""

    expert: Artifact
    place: Store | None


@dataclass
class Joining:
    """One contributor at one published place."""

    place: Store
    folder: Path
    key: str | Path | None = None
    device: str | None = None
    memory: float | None = None
    say: Callable[[str], None] = lambda text: None
    joined: Joined = field(init=False)

    def __post_init__(self) -> None:
        with storage_errors(self.place.url):
            self.card = open_card(self.place)
            self.leases = Leases(self.place, self.card.lease_seconds, self.card.leases_per_key)
            self.names = [order.lease for order in self.card.orders]
            self.joined = self.read_joined()

    def read_joined(self) -> Joined:
        """The state of this folder, or a new one; nothing is written yet."""
        holder = secrets.token_hex(8) if self.key is None else fingerprint(self.key)
        organizers = self.organizers()
        try:
            found = Joined.model_validate_json((self.folder / JOINED).read_bytes())
        except FileNotFoundError:
            return Joined(url=self.place.url, holder=holder, organizers=organizers)
        except ValidationError as error:
            raise UserError(f"{self.folder / JOINED}: cannot be read; use another --out") from error
        if found.url != self.place.url:
            raise UserError(f"{self.folder}: was begun for {found.url}; use another --out")
        if self.key is not None and found.holder != holder:
            raise UserError(f"--key {self.key}: {self.folder} was begun with another key; use that one")
        if found.organizers != organizers:
            raise UserError(f"{self.place}/{ORGANIZERS}: has changed since this order was taken; ask the organizer why")
        return found

    def organizers(self) -> str | None:
        """The organizer's keys as they are published; None where orders are not signed."""
        if not self.card.signed:
            return None
        try:
            return self.place.read(ORGANIZERS, 2**20).decode()
        except (FileNotFoundError, UnicodeError) as error:
            raise UserError(f"{self.place}/{ORGANIZERS}: is no list of keys; ask the organizer") from error

    def write_joined(self, **changed: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.joined = self.joined.model_copy(update=changed)
        write_atomic(self.folder / JOINED, self.joined.model_dump_json(indent=2).encode() + b"\n")

    def order_of(self, listed: PublishedOrder) -> Order:
        known = self.joined.organizers
        return check_order(self.place, listed, None if known is None else known.encode())

    def offers(self, dry: bool = False) -> list[Offer]:
        """Every order; `dry` by this machine's clock, since reading the store's writes a file."""
        leases: dict[str, Lease] = {}
        if not self.card.read_only:
            leases = self.leases.current(self.names, time.time() if dry else self.leases.now())
        found = []
        for listed in self.card.orders:
            order, lease = self.order_of(listed), leases.get(listed.lease)
            mine = lease is not None and lease.is_of(self.joined.holder)
            done = lease is not None and lease.file is not None and lease.file.done
            free = lease is None or mine or not (done or lease.held(self.card.lease_seconds))
            found.append(Offer(listed, lease, free, self.hours(order), account(order.architecture).parameters))
        return found

    def hours(self, order: Order) -> float | None:
        """How long an order takes here; None if it does not fit."""
        cost, training = account(order.architecture), order.training
        possible = fits(cost, this_machine(best_device(self.device), self.memory), training.batch)
        return training.images / possible[0].images_per_s / 3600 if possible else None

    def settled(self, wanted: str | None) -> PublishedOrder | None:
        """The order begun in this folder, or the `wanted` one; None where any will do."""
        begun = self.joined.order
        if begun is None and wanted is None:
            return None
        for listed in self.card.orders:
            if begun == listed.digest or (begun is None and listed.order == wanted):
                return listed
        if begun is not None:
            raise UserError(f"{self.folder}: its order is not published any more; use another --out")
        names = ", ".join(listed.order for listed in self.card.orders[:40])
        raise UserError(f"--order {wanted}: no such order; there are {names}")

    def inviting(self, offers: Sequence[Offer]) -> list[PublishedOrder]:
        """Orders that are free and fit, those of clusters without an active expert first."""
        return [o.order for o in sorted(offers, key=lambda o: o.order.served) if o.free and o.hours is not None]

    def choose(self, wanted: str | None) -> PublishedOrder:
        """The order that is settled, or the first inviting one whose lease can be taken."""
        if (settled := self.settled(wanted)) is not None:
            return settled
        for listed in self.inviting(self.offers()):
            if self.card.read_only or self.leases.take(listed.lease, self.joined.holder, self.names) is not None:
                return listed
        raise UserError(
            f"{self.place}: no order is free that fits this machine; name one with --order to train it all the same"
        )

    def run(self, wanted: str | None = None, watch: Watch | None = None) -> Sent:
        """Everything, or what is left of it."""
        try:
            with storage_errors(self.place.url):
                return self.take_part(wanted, watch)
        except PermissionError as error:
            if self.place.is_local or error.filename is not None:
                raise
            raise UserError(
                f"{self.place}: these credentials may not do that ({sanitize(str(error), 120)}); ask the organizer "
                f"for a user that may write to {INBOX}/{self.joined.holder}"
            ) from error

    def take_part(self, wanted: str | None, watch: Watch | None) -> Sent:
        listed = self.choose(wanted)
        order = self.order_of(listed)
        self.write_joined(order=listed.digest)
        self.fetch(order, listed)
        lease = None
        if not self.card.read_only and find(self.folder / "expert") is None:
            lease = self.leases.take(listed.lease, self.joined.holder, self.names)
            if lease is None:
                self.say(f"order {listed.order} is leased by another key; training anyway, both experts are evaluated")
        renewal = LeaseRenewal(self.leases, lease, watch, self.say)
        resources = Resources(self.device, self.memory)
        expert = train(f"{self.place}/{listed.path}", self.folder / "expert", resources=resources, watch=renewal)
        if expert is None:
            raise UserError("join: runs as one process; use `atoll train` under torchrun and send the folder by hand")
        if self.key is not None:
            sign_contribution(self.folder / "expert", self.key)
        if self.card.read_only:
            return Sent(expert, None)
        sent = self.send(order, expert)
        renewal.write(order.training.images, order.training.images, 0.0, done=True)
        return Sent(expert, sent)

    def fetch(self, order: Order, listed: PublishedOrder) -> None:
        """Get the shards, no more bytes than the card says, and check what the order only names."""
        if order.init is not None:
            init = Artifact.open(self.place.child(order.init.path), KIND)
            size = sum(entry.bytes for entry in init.manifest.files.values())
            if size > sum(largest_files(order.architecture, AdmissionThresholds()).values()):
                raise UserError(f"{init.store}: is larger than its network; ask the organizer")
        if not self.place.is_local:
            left, cache = listed.bytes, cache_folder()
            there = next(place for place in (cache, *cache.absolute().parents) if place.exists())
            if left > (free := shutil.disk_usage(there).free):
                raise UserError(
                    f"order {listed.order}: its data is {left:,} bytes and {cache} has {free:,} left; "
                    "set ATOLL_CACHE to a folder with more space"
                )
            for ref in order.shards:
                left -= self.place.download(ref.path, ref.sha256, left).stat().st_size
        check_text_encoder(order, self.place)

    def send(self, order: Order, expert: Artifact) -> Store:
        """Upload the expert, manifest last, unless it was sent before."""
        place = self.place.child(INBOX, self.joined.holder, f"{order.name}-{expert.digest[:12]}")
        if self.joined.sent != expert.digest:
            for name in [*expert.names(), *([SIGNATURE] if self.key is not None else []), MANIFEST]:
                place.upload(self.folder / "expert" / name, name)
            self.write_joined(sent=expert.digest)
        return place


def check_text_encoder(order: Order, place: Store) -> None:
    """Refuse captions kept as text whose encoder is not on this machine: none is downloaded because an order names it.

    No island needs the autoencoder or the features: it learns from latents, and previews them by a linear map.
    """
    if order.text is None or order.text.kind == "words" or is_here(order.text.encoder):
        return
    if any(shards_of(order, place, split).needs_text_encoder for split in ("train", "validation")):
        raise UserError(
            f"order {order.name}: its captions are read by {sanitize(order.text.encoder, 80)}, which is not on this "
            "machine, and nothing is fetched because an order says so; if you trust it, get it and set ATOLL_MODELS"
        )


@dataclass
class LeaseRenewal:
    """Passes every step on and renews the lease; a store that cannot be reached stops no training."""

    leases: Leases
    lease: Lease | None
    watch: Watch | None
    say: Callable[[str], None]
    due: float = 0.0

    def __call__(self, now: Progress) -> None:
        if now.note is None and time.monotonic() >= self.due:
            self.due = time.monotonic() + self.leases.seconds / RENEWALS
            self.write(now.images, now.total, now.seconds_left)
        if self.watch is not None:
            self.watch(now)

    def write(self, images: int, total: int, left: float | None, done: bool = False) -> None:
        if self.lease is None or self.lease.file is None:
            return
        file = LeaseFile(holder=self.lease.file.holder, images=images, total=total, seconds_left=left, done=done)
        try:
            kept = self.leases.renew(self.lease, file)
        except Exception as error:
            if storage_problem(error) is None:
                raise
            return  # the next renewal is tried again
        if not kept:
            self.say("another key has taken the lease; training goes on, both experts are evaluated")
            self.lease = None
