"""The training loop on a real GPU: what a CPU cannot show of graphs, copies, threads and memory.

Needs no organizer's packages: orders and shards are made here (tiny_orders.py).
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact
from atoll.islands.train import train
from atoll.models.dit import DiTConfig
from atoll.training.checkpoint import Checkpoints, Ledger, TrainingState, saved_compute
from atoll.training.compute import ComputeConfig, opened
from atoll.training.loop import Progress, fit, prefetched
from atoll.training.resources import Resources
from runs import ATOLL
from tiny_orders import tiny_order, tiny_task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: NOT TESTED HERE")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: NOT TESTED HERE")
MANY = {"images": 12_800, "batch": 64, "ema_images": 1024}  # 200 steps
PLAIN = {"compile": "none", "precision": "float32"}


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), **MANY)


def rows_of(expert: Artifact | Path) -> list[dict[str, float]]:
    artifact = expert if isinstance(expert, Artifact) else Artifact.open(expert)
    return [json.loads(line) for line in artifact.read("metrics.jsonl").splitlines()]


def trained(order: Path, out: Path, **settings: object) -> list[dict[str, float]]:
    """Rows of metrics of an unbroken training on the GPU."""
    artifact = train(order, out, resources=Resources("cuda", settings=settings))
    assert artifact is not None
    return rows_of(artifact)


@pytest.fixture(scope="module")
def unbroken(order: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """float32, nothing compiled: what the others are compared with."""
    return trained(order, tmp_path_factory.mktemp("unbroken") / "expert", **PLAIN)


def test_it_learns(unbroken: list[dict[str, float]]) -> None:
    assert unbroken[-1]["loss"] < 0.7 * unbroken[0]["loss"]


def test_killed_after_a_checkpoint_it_resumes_with_another_micro_batch(
    order: Path, unbroken: list[dict[str, float]], tmp_path: Path
) -> None:
    """The same images in the same order, under the settings of before but for what was asked."""
    state = tmp_path / "expert" / "state"
    command = [*ATOLL, "train", str(order), "--out", str(tmp_path / "expert"), "--device", "cuda", "--quiet"]
    first = ["--set", "compile=none", "--set", "precision=float32", "--checkpoint-seconds", "0"]
    process = subprocess.Popen([*command, *first])
    while process.poll() is None and len(list(state.glob("*.safetensors"))) < 2:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    subprocess.run([*command, "--set", "micro_batch=8"], check=True, timeout=280)
    record = json.loads((tmp_path / "expert" / "provenance.json").read_bytes())["compute"]
    assert (record["micro_batch"], record["compile"], record["precision"]) == (8, "none", "float32")
    rows = rows_of(tmp_path / "expert")
    # on other images, or in another order, every row's loss would differ by percents
    for row, expected in zip(rows, unbroken, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-3)
    assert rows[-1]["val_loss"] == pytest.approx(unbroken[-1]["val_loss"], rel=5e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"compile": "blocks", "precision": "float32"},
        {"compile": "cuda-graph", "precision": "float32"},
        {"compile": "cuda-graph", "precision": "bfloat16"},
        {"compile": "blocks", "checkpointed_blocks": 2},
        pytest.param({"moments": "8-bit", "compile": "none"}, marks=needs_torchao),
        pytest.param({"precision": "float8", "compile": "blocks"}, marks=needs_torchao),
    ],
    ids=str,
)
def test_however_it_is_computed_it_learns_the_same(
    order: Path, unbroken: list[dict[str, float]], tmp_path: Path, settings: dict[str, object]
) -> None:
    rows = trained(order, tmp_path / "expert", **settings)
    assert rows[-1]["val_loss"] == pytest.approx(unbroken[-1]["val_loss"], rel=0.03)


def test_batches_arrive_as_they_were_drawn() -> None:
    device = torch.device("cuda", 0)

    def draw(number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((1024, 64), float(number)), "t": torch.full((3,), float(number), dtype=torch.float64)}

    for number, batch in enumerate(prefetched(draw, range(50), device)):
        assert all(value.is_pinned() for value in batch.values())
        assert all(bool((value == number).all()) for value in batch.values())


def test_a_checkpoint_is_the_state_at_its_call(tmp_path: Path, order: Path) -> None:
    task = tiny_task(order, "cuda")
    state = TrainingState(task.network.cuda(), task.order.training, ComputeConfig(device="cuda"))
    expected = {name: value.cpu().clone() for name, value in state.tensors().items()}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, Ledger())
        for value in state.tensors().values():
            value.zero_()
    Checkpoints(tmp_path).restore(state)
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in state.tensors().items())


def test_out_of_memory_at_the_first_step_ends_in_a_smaller_micro_batch(tmp_path: Path) -> None:
    """A GPU that is made small: activations of 256 images do not fit into 3 GiB, those of a few do."""
    network = DiTConfig(latent=(4, 32, 32), patch=2, width=384, depth=8, heads=6, condition="labels", classes=3)
    order = tiny_order(tmp_path / "run", network=network, images=768, batch=256)
    task, compute = tiny_task(order, "cuda"), ComputeConfig(device="cuda", micro_batch=256)
    notes: list[str] = []

    def watch(now: Progress) -> None:
        if now.note is not None:
            notes.append(now.note)

    torch.cuda.empty_cache()
    with opened(compute, torch.cuda.memory_allocated() / 2**30 + 3):
        settings = {"identity": {}, "what": "order", "watch": watch}
        fitted = fit(task, task.order.training, compute, tmp_path / "state", **settings)  # type: ignore[arg-type]
    assert notes, "256 images fitted, so nothing was tested"
    assert fitted.compute.micro_batch is not None
    assert fitted.compute.micro_batch < 256
    assert fitted.state.images == 768
    assert len(fitted.rows) == 3
    assert saved_compute(tmp_path / "state") == fitted.compute
