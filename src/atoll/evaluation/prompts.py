"""Which prompts of the data images are generated for, and which class each stands for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import TypeVar

import numpy as np

from ..artifacts import Artifact
from ..data.classes import class_names, class_title
from ..data.index import Index

EACH = 4  # images of one prompt, where there are more prompts than images: images of one prompt are compared
T = TypeVar("T")


def choose_prompts(data: Artifact, count: int) -> tuple[list[str], np.ndarray]:
    """`count` prompts of the data, every different one in turn, and the class of each int64 [count], -1: none.

    A prompt is a caption, or a class by name for networks that read labels. Where classes have so many prompts that
    few images would be of each, some of every class are taken. Prompts of several classes count for none.
    """
    classes: dict[str, set[int]] = {}
    for prompts, label in zip(prompts_of(data), Index.of(data).labels.tolist(), strict=True):
        for prompt in prompts:
            classes.setdefault(prompt, set()).update([] if label < 0 else [label])
    if not classes:
        return [""] * count, np.full(count, -1)
    class_of = {prompt: labels.pop() if len(labels) == 1 else -1 for prompt, labels in classes.items()}
    by_class: dict[int, list[str]] = {}  # the most usual caption of an image is its first
    for prompt, label in sorted(class_of.items(), key=lambda one: one[1] % (1 << 31)):  # those without a class last
        by_class.setdefault(label, []).append(prompt)
    groups = spaced(list(by_class.values()), min(count, len(by_class)))
    if len(groups) == 1:
        chosen = spaced(groups[0], min(count, len(groups[0])))
    else:
        by_turns = (prompt for some in zip_longest(*groups) for prompt in some if prompt is not None)
        most = len(class_of) if len(class_of) * EACH <= count else max(len(groups), count // EACH)
        chosen = list(islice(by_turns, most))
    prompts = [chosen[i % len(chosen)] for i in range(count)]
    return prompts, np.array([class_of[prompt] for prompt in prompts])


def prompts_of(data: Artifact) -> list[list[str]]:
    """What stands for each sample to networks of this data: its captions, or where they read none, its class."""
    index = Index.of(data)
    if data.config["text"] is not None or data.config["labels"] is None:
        return index.captions
    names = class_names(data)
    return [[] if label < 0 else [class_title(label, names)] for label in index.labels.tolist()]


def spaced(things: Sequence[T], count: int) -> list[T]:
    """So many of the things, evenly apart, from the first."""
    return [things[i * len(things) // count] for i in range(count)]
