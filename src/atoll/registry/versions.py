"""What a run's model consists of, one version after the other.

RUN/ensemble/000007.json names by path and digest everything the model is made of, and its predecessor by digest. A
version is created once and never overwritten; going back is a new version. Each file carries the digest of its own
content. The model is the newest version whose file can be read: others are set aside with a warning.
"""

from __future__ import annotations

import errno
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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
from ..mixture.routes import parse_route

FOLDER = "ensemble"
MOST_BYTES = 64 * 2**20  # of a version's file
NO_FILE = (errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ELOOP)  # links to nowhere, pipes, folders
FILE_NAME = re.compile(r"^(\d{6,9})\.json$", re.ASCII)


class SetAside(AtollWarning):
    """Something of a run cannot be read, and nothing that is done now needs it."""


class ValidationLoss(BaseModel):
    """Mean squared velocity error on the holdout: in the expert's own cluster, outside it, and a Gaussian's."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    inside: float = Field(ge=0)
    outside: float | None = Field(ge=0)
    gaussian: float = Field(ge=0)


class Member(Reference):
    """An admitted expert. All that were ever admitted stay; at most one of a cluster serves."""

    weights: str = Field(pattern=DIGEST, description="digest of its tensors, whatever else is in their file")
    cluster: int = Field(ge=0, lt=4096)
    order: str = Field(pattern=DIGEST, description="digest of the order it was trained for")
    objective: str = Field(max_length=200, description="for people: such as epsilon on cosine-vp")
    val_loss: ValidationLoss | None = None
    license: str | None = Field(None, max_length=2000)
    serving: bool = True
    contributor: str | None = Field(None, max_length=80, description="as the organizer's list of signers calls them")
    copies: tuple[Annotated[str, Field(max_length=80)], ...] = Field(
        (), max_length=1000, description="who sent the same weights later"
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
    earlier: tuple[Reference, ...] = Field((), max_length=4096, description="partitions it grew from, oldest first")
    orders: tuple[Reference, ...] = Field(max_length=4096, description="whose orders are accepted, newest last")
    clusters: int = Field(gt=0, le=4096)
    latent: LatentConfig
    text: TextConfig | None = None
    class_names: tuple[str, ...] | None = Field(None, description="of the data's labels, by number, where it has names")
    route: str = Field("top-2", max_length=40)
    experts: tuple[Member, ...] = Field((), max_length=65_536, description="by cluster, then by digest")
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
        if keys and keys[-1][0] >= self.clusters:
            raise ValueError(f"expert {self.experts[-1].name} is of a cluster beyond the {self.clusters} there are")
        if twice := [k for k, count in Counter(m.cluster for m in self.serving).items() if count > 1]:
            raise ValueError(f"cluster {twice[0]} has more than one serving expert")
        return self

    @property
    def name(self) -> str:
        return file_name(self.version)

    def digest(self) -> str:
        """Of this version, its history included. A field that a later atoll adds, with a default, changes none."""
        return sha256_bytes(canonical_json(self.model_dump(mode="json", exclude_defaults=True)))

    def model_digest(self) -> str:
        """Of what decides the images, whatever came before: the same experts admitted in any order are one model."""
        kept = self.model_dump(mode="json", include={"clusters", "latent", "text", "route"})
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
        others = [member for member in self.experts if member.digest != expert.digest]
        if expert.serving:
            others = [m.model_copy(update={"serving": m.serving and m.cluster != expert.cluster}) for m in others]
        experts = sorted([*others, expert], key=lambda member: (member.cluster, member.digest))
        return self.model_copy(update={"experts": tuple(experts)})

    def to_bytes(self) -> bytes:
        content = {"digest": self.digest(), **self.model_dump(mode="json")}
        return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def file_name(version: int) -> str:
    return f"{version:06d}.json"


class UnreadableVersion(Exception):
    """A version's file that is not what was written there, or not for this atoll; the message says why."""


