"""Find pretrained weights by a name that means the same on every machine.

An id is `name@digest`: what it is called, and the first 12 digits of the sha256 of its weights. Manifests hold
ids, never paths. A name is looked for
  1. as a folder, if it is one,
  2. below the folders in $ATOLL_MODELS,
  3. where this machine has last seen weights of that digest,
  4. on the Hugging Face hub, if it reads owner/name,
and weights of another digest than the id's are refused: latents of two autoencoders do not mix.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TypeVar

import torch

from ..artifacts import UserError, file_digest, write_atomic
from ..artifacts.store import cache_folder

DIGEST_LENGTH = 12
ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?@[0-9a-f]{12}", re.ASCII)  # as `Pretrained.id` has it
EXTRA = "pip install 'atoll-diffusion[diffusers]'"
Made = TypeVar("Made")


@dataclass(frozen=True)
class Pretrained:
    """A folder of weights, and its id in manifests."""

    id: str
    folder: Path


def locate(name: str) -> Pretrained:
    """The folder for a name, a path or an id; UserError where there is none or its weights differ."""
    label, _, wanted = name.partition("@")
    folder = _local_folder(label, wanted)
    if folder is None and label.count("/") == 1 and not label.startswith((".", "/")):
        folder = _download(label)
    if folder is None:
        raise UserError(
            f"{name}: no such model; give its folder, or set ATOLL_MODELS to the folder that holds it, "
            "or name it owner/name on the Hugging Face hub"
        )
    digest = weights_digest(folder)
    if wanted and digest != wanted:
        raise UserError(f"{folder}: its weights are {digest}, expected {wanted}; get the model that {name} names")
    note, place = _note(digest), str(folder.resolve())  # an id in a manifest finds its weights again on this machine
    if not (note.is_file() and note.read_text() == place):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(note, place.encode())
    return Pretrained(f"{folder.resolve().name if Path(label).is_dir() else label}@{digest}", folder)


def is_kept(id: str) -> bool:
    """Whether this machine has the weights of an id from elsewhere: by name and digest, never by a path."""
    label, _, wanted = id.partition("@")
    if not ID.fullmatch(id):
        return False
    folder = _local_folder(label, wanted)
    return folder is not None and weights_digest(folder) == wanted


def weights_digest(folder: Path) -> str:
    """Digest of all safetensors files of a folder, by name and content."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: holds no .safetensors file; only such weights are read")
    return files_digest(files)


def files_digest(files: Sequence[Path]) -> str:
    """First digits of the sha256 of one file, or of the names and digests of several."""
    digests = [file_digest(file) for file in files]
    if len(files) > 1:
        together = "".join(f"{file.name} {digest}\n" for file, digest in zip(files, digests, strict=True))
        digests = [hashlib.sha256(together.encode()).hexdigest()]
    return digests[0][:DIGEST_LENGTH]


def fetched_file(url: str, option: str) -> Path:
    """A file of weights by its official address: below $ATOLL_MODELS, in torch's cache, or fetched into it.

    Its name may end in the first digits of its sha256, which are checked. `option` is the one that needs it.
    """
    name = url.rpartition("/")[2]
    cached = Path(torch.hub.get_dir()) / "checkpoints" / name
    places = [place for folder in model_folders() for place in (folder / name, *sorted(folder.glob(f"*/{name}")))]
    if found := next((place for place in [*places, cached] if place.is_file()), None):
        return found
    cached.parent.mkdir(parents=True, exist_ok=True)
    digits = re.search(r"-([0-9a-f]{8,})\.pth$", name)
    try:
        torch.hub.download_url_to_file(url, str(cached), None if digits is None else digits[1], progress=False)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{option}: its weights cannot be had ({first_line(error)}); fetch {url} elsewhere, and put it "
            "into a folder that ATOLL_MODELS names"
        ) from error
    return cached


def load_checkpoint(option: str, files: Sequence[Path], make: Callable[..., Made], device: str = "cpu") -> Made:
    """What `make` builds of some files of tensors; one line where they hold something else."""
    try:
        return make(*(torch.load(file, map_location=device, weights_only=True) for file in files))
    except (UnpicklingError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        names = " and ".join(map(str, files))
        raise UserError(f"{option}: {names} are not its weights ({first_line(error)})") from error


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def model_folders() -> Iterator[Path]:
    """The folders of $ATOLL_MODELS."""
    return (Path(place) for place in os.environ.get("ATOLL_MODELS", "").split(os.pathsep) if place)


def _local_folder(label: str, wanted: str) -> Path | None:
    if Path(label).is_dir():
        return Path(label)
    for place in model_folders():
        for folder in (place / label, place):
            if folder.is_dir() and folder.name == Path(label).name:
                return folder
    note = _note(wanted)
    return Path(note.read_text()) if wanted and note.is_file() and Path(note.read_text()).is_dir() else None


def _note(digest: str) -> Path:
    return cache_folder() / "models" / f"{digest}.path"


def _download(label: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(f"{label}: downloading models needs an extra: {EXTRA}") from error
    try:  # errors of the hub are OSErrors
        return Path(snapshot_download(label, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{label}: cannot be had from the Hugging Face hub ({first_line(error)}); give a folder"
        ) from error
