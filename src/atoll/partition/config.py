"""The settings of a partition."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

LARGEST_SEED = 2**31 - 1  # faiss keeps it in 32 bits


class PartitionConfig(BaseModel):
    """How to cut. `by` label and random are baselines, and deal out whole classes or hashes: they keep no bound."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    clusters: int = Field(default=8, gt=0, description="how many")
    by: Literal["features", "label", "random"] = Field(default="features", description="label, random: baselines")
    balance: float | None = Field(
        default=2.0, ge=1, allow_inf_nan=False, description="largest over smallest cluster, at most; none: no bound"
    )
    cells: int = Field(default=1024, gt=0, description="fine centroids; fewer are used for a small set")
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED, description="of k-means")
    threads: int = Field(default=1, gt=0, description="faiss threads; part of the result's last bits")
    shard_rows: int = Field(default=4096, gt=0, description="samples per shard")

    @property
    def insists_on_balance(self) -> bool:
        """Whether somebody asked for the bound; the usual one is only aimed at."""
        return "balance" in self.model_fields_set and self.balance is not None

    @model_validator(mode="before")
    @classmethod
    def _no_bound_by_default_where_none_is_kept(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("by", "features") != "features":
            return {"balance": None, **values}
        return values

    @field_validator("balance")
    @classmethod
    def _promise_only_what_is_kept(cls, balance: float | None, info: ValidationInfo) -> float | None:
        by = info.data.get("by", "features")
        if balance is not None and by != "features":
            raise ValueError(f"only a cut by features can keep a bound; leave it out with --by {by}")
        return balance
