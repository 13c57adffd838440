"""What a run's model consists of, one version after the other.

RUN/ensemble/000007.json names by path and digest everything the model is made of, and its predecessor by digest. A
version is created once and never overwritten: going back is a new version. It carries the digest of its own content,
so that a damaged one is known as such; one whose predecessors are not all there and whole does not count. The model
is the newest version that counts. RUN/ensemble.json is a copy of it for people's eyes, which no program reads.
"""

from __future__ import annotations

import errno
import json
import re
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..artifacts import (
    DIGEST,
    Artifact,
    AtollWarning,
    Reference,
    Store,
    UserError,
    canonical_json,
    explain,
    find,
    sanitize,
    sha256_bytes,
)
from ..data.space import LatentConfig, TextConfig
from ..diffusion import AnySchedule, LinearFlow
from ..mixture.routes import parse_route

FOLDER = "ensemble"
COPY = "ensemble.json"
DEFAULT_ROUTE = "top-2"
MOST_CLUSTERS = 4096
MOST_EXPERTS = 65_536  # ever admitted, of all clusters
MOST_ORDERS = 4096
MOST_BYTES = 64 * 2**20  # of a version's file
NO_FILE = (errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ELOOP)  # links to nowhere, pipes, folders
READERS = 16  # files read at once, which only counts on object stores
FILE_NAME = re.compile(r"^(\d{6,9})\.json$")


class ValidationLoss(BaseModel):
    """Mean squared velocity error on the holdout: in the expert's own cluster, outside it, and a Gaussian's."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    inside: float = Field(ge=0)
    outside: float | None = Field(ge=0)
    gaussian: float = Field(ge=0)


class Member(Reference):
    """An admitted expert. All that were ever admitted stay; of those of a cluster one serves, or none."""

    weights: str = Field(pattern=DIGEST, description="digest of its tensors, whatever else is in their file")
    cluster: int = Field(ge=0, lt=MOST_CLUSTERS)
    order: str = Field(pattern=DIGEST, description="digest of the order it was trained for")
    objective: str = Field(max_length=200, description="for people: such as epsilon on cosine-vp")
    val_loss: ValidationLoss | None = None
    license: str | None = Field(None, max_length=2000)
    serving: bool = True
    contributor: str | None = Field(None, max_length=80, description="as the organizer's list of signers calls them")
    copies: tuple[Annotated[str, Field(max_length=80)], ...] = Field(
        (), max_length=1000, description="who sent the very same one later, in the same words"
    )

    @property
    def credits(self) -> str:
        """For people: who made it, and who sent the same."""
        same = f"the same by {', '.join(self.copies)}" if self.copies else ""
        return "; ".join(filter(None, (self.contributor, same)))


class Version(BaseModel):
    """One version of a run's model. `change_ensemble` fills in `version`, `predecessor` and `change`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[2] = 2
    version: int = Field(1, ge=1, lt=10**9)
    predecessor: str | None = Field(None, pattern=DIGEST, description="digest of the version before this one")
    change: str = Field("", max_length=1000, description="for people: what was done")
    data: Reference
    partition: Reference
    earlier: tuple[Reference, ...] = Field(
        (), max_length=MOST_ORDERS, description="partitions it grew from with late data, oldest first"
    )
    orders: tuple[Reference, ...] = Field(
        max_length=MOST_ORDERS, description="every orders artifact whose orders are accepted, newest last"
    )
    clusters: int = Field(gt=0, le=MOST_CLUSTERS)
    latent: LatentConfig
    text: TextConfig | None = None
    class_names: tuple[str, ...] | None = Field(None, description="of the data's labels, by number, where it has names")
    reference: AnySchedule = Field(LinearFlow(), discriminator="name")
    route: str = Field(DEFAULT_ROUTE, max_length=40)
    experts: tuple[Member, ...] = Field((), max_length=MOST_EXPERTS, description="by cluster, then by digest")
    router: Reference | None = None
    monolith: Reference | None = Field(None, description="an expert on all of the data, to compare with")

    @model_validator(mode="after")
    def _makes_sense(self) -> Version:
        try:
            parse_route(self.route)
        except UserError as error:
            raise ValueError(str(error)) from error
        keys = [(member.cluster, member.digest) for member in self.experts]
        if keys != sorted(set(keys)):
            raise ValueError("experts must be sorted by cluster and digest, each there once")
        if beyond := [member.name for member in self.experts if member.cluster >= self.clusters]:
            raise ValueError(f"expert {beyond[0]} is of a cluster beyond the {self.clusters} there are")
        serving = Counter(member.cluster for member in self.serving)
        if twice := [cluster for cluster, count in serving.items() if count > 1]:
            raise ValueError(f"cluster {twice[0]} has more than one serving expert")
        return self

    @property
    def name(self) -> str:
        return file_name(self.version)

    def digest(self) -> str:
        """Of this version, its history included. A field that a later atoll adds, with a default, changes none."""
        return sha256_bytes(canonical_json(self.model_dump(mode="json", exclude_defaults=True)))

    def model_digest(self) -> str:
        """Of what it paints, whatever came before: the same experts admitted in any order are one model."""
        kept = self.model_dump(mode="json", include={"clusters", "latent", "text", "reference", "route"})
        experts = [[member.cluster, member.digest] for member in self.serving]
        router = None if self.router is None else self.router.digest
        return sha256_bytes(canonical_json({**kept, "experts": experts, "router": router}))

    @property
    def partitions(self) -> frozenset[str]:
        """Digests of the partitions with these very clusters: orders, experts and routers may be of any of them."""
        return frozenset(reference.digest for reference in (*self.earlier, self.partition))

    @property
    def serving(self) -> tuple[Member, ...]:
        """The experts the model consists of, by cluster."""
        return tuple(member for member in self.experts if member.serving)

    def empty_clusters(self) -> list[int]:
        """Clusters no expert serves."""
        return sorted(set(range(self.clusters)) - {member.cluster for member in self.serving})

    def with_expert(self, expert: Member) -> Version:
        """This one with one more expert, or the same one described anew; if it serves, no other of its cluster does."""
        others = [
            member.model_copy(update={"serving": member.serving and not expert.serving})
            if member.cluster == expert.cluster
            else member
            for member in self.experts
            if member.digest != expert.digest
        ]
        experts = sorted([*others, expert], key=lambda member: (member.cluster, member.digest))
        return self.model_copy(update={"experts": tuple(experts)})

    def to_bytes(self) -> bytes:
        content = {"digest": self.digest(), **self.model_dump(mode="json")}
        return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def file_name(version: int) -> str:
    return f"{version:06d}.json"


