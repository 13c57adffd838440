"""Workers and the signals that end them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import process

import pytest

from atoll.data.engine import Local, unstopped

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signal can be blocked there")
IS_IT_BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that stops the main thread, whoever may listen to it otherwise."""
    before = signal.signal(request.param, stop)
    yield request.param
    signal.signal(request.param, before)


def test_a_stop_waits_until_the_block_is_done(number: signal.Signals) -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), unstopped():
        with unstopped():
            signal.raise_signal(number)
        reached.append("the end of the outer block")
    assert reached
    assert signal.getsignal(number) is stop
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_pool_that_is_stopped_while_it_starts_is_closed(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its thread being made and started it could not be: a traceback, and workers that nobody ends."""
    start = process._ExecutorManagerThread.start

    def start_later(self: process._ExecutorManagerThread) -> None:
        signal.raise_signal(number)
        start(self)

    monkeypatch.setattr(process._ExecutorManagerThread, "start", start_later)
    with pytest.raises(KeyboardInterrupt), Local(2).start() as workers:
        list(workers.map(abs, [-1, -2]))


def test_a_worker_is_deaf_to_ctrl_c_from_its_first_moment_on() -> None:
    """It loads torch for seconds before it can ignore the signal, and would die of it, aloud, beside the parent."""
    with unstopped():
        inside = subprocess.run([sys.executable, "-c", IS_IT_BLOCKED], check=True, capture_output=True, text=True)
    outside = subprocess.run([sys.executable, "-c", IS_IT_BLOCKED], check=True, capture_output=True, text=True)
    assert (inside.stdout, outside.stdout) == ("True\n", "False\n")
    with Local(2).start() as workers:
        assert set(workers.map(how_it_listens, [0, 1, 2])) == {(False, True)}


def how_it_listens(_: int) -> tuple[bool, bool]:
    """Whether Ctrl-C is still blocked in this process, and whether it is ignored."""
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return blocked, signal.getsignal(signal.SIGINT) is signal.SIG_IGN