def parse_version(data: bytes, number: int) -> Version:
    """A version out of its file's bytes, checked against its own digest."""
    if len(data) > MOST_BYTES:
        raise UnreadableVersion(f"is larger than {MOST_BYTES:,} bytes")
    try:
        content = json.loads(data)
        digest = content.pop("digest")
        version = Version.model_validate_json(canonical_json(content))
    except ValidationError as error:
        raise UnreadableVersion(f"is damaged, or of a newer atoll ({explain(error)})") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableVersion("is damaged (it is no version)") from error
    if (version.digest(), version.version) != (digest, number):
        raise UnreadableVersion("is damaged (its content is not what its digest and name say)")
    return version


def read_version(run: Store, number: int) -> Version:
    """UnreadableVersion says why its file is none. A store that does not answer says nothing about it: a UserError."""
    try:
        return parse_version(run.child(FOLDER).read(file_name(number), MOST_BYTES), number)
    except OSError as error:
        why = sanitize(error.strerror or " ".join(str(error).split()) or type(error).__name__)
        if run.is_local and error.errno in NO_FILE:
            raise UnreadableVersion(f"is no file ({why.lower()})") from error
        # to go on without it would undo what somebody did
        raise UserError(f"{run}/{FOLDER}/{file_name(number)}: cannot be read ({why}); try again") from error


def numbers(run: Store) -> list[int]:
    """Of all versions that have a file, oldest first."""
    found = {int(match[1]): name for name in run.child(FOLDER).children() if (match := FILE_NAME.match(name))}
    return sorted(number for number, name in found.items() if name == file_name(number))


def history(run: Store) -> Iterator[tuple[int, Version | str]]:
    """Every version, newest first, or why it cannot be read."""
    for number in reversed(numbers(run)):
        try:
            yield number, read_version(run, number)
        except UnreadableVersion as error:
            yield number, str(error)


@dataclass(frozen=True)
class Newest:
    """The newest version that can be read, None before the first; why newer ones cannot; the number after all."""

    version: Version | None
    unreadable: str | None
    next_number: int

    @staticmethod
    def of(run: Store) -> Newest:
        unreadable, last = None, 0
        for number, found in history(run):
            last = last or number
            if isinstance(found, Version):
                return Newest(found, unreadable, last + 1)
            unreadable = unreadable or f"{run}/{FOLDER}/{file_name(number)} {found}"
        if unreadable is not None:
            raise UserError(f"{unreadable}; no version of this model can be read: restore the files of {FOLDER}/")
        return Newest(None, None, 1)


def find_ensemble(run: Store) -> Version | None:
    """The run's model: its newest version that can be read, or None before the first."""
    newest = Newest.of(run)
    if newest.unreadable is not None:
        assert newest.version is not None
        number = newest.version.version
        words = f"version {number} is used instead: restore the file, or `atoll ensemble {run} --rollback {number}`"
        warnings.warn(SetAside(f"{newest.unreadable}; {words}"), stacklevel=2)
    return newest.version


def open_ensemble(run: Store) -> Version:
    """The run's model, or one line that says how to begin one."""
    version = find_ensemble(run)
    if version is None:
        raise UserError(no_ensemble(run))
    return version


def no_ensemble(run: Store) -> str:
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
    """What a version names; another artifact in its place is refused."""
    artifact = Artifact.open(place_of(run, reference), kind)
    if artifact.digest != reference.digest:
        raise UserError(
            f"{artifact.store}: is {artifact.digest[:12]}, but the model of {run} was made with "
            f"{reference.digest[:12]}; put that one back, or see `atoll ensemble {run}`"
        )
    return artifact


def is_whole(run: Store, reference: Reference) -> bool:
    """Whether what a version names is there, as far as its manifest tells."""
    try:
        artifact = find(place_of(run, reference))
    except UserError:
        return False
    return artifact is not None and artifact.digest == reference.digest
