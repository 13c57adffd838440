"""A work order: everything an island needs to know, in one file it can be handed."""

from __future__ import annotations

from errno import EINVAL, EISDIR, ENOTDIR
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..artifacts import Reference, Store, UserError, canonical_json, explain, sha256_bytes
from ..data.space import LatentConfig, TextConfig
from ..diffusion import Objective
from ..models.dit import DiTConfig
from ..training.config import TrainConfig

MOST_BYTES = 64 * 2**20  # of an order; a vocabulary may be long
NOT_A_FILE = (EINVAL, EISDIR, ENOTDIR)


class ShardRef(BaseModel):
    """One shard of this order's cluster: where it lies relative to the run, and what it must hash to."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    split: Literal["train", "validation"]


class Acceptance(BaseModel):
    """What `admit` checks on the holdout, which no island has seen.

    The validation loss is the squared error of the bridged velocity on the sampling path. Its unit is the error of
    the best denoiser for a Gaussian with the mean and variance of each latent value of the cluster. Noise experts are
    weak near t = 1, which is included, so an honest one may lie somewhat above 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    times: int = Field(16, gt=0, description="times per holdout sample")
    max_ratio_to_gaussian: float = Field(1.5, gt=0, description="largest error, as a ratio to the Gaussian's")


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[2] = 2
    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$", description="such as 03")
    cluster: int | None = Field(None, ge=0, description="None: all of the data, for a monolith")
    clusters: int = Field(gt=0, description="how many the partition has")
    data: str = Field(description="digest of the data artifact")
    partition: str = Field(description="digest of the partition artifact")
    latent: LatentConfig
    text: TextConfig | None = None
    shards: tuple[ShardRef, ...] = Field(min_length=1)
    architecture: DiTConfig
    objective: Objective
    training: TrainConfig
    acceptance: Acceptance = Acceptance()
    license: str | None = Field(None, description="of the data, to travel with the expert")
    init: Reference | None = Field(None, description="expert of the run to begin from; None: random weights")

    @model_validator(mode="after")
    def _fits_the_latents(self) -> Order:
        if tuple(self.architecture.latent) != tuple(self.latent.shape):
            raise ValueError(f"architecture.latent {self.architecture.latent} is not the data's {self.latent.shape}")
        return self

    def digest(self) -> str:
        return sha256_bytes(canonical_json(self.model_dump(mode="json")))

    def to_bytes(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"


def read_order(place: str | Path) -> tuple[Order, Store]:
    """An order file, local or remote, and the run it belongs to: the folder above its own."""
    folder, slash, name = str(place).rpartition("/")
    store = Store.at(folder or slash or ".")  # 03.json lies in ".", /03.json in "/"
    try:
        content = store.read(name, None if store.is_local else MOST_BYTES)
        if len(content) > MOST_BYTES:
            raise UserError(f"{place}: larger than {MOST_BYTES:,} bytes, so no order; check the path")
        order = Order.model_validate_json(content)
        order.digest()
    except FileNotFoundError as error:
        raise UserError(f"{place}: no such order; `atoll plan` writes them") from error
    except OSError as error:
        if error.errno not in NOT_A_FILE:
            raise
        raise UserError(f"{place}: is not a file; give one order such as orders/00.json") from error
    except ValidationError as error:
        raise UserError(f"{place}: not a valid order ({explain(error)}); get it again") from error
    except (ValueError, RecursionError) as error:  # NaN, or half a character
        raise UserError(f"{place}: not a valid order (it holds what no JSON file can hold); get it again") from error
    return order, store.parent
