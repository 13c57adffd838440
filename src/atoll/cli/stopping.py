"""Being stopped, whatever the verb: Ctrl-C and SIGTERM end in a line that says what is kept, and in their exit codes.

A handler raises `Stopped` in the main thread, so that whatever is open is closed on the way out. Where a training runs
it listens itself: it saves its state first, and says how far it is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# what a verb leaves that was stopped, and what to do then
KEPT = {
    "run": "every finished stage and every island's last checkpoint are kept; the same command goes on",
    "demo": "every finished stage and every island's last checkpoint are kept; the same command goes on",
    "status": "nothing is changed by it",
    "prepare": "what was read and encoded is kept; the same command goes on",
    "partition": "nothing is kept; the same command begins again",
    "plan": "what was written before is as it was; give the same command again",
    "publish": "what was uploaded is kept; the same command goes on",
    "admit": "experts that were admitted stay; the same command goes on with the others",
    "router": "the last checkpoint is kept, if there was one; the same command goes on",
    "ensemble": "the model is as it was, or changed as a whole; `atoll ensemble RUN` tells",
    "evaluate": "finished batches of samples are kept; the same command goes on with the next",
    "distill": "the last checkpoint is kept, if there was one; the same command goes on",
    "export": "nothing is kept; give the same command again",
    "train": "the last checkpoint is kept, if there was one; the same command goes on",
    "join": "the last checkpoint is kept, if there was one; the same command goes on",
    "sample": "earlier images are as they were, finished batches of these are kept; the same command goes on",
    "describe": "nothing is changed by it",
    "convert": "nothing is kept; give the same command again",
}
OTHERS = "give the same command again"
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopped(BaseException):
    """Somebody wants the process to end. No Exception: nobody's `except Exception` is to go on from here."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.signal = number

    def said(self, verb: str) -> str:
        return f"stopped ({NAMES[signal.Signals(self.signal)]}): {KEPT.get(verb, OTHERS)}"

    @property
    def exit_code(self) -> int:
        """As a shell says it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn both signals into `Stopped`, once: what closes on the way out is not to be stopped halfway."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may listen
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in NAMES:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in NAMES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
