"""The settings of a partition."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..artifacts import UserError, explain
from . import kmeans as _registers_itself  # noqa: F401
from .methods import Method, method_named

LARGEST_SEED = 2**31 - 1  # faiss keeps it in 32 bits


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
        known = method_named(self.method).model_fields
        if unknown := [name for name in self.options if name not in known]:
            there = f"its options are {', '.join(known)}" if known else "it has none"
            raise UserError(f"--method {self.method}: has no option {unknown[0]}; {there}")
        try:
            self.make_method()
        except ValidationError as error:
            raise UserError(f"options.{explain(error)}; correct it") from error
        return self

    def make_method(self) -> Method:
        return method_named(self.method).model_validate(self.options)

    def resolved(self) -> dict[str, Any]:
        """All settings for the manifest, the method's defaults included."""
        return {**self.model_dump(), "options": self.make_method().model_dump()}
