"""Being told to stop: a preempted machine gets SIGTERM and a few seconds."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequested(Exception):
    """Training stopped on a signal after saving; the same command resumes."""


class StopSignal:
    """Remembers SIGTERM and SIGINT while a loop runs; the loop polls `requested` at every step."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
