"""Clustering methods: one class each, registered by name. docs/extend.md shows how to add one."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, PrivateAttr
from safetensors.numpy import load_file, save_file

from ..artifacts import UserError, canonical_json, suggest

METHODS: dict[str, type[Method]] = {}
OPTIONS, TENSORS = "method.json", "centroids.safetensors"
Array = np.ndarray
State = dict[str, np.ndarray]


class Method(BaseModel):
    """How samples are assigned to clusters. Fields are options, which `--set options.NAME=VALUE` changes.

    All that `assign` needs is in the options and in `state`, the arrays that `fit` returned. Both are saved with the
    partition, so that samples added later, `--onto`, are assigned by the same rule.
    """

    model_config = ConfigDict(extra="forbid")
    name: ClassVar[str]
    _state: State = PrivateAttr(default_factory=dict)

    @property
    def state(self) -> State:
        return self._state

    @abstractmethod
    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        """Learn K clusters from training samples: features float32 [N, D], labels int64 [N] (-1: none)."""

    @abstractmethod
    def assign(self, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        """The cluster int64 [N] of each sample; it depends on that sample and the state only."""

    def save(self, folder: Path) -> None:
        (folder / OPTIONS).write_bytes(canonical_json({"method": self.name, "options": self.model_dump()}) + b"\n")
        save_file(self._state, folder / TENSORS)

    @staticmethod
    def load(options: Path, tensors: Path) -> Method:
        """A method as `save` left it; its class must be registered, so a plugin's must be loaded first."""
        saved = json.loads(options.read_bytes())
        method = method_named(saved["method"]).model_validate(saved["options"])
        return method.with_state(load_file(tensors))

    def fitted(self, features: np.ndarray, labels: np.ndarray, ids: Sequence[str], clusters: int, seed: int) -> Self:
        return self.with_state(self.fit(features, labels, ids, clusters, seed))

    def with_state(self, state: State) -> Self:
        self._state = {name: np.ascontiguousarray(value) for name, value in state.items()}
        return self


Class = TypeVar("Class", bound=type[Method])


def clustering(name: str) -> Callable[[Class], Class]:
    """Register a Method class: `atoll partition --method NAME` uses it."""

    def register(method: Class) -> Class:
        method.name = name
        METHODS[name] = method
        return method

    return register


def method_named(name: str) -> type[Method]:
    if name not in METHODS:
        raise UserError(f"--method {name}: not known; {suggest(name, list(METHODS))}, or add it with --plugin FILE")
    return METHODS[name]


@clustering("random")
class Random(Method):
    """A baseline: a hash of (seed, id). A sample has the same cluster whatever else is in the set."""

    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        return {"random": np.array([seed, clusters])}

    def assign(self, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        seed, clusters = self.state["random"].tolist()
        return np.array([random_cluster(identity, seed, clusters) for identity in ids], dtype=np.int64)


@clustering("label")
class Label(Random):
    """A baseline: whole classes, the largest first, each to the smallest cluster; samples without one at random."""

    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        counts = np.bincount(labels[labels >= 0])
        classes = np.flatnonzero(counts)
        if len(classes) == 0:
            raise UserError("--method label: no sample of the data has a label; use --method kmeans")
        if len(classes) < clusters:
            raise UserError(f"-k {clusters}: there are only {len(classes)} labels for --method label; use a smaller -k")
        sizes, table = np.zeros(clusters), np.full(len(counts), -1)
        for label in classes[np.lexsort((classes, -counts[classes]))]:
            table[label] = sizes.argmin()
            sizes[table[label]] += counts[label]
        return {"table": table, **super().fit(features, labels, ids, clusters, seed)}

    def assign(self, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        table = np.append(self.state["table"], -1)  # of an unknown label, and of none
        found = table[np.where((labels >= 0) & (labels < len(table)), labels, len(table) - 1)]
        return np.where(found >= 0, found, super().assign(features, labels, ids))


def random_cluster(identity: str, seed: int, clusters: int) -> int:
    digest = hashlib.sha256(f"cluster:{seed}:{identity}".encode()).digest()
    return int.from_bytes(digest[:8], "big") * clusters >> 64
