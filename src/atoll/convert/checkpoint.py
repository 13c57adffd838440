"""Read untrusted weights without running untrusted code.

A `.pt` file is a zip that holds a pickle. torch's `weights_only` unpickler builds tensors and plain containers only;
argparse.Namespace, which DiT's training checkpoints hold, is the one class added. Before it runs, the zip is checked:
entries must be stored, not compressed, so that no small file unfolds into a large one. After it, every tensor must own
the bytes it claims.
"""

from __future__ import annotations

import argparse
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..artifacts import UserError, sanitize

# where training code puts the weights inside a checkpoint; the average comes first, it is the better network
CONTAINERS = ("ema", "state_dict_ema", "state_dict", "model")
MOST_TENSORS = 20_000


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The named tensors of a `.pt`, `.pth`, `.bin` or `.safetensors` file, checked, on the CPU."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a checkpoint (.pt, .pth, .safetensors) or a diffusers folder")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else _load_torch(path)
    except Exception as error:  # a hostile file can raise anything from its reader
        why = "holds more than tensors" if isinstance(error, pickle.UnpicklingError) else "cannot be read"
        raise UserError(f"{path}: {why} ({_line(error)}); get it again, or save it as safetensors") from error
    if isinstance(found, Mapping):
        found = next((found[name] for name in CONTAINERS if isinstance(found.get(name), Mapping)), found)
    if not isinstance(found, Mapping) or not found:
        raise UserError(f"{path}: holds no table of named tensors; give a state dict saved with torch.save")
    if len(found) > MOST_TENSORS:
        raise UserError(f"{path}: holds {len(found):,} tensors, at most {MOST_TENSORS:,} are read; refused")
    for name, value in found.items():
        if (wrong := fault(name, value)) is not None:
            raise UserError(f"{path}: entry {sanitize(str(name), 80)!r} {wrong}; give a plain, sound state dict")
    return {name.removeprefix("module."): value.detach() for name, value in found.items()}


def _load_torch(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("holds compressed entries, which torch.save never writes")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("claims to hold more bytes than it has")
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)


def fault(name: object, value: object) -> str | None:
    """What keeps an entry from being a named, finite, dense tensor that owns the bytes it claims."""
    if not isinstance(name, str) or not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_complex():
        return "is not an ordinary dense tensor"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"claims {value.numel():,} values but holds fewer"
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        return "holds values that are not finite"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of an untrusted file."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({_line(error)}); get it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, got a {type(value).__name__}; get it again")
    return value


def _line(error: BaseException) -> str:
    """The first line of an error, short enough to print."""
    return sanitize(next(iter(str(error).strip().splitlines()), type(error).__name__), 160)
