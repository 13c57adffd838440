"""Batches on their way to the device: drawn ahead by a thread, packed, and sent in one copy.

What a batch holds is a pure function of where training stands, so nothing here needs to be saved. On a CPU there is
no thread and no copy: batches are drawn when they are asked for.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..diffusion import wide_dtype
from .packing import Batch, Layout

AHEAD = 3  # batches sent before they are needed
DRAWING = 3  # threads that draw: two million normal numbers, a batch of 1024 small latents, take a core 20 ms


@dataclass
class Slot:
    """One batch's room: pinned memory here, memory there, and when each may be used again."""

    layout: Layout
    pinned: Tensor
    arrived: Tensor
    sent: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    used: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    @staticmethod
    def for_layout(layout: Layout, device: torch.device) -> Slot:
        pinned = torch.empty(layout.size, dtype=torch.uint8, pin_memory=True)
        return Slot(layout, pinned, torch.empty(layout.size, dtype=torch.uint8, device=device))


class Feed:
    """An endless stream of batches on a device: `for step, batch in feed.stream(first)`.

    `draw(step)` returns the tensors of step number `step`, or None after the last; it runs in a thread and, on CUDA,
    on a stream of its own, so that what it computes there (text embeddings) is beside the training too.
    A batch is valid until the next one is asked for.
    """

    def __init__(self, draw: Callable[[int], Batch | None], device: torch.device) -> None:
        self._draw = draw
        # with its number: threads do not share what the current device is
        self._device = torch.empty(0, device=device).device

    def stream(self, first: int) -> Iterator[tuple[int, Batch]]:
        if self._device.type == "cuda":
            yield from self._sent(first)
            return
        step = first
        while (batch := self._draw(step)) is not None:
            yield step, {name: narrowed(value, self._device).to(self._device) for name, value in batch.items()}
            step += 1

    def _sent(self, first: int) -> Iterator[tuple[int, Batch]]:
        ready: queue.Queue[tuple[int, Batch, Slot] | BaseException | None] = queue.Queue(AHEAD)
        free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        ended = threading.Event()
        thread = threading.Thread(target=self._work, args=(first, ready, free, ended), name="atoll-feed", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                step, batch, slot = item
                torch.cuda.current_stream().wait_event(slot.sent)
                yield step, batch
                slot.used.record()
                free.put(slot)
        finally:
            ended.set()
            free.put(None)
            while thread.is_alive():  # it may be waiting for room
                while not ready.empty():
                    ready.get_nowait()
                thread.join(0.05)

    def _work(
        self,
        first: int,
        ready: queue.Queue[tuple[int, Batch, Slot] | BaseException | None],
        free: queue.SimpleQueue[Slot | None],
        ended: threading.Event,
    ) -> None:
        """The thread: draw, pack, send, until the end or a failure, which the reader is handed."""
        try:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
            step, made = first, 0
            with ThreadPoolExecutor(DRAWING, "atoll-draw") as pool, torch.cuda.stream(stream):
                coming = deque(pool.submit(self._drawn_on, stream, first + n) for n in range(DRAWING))
                while not ended.is_set() and (batch := coming.popleft().result()) is not None:
                    coming.append(pool.submit(self._drawn_on, stream, step + DRAWING))
                    here = {n: narrowed(v, self._device) for n, v in batch.items() if v.device.type == "cpu"}
                    there = {n: v for n, v in batch.items() if v.device.type != "cpu"}
                    layout = Layout.of(here)
                    if made <= AHEAD:
                        slot, made = Slot.for_layout(layout, self._device), made + 1
                    else:
                        if (again := free.get()) is None:
                            return
                        slot = again
                        slot.used.synchronize()  # the host may run ahead of the device by this many steps, no more
                        if slot.layout != layout:  # the short last batch
                            slot = Slot.for_layout(layout, self._device)
                    for name, view in layout.views(slot.pinned).items():
                        view.copy_(here[name])
                    slot.arrived.copy_(slot.pinned, non_blocking=True)
                    for value in there.values():
                        value.record_stream(torch.cuda.default_stream(self._device))
                    slot.sent.record()
                    ready.put((step, {**layout.views(slot.arrived), **there}, slot))
                    step += 1
            ready.put(None)
        except BaseException as error:  # noqa: BLE001, it is raised where the batch was asked for
            ready.put(error)

    def _drawn_on(self, stream: torch.cuda.Stream, step: int) -> Batch | None:
        """Batches do not depend on each other, so several are drawn at once; device work is in the stream's order."""
        with torch.cuda.stream(stream):
            return self._draw(step)


def narrowed(value: Tensor, device: torch.device) -> Tensor:
    """A drawn tensor in a type the device has: Apple's GPUs have no float64."""
    return value.to(wide_dtype(device)) if value.dtype == torch.float64 else value
