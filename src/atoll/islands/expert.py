"""An expert on disk: frozen weights, and a card that says how to use them.

    model.safetensors   the averaged weights, float32
    expert.json         the card
    metrics.jsonl       loss and yardstick against images seen
    manifest.json       written last

Weights may come from a stranger: they are read as safetensors only, every key and shape is checked against
the architecture on the card, and a value that is not finite is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..artifacts import Artifact, Store, UserError, explain, seal, write_atomic
from ..data.space import LatentSpace, TextSpace
from ..models.dit import DiT, DiTConfig
from ..process import AnySchedule, Bridge, Kind, NetworkDenoiser, Schedule

KIND = "expert"


class ExpertCard(BaseModel):
    """expert.json. Two experts fit into one ensemble if `latent` and `text` agree; all else may differ."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    architecture: DiTConfig
    schedule: AnySchedule
    kind: Kind
    bridge_limit: float | None = Field(100.0, gt=0, description="largest sigma/alpha asked of a noise-like kind")
    latent: LatentSpace
    text: TextSpace | None = None
    cluster: int | None = Field(None, description="None: trained on all of the data")
    images: int = Field(ge=0, description="images seen in training")
    order: str | None = Field(None, description="digest of the order it was trained for")
    partition: str | None = Field(None, description="digest of the partition its cluster belongs to")
    origin: str | None = Field(None, description="what its weights started from, if not from random numbers")
    licence: str | None = None


@dataclass(frozen=True)
class Expert:
    """A loaded expert."""

    card: ExpertCard
    network: DiT
    digest: str

    def denoiser(self, onto: Schedule) -> Bridge:
        """This expert as a velocity on the reference path."""
        return bridged(self.network, self.card, onto)


def bridged(network: DiT, card: ExpertCard, onto: Schedule) -> Bridge:
    denoiser = NetworkDenoiser(network, card.schedule, card.kind, card.architecture.time_scale)
    return Bridge(denoiser, onto=onto, limit=card.bridge_limit)


def write_expert(
    folder: Path,
    weights: Mapping[str, Tensor],
    card: ExpertCard,
    metrics: Sequence[Mapping[str, Any]],
    parents: Mapping[str, str],
) -> Artifact:
    """Write the files of an expert into `folder` and seal it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors")
    write_atomic(folder / "expert.json", card.model_dump_json(indent=2).encode() + b"\n")
    lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in metrics)
    write_atomic(folder / "metrics.jsonl", lines.encode())
    return seal(folder, KIND, config=card.model_dump(mode="json"), parents=parents, licence=card.licence)


def read_card(artifact: Artifact) -> ExpertCard:
    where = f"{artifact.store}/expert.json"
    try:
        return ExpertCard.model_validate_json(artifact.read("expert.json"))
    except ValidationError as error:
        raise UserError(f"{where}: not a valid expert card ({explain(error)}); get the expert again") from error


def load_expert(place: str | Path | Store, device: torch.device | str = "cpu") -> Expert:
    """Read an expert, checking digests, keys, shapes and that every weight is finite."""
    artifact = Artifact.open(place, KIND)
    card = read_card(artifact)
    weights = read_weights(artifact.file("model.safetensors"))
    network = DiT(card.architecture)
    check_weights(network.state_dict(), weights, str(artifact.store))
    network.load_state_dict(weights, strict=True)
    return Expert(card, network.to(device).eval().requires_grad_(False), artifact.digest)


def read_weights(path: Path) -> dict[str, Tensor]:
    """A safetensors file from anybody, as tensors on the CPU."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); get it again") from error


def check_weights(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights whose names, shapes or values cannot be the network's."""
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        what = f"missing {missing[:3]}" if missing else f"unknown {unknown[:3]}"
        raise UserError(f"{where}: the weights do not fit the card's architecture ({what}); ask for another file")
    for name, value in found.items():
        if value.shape != expected[name].shape:
            shapes = f"{list(value.shape)}, expected {list(expected[name].shape)}"
            raise UserError(f"{where}: weight {name} has shape {shapes}; ask for another file")
        if not bool(torch.isfinite(value).all()):
            raise UserError(f"{where}: weight {name} holds values that are not finite; ask for another file")
