"""How a training is computed: on what, how precisely, in which pieces. Never what is learned.

An order says nothing of this: each island chooses, may change it on a resume, and writes it to provenance.json. On a
CPU the default follows from network and batch alone, so that the same order gives the same digest; on a GPU memory.py
chooses by what is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..artifacts import UserError
from .distributed import local_device

CONTEXT = 0.5  # GiB of a GPU that are CUDA's own, in no allocator's count


class ComputeConfig(BaseModel):
    """Settings that change speed and memory, and the result by rounding alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    device: str = Field("cpu", description="cpu, cuda, cuda:1 or mps")
    precision: Literal["float32", "bfloat16", "float8"] = Field(
        "float32",
        description="of activations and matrix products; weights, moments and sums are float32. float8: bfloat16, with "
        "the long products of the blocks in 8 bits (torchao)",
    )
    micro_batch: int | None = Field(None, gt=0, description="images per forward pass; none: the whole batch")
    checkpointed_blocks: int = Field(0, ge=0, description="blocks that keep no activations and compute them twice")
    compile: Literal["none", "blocks", "cuda-graph"] = Field(
        "none", description="blocks: each compiled; cuda-graph: that, and the step replayed as one CUDA graph"
    )
    moments: Literal["float32", "8-bit"] = Field("float32", description="storage of Adam's moments (8-bit: torchao)")
    threads: int = Field(1, gt=0, description="CPU threads; sums depend on it, so it is a constant by default")

    @property
    def savings(self) -> list[str]:
        """What lowers the need of memory, besides smaller micro-batches, in words."""
        parts = [f"{self.checkpointed_blocks} blocks checkpointed"] if self.checkpointed_blocks else []
        return parts if self.moments == "float32" else [*parts, f"{self.moments} moments"]

    @property
    def in_words(self) -> str:
        """Such as `micro-batch 32, bfloat16, 8-bit moments, compiled`."""
        micro_batch = "whole batches" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        compiled = {"none": [], "blocks": ["compiled"], "cuda-graph": ["one CUDA graph"]}[self.compile]
        return ", ".join([micro_batch, self.precision, *self.savings, *compiled])

    def autocast(self) -> AbstractContextManager[None]:
        """bfloat16 for the network's activations and matrix products unless it is float32; losses stay float32."""
        enabled = self.precision != "float32"
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=enabled)

    @field_validator("compile", mode="before")
    @classmethod
    def _none_is_a_name(cls, value: object) -> object:
        return "none" if value is None else value  # `--set compile=none`: the command line reads none as nothing


@contextmanager
def opened(compute: ComputeConfig, memory: float | None = None) -> Iterator[torch.device]:
    """The device of a training, ready to use; thread count and memory limit (GiB of a GPU) are restored afterwards."""
    device = open_device(compute)
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(compute.threads)
        elif device.type == "cuda":
            torch.cuda.set_device(device)
            if memory is not None:
                total = torch.cuda.get_device_properties(device).total_memory / 2**30
                torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, memory - CONTEXT) / total), device)
        yield device
    finally:
        torch.set_num_threads(threads)
        if device.type == "cuda" and memory is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def open_device(compute: ComputeConfig) -> torch.device:
    """The device, with its number where it has one; UserError if it cannot compute so."""
    try:
        device = torch.empty(1, device=local_device(compute.device)).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {compute.device}: not usable here ({reason}); use cpu") from error
    if compute.compile == "cuda-graph" and device.type != "cuda":
        raise UserError(f"compile cuda-graph: CUDA graphs need a CUDA device, not {device}; use blocks or none")
    if compute.precision == "float8" and not (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    ):
        raise UserError(f"precision float8: {device} multiplies no 8-bit numbers, as an RTX 4090 does; use bfloat16")
    if (compute.moments == "8-bit" or compute.precision == "float8") and find_spec("torchao") is None:
        raise UserError("8-bit moments and float8: pip install 'atoll-diffusion[torchao]'; or use float32")
    return device


def best_device(name: str | None) -> str:
    """The device a user names; without a name cuda if there is one, else cpu."""
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def kind_of(device: str) -> str:
    """`cuda` of `cuda:1`."""
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device {device}: no such kind of device; use cpu, cuda, cuda:1 or mps") from error


def usable(device: str) -> bool:
    """Whether this machine has such a device."""
    kind = kind_of(device)
    if kind == "cuda":
        return torch.cuda.is_available() and (torch.device(local_device(device)).index or 0) < torch.cuda.device_count()
    return kind == "cpu" or (kind == "mps" and torch.backends.mps.is_available())


def device_name(device: torch.device) -> str:
    """A GPU's name, or the kind of device: for provenance."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
