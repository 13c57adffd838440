"""Captions become conditions: the `words` encoder, and what any text encoder must offer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..artifacts import UserError, suggest
from ..models.text_encoders import load_pretrained_text
from .shards import pack_captions
from .space import TextConfig

MOST_WORDS = 65_536  # a larger vocabulary is not a toy any more: use a pretrained text encoder


class TextEncoder(Protocol):
    """Captions to the tensors of a Condition: {"tokens", "mask"} or {"pooled"}, the batch first."""

    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]: ...


class Words:
    """Caption words as ids of a vocabulary kept with the data; each network learns its own table."""

    def __init__(self, space: TextConfig) -> None:
        self.space = space

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.space.vocabulary or ())}

    def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return word_ids(captions, self._ids, self.space.length)

    def knows(self, caption: str) -> bool:
        """Whether networks have a row for each word, and room for all."""
        words = split_words(caption)
        return len(words) <= self.space.length and self._ids.keys() >= set(words)


def split_words(caption: str) -> list[str]:
    """Lower-case words: runs of letters, digits and apostrophes, whatever the script."""
    return re.findall(r"[\w']+", caption.lower())


def word_ids(captions: Sequence[str], ids: Mapping[str, int], length: int) -> dict[str, Tensor]:
    """`tokens` int64 [B, length] word ids, 0 where `mask` bool [B, length] is False."""
    tokens = torch.zeros(len(captions), length, dtype=torch.int64)
    mask = torch.zeros(len(captions), length, dtype=torch.bool)
    for row, caption in enumerate(captions):
        words = split_words(caption)
        for word in words:
            if word not in ids:
                raise UserError(f"prompt {caption!r}: unknown word {word!r}; {suggest(word, list(ids))}")
        if len(words) > length:
            raise UserError(f"prompt {caption!r}: {len(words)} words, the model takes at most {length}; shorten it")
        tokens[row, : len(words)] = torch.tensor([ids[word] for word in words], dtype=torch.int64)
        mask[row, : len(words)] = True
    return {"tokens": tokens, "mask": mask}


def words_space(captions: Iterable[str]) -> TextConfig:
    """The text space of the words of these captions."""
    words, longest = set[str](), 1
    for caption in captions:
        found = split_words(caption)
        words.update(found)
        longest = max(longest, len(found))
        if len(words) > MOST_WORDS:
            raise UserError(
                f"--text-encoder words: the captions hold more than {MOST_WORDS:,} different words; "
                "use a pretrained text encoder"
            )
    return TextConfig(encoder="words", kind="words", length=longest, width=None, vocabulary=tuple(sorted(words)))


def pretrained_space(name: str) -> TextConfig:
    """The text space of a pretrained encoder such as clip:PLACE or minilm."""
    encoder = load_pretrained_text(name)
    return TextConfig(
        encoder=encoder.id, kind=encoder.kind, length=encoder.length, width=encoder.width, vocabulary=None
    )


def text_encoder(space: TextConfig, device: str = "cpu") -> TextEncoder:
    """The encoder that made this text space, for the captions of a shard or the prompts of a user."""
    return Words(space) if space.kind == "words" else load_pretrained_text(space.encoder, device)


def encode_conditions(
    text: TextConfig, captions: Sequence[Sequence[str]], storage: Literal["cache", "online"], device: str
) -> dict[str, Tensor]:
    """The text of a shard: `captions` offsets int64 [N + 1], and all captions embedded, or packed as they are."""
    offsets = torch.tensor([0, *(len(texts) for texts in captions)], dtype=torch.int64).cumsum(0)
    flat = [caption for texts in captions for caption in texts]
    if storage == "online":
        return {"captions": offsets, **pack_captions(flat)}
    # each is embedded once: images of a class share theirs. The empty one is for a shard without captions
    place = {caption: row for row, caption in enumerate(dict.fromkeys([*flat, ""]))}
    encoded = text_encoder(text, device).encode(list(place))
    rows = torch.tensor([place[caption] for caption in flat], dtype=torch.int64)
    return {"captions": offsets, **{name: value.cpu()[rows] for name, value in encoded.items()}}
