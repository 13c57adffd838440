"""Several processes train one expert, started by torchrun: what one process would have learned, and nobody hangs.

Two processes on the CPU, which talk by gloo; on GPUs it is the same code with nccl.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, find
from atoll.islands.expert import load_expert
from atoll.islands.train import train
from atoll.router.card import load_router
from atoll.training import StopRequested
from atoll.training.loop import Progress
from atoll.training.resources import Resources
from runs import ATOLL
from tiny_orders import tiny_order

pytestmark = pytest.mark.timeout(240)
CPU = Resources("cpu")
IMAGES = 32 * 24 + 1  # the last batch has one image: too few for two processes
LONGEST = 120  # seconds before a process that should have ended counts as hanging


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("team"), images=IMAGES, batch=32)


@pytest.fixture(scope="module")
def alone(order: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The expert of one process that was never stopped."""
    artifact = train(order, tmp_path_factory.mktemp("alone") / "expert", resources=CPU)
    assert artifact is not None
    return artifact


def start(order: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    return start_two(["train", str(order)], out, *more)


def start_two(verb: list[str], out: Path, *more: str) -> subprocess.Popen[str]:
    """Two processes in a process group of their own, so that all of them can be ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "atoll", *verb, "--out", str(out), "--device", "cpu", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said; it is an error not to end in time, and then nothing of it is left."""
    try:
        return process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still running after {LONGEST} s: {process.communicate()}")


def rows_of(expert: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in expert.read("metrics.jsonl").splitlines()]


def assert_alike(found: Artifact, expected: Artifact) -> None:
    """The loss curve and the weights of another, but for the rounding of sums."""
    for row, other in zip(rows_of(found), rows_of(expected), strict=True):
        assert row["images"] == other["images"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert row["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)
    mine, its = load_expert(found.store).network, load_expert(expected.store).network
    for name, value in mine.named_parameters():
        torch.testing.assert_close(value, its.get_parameter(name), rtol=0, atol=1e-4, msg=name)


def log_of(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def wait_for_a_step(process: subprocess.Popen[str], out: Path) -> None:
    began = time.monotonic()
    while not ((out / "log.jsonl").exists() and '"progress"' in (out / "log.jsonl").read_text()):
        time.sleep(0.01)
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() - began < LONGEST


def test_two_processes_learn_what_one_does(order: Path, alone: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "expert"
    process = start(order, out, "--set", "micro_batch=5")  # 16 rows each: three passes of 5 and one of 1
    said, errors = end(process)
    assert process.returncode == 0, errors
    assert_alike(Artifact.open(out, "expert"), alone)
    assert said.count("send this folder back") == 1, "one of them talks"
    assert [entry["event"] for entry in log_of(out)].count("start") == 1
    assert sorted(path.name for path in out.iterdir()) == [
        "expert.json",
        "log.jsonl",
        "manifest.json",
        "metrics.jsonl",
        "model.safetensors",
        "provenance.json",
        "sheets",
    ]
    again = start(order, out, "--quiet")
    end(again)
    assert again.returncode == 0, "it finds the expert done, in every process"


def test_two_processes_are_stopped_and_one_goes_on(order: Path, alone: Artifact, tmp_path: Path) -> None:
    """SIGTERM to torchrun, which passes it on, as a cluster's scheduler sends it."""
    out = tmp_path / "expert"
    process = start(order, out)
    wait_for_a_step(process, out)
    process.terminate()
    _, errors = end(process)
    assert process.returncode != 0
    assert "Interrupted, saved after" in errors, errors
    assert find(out) is None
    saved = max(int(path.stem) for path in (out / "state").glob("*.safetensors"))
    assert 0 < saved < IMAGES
    seen: list[int] = []
    artifact = train(order, out, resources=CPU, watch=lambda now: seen.append(now.images))
    assert artifact is not None
    assert next(images for images in seen if images) == saved + 32, "not from the start"
    assert_alike(artifact, alone)


def test_one_process_is_stopped_and_two_go_on(order: Path, alone: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "expert"

    def stop(now: Progress) -> None:
        if now.images == 320:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StopRequested):
        train(order, out, resources=CPU, watch=stop)
    process = start(order, out, "--quiet")
    _, errors = end(process)
    assert process.returncode == 0, errors
    assert_alike(Artifact.open(out, "expert"), alone)


@pytest.mark.slow
def test_a_member_that_is_killed_ends_the_others(order: Path, alone: Artifact, tmp_path: Path) -> None:
    """kill -9 the second process: nobody waits for it for ever, and one process goes on from what was saved."""
    out = tmp_path / "expert"
    process = start(order, out, "--checkpoint-seconds", "0")
    wait_for_a_step(process, out)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    end(process)
    assert process.returncode != 0
    assert find(out) is None
    artifact = train(order, out, resources=CPU)
    assert artifact is not None
    assert_alike(artifact, alone)


def test_two_processes_train_a_router(planned: Path, tmp_path: Path) -> None:
    """One writes it and prints; the router is that of one process, but for the rounding of sums."""
    short = [f"--set=training.{name}" for name in ("images=513", "batch=32", "ema_images=64", "warmup_images=0")]
    plan = ["router", str(planned), *short, "--set=accuracy_times=2"]
    process = start_two(plan, tmp_path / "two")
    output, errors = end(process)
    assert process.returncode == 0, errors
    assert output.count(str(tmp_path)) == 1, "only one of them prints where it lies"
    subprocess.run([*ATOLL, *plan, "--out", str(tmp_path / "one"), "--device", "cpu"], check=True)
    two, one = (load_router(tmp_path / name) for name in ("two", "one"))
    for mine, other in zip(two.network.parameters(), one.network.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-4)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}
    again = start_two(plan, tmp_path / "two")
    assert end(again)[0].count("already there") == 1