class Damaged(Exception):
    """A version's file that is not what was written there; the message says why, and not where."""


def parse_version(data: bytes, number: int) -> Version:
    """A version out of its file's bytes, checked against its own digest."""
    if len(data) > MOST_BYTES:
        raise Damaged(f"larger than {MOST_BYTES:,} bytes")
    try:
        content = json.loads(data)
        if not isinstance(content, dict):
            raise Damaged("no JSON object")
        digest = content.pop("digest", None)
        version = Version.model_validate_json(canonical_json(content))
    except ValidationError as error:
        raise Damaged(explain(error)) from error
    except (ValueError, RecursionError) as error:
        raise Damaged("not valid JSON") from error
    if version.digest() != digest:
        raise Damaged("its content is not what its digest says")
    if version.version != number:
        raise Damaged(f"calls itself version {version.version}")
    return version


def read_version(folder: Store, number: int) -> Version | Damaged:
    """A version, or why its file is none. A store that does not answer says nothing about it: that is an error."""
    try:
        return parse_version(folder.read(file_name(number), MOST_BYTES), number)
    except Damaged as error:
        return Damaged(f"is damaged ({error})")
    except OSError as error:
        why = error.strerror or " ".join(str(error).split()) or type(error).__name__
        if folder.is_local and error.errno in NO_FILE:
            return Damaged(f"is no file ({why.lower()})")
        # to go on without it would undo what somebody did
        raise UserError(f"{folder}/{file_name(number)}: cannot be read ({sanitize(why)}); try again") from error


class DamagedHistory(AtollWarning):
    """A run has versions that do not count, since a file is damaged or missing."""


