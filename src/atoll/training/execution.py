"""How a training is computed: on what, how precisely, in which pieces. Never what is learned.

An order says nothing of this: every island chooses its own, may change it when it goes on elsewhere, and writes it
to provenance.json. On a CPU the default is a constant, so that the same order gives the same digest; on a GPU
memory.py chooses by what is free.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..artifacts import UserError
from .team import placed_on


class Execution(BaseModel):
    """Settings that change speed and memory, and the result by rounding alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    device: str = Field("cpu", description="cpu, cuda, cuda:1 or mps")
    precision: Literal["float32", "bfloat16", "float8"] = Field(
        "float32",
        description="of activations and matrix products; weights, moments and sums are float32. float8: bfloat16, with "
        "the long products of a block in 8 bits (torchao)",
    )
    micro_batch: int | None = Field(None, gt=0, description="images per forward pass; none: the whole batch")
    recomputed_blocks: int = Field(0, ge=0, description="blocks that keep no activations and compute them twice")
    compiling: Literal["none", "blocks", "graph"] = Field(
        "none", description="blocks: each compiled; graph: that, and the step replayed as one CUDA graph"
    )
    moments: Literal["float32", "8-bit"] = Field("float32", description="storage of Adam's moments (8-bit: torchao)")
    samples: Literal["device", "host"] = Field("host", description="where the cluster's samples lie")
    threads: int = Field(1, gt=0, description="CPU threads; sums depend on it, so it is a constant by default")

    @property
    def savings(self) -> list[str]:
        """What is done to need less memory, besides smaller micro-batches, in words."""
        parts = [f"{self.recomputed_blocks} blocks recomputed"] if self.recomputed_blocks else []
        if self.moments != "float32":
            parts.append(f"{self.moments} moments")
        return parts

    @property
    def in_words(self) -> str:
        """Such as `micro-batch 32, bfloat16, 8-bit moments, compiled`."""
        micro_batch = "whole batches" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        compiling = {"none": [], "blocks": ["compiled"], "graph": ["one CUDA graph"]}[self.compiling]
        return ", ".join([micro_batch, self.precision, *self.savings, *compiling])

    @field_validator("compiling", mode="before")
    @classmethod
    def _none_is_a_name(cls, value: object) -> object:
        return "none" if value is None else value  # `--set compiling=none`: the command line reads none as nothing


def named_or_best(name: str | None) -> str:
    """The device a user names; for who names none, cuda if there is one."""
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def open_device(execution: Execution) -> torch.device:
    """The device of an execution, ready to use; on a CPU with its number of threads."""
    try:
        # with its number, where it has one: `cuda` alone is not a device everywhere
        device = torch.empty(1, device=placed_on(execution.device)).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {execution.device}: not usable here ({reason}); use cpu") from error
    if execution.compiling == "graph" and device.type != "cuda":
        raise UserError(f"compiling graph: CUDA graphs need a CUDA device, not {device}; use blocks or none")
    if execution.precision == "float8" and not (device.type == "cuda" and multiplies_float8(device)):
        raise UserError(
            f"precision float8: {device} multiplies no 8-bit numbers, as an H100 or RTX 4090 does; use bfloat16"
        )
    for option, value in (("moments", "8-bit"), ("precision", "float8")):
        if getattr(execution, option) == value and find_spec("torchao") is None:
            raise UserError(f"{option} {value}: needs an extra: pip install 'atoll-diffusion[torchao]'")
    if device.type == "cpu":
        torch.set_num_threads(execution.threads)
    elif device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def multiplies_float8(device: torch.device) -> bool:
    """Whether a CUDA card multiplies 8-bit numbers with a scale for each row: Ada's and Hopper's and later do."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def autocast(execution: Execution) -> AbstractContextManager[None]:
    """bfloat16 for the network's activations and matrix products unless it is float32; losses stay float32."""
    enabled = execution.precision != "float32"
    return torch.autocast(torch.device(execution.device).type, torch.bfloat16, enabled=enabled)


def device_name(device: torch.device) -> str:
    """What provenance says of a device: a GPU's name, or its kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
