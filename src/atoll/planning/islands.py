"""Who takes part: the machines contributors offer, from islands.yaml.

islands:
  - {name: anna, gpu: RTX 4090, hours: 72, price: 0.40}
  - {name: lab, gpu: A100-80GB, hours: 48, size: xl/2, objective: ddpm}
  - {name: shed, memory: 12, tflops: 30, bandwidth: 400, hours: 200, eight_bit: true, clusters: [3]}
  - {name: mia, gpu: M2 Max 64GB, hours: 20}
  - {name: old, gpu: CPU 8 cores, hours: 100}
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..artifacts import UserError, explain
from ..training.machines import Machine, bandwidth_for, machine_named


class Island(BaseModel):
    """One contributor's machine. `gpu` fills in what is not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[A-Za-z0-9 _.-]+$")
    gpu: str | None = Field(default=None, description="a card, an Apple M... or a CPU, as people write it")
    memory: float | None = Field(default=None, gt=0, description="GiB that training may use")
    tflops: float | None = Field(default=None, gt=0, description="dense matrix rate, TFLOP/s")
    bandwidth: float | None = Field(default=None, gt=0, description="of its memory, GB/s; None: as cards of its tflops")
    bfloat16: bool | None = None
    # said by the contributor, not looked up here: the same islands must give the same plan wherever it is made
    eight_bit: bool = Field(default=False, description="has the extra torchao: Adam's moments in 8 bits save memory")
    hours: float = Field(gt=0)
    price: float | None = Field(default=None, ge=0, description="per hour, in whatever currency")
    size: str | None = Field(default=None, description="such as xl/2; None: the largest that fits and gets done")
    objective: str | None = Field(default=None, description="such as ddpm; None: by the mix")
    clusters: tuple[int, ...] | None = Field(default=None, description="None: any")

    @model_validator(mode="after")
    def _is_a_machine(self) -> Island:
        if self.gpu is not None:
            machine_named(self.gpu)
        if self.gpu is None and (self.memory is None or self.tflops is None):
            raise ValueError("needs a gpu, or memory (GiB) and tflops")
        return self

    @property
    def machine(self) -> Machine:
        if self.gpu is not None:
            known = machine_named(self.gpu)
        else:
            assert self.memory is not None, "checked above"
            assert self.tflops is not None, "checked above"
            known = Machine(self.memory, self.tflops, bandwidth_for(self.tflops))
        said = {name: getattr(self, name) for name in ("memory", "tflops", "bandwidth", "bfloat16")}
        return replace(known, **{name: value for name, value in said.items() if value is not None})

    @property
    def strength(self) -> float:
        """What it can compute in all, in TFLOP/s x hours."""
        return self.machine.tflops * self.machine.cores * self.hours

    def hours_for_each(self, clusters: int) -> float:
        """Hours for each of so many clusters; on a CPU as many train side by side as it has cores."""
        return self.hours / -(-clusters // self.machine.cores)


class IslandsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    islands: tuple[Island, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> IslandsFile:
        names = [island.name for island in self.islands]
        if len(set(names)) < len(names):
            raise ValueError(f"two islands have the same name: {sorted(n for n in names if names.count(n) > 1)[0]}")
        return self


def read_islands(path: Path) -> tuple[Island, ...]:
    """Islands from a YAML or TOML file."""
    try:
        content = parse(path)
    except FileNotFoundError as error:
        raise UserError(f"--islands {path}: no such file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--islands {path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"--islands {path}: cannot be read ({error.strerror}); pass a YAML or TOML file") from error
    try:
        return IslandsFile.model_validate(content).islands
    except ValidationError as error:
        raise UserError(f"--islands {path}: {explain(error)}") from error


def parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"--islands {path}: not valid TOML ({error})") from error
    try:
        import yaml
    except ImportError as error:
        raise UserError(f"--islands {path}: reading YAML needs PyYAML; pip install pyyaml, or write TOML") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--islands {path}: not valid YAML ({' '.join(str(error).split())[:120]})") from error
