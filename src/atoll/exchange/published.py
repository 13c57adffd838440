"""What an organizer publishes: orders, their clusters' shards, experts to begin from, and a card.

Holdout, index, evaluations and the list of signers stay in the run: contributors train without them, and cannot train
on them. Contributors write below inbox/<key>/ and leases/ only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import MANIFEST, Artifact, Reference, Store, UserError, explain
from ..artifacts.signing import MOST_SIGNATURE, allowed_line, sign, signer, statement
from ..data.progress import Progress, silent
from ..islands.order import Order, read_order
from ..registry.checks import accepted_orders
from ..registry.versions import Version, open_ensemble, place_of
from .inbox import INBOX
from .leases import FOLDER as LEASES

CARD = "published.json"
ORGANIZERS = "organizers"
MOST_CARD = 16 * 2**20
LEASE_SECONDS = 3600.0


class PublishedOrder(Reference):
    """One order: where it lies, its digest, and what the order itself does not know."""

    order: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$", description="its name, such as 03")
    bytes: int = Field(ge=0, description="of its shards")
    served: bool = Field(description="whether its cluster has an active expert already")

    @property
    def lease(self) -> str:
        return f"{self.order}-{self.digest[:12]}"


class PublishedCard(BaseModel):
    """published.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    orders: tuple[PublishedOrder, ...] = Field(max_length=65_536)
    files: dict[str, str] = Field(description="sha256 of everything else that is published, by path")
    read_only: bool = False
    signed: bool = Field(False, description="whether an organizer's key signed every order, and lies beside")
    lease_seconds: float = Field(LEASE_SECONDS, gt=0, le=30 * 86400)


def publish(
    run: Store,
    place: Store,
    *,
    key: str | Path | None = None,
    read_only: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    progress: Progress = silent,
) -> PublishedCard:
    """Put a run's open orders where contributors can read them; again to add what is new.

    The card that names the files is written before they are uploaded, and those that name the orders after, so that a
    publication that was stopped resumes with what is missing, and what an order names is always there.
    """
    version = open_ensemble(run)
    if not read_only:
        place.check_creates()
    orders = open_orders(run, version)
    if not orders:
        raise UserError(f"{run}: has no orders to publish; make some with `atoll plan`")
    earlier = find_card(place) or PublishedCard(orders=(), files={})
    if earlier.signed and key is None:
        raise UserError(f"{place}: its orders are signed, and contributors insist on it; sign again with --key")
    references = {order.init.path: order.init for order in orders.values() if order.init is not None}
    inits = {path: Artifact.open(place_of(run, reference)).manifest for path, reference in references.items()}
    files = {ref.path: ref.sha256 for order in orders.values() for ref in order.shards}
    for folder, manifest in inits.items():
        files |= {f"{folder}/{name}": entry.sha256 for name, entry in manifest.files.items()}
    if reserved := folders_of([*files, *orders]) & {INBOX, LEASES}:
        raise UserError(f"{run}: contributors may write to folders called {reserved.pop()}; use another name")
    if key is not None:
        place.write(ORGANIZERS, allowed_line("organizer", key))
    card = PublishedCard(
        orders=earlier.orders,
        files=earlier.files | files,
        read_only=read_only,
        signed=key is not None,
        lease_seconds=lease_seconds,
    )
    upload(run, place, files, earlier.files, card, progress)
    for folder, manifest in inits.items():
        place.write(f"{folder}/{MANIFEST}", manifest.to_bytes())
    for path, order in orders.items():
        place.write(path, order.to_bytes())
        if key is not None:
            place.write(f"{path}.sig", sign(order_statement(order), key))
    active = {member.cluster for member in version.serving}
    listed = tuple(
        PublishedOrder(
            path=path,
            digest=order.digest(),
            order=order.name,
            bytes=sum(local_copy(run, ref.path, ref.sha256).stat().st_size for ref in order.shards),
            served=order.cluster in active,
        )
        for path, order in orders.items()
    )
    return write_card(place, card.model_copy(update={"orders": listed}))


