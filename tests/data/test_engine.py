"""Workers and the signals that end them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from atoll.data.engine import unstopped

IS_IT_BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_waits_until_a_worker_is_started(number: signal.Signals) -> None:
    """In the middle of it the pool could not be closed any more: a traceback, and a worker that nobody ends."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before, reached = signal.signal(number, stop), []
    try:
        with pytest.raises(KeyboardInterrupt), unstopped():
            signal.raise_signal(number)
            reached.append("the end of the block")
        assert reached
        assert signal.getsignal(number) is stop
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(number, before)


def test_a_worker_is_deaf_to_ctrl_c_until_it_decides() -> None:
    """It loads torch for seconds before it can ignore the signal, and would die of it, aloud, beside the parent."""
    with unstopped():
        inside = subprocess.run([sys.executable, "-c", IS_IT_BLOCKED], check=True, capture_output=True, text=True)
    outside = subprocess.run([sys.executable, "-c", IS_IT_BLOCKED], check=True, capture_output=True, text=True)
    assert (inside.stdout, outside.stdout) == ("True\n", "False\n")
