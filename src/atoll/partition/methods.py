"""Clustering methods: one class each, registered by name. docs/extend.md shows how to add one."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..artifacts import UserError, explain, suggest

LARGEST_SEED = 2**31 - 1  # faiss keeps it in 32 bits
METHODS: dict[str, type[Method]] = {}
Array = np.ndarray
State = dict[str, np.ndarray]


class Method(BaseModel):
    """How samples are assigned to clusters. Fields are options, which `--set options.NAME=VALUE` changes.

    All that `assign` needs is in the options and in the arrays that `fit` returns. Both are saved with the partition,
    so that samples added later, `--onto`, are assigned by the same rule.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @abstractmethod
    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        """Learn K clusters from training samples: features float32 [N, D], labels int64 [N] (-1: none)."""

    @abstractmethod
    def assign(self, state: State, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        """The cluster int64 [N] of each sample, by itself and the state only; -1 where the method has none for it."""


Class = TypeVar("Class", bound=type[Method])


def clustering(name: str) -> Callable[[Class], Class]:
    """Register a Method class: `atoll partition --method NAME` uses it."""

    def register(method: Class) -> Class:
        METHODS[name] = method
        return method

    return register


class PartitionConfig(BaseModel):
    """How to cluster: a method by name, with its own options."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    clusters: int = Field(default=8, gt=0, description="how many")
    method: str = Field(default="kmeans", description="kmeans, the baselines label and random, or a plugin's")
    options: dict[str, Any] = Field(default={}, description="of the method, such as options.cells")
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED, description="of the method and of the order of samples")
    shard_rows: int = Field(default=4096, gt=0, description="samples per shard")

    @model_validator(mode="after")
    def _method_has_these_options(self) -> PartitionConfig:
        self.make_method()
        return self

    def make_method(self) -> Method:
        from . import kmeans as _registers_itself  # noqa: F401  faiss is heavy

        if self.method not in METHODS:
            hint = suggest(self.method, list(METHODS))
            raise UserError(f"--method {self.method}: not known; {hint}, or add it with --plugin FILE")
        known = METHODS[self.method]
        try:
            return known.model_validate(self.options)
        except ValidationError as error:
            there = ", ".join(known.model_fields) or "none"
            raise UserError(f"options.{explain(error)}; options of --method {self.method}: {there}") from error

    def resolved(self) -> dict[str, Any]:
        """All settings for the manifest, the method's defaults included."""
        return {**self.model_dump(), "options": self.make_method().model_dump()}


@clustering("random")
class Random(Method):
    """A baseline: a hash of (seed, id). A sample has the same cluster whatever else is in the set."""

    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        return {"random": np.array([seed, clusters])}

    def assign(self, state: State, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        seed, clusters = state["random"].tolist()
        return np.array([random_cluster(identity, seed, clusters) for identity in ids], dtype=np.int64)


@clustering("label")
class Label(Method):
    """A baseline: whole classes, the largest first, each to the smallest cluster. State: table int64 [labels]."""

    def fit(self, features: Array, labels: Array, ids: Sequence[str], clusters: int, seed: int) -> State:
        counts = np.bincount(labels[labels >= 0])
        classes = np.flatnonzero(counts)
        if len(classes) < clusters:
            raise UserError(f"-k {clusters}: there are only {len(classes)} labels for --method label; use a smaller -k")
        sizes, table = np.zeros(clusters), np.full(len(counts), -1)
        for label in classes[np.lexsort((classes, -counts[classes]))]:
            table[label] = sizes.argmin()
            sizes[table[label]] += counts[label]
        return {"table": table}

    def assign(self, state: State, features: Array, labels: Array, ids: Sequence[str]) -> Array:
        known = (labels >= 0) & (labels < len(state["table"]))
        return np.where(known, state["table"][np.where(known, labels, 0)], -1)


def random_cluster(identity: str, seed: int, clusters: int) -> int:
    digest = hashlib.sha256(f"cluster:{seed}:{identity}".encode()).digest()
    return int.from_bytes(digest[:8], "big") * clusters >> 64