def upload(
    run: Store, place: Store, files: dict[str, str], known: dict[str, str], card: PublishedCard, progress: Progress
) -> None:
    """Upload the files (sha256 by path) that are missing or differ from what the place's card has `known`."""
    folders = {path.rpartition("/")[0] for path in files}
    there = {f"{folder}/{name}" for folder in folders for name in place.child(folder).children()}
    different = sorted(path for path in there & files.keys() if known.get(path) != files[path])
    todo = [*different, *sorted(files.keys() - there)]
    for done, path in enumerate(todo):
        if done == len(different):
            write_card(place, card)  # from here on a file that is there is the one that is named
        progress("publishing", done, len(todo))
        place.upload(local_copy(run, path, files[path]), path)
    progress("publishing", len(todo), len(todo))


def write_card(place: Store, card: PublishedCard) -> PublishedCard:
    place.write(CARD, card.model_dump_json(indent=2).encode() + b"\n")
    return card


def open_orders(run: Store, version: Version) -> dict[str, Order]:
    """The newest order of every cluster, by its path in the run."""
    newest: dict[int, tuple[str, Order]] = {}
    for each in accepted_orders(run, version).values():
        if each.order.cluster is not None:
            newest[each.order.cluster] = (each.path, each.order)
    return dict(newest[cluster] for cluster in sorted(newest))


def order_statement(order: Order) -> bytes:
    return statement("order", order=order.digest())


def local_copy(run: Store, path: str, digest: str) -> Path:
    return run.path / path if run.is_local else run.download(path, digest)


def find_card(place: Store) -> PublishedCard | None:
    """The card of a published place; None where there is none."""
    try:
        data = place.read(CARD, MOST_CARD)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return PublishedCard.model_validate_json(data)
    except ValidationError as error:
        raise UserError(f"{place}/{CARD}: cannot be read ({explain(error)}); ask the organizer") from error


def check_order(place: Store, listed: PublishedOrder, organizers: bytes | None) -> Order:
    """An order as the card names it, signed by an organizer if there are any."""
    order, _ = read_order(f"{place}/{listed.path}")
    if order.digest() != listed.digest or order.name != listed.order:
        raise UserError(f"{place}/{listed.path}: is not the order that {CARD} names; ask the organizer")
    if organizers is not None:
        try:
            signature = place.read(f"{listed.path}.sig", MOST_SIGNATURE)
        except FileNotFoundError:
            signature = b""
        if signer(order_statement(order), signature, organizers) is None:
            raise UserError(f"{place}/{listed.path}: is not signed by the organizer; do not train it")
    return order


def folders_of(paths: Iterable[str]) -> set[str]:
    """The folders of the place that these paths lie in, without the number of orders-2."""
    return {re.sub(r"-[0-9]+$", "", path.partition("/")[0]) for path in paths}


def policy(url: str, card: PublishedCard) -> bytes:
    """An S3 policy for contributors: to read what is published, and to write to inbox/NAME/ and leases/ only.

    NAME is the user's own in IAM. A user who is named by their key, as `atoll join --dry-run` shows it, writes to no
    other contributor's folder. Only the organizer reads and lists what was sent, and removes anything. Later versions
    of a folder, such as orders-2 after orders, may be read too, so the policy stays the same when data is added.
    """
    bucket, _, prefix = url.removeprefix("s3://").removeprefix("s3a://").partition("/")
    folder = f"{prefix}/" if prefix else ""
    root = f"arn:aws:s3:::{bucket}/{folder}"

    def allow(what: str, actions: list[str], resources: list[str]) -> dict[str, Any]:
        return {"Sid": what, "Effect": "Allow", "Action": actions, "Resource": resources}

    folders = folders_of([*card.files, *(order.path for order in card.orders), "contributions/"])
    readable = [CARD, ORGANIZERS, *(f"{name}{later}/*" for name in sorted(folders) for later in ("", "-*"))]
    statements = [
        allow("ReadWhatIsPublished", ["s3:GetObject"], [f"{root}{name}" for name in readable]),
        allow("Leases", ["s3:GetObject", "s3:PutObject"], [f"{root}{LEASES}/*"]),
        allow("SendOnly", ["s3:PutObject", "s3:AbortMultipartUpload"], [f"{root}{INBOX}/${{aws:username}}/*"]),
        allow("ListLeases", ["s3:ListBucket"], [f"arn:aws:s3:::{bucket}"])
        | {"Condition": {"StringLike": {"s3:prefix": [f"{folder}{LEASES}/*"]}}},
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2).encode() + b"\n"
