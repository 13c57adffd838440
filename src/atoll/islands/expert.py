"""An expert on disk: frozen weights, and a card that says how to use them.

model.safetensors   the averaged weights, float32
expert.json         the card
metrics.jsonl       loss and validation loss against images seen
manifest.json       written last
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from ..artifacts import DIGEST, Artifact, Store
from ..data.space import LatentConfig, TextConfig
from ..diffusion import AnySchedule, Bridge, Kind, NetworkDenoiser, Schedule
from ..models.dit import DiT, DiTConfig
from ..training.result import WEIGHTS, Result, read_card, read_network, write_result

KIND = "expert"


class Teacher(BaseModel):
    """An expert whose answers another one has learned."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    cluster: int
    digest: str = Field(pattern=DIGEST)
    license: str | None = None


class ExpertCard(BaseModel):
    """expert.json. Two experts fit into one ensemble if `latent` and `text` agree; all else may differ."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    architecture: DiTConfig
    schedule: AnySchedule = Field(discriminator="name")
    kind: Kind
    bridge_limit: float | None = Field(100.0, gt=0, description="largest sigma/alpha asked of a noise-like kind")
    latent: LatentConfig
    text: TextConfig | None = None
    cluster: int | None = Field(None, description="None: trained on all of the data")
    images: int = Field(ge=0, description="images seen in training")
    order: str | None = Field(None, description="digest of the order it was trained for")
    partition: str | None = Field(None, description="digest of the partition its cluster belongs to")
    origin: str | None = Field(None, description="what its weights started from, if not from random numbers")
    license: str | None = None
    teachers: tuple[Teacher, ...] = Field((), description="experts it was distilled from")
    class_names: tuple[str, ...] | None = Field(None, description="of labels by number, for one that is a whole model")


def all_licenses(licenses: Iterable[str | None]) -> str | None:
    """Of something made from several others: every license that is named, once."""
    return " AND ".join(dict.fromkeys(license for license in licenses if license)) or None


@dataclass(frozen=True)
class Expert:
    """A loaded expert."""

    card: ExpertCard
    network: DiT
    digest: str

    def denoiser(self, onto: Schedule) -> Bridge:
        """This expert as a velocity on the sampling path."""
        return bridged(self.network, self.card, onto)


def bridged(network: nn.Module, card: ExpertCard, onto: Schedule) -> Bridge:
    denoiser = NetworkDenoiser(network, card.schedule, card.kind, card.architecture.time_scale)
    return Bridge(denoiser, onto=onto, limit=card.bridge_limit)


def expert_result(card: ExpertCard, extra: Mapping[str, bytes] | None = None) -> Result:
    """What makes a finished training an expert: its card, and `extra` files."""
    files = {"expert.json": card.model_dump_json(indent=2).encode() + b"\n", **(extra or {})}
    return Result(card.model_dump(mode="json"), card.license, files)


def write_expert(
    folder: Path,
    weights: Mapping[str, Tensor],
    card: ExpertCard,
    metrics: Sequence[Mapping[str, Any]],
    parents: Mapping[str, str],
    extra: Mapping[str, bytes] | None = None,
) -> Artifact:
    """Write the files of an expert, and `extra` ones such as a conversion's report, into `folder` and finalize it."""
    result = expert_result(card, extra)
    return write_result(folder, KIND, weights, result, metrics, parents=parents)


def read_expert_card(artifact: Artifact) -> ExpertCard:
    return read_card(artifact, "expert.json", ExpertCard)


def load_expert(place: str | Path | Store, device: torch.device | str = "cpu") -> Expert:
    """Read an expert, checking digests, names, shapes, dtypes and that every weight is finite."""
    artifact = Artifact.open(place, KIND)
    card = read_expert_card(artifact)
    network = read_network(lambda: DiT(card.architecture), card.architecture, artifact.file(WEIGHTS), device)
    return Expert(card, network, artifact.digest)
