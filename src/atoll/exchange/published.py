"""What an organizer publishes: orders, their clusters' shards, experts to train on, and a card. Nothing else.

No holdout, no index, no evaluation, no seed of one, no list of keys: contributors train without them, and what they do
not have they cannot train on. Contributors write below inbox/<key>/ and leases/ only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import MANIFEST, Artifact, Reference, Store, UserError, explain
from ..artifacts.signing import allowed_line, sign, signer, statement
from ..data.progress import Progress, silent
from ..ensemble.checks import Checks
from ..ensemble.versions import open_ensemble, place_of
from ..islands.order import Order, read_order
from .inbox import INBOX
from .leases import FOLDER as LEASES

CARD = "published.json"
ORGANISERS = "organizers"
MOST_CARD = 16 * 2**20
LEASE_SECONDS = 3600.0
MOST_LEASES = 2


class PublishedOrder(Reference):
    """One order: where it lies, its digest, and what a contributor wants to know before reading it."""

    order: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$", description="its name, such as 03")
    cluster: int = Field(ge=0)
    images: int = Field(gt=0)
    objective: str = Field(max_length=200)
    bytes: int = Field(ge=0, description="of its shards")
    served: bool = Field(description="whether an expert serves its cluster already")

    @property
    def lease(self) -> str:
        return f"{self.order}-{self.digest[:12]}"


class PublishedCard(BaseModel):
    """published.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = Field(1, ge=1, le=1)
    model: str = Field(max_length=200, description="what the organizer calls it")
    version: int = Field(ge=1)
    clusters: int = Field(gt=0)
    license: str | None = Field(None, max_length=2000)
    orders: tuple[PublishedOrder, ...] = Field(max_length=65_536)
    files: dict[str, str] = Field({}, description="sha256 of everything that was published, by path")
    read_only: bool = False
    signed: bool = Field(False, description="whether an organizer's key signed every order, and lies beside")
    lease_seconds: float = Field(LEASE_SECONDS, gt=0, le=30 * 86400)
    leases_per_key: int = Field(MOST_LEASES, ge=1, le=1000)


def publish(
    run: Store,
    place: Store,
    *,
    key: str | Path | None = None,
    read_only: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    leases_per_key: int = MOST_LEASES,
    progress: Progress = silent,
) -> PublishedCard:
    """Put a run's open orders where contributors can read them; again after late data adds what is new."""
    version = open_ensemble(run)
    if not read_only:
        place.check_creates()
    orders = list(open_orders(run))
    if not orders:
        raise UserError(f"{run}: has no orders to publish; make some with `atoll plan`")
    there = find_card(place)
    if there is not None and there.signed and key is None:
        raise UserError(f"{place}: its orders are signed, and contributors insist on it; sign again with --key")
    known = {} if there is None else dict(there.files)
    wanted: dict[str, tuple[Store, str]] = {}
    for _, order in orders:
        wanted |= {ref.path: (run, ref.sha256) for ref in order.shards}
        if order.init is not None:
            start = Artifact.open(place_of(run, order.init))
            for name in start.names():
                wanted[f"{order.init.path}/{name}"] = (run, start.manifest.files[name].sha256)
    files = {path: digest for path, (_, digest) in wanted.items()}
    for done, (path, digest) in enumerate(sorted(files.items())):
        progress("publishing", done, len(files))
        if known.get(path) != digest:
            put(place, path, local_copy(run, path, digest))
    progress("publishing", len(files), len(files))
    for _, order in orders:
        if order.init is not None:
            manifest = Artifact.open(place_of(run, order.init)).manifest
            place.child(*order.init.path.split("/")).write(MANIFEST, manifest.to_bytes())
    listed = []
    served = {member.cluster for member in version.serving}
    for path, order in orders:
        folder, _, name = path.rpartition("/")
        place.child(*folder.split("/")).write(name, order.to_bytes())
        if key is not None:
            place.child(*folder.split("/")).write(f"{name}.sig", sign(order_statement(order), key))
        assert order.cluster is not None
        objective = f"{order.objective.kind} on {order.objective.schedule.name}"
        size = sum(size_of(run, ref.path, ref.sha256) for ref in order.shards)
        listed.append(
            PublishedOrder(
                path=path,
                digest=order.digest(),
                order=order.name,
                cluster=order.cluster,
                images=order.training.images,
                objective=objective,
                bytes=size,
                served=order.cluster in served,
            )
        )
    if key is not None:
        place.write(ORGANISERS, allowed_line("organizer", key))
    card = PublishedCard(
        model=run.name,
        version=version.version,
        clusters=version.clusters,
        license=orders[0][1].license,
        orders=tuple(listed),
        files={**known, **files},
        read_only=read_only,
        signed=key is not None,
        lease_seconds=lease_seconds,
        leases_per_key=leases_per_key,
    )
    place.write(CARD, card.model_dump_json(indent=2).encode() + b"\n")  # last: what it names is there
    return card


