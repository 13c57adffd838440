"""The settings of a partition."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PartitionConfig(BaseModel):
    """How to cut. `by` label and random are baselines."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    clusters: int = Field(default=8, gt=0)
    by: Literal["features", "label", "random"] = "features"
    balance: float | None = Field(default=2.0, ge=1, description="largest over smallest cluster; None: no bound")
    cells: int = Field(default=1024, gt=0, description="fine centroids; fewer are used for a small set")
    seed: int = Field(default=0, ge=0)
    threads: int = Field(default=1, gt=0, description="faiss threads; part of the result's last bits")
    shard_rows: int = Field(default=4096, gt=0)
