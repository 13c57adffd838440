"""The machines that contributors offer, from a TOML file with a table [[islands]] for each (docs/planning.md)."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..artifacts import UserError, explain
from ..training.memory import Machine, machine_named


class Island(BaseModel):
    """One contributor's machine. `gpu` fills in what is not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[A-Za-z0-9 _.-]+$")
    gpu: str | None = Field(default=None, description="GPU, Apple or CPU, by its usual name")
    memory: float | None = Field(default=None, gt=0, description="GiB that training may use")
    tflops: float | None = Field(default=None, gt=0, description="dense matrix rate, TFLOP/s")
    bfloat16: bool | None = None
    # given, not looked up here: the same islands must give the same plan wherever it is made
    eight_bit: bool = Field(default=False, description="has the extra torchao: Adam's moments in 8 bits save memory")
    hours: float = Field(gt=0)
    size: str | None = Field(default=None, description="such as xl/2; None: the largest that fits and gets done")
    objective: str | None = Field(default=None, description="such as ddpm; None: by --objectives")
    clusters: tuple[int, ...] | None = Field(default=None, description="None: any")

    @model_validator(mode="after")
    def _is_a_machine(self) -> Island:
        if self.gpu is not None:
            machine_named(self.gpu)
        elif self.memory is None or self.tflops is None:
            raise ValueError("needs a gpu, or memory (GiB) and tflops")
        return self

    @property
    def machine(self) -> Machine:
        if self.gpu is not None:
            known = machine_named(self.gpu)
        else:
            known = Machine(self.memory or 0.0, self.tflops or 0.0)
        given = {name: getattr(self, name) for name in ("memory", "tflops", "bfloat16")}
        return replace(known, **{name: value for name, value in given.items() if value is not None})

    @property
    def strength(self) -> float:
        """What it can compute in all, in TFLOP/s x hours."""
        return self.machine.tflops * self.machine.cores * self.hours

    def hours_for_each(self, clusters: int) -> float:
        """Hours for each of so many clusters; a CPU trains as many at a time as it has cores."""
        return self.hours / -(-clusters // self.machine.cores)


class IslandsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    islands: tuple[Island, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> IslandsFile:
        name, count = Counter(island.name for island in self.islands).most_common(1)[0]
        if count > 1:
            raise ValueError(f"two islands have the same name: {name}")
        return self


def read_islands(path: Path) -> tuple[Island, ...]:
    try:
        return IslandsFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).islands
    except ValidationError as error:
        raise UserError(f"--islands {path}: {explain(error)}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"--islands {path}: not a TOML file ({error}); docs/planning.md has an example") from error


def match(islands: Sequence[Island], sizes: Sequence[int]) -> dict[int, Island]:
    """An island for every cluster of `sizes` [K]: each island gets one before any gets two, then by strength.

    Clusters that an island names go first, and to such an island; then the largest first.
    """
    named = {k for island in islands for k in island.clusters or ()}
    if bad := sorted(k for k in named if not 0 <= k < len(sizes)):
        raise UserError(f"--islands: cluster {bad[0]} does not exist, the partition has 0 to {len(sizes) - 1}")
    chosen: dict[int, Island] = {}
    for cluster in sorted(range(len(sizes)), key=lambda k: (k not in named, -sizes[k], k)):
        able = [island for island in islands if island.clusters is None or cluster in island.clusters]
        if not able:
            raise UserError(f"--islands: no island takes cluster {cluster}; leave out `clusters` of one")
        taken = Counter(island.name for island in chosen.values())
        chosen[cluster] = max(
            able, key=lambda i: (i.clusters is not None, not taken[i.name], i.strength / (taken[i.name] + 1))
        )
    return chosen
