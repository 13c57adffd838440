"""Which experts are on the device, and which come next.

A device has a number of slots, each a piece of memory for one expert's weights with the networks and graphs that read
it. Where all experts fit, each has a slot and stays. Where they do not, they take turns: their weights wait in the
host's memory (pinned, if there is enough of it) or in their files, and the next one is copied into a slot that is not
in use, while another one computes.
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
from .graphs import Runner
from .weights import Layout, WeightsFile

READERS = 8  # threads that read experts at the same time
STREAMS = 4  # on which experts run at the same time; two to eight are alike on an H200


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


class Slot:
    """Memory for the weights of one expert at a time, and what runs on them."""

    def __init__(self, memory: Tensor, stream: torch.cuda.Stream | None, graphs: bool) -> None:
        self.memory, self.stream, self.graphs, self.device = memory, stream, graphs, memory.device
        self.holds: int | None = None
        self.filled: torch.cuda.Event | None = None  # the copy into it is done
        self.left: torch.cuda.Event | None = None  # what was computed in it last is done
        self.coming: Future[None] | None = None  # a file is being read into it
        self.last_used = 0
        self._runners: dict[object, Runner] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs and self.device.type == "cuda" else None

    def runner(self, stored: Stored, onto: Schedule) -> Runner:
        """(x, t, condition) -> velocity on the sampling path, of whatever expert of this kind is in the slot."""
        card, layout = stored.card, stored.layout
        key = card.architecture, card.schedule, card.kind, card.bridge_limit, layout.precision, layout.int8
        if key not in self._runners:
            network = layout.network(self.memory)
            if layout.precision == "bfloat16":
                use_kernels(network)
            bridge = bridged(network, card, onto)

            def velocity(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
                return bridge(x, t, condition).value

            self._runners[key] = Runner(velocity, self.device, self.graphs, pool=self._pool)
        return self._runners[key]


class Residency:
    """Slots, and which experts are in them.

    `enter(k)` gives the slot with expert k, once it may be computed in on the slot's own stream; `leave(slot)` says
    that no more is computed there for now. `expect_first_of` has an expert copied to a slot meanwhile.
    """

    def __init__(
        self, experts: Sequence[Stored], slots: int, devices: Sequence[torch.device], graphs: bool = False
    ) -> None:
        assert 1 <= slots <= len(experts)
        self.experts = experts
        self.resident = slots == len(experts)  # all stay
        self.current = 0  # the expert that ran last, while experts take turns
        self.fetched = 0  # experts put into a slot in which another was, or none
        self._readers = ThreadPoolExecutor(READERS, "expert")
        cuda = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        streams = {device: [torch.cuda.Stream(device) for _ in range(STREAMS)] for device in cuda}
        self._copying = {device: torch.cuda.Stream(device, priority=-1) for device in cuda}
        largest = max(stored.layout.nbytes for stored in experts)
        self.slots = []
        for i in range(slots):
            device, nbytes = devices[i % len(devices)], experts[i].layout.nbytes if self.resident else largest
            stream = streams[device][i % STREAMS] if device in streams else None
            self.slots.append(Slot(torch.empty(nbytes, dtype=torch.uint8, device=device), stream, graphs))
        self._host: dict[int, Tensor] = {}
        self._pinned = not self.resident and bool(cuda) and host_holds(experts)
        self._clock = 0
        errors = self._readers.map(self._prepare, range(len(experts)))
        if unreadable := {k: error for k, error in enumerate(errors) if error is not None}:
            raise UnreadableExperts(unreadable)

    def _prepare(self, k: int) -> UserError | None:
        """An expert to where it stays or waits; where it waits in its file, checked."""
        stored = self.experts[k]
        try:
            if self.resident:
                self._read(self.slots[k], k)
                self.slots[k].holds = k
            elif self._pinned:
                self._host[k] = torch.empty(stored.layout.nbytes, dtype=torch.uint8, pin_memory=True)
                stored.file.read_into(stored.layout, self._host[k])
            else:
                stored.file.check()
        except UserError as error:
            return error
        return None

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
        slot.last_used = self._clock
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
        slot = min(free, key=lambda slot: slot.last_used)
        if slot.coming is not None:
            slot.coming.result()
            slot.coming = None
        slot.holds = k
        self.fetched += 1
        if k in self._host:
            stream = self._copying[slot.device]
            if slot.left is not None:
                stream.wait_event(slot.left)
            with torch.cuda.stream(stream):
                slot.memory[: len(self._host[k])].copy_(self._host[k], non_blocking=True)
            slot.filled = stream.record_event()
        else:
            slot.coming = self._readers.submit(self._read, slot, k)
        return slot

    def _read(self, slot: Slot, k: int) -> None:
        """From the file."""
        if slot.left is not None:
            slot.left.synchronize()
        layout = self.experts[k].layout
        self.experts[k].file.read_into(layout, slot.memory[: layout.nbytes])
        if slot.device.type == "cuda":
            torch.cuda.current_stream(slot.device).synchronize()


def host_holds(experts: Sequence[Stored]) -> bool:
    """Whether half of the host's free memory is enough for all experts."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(stored.layout.nbytes for stored in experts) <= free // 2
