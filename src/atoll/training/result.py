"""What a finished loop leaves behind, and how to read it when it may come from a stranger.

Weights are safetensors only; every key and shape is checked against the architecture on the card, and a
value that is not finite is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..artifacts import Artifact, UserError, explain, raise_if_disk_full, seal, write_atomic

WEIGHTS = "model.safetensors"
Card = TypeVar("Card", bound=BaseModel)


def write_result(
    folder: Path,
    kind: str,
    weights: Mapping[str, Tensor],
    texts: Mapping[str, bytes],
    metrics: Sequence[Mapping[str, Any]],
    *,
    config: Mapping[str, Any],
    parents: Mapping[str, str],
    licence: str | None,
) -> Artifact:
    """Write model.safetensors (float32), metrics.jsonl and `texts` into `folder`, and seal it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in weights.items()}
    lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in metrics)
    try:
        save_file(tensors, folder / WEIGHTS)
        files = {**texts, "metrics.jsonl": lines.encode()}
        for name, content in files.items():
            write_atomic(folder / name, content)
        return seal(folder, [WEIGHTS, *files], kind, config=config, parents=parents, licence=licence)
    except (OSError, SafetensorError) as error:
        raise_if_disk_full(error, str(folder))
        raise


def read_card(artifact: Artifact, name: str, model: type[Card]) -> Card:
    """A JSON card of an artifact, validated."""
    try:
        return model.model_validate_json(artifact.read(name))
    except ValidationError as error:
        raise UserError(f"{artifact.store}/{name}: not valid ({explain(error)}); get it again") from error


def load_weights(network: nn.Module, artifact: Artifact) -> None:
    """Fill a network from an artifact's model.safetensors, or say in one line why it does not fit."""
    path = artifact.file(WEIGHTS)
    try:
        found = load_file(path)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); get it again") from error
    check_weights(network.state_dict(), found, str(path))
    network.load_state_dict(found, strict=True)


def check_weights(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights whose names, shapes or values cannot be the network's."""
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        what = f"missing {', '.join(missing[:3])}" if missing else f"unknown {', '.join(unknown[:3])}"
        raise UserError(f"{where}: the weights do not fit the card's architecture ({what}); ask for another file")
    for name, value in found.items():
        if value.shape != expected[name].shape:
            shapes = f"{list(value.shape)}, expected {list(expected[name].shape)}"
            raise UserError(f"{where}: weight {name} has shape {shapes}; ask for another file")
        if not bool(torch.isfinite(value).all()):
            raise UserError(f"{where}: weight {name} holds values that are not finite; ask for another file")
