"""Being told to stop: a preempted machine gets SIGTERM and a few seconds."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequested(Exception):
    """Training stopped on a signal after saving; the same command goes on from there."""

    signal: int = signal.SIGTERM  # what stopped it


class StopSignal:
    """Remembers SIGTERM and SIGINT while a loop runs; the loop polls `requested` at every step."""

    def __init__(self) -> None:
        self._received: int | None = None

    @property
    def requested(self) -> bool:
        return self._received is not None

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, StopRequested) and self._received is not None:
            error.signal = self._received

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
