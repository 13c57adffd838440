"""Take part: take an order that is free, train it, sign it, send it. Stop at any moment; the same call goes on.

FOLDER/
  joined.json   which order, for whom, and the organizer's keys as they were when it was taken
  expert/       what `atoll train` makes, its state while it is made
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import DIGEST, MANIFEST, Artifact, Store, UserError, find, sanitize, write_atomic
from ..artifacts.away import is_away, reaching
from ..artifacts.signing import fingerprint
from ..artifacts.store import cache_folder
from ..islands.expert import KIND
from ..islands.order import Order
from ..islands.train import shards_of, train
from ..models.accounting import account
from ..models.text_encoders import is_here
from ..training.execution import named_or_best
from ..training.loop import Progress, Watch
from ..training.machines import this_gpu
from ..training.memory import fits
from ..training.resources import Resources
from .card_checks import largest_files
from .inbox import INBOX
from .leases import HOLDER, Lease, LeaseFile, Leases
from .published import ORGANISERS, PublishedCard, PublishedOrder, check_order, open_card
from .signed import SIGNATURE, sign_contribution
from .thresholds import AdmissionThresholds

JOINED = "joined.json"
RENEWALS = 4  # of a lease in its time
CPU_SHARE = 0.25  # of a matrix product's rate that a training step reaches on a CPU


class Joined(BaseModel):
    """joined.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    url: str
    holder: str = Field(pattern=HOLDER)
    order: str | None = Field(None, pattern=DIGEST)
    organizers: str | None = None
    sent: str | None = Field(None, pattern=DIGEST, description="the expert that was sent: who sends may not look again")


@dataclass(frozen=True)
class Offer:
    """An order as it looks from this machine. `hours` None: it does not fit."""

    order: PublishedOrder
    lease: Lease | None
    free: bool
    hours: float | None
    parameters: int


@dataclass(frozen=True)
class Sent:
    """What `join` did: the expert, and where it was sent; None: it is to be sent by hand."""

    expert: Artifact
    place: Store | None


Say = Callable[[str], None]


