"""Which experts are on the device, and which come next.

A device has a number of slots, each a piece of memory for one expert's weights with the networks and graphs that read
it. Where all experts fit, each has a slot and stays. Where they do not, experts take turns: their weights wait in
the host's memory (pinned, if there is enough of it) or in their files, and the next one is copied into a slot that
nobody computes in, beside the work of the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artifacts import UserError
from ..diffusion import Condition, Schedule
from ..islands.expert import ExpertCard, bridged
from ..models.kernel_check import use_kernels
from ..training.compute import ComputeConfig
from ..training.loop import prepare_blocks
from .graphs import SHAPES, Function, GraphRunner
from .weights import Layout, WeightsFile

READERS = 8  # threads that read experts at the same time


class UnreadableExperts(UserError):
    """Some experts cannot be used, by number, and why."""

    def __init__(self, reasons: Mapping[int, UserError]) -> None:
        super().__init__(str(next(iter(reasons.values()))))
        self.reasons = reasons


@dataclass(frozen=True)
class Stored:
    """An expert that can be put into a slot."""

    card: ExpertCard
    file: WeightsFile
    layout: Layout


@dataclass(frozen=True)
class Running:
    """How experts are run. `graphs` None: on CUDA devices."""

    streams: int = 4  # on which experts run at the same time; two to eight are alike on an H200
    graphs: bool | None = None
    shapes: tuple[int, ...] = SHAPES
    compiled: bool = False  # blocks by inductor: seconds for each shape, for a few hundredths of the time


class Slot:
    """Memory for the weights of one expert at a time, and what runs on them."""

    def __init__(self, memory: Tensor, stream: torch.cuda.Stream | None, running: Running) -> None:
        self.memory, self.stream, self._running = memory, stream, running
        self.device = memory.device
        self.holds: int | None = None
        self.filled: torch.cuda.Event | None = None  # the copy into it is done
        self.left: torch.cuda.Event | None = None  # what was computed in it last is done
        self.coming: Future[None] | None = None  # somebody is reading a file into it
        self._functions: dict[object, GraphRunner | Function] = {}
        cuda = self.device.type == "cuda" and running.graphs is not False
        self._pool = torch.cuda.graph_pool_handle() if cuda else None

    def function(self, stored: Stored, onto: Schedule) -> GraphRunner | Function:
        """(x, t, condition) -> velocity on the reference path, of whatever expert of this kind is in the slot."""
        card, layout = stored.card, stored.layout
        key = card.architecture, card.schedule, card.kind, card.bridge_limit, layout.precision, layout.int8
        if key not in self._functions:
            network = layout.network(self.memory)
            use_kernels(network)
            if self._running.compiled:
                prepare_blocks(network, ComputeConfig(compile="blocks"))
            bridge = bridged(network, card, onto)

            def answer(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
                return bridge(x, t, condition).value

            graphs = self._running.graphs
            if graphs is None:
                graphs = self.device.type == "cuda"
            self._functions[key] = (
                GraphRunner(
                    answer,
                    self.device,
                    shapes=self._running.shapes,
                    record=self.device.type == "cuda",
                    pool=self._pool,
                )
                if graphs
                else answer
            )
        return self._functions[key]


class Residency:
    """Slots, and who is in them.

    `enter(k)` gives the slot with expert k, once it may be computed in on the slot's own stream; `leave(slot)` says
    that no more is computed there for now. `expect_first_of` has an expert copied to a slot meanwhile.
    """

    def __init__(
        self, experts: Sequence[Stored], slots: int, devices: Sequence[torch.device], running: Running = Running()
    ) -> None:
        assert 1 <= slots <= len(experts)
        self.experts, self.running = experts, running
        self._readers = ThreadPoolExecutor(READERS, "expert")
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        largest = max(stored.layout.nbytes for stored in experts)
        self.resident = slots == len(experts)  # everybody stays
        self.slots = [
            self._make_slot(devices[i % len(devices)], experts[i].layout.nbytes if self.resident else largest, i)
            for i in range(slots)
        ]
        self._copying = {
            d: torch.cuda.Stream(d, priority=-1) for d in {s.device for s in self.slots} if d.type == "cuda"
        }
        self._host: dict[int, Tensor] = {}
        self._keep = not self.resident and bool(self._copying) and host_holds(experts)
        self._last_used: dict[int, int] = {}
        self._clock = 0
        self.current = 0  # the expert that ran last, while experts take turns
        self.fetched = 0  # experts put into a slot in which another was, or nobody
        self._read_all()

    def _make_slot(self, device: torch.device, nbytes: int, number: int) -> Slot:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        stream = None
        if device.type == "cuda" and self.running.streams > 1:
            key = device, number % self.running.streams
            stream = self._streams.setdefault(key, torch.cuda.Stream(device))
        elif device.type == "cuda":
            stream = torch.cuda.current_stream(device)
        return Slot(memory, stream, self.running)

    def _read_all(self) -> None:
        """Every expert to where it stays or waits, several files at once; where it stays in its file, checked."""

        def read(k: int) -> UserError | None:
            stored = self.experts[k]
            try:
                if self.resident:
                    stored.file.read_into(stored.layout, self._part(self.slots[k], k))
                elif self._keep:
                    self._host[k] = self._read_host(k)
                else:
                    stored.file.check()
            except UserError as error:
                return error
            return None

        found = dict(enumerate(self._readers.map(read, range(len(self.experts)))))
        unreadable = {k: error for k, error in found.items() if error is not None}
        if unreadable:
            raise UnreadableExperts(unreadable)
        if self.resident:
            for k, slot in enumerate(self.slots):
                slot.holds = k

    def _read_host(self, k: int) -> Tensor:
        stored = self.experts[k]
        memory = torch.empty(stored.layout.nbytes, dtype=torch.uint8, pin_memory=True)
        stored.file.read_into(stored.layout, memory)
        return memory

    def _part(self, slot: Slot, k: int) -> Tensor:
        return slot.memory[: self.experts[k].layout.nbytes]

    def find(self, k: int) -> Slot | None:
        """The slot that holds expert k, or is being filled with it."""
        return next((slot for slot in self.slots if slot.holds == k), None)

    def enter(self, k: int) -> Slot:
        slot = self.find(k) or self._replace(k, self.slots)
        if slot.coming is not None:
            slot.coming.result()
            slot.coming = None
        if slot.stream is not None and slot.filled is not None:
            slot.stream.wait_event(slot.filled)
            slot.filled = None
        self._clock += 1
        self._last_used[id(slot)] = self._clock
        return slot

    def leave(self, slot: Slot) -> None:
        if slot.stream is not None and not self.resident:
            slot.left = slot.stream.record_event()

    def expect_first_of(self, coming: Sequence[int], busy: Slot) -> None:
        """Have the first of these experts that is nowhere copied to a slot that neither is busy nor holds another."""
        absent = next((k for k in coming if self.find(k) is None), None)
        free = [slot for slot in self.slots if slot is not busy and slot.holds not in coming]
        if absent is not None and free:
            self._replace(absent, free)

    def _replace(self, k: int, free: Sequence[Slot]) -> Slot:
        """Put expert k into that of some slots that was used longest ago."""
        slot = min(free, key=lambda slot: self._last_used.get(id(slot), 0))
        if slot.coming is not None:
            slot.coming.result()
        slot.holds = k
        self.fetched += 1
        if k in self._host:
            self._copy(slot, k)
            slot.coming = None
        else:
            slot.coming = self._readers.submit(self._read, slot, k)
        return slot

    def _read(self, slot: Slot, k: int) -> None:
        """From the file."""
        if slot.left is not None:
            slot.left.synchronize()
        stored = self.experts[k]
        stored.file.read_into(stored.layout, self._part(slot, k))

    def _copy(self, slot: Slot, k: int) -> None:
        stream = self._copying[slot.device]
        if slot.left is not None:
            stream.wait_event(slot.left)
        with torch.cuda.stream(stream):
            self._part(slot, k).copy_(self._host[k], non_blocking=True)
        slot.filled = stream.record_event()


def host_holds(experts: Sequence[Stored]) -> bool:
    """Whether half of the host's free memory is enough for all experts."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(stored.layout.nbytes for stored in experts) <= free // 2
