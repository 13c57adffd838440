"""What a finished training leaves, and how to read it when its maker may be untrusted.

Weights are safetensors only. Names, shapes and dtypes in the file's header are checked against the architecture on the
card before anything of that size exists, and a value that is not finite is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..artifacts import (
    Artifact,
    UserError,
    explain,
    finalize,
    remove_unfinished,
    sanitize,
    storage_errors,
    write_atomic,
)
from ..models.dit import DiTConfig

WEIGHTS = "model.safetensors"
MOST_POSITIONS = 2**27  # values of a position table, which no file holds: 65,536 tokens of width 2,048
Card = TypeVar("Card", bound=BaseModel)
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Result:
    """What a finished training adds to weights and metrics: the manifest's config and license, and further files."""

    config: Mapping[str, Any]
    license: str | None
    files: Mapping[str, bytes]


def write_result(
    folder: Path,
    kind: str,
    weights: Mapping[str, Tensor],
    result: Result,
    metrics: Sequence[Mapping[str, Any]],
    *,
    parents: Mapping[str, str],
    provenance: Mapping[str, Any] | None = None,
) -> Artifact:
    """Write model.safetensors (float32), metrics.jsonl and the result's files into `folder`, and finalize it."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in metrics)
    files = {**result.files, "metrics.jsonl": lines.encode()}
    with storage_errors(str(folder)):
        save_file(as_saved(weights), folder / WEIGHTS)
        for name, content in files.items():
            write_atomic(folder / name, content)
        return finalize(
            folder,
            [WEIGHTS, *files],
            kind,
            config=result.config,
            parents=parents,
            license=result.license,
            provenance=provenance,
        )


def as_saved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as model.safetensors holds them."""
    return {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in weights.items()}


def read_card(artifact: Artifact, name: str, model: type[Card]) -> Card:
    """A JSON card of an artifact, validated."""
    try:
        return model.model_validate_json(artifact.read(name))
    except ValidationError as error:
        raise UserError(f"{artifact.store}/{name}: not valid ({explain(error)}); get it again") from error


def read_network(
    build: Callable[[], Network], trunk: DiTConfig, path: Path, device: torch.device | str = "cpu"
) -> Network:
    """The network that `build` makes, on a device, frozen, with the weights of a safetensors file.

    It is built on the meta device, as shapes only, and gets its tensors from the file. A card that asks for more than
    the file holds is refused before it costs anything.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  shapes; no values are read yet
            header = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
            network = build_as_shapes(build, trunk, header, str(path))
            check_header(network.state_dict(), header, str(path))
            # copies: a mapped file may change or vanish while the network is in use
            weights = {name: file.get_tensor(name).to(device, copy=True) for name in found}
    except (SafetensorError, ValueError) as error:
        why = sanitize(str(error), 160)
        raise UserError(f"{path}: not a readable safetensors file ({why}); get it again") from error
    for name, value in weights.items():
        # bfloat16, used for sampling, rounds the largest float32 up to infinity
        if not bool(torch.isfinite(value).all()) or not bool(torch.isfinite(value.abs().max().bfloat16())):
            raise UserError(f"{path}: weight {name} holds values that are not finite; ask for another file")
    network.load_state_dict(weights, strict=True, assign=True)
    return network.to(device).eval().requires_grad_(False)  # tables that no file holds were made on the CPU


Header = Mapping[str, tuple[str, tuple[int, ...]]]  # a safetensors header: dtype and shape by name


def build_as_shapes(build: Callable[[], Network], trunk: DiTConfig, header: Header, where: str) -> Network:
    """The network without its weights, once the file is known to have tensors enough for its depth and width.

    What costs something even there is a Python object per block and the position table, tokens x width.
    """
    largest = max((side for _, shape in header.values() for side in shape), default=0)
    if trunk.depth > len(header) or trunk.width > largest:
        raise UserError(
            f"{where}: the weights do not fit the card's architecture (depth {trunk.depth} and width {trunk.width} for "
            f"{len(header)} tensors); ask for another file"
        )
    if trunk.image_tokens * trunk.width > MOST_POSITIONS:
        raise UserError(
            f"{where}: its card asks for {trunk.image_tokens:,} image tokens of width {trunk.width:,}, more than "
            f"{MOST_POSITIONS:,} values; refused"
        )
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond 64 bits
        line = str(error).splitlines()[0][:160]
        raise UserError(f"{where}: its card asks for a network that cannot be built ({line}); refused") from error


def check_header(expected: Mapping[str, Tensor], header: Header, where: str) -> None:
    """Refuse a file whose names, shapes or dtypes cannot be the network's."""
    missing, unknown = sorted(expected.keys() - header.keys()), sorted(header.keys() - expected.keys())
    if missing or unknown:
        what = f"missing {', '.join(missing[:3])}" if missing else f"unknown {sanitize(', '.join(unknown[:3]), 120)}"
        raise UserError(f"{where}: the weights do not fit the card's architecture ({what}); ask for another file")
    for name, (dtype, shape) in header.items():
        if shape != tuple(expected[name].shape):
            shapes = f"{list(shape)}, expected {list(expected[name].shape)}"
            raise UserError(f"{where}: weight {name} has shape {shapes}; ask for another file")
        if dtype != "F32":
            raise UserError(f"{where}: weight {name} is {dtype}, weights are kept as F32; save them as float32")
