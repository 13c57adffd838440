"""ensemble.json: which experts make the model, which router fuses them, and how.

One file, replaced atomically; each version names the one before it, so the history of a model is a chain of
digests. Everything else a run holds is immutable.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import Artifact, Store, UserError, canonical_json, explain, only_one, sha256_bytes
from ..data.space import LatentSpace, TextSpace
from ..process import AnySchedule, LinearFlow

NAME = "ensemble.json"
DEFAULT_ROUTE = "top-2"


class Yardsticks(BaseModel):
    """Mean squared velocity error on the holdout: in the expert's own cluster, outside it, and a Gaussian's."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    inside: float
    outside: float | None
    gaussian: float


class Member(BaseModel):
    """An admitted expert: `path` is relative to the run, `digest` is what must lie there."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    digest: str
    cluster: int = Field(ge=0)
    objective: str = Field(description="for people: such as epsilon on cosine-vp")
    yardsticks: Yardsticks | None = None
    licence: str | None = None


class RouterRef(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    digest: str


class EnsembleFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    partition: str = Field(description="digest of the partition whose clusters the experts hold")
    clusters: int = Field(gt=0)
    latent: LatentSpace
    text: TextSpace | None = None
    reference: AnySchedule = LinearFlow()
    route: str = DEFAULT_ROUTE
    experts: tuple[Member, ...] = ()
    router: RouterRef | None = None
    predecessor: str | None = Field(None, description="digest of the version before this one")

    def digest(self) -> str:
        """Of this version, its history included."""
        return sha256_bytes(canonical_json(self.model_dump(mode="json")))

    def model_digest(self) -> str:
        """Of the model it names, whatever came before: the same experts admitted in any order are one model."""
        return self.model_copy(update={"predecessor": None}).digest()

    def empty_clusters(self) -> list[int]:
        """Clusters no admitted expert holds."""
        return sorted(set(range(self.clusters)) - {member.cluster for member in self.experts})


def find_ensemble(run: Store) -> EnsembleFile | None:
    """The run's ensemble, or None before the first expert is admitted."""
    try:
        return EnsembleFile.model_validate_json(run.read(NAME))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        raise UserError(
            f"{run}/{NAME}: not valid ({explain(error)}); restore it, or admit the experts again"
        ) from error


def change_ensemble(run: Store, change: Callable[[EnsembleFile | None], EnsembleFile]) -> EnsembleFile:
    """Replace the ensemble by `change(what it is now)`, one process at a time; the new version names the old one.

    On an object store nobody can be made to wait: let one organiser at a time admit there.
    """
    with only_one(run.path, wait=True) if run.is_local else nullcontext():
        before = find_ensemble(run)
        after = change(before).model_copy(update={"predecessor": None})
        if before is not None:
            if after == before.model_copy(update={"predecessor": None}):
                return before
            after = after.model_copy(update={"predecessor": before.digest()})
        run.write(NAME, after.model_dump_json(indent=2).encode() + b"\n")
        return after


def register_router(run: Store, router: Artifact, name: str) -> EnsembleFile:
    """Make a router the one the ensemble uses."""

    def change(file: EnsembleFile | None) -> EnsembleFile:
        if file is None:
            raise UserError(f"{run}: holds no {NAME} to register the router in; admit an expert first")
        if router.manifest.parents["partition"] != file.partition:
            raise UserError(f"{router.store}: tells the clusters of another partition apart; train one for this run's")
        return file.model_copy(update={"router": RouterRef(path=name, digest=router.digest)})

    return change_ensemble(run, change)
