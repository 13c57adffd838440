"""The executor: items in, results out, and what happens when processes are stopped or die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import process
from pathlib import Path

import pytest

from atoll.artifacts import UserError
from atoll.executor import Executor, RayExecutor, make_executor


@pytest.fixture(params=[1, 2])
def executor(request: pytest.FixtureRequest) -> Executor:
    return Executor(request.param)


def test_results_come_with_the_index_of_their_item(executor: Executor) -> None:
    with executor:
        assert sorted(executor.map(abs, range(-20, 0))) == [(n, 20 - n) for n in range(20)]
        assert sorted(executor.map(str, [7])) == [(0, "7")], "the workers are used again"


def test_items_are_read_as_workers_become_free(executor: Executor) -> None:
    read = []

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    with executor:
        next(executor.map(abs, items()))
        assert len(read) <= 2 * executor.workers


def refuse(item: int) -> int:
    if item == 3:
        raise UserError("item 3: is odd; use another")
    return item


def test_an_error_of_the_function_ends_the_map(executor: Executor) -> None:
    with pytest.raises(UserError, match=r"^item 3: is odd; use another$"), executor:
        list(executor.map(refuse, range(10)))


def die_once(folder: Path) -> str:
    """Kill this process, unless it has been done before."""
    if (folder / "died").exists():
        return "done"
    (folder / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_an_item_whose_worker_died_is_repeated_or_reported(tmp_path: Path) -> None:
    with Executor(2) as executor:
        assert list(executor.map(die_once, [tmp_path], retries=1)) == [(0, "done")]
        (tmp_path / "died").unlink()
        with pytest.raises(UserError, match="worker process died, most likely because memory ran out; run the same"):
            list(executor.map(die_once, [tmp_path]))


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        """
import os, time
from atoll.executor import Executor
def tell(seconds):
    print(os.getpid(), flush=True)
    time.sleep(seconds)
if __name__ == "__main__":
    with Executor(2) as executor:
        list(executor.map(tell, [60, 60]))
"""
    )
    parent = subprocess.Popen([sys.executable, str(tmp_path / "run.py")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [Path("/proc") / parent.stdout.readline().strip() for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(place.exists() for place in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(place.exists() for place in workers)


def stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_pool_that_is_stopped_while_it_starts_is_closed(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin: Callable[..., None] = process._ExecutorManagerThread.start

    def start_later(self: process._ExecutorManagerThread) -> None:
        signal.raise_signal(number)
        begin(self)

    monkeypatch.setattr(process._ExecutorManagerThread, "start", start_later)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt), Executor(2) as executor:
            list(executor.map(abs, [-1, -2]))
        assert signal.getsignal(number) is stop
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(number, before)


def sigint_here(_: int) -> tuple[bool, bool]:
    """Whether Ctrl-C is blocked in this process, and whether it is ignored."""
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return blocked, signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_workers_leave_ctrl_c_to_the_parent() -> None:
    with Executor(2) as executor:
        assert {listens for _, listens in executor.map(sigint_here, range(3))} == {(False, True)}


def test_an_unusable_executor_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--engine slurm: use local or ray"):
        make_executor("slurm")
    with pytest.raises(UserError, match="--workers 0: must be at least 1"):
        make_executor("local", 0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"^--engine ray: needs ray; pip install 'atoll-diffusion\[ray\]'$"):
        make_executor("ray").__enter__()


@pytest.mark.slow
def test_ray_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs ray: NOT TESTED HERE")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # its workers import this module
    with RayExecutor() as executor:
        assert sorted(executor.map(abs, range(-20, 0))) == [(n, 20 - n) for n in range(20)]
        assert list(executor.map(die_once, [tmp_path], retries=1)) == [(0, "done")]
        with pytest.raises(UserError, match="a Ray worker failed: item 3: is odd; use another; every node must see"):
            list(executor.map(refuse, range(10)))
        with pytest.raises(UserError, match="the Ray cluster has no GPU"):
            list(executor.map(abs, [1], gpus=1))
