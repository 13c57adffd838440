"""An expert's weights as one piece of memory, and the way from its file into it.

A file is read once: each tensor goes from the disk into a buffer, its bytes into the digest, its numbers in their new
type to where they belong. Nothing is initialised to be overwritten, and nothing is used before the digest is right.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..artifacts import UserError, verify_file
from ..artifacts.digest import file_state, known_digests, remember_digest
from ..models.dit import DiT, DiTConfig
from ..models.int8 import CODES, SCALE, quantised, to_int8
from ..training.result import Header, build_as_shapes, check_header

Precision = Literal["float32", "bfloat16"]  # of weights and of what is computed with them
ALIGNMENT = 256  # bytes: what kernels like
BUFFERS = 3  # pinned, in turn: one is read into, one on its way to the device, one just done


@dataclass(frozen=True)
class Place:
    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """This tensor in a piece of memory, uint8 [bytes]."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where the weights of an architecture lie in one piece of memory."""

    architecture: DiTConfig
    precision: Precision
    int8: bool  # the blocks' matrices; the rest is of the precision
    places: Mapping[str, Place]
    nbytes: int

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a tensor by its name in the file."""
        return self.places[name if name in self.places else name.removesuffix("weight") + CODES].shape

    def network(self, memory: Tensor) -> DiT:
        """The network whose weights are this memory, whatever is in it now or later."""
        network = shapes_of(self.architecture, int8=self.int8)
        network.load_state_dict({name: place.of(memory) for name, place in self.places.items()}, assign=True)
        return network.to(memory.device).eval().requires_grad_(False)  # positions are in no file


def layout_of(architecture: DiTConfig, precision: Precision, *, int8: bool = False) -> Layout:
    places, end = {}, 0
    wide = torch.float32 if precision == "float32" else torch.bfloat16
    for name, value in shapes_of(architecture, int8=int8).state_dict().items():
        kept = wide if value.dtype == torch.float32 else value.dtype
        places[name] = Place(end, kept, tuple(value.shape))
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
    start: int  # bytes before the first tensor
    spans: Mapping[str, tuple[int, int]]  # of each tensor, from `start`; in the file's order

    @property
    def nbytes(self) -> int:
        return self.start + max(end for _, end in self.spans.values())

    def check(self) -> None:
        """Refuse a file that is not what it must be, without keeping any of it."""
        verify_file(self.path, self.sha256, self.nbytes)

    def read_into(self, layout: Layout, memory: Tensor) -> None:
        """Fill memory, uint8 [layout.nbytes] on any device, and refuse a file that is not what it must be."""
        assert layout.architecture == self.architecture
        state = file_state(self.path)
        known = known_digests.get(state)
        digest = hashlib.sha256() if known is None else None
        filled = Filling(layout, memory, max(end - begin for begin, end in self.spans.values()))
        try:
            with self.path.open("rb", buffering=0) as stream, filled:
                head = stream.read(self.start)
                if digest is not None:
                    digest.update(head)
                for name, (begin, end) in self.spans.items():
                    with filled.room(name, end - begin) as room:
                        read_exactly(stream, room, self.path)
                        if digest is not None:
                            digest.update(room)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be read ({error.strerror}); check the disk, or copy it again"
            ) from error
        found = digest.hexdigest() if digest is not None else known or ""
        if found != self.sha256:
            raise UserError(
                f"{self.path}: corrupt, sha256 is {found[:12]} but the manifest says {self.sha256[:12]}; copy it again"
            )
        remember_digest(state, found)
        if (bad := filled.not_finite()) is not None:
            raise UserError(f"{self.path}: weight {bad} holds values that are not finite; ask for another file")


def open_weights(path: Path, sha256: str, architecture: DiTConfig) -> WeightsFile:
    """Read the header, and refuse a file that cannot be this architecture's before anything of its size exists."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no values are read
            header: Header = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); get it again") from error
    network = build_as_shapes(lambda: DiT(architecture), architecture, header, str(path))
    check_header(network.state_dict(), header, str(path))
    with path.open("rb") as stream:  # safetensors has checked this: eight bytes of length, then JSON
        length = int.from_bytes(stream.read(8), "little")
        spans = {
            name: entry["data_offsets"] for name, entry in json.loads(stream.read(length)).items() if name in found
        }
    in_order = sorted(spans.items(), key=lambda item: item[1])
    return WeightsFile(path, sha256, architecture, 8 + length, {name: (begin, end) for name, (begin, end) in in_order})


class Filling:
    """Takes the bytes of a file's float32 tensors one by one, and puts their numbers where a layout wants them."""

    def __init__(self, layout: Layout, memory: Tensor, largest: int) -> None:
        self._layout, self._memory = layout, memory
        self._cuda = memory.device.type == "cuda"
        direct = layout.precision == "float32" and not layout.int8 and memory.device.type == "cpu"
        count = 0 if direct else BUFFERS if self._cuda else 1
        self._buffers = [torch.empty(largest, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(count)]
        self._free: list[torch.cuda.Event | None] = [None] * count
        # of another priority than experts run at: torch has few streams and deals them out in turn, and one that
        # belongs to an expert as well may be recording
        self._stream = torch.cuda.Stream(memory.device, priority=-1) if self._cuda else None
        self._extremes: dict[str, Tensor] = {}
        self._turn = 0

    def __enter__(self) -> Filling:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def room(self, name: str, nbytes: int) -> Iterator[memoryview]:
        """Where to read a tensor's bytes to; what is there when the `with` block ends is taken."""
        if not self._buffers:
            target = self._layout.places[name].of(self._memory)
            yield bytes_of(target.view(-1).view(torch.uint8))
            self._extremes[name] = torch.stack(target.aminmax())
            return
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        if (event := self._free[turn]) is not None:
            event.synchronize()
        buffer = self._buffers[turn][:nbytes]
        yield bytes_of(buffer)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            value = buffer.view(torch.float32).view(self._layout.shape_of(name))
            there = value.to(self._memory.device, non_blocking=True)
            self._extremes[name] = torch.stack((there if self._cuda else value).aminmax())
            self.put(name, there)
            if self._stream is not None:
                self._free[turn] = self._stream.record_event()

    def put(self, name: str, value: Tensor) -> None:
        """Take a tensor of the file, by its name there."""
        kept = {name: value}
        if name not in self._layout.places:
            module = name.removesuffix("weight")
            kept = dict(zip((module + CODES, module + SCALE), quantised(value), strict=True))
        for name, part in kept.items():
            self._layout.places[name].of(self._memory).copy_(part)

    def not_finite(self) -> str | None:
        """The name of a tensor with a value that is not finite, or that its new type cannot hold."""
        finite = torch.stack(list(self._extremes.values())).isfinite().all(dim=1).tolist()
        return next((name for name, good in zip(self._extremes, finite, strict=True) if not good), None)


def bytes_of(memory: Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]


def read_exactly(stream: BinaryIO, room: memoryview, path: Path) -> None:
    done = 0
    while done < len(room):
        read = stream.readinto(room[done:])  # type: ignore[attr-defined]
        if not read:
            raise UserError(f"{path}: ends too early; copy it again")
        done += read