def open_orders(run: Store) -> Iterator[tuple[str, Order]]:
    """The newest order of every cluster, with its path in the run."""
    version, checks = open_ensemble(run), Checks(run)
    newest: dict[int, tuple[str, Order]] = {}
    for reference in version.orders:
        artifact = checks.opened(reference, "orders")
        for name in () if artifact is None else artifact.names():
            assert artifact is not None
            order, _ = read_order(artifact.file(name))
            if order.cluster is not None:
                newest[order.cluster] = (f"{reference.path}/{name}", order)
    yield from (newest[cluster] for cluster in sorted(newest))


def order_statement(order: Order) -> bytes:
    return statement("order", order=order.digest())


def local_copy(run: Store, path: str, digest: str) -> Path:
    return run.path / path if run.is_local else run.download(path, digest)


def size_of(run: Store, path: str, digest: str) -> int:
    return local_copy(run, path, digest).stat().st_size


def put(place: Store, path: str, source: Path) -> None:
    if not place.is_local:
        place.upload(source, path)
        return
    folder, _, name = path.rpartition("/")
    place.child(*folder.split("/")).write(name, source.read_bytes())


def find_card(place: Store) -> PublishedCard | None:
    """The card of a published place; None where there is none."""
    try:
        data = place.read(CARD, MOST_CARD)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return PublishedCard.model_validate_json(data)
    except ValidationError as error:
        raise UserError(f"{place}/{CARD}: cannot be read ({explain(error)}); ask whoever published it") from error


def open_card(place: Store) -> PublishedCard:
    card = find_card(place)
    if card is None:
        raise UserError(f"{place}: nothing is published here (no {CARD}); check the URL")
    return card


def check_order(place: Store, listed: PublishedOrder, organizers: bytes | None) -> Order:
    """An order as the card names it, signed by an organizer if there are any."""
    order, _ = read_order(f"{place}/{listed.path}")
    if order.digest() != listed.digest or order.name != listed.order:
        raise UserError(f"{place}/{listed.path}: is not the order that {CARD} names; ask whoever published it")
    if organizers is not None:
        folder, _, name = listed.path.rpartition("/")
        try:
            signature = place.child(*folder.split("/")).read(f"{name}.sig", 2**14)
        except FileNotFoundError:
            signature = b""
        if signer(order_statement(order), signature, organizers) is None:
            raise UserError(f"{place}/{listed.path}: is not signed by the organizer; do not train it")
    return order


def policy(url: str) -> bytes:
    """What S3 should allow contributors: to read what is published, and to write to inbox/NAME/ and leases/ only.

    NAME is the user's own in IAM, so whoever has a user of their own, named by their key as `atoll join --dry-run`
    shows it, writes into no other's folder. Nobody but the organizer reads or lists what was sent, or removes anything.
    """
    bucket, _, prefix = url.removeprefix("s3://").removeprefix("s3a://").partition("/")
    folder = f"{prefix}/" if prefix else ""
    root = f"arn:aws:s3:::{bucket}/{folder}"

    def allow(what: str, actions: list[str], resources: list[str]) -> dict[str, Any]:
        return {"Sid": what, "Effect": "Allow", "Action": actions, "Resource": resources}

    readable = (CARD, ORGANISERS, "orders*", "partition*", "contributions/*")
    statements = [
        allow("ReadWhatIsPublished", ["s3:GetObject"], [f"{root}{name}" for name in readable]),
        allow("Leases", ["s3:GetObject", "s3:PutObject"], [f"{root}{LEASES}/*"]),
        allow("SendOnly", ["s3:PutObject", "s3:AbortMultipartUpload"], [f"{root}{INBOX}/${{aws:username}}/*"]),
        allow("ListLeases", ["s3:ListBucket"], [f"arn:aws:s3:::{bucket}"])
        | {"Condition": {"StringLike": {"s3:prefix": [f"{folder}{LEASES}/*"]}}},
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2).encode() + b"\n"