@dataclass
class Joining:
    """One contributor at one published place."""

    place: Store
    folder: Path
    key: str | Path | None = None
    device: str | None = None
    memory: float | None = None
    provenance: bool = False
    say: Say = lambda text: None
    card: PublishedCard = field(init=False)
    joined: Joined = field(init=False)

    def __post_init__(self) -> None:
        with reaching(self.place.url, "check the URL and the network, then run the same command again"):
            self.card = open_card(self.place)
            self.joined = self.read_joined()

    def read_joined(self) -> Joined:
        """What this folder was begun with; nothing is written yet."""
        holder = secrets.token_hex(8) if self.key is None else fingerprint(self.key)
        try:
            found = Joined.model_validate_json((self.folder / JOINED).read_bytes())
        except FileNotFoundError:
            return Joined(url=self.place.url, holder=holder, organizers=self.published_organizers())
        except ValidationError as error:
            raise UserError(f"{self.folder / JOINED}: cannot be read; use another --out") from error
        if found.url != self.place.url:
            raise UserError(f"{self.folder}: was begun for {found.url}; use another --out")
        if self.key is not None and found.holder != holder:
            raise UserError(f"--key {self.key}: {self.folder} was begun with another key; use that one")
        if found.organizers != self.published_organizers():
            raise UserError(f"{self.place}/{ORGANISERS}: has changed since this order was taken; ask the organizer why")
        return found

    def published_organizers(self) -> str | None:
        if not self.card.signed:
            return None
        try:
            return self.place.read(ORGANISERS, 2**20).decode()
        except (FileNotFoundError, UnicodeError) as error:
            raise UserError(f"{self.place}/{ORGANISERS}: is no list of keys; ask whoever published it") from error

    def write_joined(self, **changed: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.joined = self.joined.model_copy(update=changed)
        write_atomic(self.folder / JOINED, self.joined.model_dump_json(indent=2).encode() + b"\n")

    @property
    def leases(self) -> Leases:
        return Leases(self.place, self.card.lease_seconds, self.card.leases_per_key)

    def order_of(self, listed: PublishedOrder) -> Order:
        known = self.joined.organizers
        return check_order(self.place, listed, None if known is None else known.encode())

    def offers(self, dry: bool = False) -> list[Offer]:
        """Every order, with what it needs here and who has it; `dry` by this machine's clock, since asking for the
        store's writes into it.
        """
        now = time.time() if dry else None
        leases = {} if self.card.read_only else self.leases.current(self.names(), now or self.leases.now())
        found = []
        for listed in self.card.orders:
            order, lease = self.order_of(listed), leases.get(listed.lease)
            mine = lease is not None and lease.is_of(self.joined.holder)
            finished = lease is not None and lease.file is not None and lease.file.done
            free = lease is None or mine or not (finished or lease.held(self.card.lease_seconds))
            found.append(Offer(listed, lease, free, self.hours(order), account(order.architecture).parameters))
        return found

    def hours(self, order: Order) -> float | None:
        """How long an order takes here; None if it does not fit."""
        device = torch.device(named_or_best(self.device))
        cost, training = account(order.architecture), order.training
        if device.type == "cuda":
            possible = fits(cost, this_gpu(device, self.memory), training.batch)
            return training.images / possible[0].images_per_s / 3600 if possible else None
        rate = CPU_SHARE * cpu_rate()
        return training.images * cost.flops_training / rate / 3600

    def settled(self, wanted: str | None) -> PublishedOrder | None:
        """The order begun here, or the one asked for; None where any will do."""
        if self.joined.order is not None:
            begun = [o for o in self.card.orders if o.digest == self.joined.order]
            if not begun:
                raise UserError(f"{self.folder}: its order is not published any more; use another --out")
            return begun[0]
        if wanted is None:
            return None
        named = [o for o in self.card.orders if o.order == wanted]
        if not named:
            names = ", ".join(o.order for o in self.card.orders[:40])
            raise UserError(f"--order {wanted}: no such order; there are {names}")
        return named[0]

    def inviting(self, offers: Sequence[Offer]) -> list[PublishedOrder]:
        """What is free and fits, first of all where nobody serves."""
        return [o.order for o in sorted(offers, key=lambda o: o.order.served) if o.free and o.hours is not None]

    def choose(self, wanted: str | None) -> PublishedOrder:
        """The order begun here, the one asked for, or the first that invites and whose lease can be had."""
        if (settled := self.settled(wanted)) is not None:
            return settled
        for listed in self.inviting(self.offers()):
            if self.card.read_only or self.leases.take(listed.lease, self.joined.holder, self.names()) is not None:
                return listed
        raise UserError(
            f"{self.place}: no order is free that fits this machine; name one with --order to work beside its holder"
        )

    def names(self) -> list[str]:
        return [order.lease for order in self.card.orders]

    def run(self, wanted: str | None = None, watch: Watch | None = None) -> Sent:
        """Everything, or what is left of it."""
        try:
            with reaching(self.place.url, "run the same command again: nothing is lost"):
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
            lease = self.leases.take(listed.lease, self.joined.holder, self.names())
            if lease is None:
                self.say(f"order {listed.order} has another holder; both experts will be judged, and both are credited")
        renewing = Renewing(self.leases, lease, watch, self.say)
        expert = train(
            f"{self.place}/{listed.path}",
            self.folder / "expert",
            resources=Resources(self.device, self.memory),
            sheets=True,
            watch=renewing,
        )
        if expert is None:
            raise UserError("join: runs as one process; use `atoll train` under torchrun and send the folder by hand")
        if self.key is not None:
            sign_contribution(self.folder / "expert", self.key)
        if self.card.read_only:
            return Sent(expert, None)
        sent = self.send(order, expert)
        renewing.finish(order.training.images)
        return Sent(expert, sent)

    def fetch(self, order: Order, listed: PublishedOrder) -> None:
        """Get what the order trains on, no more than was announced; and nothing that it only names."""
        start = None if order.init is None else Artifact.open(self.place.child(*order.init.path.split("/")), KIND)
        if start is not None and sum(f.bytes for f in start.manifest.files.values()) > sum(
            largest_files(order.architecture, AdmissionThresholds()).values()
        ):
            raise UserError(f"{start.store}: is larger than its network; ask whoever published it")
        if not self.place.is_local:
            left = listed.bytes
            if left > (free := free_bytes(cache_folder())):
                raise UserError(
                    f"order {listed.order}: its data is {left:,} bytes and {cache_folder()} has {free:,} left; "
                    "say with ATOLL_CACHE where there is more"
                )
            for ref in order.shards:
                left -= self.place.download(ref.path, ref.sha256, left).stat().st_size
        check_reader(order, self.place)

    def send(self, order: Order, expert: Artifact) -> Store:
        """Upload the expert, manifest last: half of one is none. What was sent already is not sent again."""
        place = self.place.child(INBOX, self.joined.holder, f"{order.name}-{expert.digest[:12]}")
        if self.joined.sent == expert.digest:
            return place
        folder = self.folder / "expert"
        names = [*expert.names(), *([SIGNATURE] if self.key is not None else [])]
        names += ["provenance.json"] if self.provenance else []
        for name in names:
            send_file(place, folder / name, name)
        place.write(MANIFEST, (folder / MANIFEST).read_bytes())
        self.write_joined(sent=expert.digest)
        return place


def check_reader(order: Order, place: Store) -> None:
    """Refuse captions that only a network reads which is not on this machine: it is not fetched at a stranger's word.

    No island needs the autoencoder or the features: it learns from latents, and shows them through a linear map.
    """
    if order.text is None or order.text.kind == "words":
        return
    kept_as_text = any(shards_of(order, place, split).needs_text_encoder for split in ("train", "validation"))
    if kept_as_text and not is_here(order.text.encoder):
        raise UserError(
            f"order {order.name}: its captions are read by {sanitize(order.text.encoder, 80)}, which is not on this "
            "machine, and nothing is fetched because an order says so; if you trust it, get it and set ATOLL_MODELS"
        )


def free_bytes(folder: Path) -> int:
    """Of the disk where this folder is, or will be."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def send_file(place: Store, source: Path, name: str) -> None:
    if place.is_local:
        place.write(name, source.read_bytes())
    else:
        place.upload(source, name)


class Renewing:
    """Passes every step on, and keeps the lease alive; a store that does not answer stops no training."""

    def __init__(self, leases: Leases, lease: Lease | None, watch: Watch | None, say: Say) -> None:
        self._leases, self._lease, self._watch, self._say = leases, lease, watch, say
        self._every = leases.seconds / RENEWALS
        self._due = 0.0

    def __call__(self, now: Progress) -> None:
        if self._lease is not None and now.note is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            self._write(now.images, now.total, now.seconds_left)
        if self._watch is not None:
            self._watch(now)

    def finish(self, images: int) -> None:
        self._write(images, images, 0.0, done=True)

    def _write(self, images: int, total: int, left: float | None, done: bool = False) -> None:
        if self._lease is None or self._lease.file is None:
            return
        file = LeaseFile(holder=self._lease.file.holder, images=images, total=total, seconds_left=left, done=done)
        try:
            kept = self._leases.renew(self._lease, file)
        except Exception as error:
            if not is_away(error):
                raise
            return  # again a quarter of the lease later
        if not kept:
            self._say("the lease went to somebody else; going on all the same, both experts will be judged")
            self._lease = None


def cpu_rate(size: int = 512) -> float:
    """Operations per second of a matrix product here, in a twentieth of a second."""
    a = torch.randn(size, size)
    a @ a
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < 0.05:
        a @ a
        times += 1
    return 2 * size**3 * times / (time.perf_counter() - began)
