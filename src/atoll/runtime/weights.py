"""An expert's weights as one piece of memory, and the way from its file into it.

Experts of any architecture fit into the same piece of memory, one after another. The digest of a file is checked before
anything of it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..artifacts import UserError, sanitize, verify_file
from ..models.dit import DiT, DiTConfig
from ..models.int8 import CODES, SCALE, quantised, to_int8
from ..training.result import build_as_shapes, check_header

Precision = Literal["float32", "bfloat16"]  # of weights and of what is computed with them
ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a piece of memory."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """This tensor in memory, uint8 [bytes]."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where the weights of an architecture lie in one piece of memory."""

    architecture: DiTConfig
    precision: Precision
    int8: bool  # the blocks' matrices; the rest is of the precision
    places: Mapping[str, Place]
    nbytes: int

    def network(self, memory: Tensor) -> DiT:
        """The network whose weights are this memory, whatever is in it now or later."""
        network = shapes_of(self.architecture, int8=self.int8)
        network.load_state_dict({name: place.of(memory) for name, place in self.places.items()}, assign=True)
        return network.to(memory.device).eval().requires_grad_(False)  # positions are in no file

    def put(self, memory: Tensor, name: str, value: Tensor) -> None:
        """Write a tensor of the file, by its name there, to where it belongs."""
        parts = {name: value}
        if name not in self.places:
            module = name.removesuffix("weight")
            parts = dict(zip((module + CODES, module + SCALE), quantised(value), strict=True))
        for part, its in parts.items():
            self.places[part].of(memory).copy_(its)


def layout_of(architecture: DiTConfig, precision: Precision, *, int8: bool = False) -> Layout:
    places, end = {}, 0
    wide = torch.float32 if precision == "float32" else torch.bfloat16
    for name, value in shapes_of(architecture, int8=int8).state_dict().items():
        places[name] = Place(end, wide if value.dtype == torch.float32 else value.dtype, tuple(value.shape))
        end += -(-places[name].nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(architecture, precision, int8, places, end)


def shapes_of(architecture: DiTConfig, *, int8: bool) -> DiT:
    """The network without weights."""
    with torch.device("meta"):
        network = DiT(architecture)
        if int8:
            to_int8(network)
    return network


@dataclass(frozen=True)
class WeightsFile:
    """A safetensors file whose header fits an architecture. `sha256` is what it must be."""

    path: Path
    sha256: str
    architecture: DiTConfig

    def check(self) -> None:
        """Refuse a file that is not what it must be."""
        verify_file(self.path, self.sha256)

    def read_into(self, layout: Layout, memory: Tensor) -> None:
        """Fill memory, uint8 [layout.nbytes] on any device."""
        self.check()
        try:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    value = file.get_tensor(name)
                    if not bool(
                        torch.isfinite(value.abs().max().bfloat16())
                    ):  # which rounds the largest up to infinity
                        words = f"weight {name} holds values that are not finite; ask for another file"
                        raise UserError(f"{self.path}: {words}")
                    layout.put(memory, name, value)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.path}: cannot be read ({sanitize(str(error), 160)}); copy it again") from error


def open_weights(path: Path, sha256: str, architecture: DiTConfig) -> WeightsFile:
    """Read the header, and refuse a file that cannot be this architecture's before anything of its size exists."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no values are read
            header = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); get it again") from error
    network = build_as_shapes(lambda: DiT(architecture), architecture, header, str(path))
    check_header(network.state_dict(), header, str(path))
    return WeightsFile(path, sha256, architecture)
