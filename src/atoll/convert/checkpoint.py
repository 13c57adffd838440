"""Read a stranger's weights without running a stranger's code.

A `.pt` file is a zip that holds a pickle. torch's `weights_only` unpickler builds tensors and plain containers
and nothing else; argparse.Namespace, which DiT's own training checkpoints hold, is the one class let in. Before
it runs, the zip is checked: entries are stored, not compressed, so that no small file can unfold into a large
one. After it, every tensor must own as many bytes as it claims.
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
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..artifacts import UserError

# where training code puts the weights inside a checkpoint; the average comes first, it is the better network
CONTAINERS = ("ema", "state_dict_ema", "state_dict", "model")
MOST_TENSORS = 20_000


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The named tensors of a `.pt`, `.pth`, `.bin` or `.safetensors` file, checked, on the CPU."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a checkpoint (.pt, .pth, .safetensors) or a diffusers folder")
    loaded = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    return check_tensors(_unwrap(loaded, path), path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError, MemoryError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({_line(error)}); get it again") from error


def _read_torch(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"{path}: not a complete torch checkpoint ({_line(error)}); get it again, or save it again with torch.save"
        ) from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UserError(f"{path}: holds compressed entries, which torch.save never writes; refused")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise UserError(f"{path}: claims to hold more bytes than it has; refused")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds more than tensors ({_line(error)}); refused, ask for a safetensors file"
        ) from error
    except Exception as error:  # a hostile pickle can raise anything from the unpickler
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {_line(error)}); get it again") from error


def _unwrap(loaded: Any, path: Path) -> Mapping[str, Any]:
    for name in CONTAINERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
            break
    if not isinstance(loaded, Mapping) or not loaded:
        raise UserError(f"{path}: holds no table of named tensors; give a state dict saved with torch.save")
    return loaded


def check_tensors(found: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """Refuse what is not a plain table of finite dense tensors that own the bytes they claim."""
    if len(found) > MOST_TENSORS:
        raise UserError(f"{path}: holds {len(found):,} tensors, more than any network we read; refused")
    tensors: dict[str, Tensor] = {}
    for name, value in found.items():
        shown = f"{path}: entry {str(name)[:80]!r}"
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{shown} is a {type(value).__name__}, not a tensor; give a plain state dict")
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_complex():
            raise UserError(f"{shown} is not an ordinary dense tensor; save it again as float32")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise UserError(f"{shown} claims {value.numel():,} values but holds fewer; refused")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"{shown} holds values that are not finite; the checkpoint is broken, use another one")
        tensors[name.removeprefix("module.")] = value.detach()
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object written by somebody else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: file is missing; give a complete diffusers folder") from error
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({_line(error)}); get it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, got a {type(value).__name__}; get it again")
    return value


def _line(error: BaseException) -> str:
    """The first line of an error, short enough to print."""
    text = str(error).strip().splitlines()
    return text[0][:160] if text else type(error).__name__
