"""Take part: take a free order, train it, sign the expert and send it. The same command resumes after any stop.

FOLDER/
  joined.json   the order, the contributor, and the organizer's keys as they were when the order was taken
  expert/       the result of `atoll train`, and its state while it trains
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
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
from ..islands.expert import KIND
from ..islands.order import Order
from ..islands.train import shards_of, train
from ..models.accounting import account
from ..models.text_encoders import is_here
from ..training.compute import best_device
from ..training.loop import Progress, Watch
from ..training.memory import Machine, fits, this_machine
from ..training.resources import Resources
from .card_checks import largest_files
from .inbox import INBOX
from .leases import HOLDER, Lease, LeaseFile, Leases
from .published import CARD, ORGANIZERS, PublishedOrder, check_order, find_card
from .signed import SIGNATURE, sign_contribution
from .thresholds import AdmissionThresholds

JOINED = "joined.json"
RENEWALS = 4  # of a lease while it is valid
NONE_FREE = "no order is free that fits this machine; name one with --order to train it anyway"


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

    listed: PublishedOrder
    order: Order
    lease: Lease | None
    free: bool
    hours: float | None


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
        with self.errors():
            card = find_card(self.place)
            if card is None:
                raise UserError(f"{self.place}: nothing is published here (no {CARD}); check the URL")
            self.card, self.leases = card, Leases(self.place, card.lease_seconds)
            self.joined = self.read_joined()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """One line where the place cannot be reached, or does not allow something."""
        try:
            with storage_errors(self.place.url):
                yield
        except PermissionError as error:
            if self.place.is_local or error.filename is not None:
                raise
            raise UserError(
                f"{self.place}: these credentials may not do that ({sanitize(str(error), 120)}); ask the organizer "
                f"for a user that may write to {INBOX}/{fingerprint(self.key) if self.key else '<key>'}"
            ) from error

    def read_joined(self) -> Joined:
        """The state of this folder, or a new one; nothing is written yet."""
        organizers = self.organizers()
        try:
            found = Joined.model_validate_json((self.folder / JOINED).read_bytes())
        except FileNotFoundError:
            holder = secrets.token_hex(8) if self.key is None else fingerprint(self.key)
            return Joined(url=self.place.url, holder=holder, organizers=organizers)
        except ValidationError as error:
            raise UserError(f"{self.folder / JOINED}: cannot be read; use another --out") from error
        if found.url != self.place.url:
            raise UserError(f"{self.folder}: was begun for {found.url}; use another --out")
        if self.key is not None and found.holder != fingerprint(self.key):
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

    def offers(self, orders: Iterable[PublishedOrder], dry: bool = False) -> list[Offer]:
        """These orders as they are now; `dry` by this machine's clock, since reading the store's writes a file."""
        leases: dict[str, Lease] = {}
        if not self.card.read_only:
            now = time.time() if dry else self.leases.now()
            leases = self.leases.current([listed.lease for listed in orders], now)
        found = []
        for listed in orders:
            order, lease = self.order_of(listed), leases.get(listed.lease)
            done = lease is not None and lease.file is not None and lease.file.done
            mine = lease is not None and lease.is_of(self.joined.holder)
            free = lease is None or (not done and (mine or not lease.held(self.card.lease_seconds)))
            found.append(Offer(listed, order, lease, free, self.hours(order)))
        return found

    @cached_property
    def machine(self) -> Machine:
        return this_machine(best_device(self.device), self.memory)

    def hours(self, order: Order) -> float | None:
        """How long an order takes here; None if it does not fit."""
        possible = fits(account(order.architecture), self.machine, order.training.batch)
        return order.training.images / possible[0].images_per_s / 3600 if possible else None

    def candidates(self, wanted: str | None, dry: bool = False) -> list[Offer]:
        """The order begun in this folder, or the `wanted` one; else those that are free and fit, the best first."""
        begun, orders = self.joined.order, self.card.orders
        if begun is None and wanted is None:
            found = [offer for offer in self.offers(orders, dry) if offer.free and offer.hours is not None]
            if not found:
                raise UserError(f"{self.place}: {NONE_FREE}")
            return sorted(found, key=lambda offer: offer.listed.served)  # clusters without an active expert first
        settled = [listed for listed in orders if begun == listed.digest or (begun is None and listed.order == wanted)]
        if not settled and begun is not None:
            raise UserError(f"{self.folder}: its order is not published any more; use another --out")
        if not settled:
            names = ", ".join(listed.order for listed in orders[:40])
            raise UserError(f"--order {wanted}: no such order; there are {names}")
        return self.offers(settled, dry)

    def run(self, wanted: str | None = None, watch: Watch | None = None) -> Sent:
        """Everything, or what is left of it."""
        with self.errors():
            offer, lease = self.take(wanted)
            order, out = offer.order, self.folder / "expert"
            self.write_joined(order=offer.listed.digest)
            self.fetch(order, offer.listed)
            renewal = LeaseRenewal(self.leases, lease, watch, self.say)
            resources = Resources(self.device, self.memory)
            expert = train(f"{self.place}/{offer.listed.path}", out, resources=resources, watch=renewal)
            if expert is None:
                raise UserError("join: runs as one process; use `atoll train` under torchrun and send the folder")
            if self.key is not None:
                sign_contribution(out, self.key)
            if self.card.read_only:
                return Sent(expert, None)
            sent = self.send(order, expert)
            renewal.write(order.training.images, order.training.images, 0.0, done=True)
            return Sent(expert, sent)

    def take(self, wanted: str | None) -> tuple[Offer, Lease | None]:
        """The order to train, and its lease; None where there are no leases, or all is done."""
        offers = self.candidates(wanted)
        if self.card.read_only or find(self.folder / "expert") is not None:
            return offers[0], None
        for offer in offers:
            if (lease := self.leases.take(offer.listed.lease, self.joined.holder)) is not None:
                return offer, lease
        if wanted is None and self.joined.order is None:  # others were faster
            raise UserError(f"{self.place}: {NONE_FREE}")
        self.say(f"order {offers[0].listed.order} is leased by another key; training anyway, both are evaluated")
        return offers[0], None

    def fetch(self, order: Order, listed: PublishedOrder) -> None:
        """Get the shards, no more bytes than the card says, and check what the order only names."""
        if order.init is not None:
            init = Artifact.open(self.place.child(order.init.path), KIND)
            size = sum(entry.bytes for entry in init.manifest.files.values())
            if size > sum(largest_files(order.architecture, AdmissionThresholds()).values()):
                raise UserError(f"{init.store}: is larger than its network; ask the organizer")
        left = listed.bytes
        for ref in () if self.place.is_local else order.shards:
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
