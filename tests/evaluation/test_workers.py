"""Images sampled by other processes are those of one process, though a worker is killed on the way."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.artifacts import Artifact, Store
from atoll.evaluation.evaluate import EvaluationPlan, configurations, evaluate
from atoll.executor import Executor, RayExecutor
from atoll.sampling import Sampling
from runs import atoll

PLAN = EvaluationPlan(
    configurations=configurations(["top-1"], [2.0], sampling=Sampling(steps=4)), count=45, seeds=2, batch=8
)


@pytest.fixture
def cluster() -> Iterator[None]:
    """Two worker processes on this machine."""
    ray = pytest.importorskip("ray", reason="needs ray: NOT TESTED HERE")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def workers_at(task: str) -> set[int]:
    """Processes below this one that Ray has named after a task."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if task in (place / "cmdline").read_text() and os.getpid() in ancestors(int(place.name)):
                found.add(int(place.name))
        except OSError:  # ended meanwhile
            continue
    return found


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_one(task: str, killed: list[int]) -> None:
    deadline = time.monotonic() + 120
    while not killed and time.monotonic() < deadline:
        for pid in list(workers_at(task))[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc: NOT TESTED HERE")
def test_workers_sample_the_same_images_though_one_is_killed(tiny_demo: Path, tmp_path: Path, cluster: None) -> None:
    run = Store.at(tiny_demo)
    alone = evaluate(run, PLAN, Store.at(tmp_path / "alone"))
    killed: list[int] = []
    killer = threading.Thread(target=kill_one, args=("ray::call", killed))
    killer.start()
    reported: list[int] = []
    together = evaluate(
        run,
        PLAN,
        Store.at(tmp_path / "ray"),
        executor=RayExecutor(),
        progress=lambda name, done, total: reported.append(done),
    )
    killer.join()
    assert killed, "none was killed while sampling"
    assert together == alone
    (row,) = together["configurations"]
    assert [Artifact.open(tmp_path / "ray/samples" / name).digest for name in row["folders"]] == row["samples"]
    assert reported[-1] == 45
    assert len(reported) == 12, "each part once"


@pytest.mark.slow
def test_two_processes_of_this_machine_sample_the_same_images(tiny_demo: Path, tmp_path: Path) -> None:
    """As `atoll run` samples where there are cores for it."""
    alone, together = (
        evaluate(Store.at(tiny_demo), PLAN, Store.at(tmp_path / str(workers)), executor=Executor(workers))
        for workers in (1, 2)
    )
    assert together == alone


@pytest.mark.slow
def test_the_command_samples_with_a_cluster_of_its_own(tiny_demo: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: NOT TESTED HERE")
    options = ["-n", "30", "--batch", "8", "--steps", "2", "--route", "top-1", "--threads", "1"]
    atoll("evaluate", tiny_demo, *options, "--engine", "ray", "--out", tmp_path / "ray")
    atoll("evaluate", tiny_demo, *options, "--out", tmp_path / "alone")
    one, other = ((tmp_path / name / "evaluation.json").read_bytes() for name in ("ray", "alone"))
    assert one == other