@dataclass
class History:
    """The versions of a run as far as they were read; `refresh` reads those that came since."""

    run: Store
    versions: dict[int, Version] = field(default_factory=dict)  # those that count, by number
    unused: dict[int, str] = field(default_factory=dict)  # those that do not, and why
    orphans: dict[int, Version] = field(default_factory=dict)  # whole themselves, but their chain is not
    digests: dict[str, int] = field(default_factory=dict)  # of those that count

    @staticmethod
    def of(run: Store) -> History:
        history = History(run)
        history.refresh()
        return history

    def refresh(self) -> None:
        folder = self.run.child(FOLDER)
        known = self.versions.keys() | self.unused.keys()
        numbers = {int(m[1]): name for name in folder.children() if (m := FILE_NAME.match(name)) is not None}
        new = sorted(n for n, name in numbers.items() if n not in known and name == file_name(n))
        with ThreadPoolExecutor(READERS) as pool:
            read = list(pool.map(lambda number: read_version(folder, number), new))
        for number, version in zip(new, read, strict=True):
            if isinstance(version, Damaged):
                self.unused[number] = str(version)
                continue
            if version.predecessor not in self.digests and (number, version.predecessor) != (1, None):
                self.unused[number] = "rests on a version that is damaged or missing"
                self.orphans[number] = version
                continue
            self.versions[number] = version
            self.digests[version.digest()] = number

    @property
    def newest(self) -> Version | None:
        return self.versions[max(self.versions)] if self.versions else None

    @property
    def next_number(self) -> int:
        return max([0, *self.versions, *self.unused]) + 1

    def chain(self) -> list[Version]:
        """The newest version and all it comes from, newest first."""
        chain = [] if self.newest is None else [self.newest]
        while chain and chain[-1].predecessor is not None:
            chain.append(self.versions[self.digests[chain[-1].predecessor]])
        return chain

    def complaint(self) -> str | None:
        """One line about versions newer than the newest that counts; None if there are none."""
        newest = max(self.versions, default=0)
        newer = sorted(number for number in self.unused if number > newest)
        if not newer:
            return None
        first = f"{self.run}/{FOLDER}/{file_name(newer[0])} {self.unused[newer[0]]}"
        count = f"; {len(newer) - 1} more after it cannot be used" if len(newer) > 1 else ""
        return f"{first}{count}"


def find_ensemble(run: Store) -> Version | None:
    """The run's model: its newest version that counts, or None before the first. A damaged newer one is told of."""
    history = History.of(run)
    warn_if_stale(history)
    return history.newest


def warn_if_stale(history: History) -> None:
    """Warn that the newest version is not used; refuse a run of which none is left."""
    if (complaint := history.complaint()) is None:
        return
    if history.newest is None:
        raise UserError(f"{complaint}; no version of this model is whole: restore the files of {FOLDER}/")
    number = history.newest.version
    warnings.warn(
        DamagedHistory(
            f"{complaint}; version {number} is used instead: restore the file, or see `atoll ensemble {history.run}`"
        ),
        stacklevel=3,
    )


def open_ensemble(run: Store) -> Version:
    """The run's model, or one line that says how to begin one."""
    version = find_ensemble(run)
    if version is None:
        raise UserError(no_ensemble(run))
    return version


def no_ensemble(run: Store) -> str:
    if run.exists(COPY):
        return (
            f"{run}: its {COPY} was written by an older atoll, before models had versions; begin one with "
            f"`atoll plan {run}/data`, then `atoll admit {run}/contributions/* --out {run}` and `atoll router {run}`"
        )
    if not run.exists():
        return f"{run}: does not exist; check the path, or make a run with `atoll demo`"
    return f"{run}: holds no model yet (no {FOLDER}/{file_name(1)}); check the path, or plan one with `atoll plan`"


def reference_to(run: Store, artifact: Artifact) -> Reference:
    """An artifact of this run by its path in it, and digest."""
    inside = artifact.store.url.removeprefix(run.url.rstrip("/") + "/")
    if inside == artifact.store.url:
        raise UserError(f"{artifact.store}: lies outside the run {run}; put it there, so that the run is complete")
    return Reference(path=inside, digest=artifact.digest)


def place_of(run: Store, reference: Reference) -> Store:
    return run.child(*reference.path.split("/"))


def open_reference(run: Store, reference: Reference, kind: str) -> Artifact:
    """What a version names, if it is that and no other."""
    artifact = Artifact.open(place_of(run, reference), kind)
    check_reference(run, reference, artifact, kind)
    return artifact


def is_whole(run: Store, reference: Reference) -> bool:
    """Whether what a version names is there, as far as its manifest tells."""
    try:
        artifact = find(place_of(run, reference))
    except UserError:
        return False
    return artifact is not None and artifact.digest == reference.digest


def check_reference(run: Store, reference: Reference, artifact: Artifact, kind: str) -> None:
    """Refuse another artifact than the one a version names."""
    if artifact.manifest.kind != kind or artifact.digest != reference.digest:
        raise UserError(
            f"{artifact.store}: is {artifact.digest[:12]}, but the model of {run} was made with "
            f"{reference.digest[:12]}; put that one back, or see `atoll ensemble {run}`"
        )
