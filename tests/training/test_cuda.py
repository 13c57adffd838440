"""The training loop on a real GPU: what a CPU cannot show of graphs, streams, copies and memory.

Needs no organizer's packages: orders and shards are made here (tiny_orders.py).
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact
from atoll.islands.train import train
from atoll.models.dit import DiTConfig
from atoll.training.checkpoints import Checkpoints, Ledger, saved_execution
from atoll.training.execution import Execution, open_device
from atoll.training.feed import Feed
from atoll.training.loop import Progress, fit
from atoll.training.machines import BESIDE, GIB, stay_within
from atoll.training.packing import Batch, forget_last_error, pinned_bytes
from atoll.training.resources import Resources
from atoll.training.state import TrainingState
from atoll.training.step import Step
from atoll.training.stopping import StopRequested
from atoll.training.team import Team
from runs import ATOLL
from tiny_orders import tiny_learner, tiny_order

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: NOT TESTED HERE")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: NOT TESTED HERE")
MANY = {"images": 12_800, "batch": 64, "ema_images": 1024}  # 200 steps
PLAIN = {"compiling": "none", "precision": "float32"}


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


def test_killed_after_a_checkpoint_it_goes_on_with_another_micro_batch(
    order: Path, unbroken: list[dict[str, float]], tmp_path: Path
) -> None:
    """The same images in the same order, under the settings of before but for what was asked."""
    state = tmp_path / "expert" / "state"
    command = [*ATOLL, "train", str(order), "--out", str(tmp_path / "expert"), "--device", "cuda", "--quiet"]
    first = ["--set", "compiling=none", "--set", "precision=float32", "--checkpoint-seconds", "0"]
    process = subprocess.Popen([*command, *first])
    while process.poll() is None and len(list(state.glob("*.safetensors"))) < 2:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    seen = int(max(state.glob("*.safetensors")).stem)
    assert 0 < seen < MANY["images"]

    subprocess.run([*command, "--set", "micro_batch=8"], check=True, timeout=280)
    record = json.loads((tmp_path / "expert" / "provenance.json").read_bytes())["execution"]
    assert (record["micro_batch"], record["compiling"], record["precision"]) == (8, "none", "float32")
    rows = rows_of(tmp_path / "expert")
    assert [row["images"] for row in rows] == [row["images"] for row in unbroken]
    # on other images, or in another order, every row's loss would differ by percents
    for row, expected in zip(rows, unbroken, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-3)
    assert rows[-1]["val_loss"] == pytest.approx(unbroken[-1]["val_loss"], rel=5e-3)


@pytest.mark.parametrize("compiling", ["none", "blocks", "graph"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float8"])
def test_however_it_is_compiled_it_learns_the_same(
    order: Path, unbroken: list[dict[str, float]], tmp_path: Path, compiling: str, precision: str
) -> None:
    rows = trained(order, tmp_path / "expert", compiling=compiling, precision=precision, micro_batch=64)
    assert [row["images"] for row in rows] == [row["images"] for row in unbroken]
    assert rows[-1]["val_loss"] == pytest.approx(unbroken[-1]["val_loss"], rel=5e-3)


def test_a_budget_that_no_batch_divides_and_micro_batches_in_a_graph(tmp_path: Path) -> None:
    """The short last batch cannot be replayed, and is trained on nevertheless."""
    order = tiny_order(tmp_path / "run", images=64 * 20 + 17, batch=64)
    plain = trained(order, tmp_path / "plain", **PLAIN)
    graph = trained(order, tmp_path / "graph", compiling="graph", precision="float32", micro_batch=16)
    assert [row["images"] for row in graph] == [row["images"] for row in plain]
    assert graph[-1]["images"] == 64 * 20 + 17
    assert graph[-1]["val_loss"] == pytest.approx(plain[-1]["val_loss"], rel=5e-3)


@pytest.mark.parametrize("compiling", ["none", "blocks", "graph"])
@pytest.mark.parametrize("samples", ["host", "device"])
def test_no_step_waits_for_the_device(order: Path, compiling: str, samples: str) -> None:
    """torch raises at whatever makes the host wait, in the loop's thread and in the feed's."""
    execution = Execution(device="cuda", precision="bfloat16", compiling=compiling, micro_batch=32)  # type: ignore[arg-type]
    device = open_device(execution)
    learner = tiny_learner(order, "cuda")
    learner.network.to(device)
    if samples == "device":
        learner.samples = learner.samples.to(device)
    training = learner.order.training
    state = TrainingState(learner.network, training, execution)
    step = Step(learner, state, training, execution, Team())

    def draw(number: int) -> Batch | None:
        if number == 30:
            return None
        return learner.draw(number * 64, 64, slice(0, 64))

    taken = 0
    try:
        for number, batch in Feed(draw, device).stream(0):
            if number == 10:  # compiled, recorded, and the feed has all its room
                torch.cuda.set_sync_debug_mode("error")
            step(batch, 64, 1e-3, 0.1)
            state.meters.glance()
            taken += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken == 30
    assert state.meters.read().steps == 30


def test_the_watch_of_the_step_is_awake() -> None:
    """What the test above relies on: a wait inside a step is an error."""
    value = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stop_at(images: int) -> object:
    def watch(now: Progress) -> None:
        if now.images == images:
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


@needs_torchao
@pytest.mark.parametrize("compiling", ["none", "graph"])
def test_moments_in_eight_bits(order: Path, unbroken: list[dict[str, float]], tmp_path: Path, compiling: str) -> None:
    rows = trained(order, tmp_path / "expert", compiling=compiling, precision="float32", moments="8-bit")
    assert rows[-1]["val_loss"] == pytest.approx(unbroken[-1]["val_loss"], rel=0.02)


@needs_torchao
@pytest.mark.parametrize(("before", "after"), [("8-bit", "float32"), ("float32", "8-bit")])
def test_moments_are_converted_when_a_training_goes_on(
    order: Path, unbroken: list[dict[str, float]], tmp_path: Path, before: str, after: str
) -> None:
    out = tmp_path / "expert"
    with pytest.raises(StopRequested):
        resources = Resources("cuda", settings={**PLAIN, "moments": before})
        train(order, out, resources=resources, watch=stop_at(6400))  # type: ignore[arg-type]
    saved = saved_execution(out / "state")
    assert saved is not None
    assert saved.moments == before
    artifact = train(order, out, resources=Resources("cuda", settings={"moments": after}))
    assert artifact is not None
    rows = rows_of(artifact)
    assert [row["images"] for row in rows] == [row["images"] for row in unbroken]
    assert rows[-1]["val_loss"] == pytest.approx(unbroken[-1]["val_loss"], rel=0.02)


def test_stopped_and_gone_on_with_it_ends_like_an_unbroken_run(
    order: Path, unbroken: list[dict[str, float]], tmp_path: Path
) -> None:
    """With a graph, whose static memory a restored state must reach."""
    out = tmp_path / "expert"
    settings = {"compiling": "graph", "precision": "float32", "micro_batch": 64}
    with pytest.raises(StopRequested):
        train(order, out, resources=Resources("cuda", settings=settings), watch=stop_at(6400))  # type: ignore[arg-type]
    artifact = train(order, out)
    assert artifact is not None
    rows = rows_of(artifact)
    assert [row["images"] for row in rows] == [row["images"] for row in unbroken]
    assert rows[-1]["val_loss"] == pytest.approx(unbroken[-1]["val_loss"], rel=5e-3)
    # no "as before": the same expert must come out on any machine that has the saved state
    assert json.loads((out / "provenance.json").read_bytes())["execution"]["compiling"] == "graph"


@pytest.mark.parametrize("compiling", ["none", "graph"])
def test_a_checkpoint_is_the_state_at_the_step_it_was_asked_for(order: Path, tmp_path: Path, compiling: str) -> None:
    """The copy runs beside the steps that follow; none of what they change may be in it."""
    execution = Execution(device="cuda", compiling=compiling, micro_batch=64)  # type: ignore[arg-type]
    device = open_device(execution)
    learner = tiny_learner(order, "cuda")
    learner.network.to(device)
    training = learner.order.training
    state = TrainingState(learner.network, training, execution)
    step = Step(learner, state, training, execution, Team())
    expected: dict[str, torch.Tensor] = {}

    def draw(number: int) -> Batch | None:
        return None if number == 30 else learner.draw(number * 64, 64, slice(0, 64))

    with Checkpoints(tmp_path) as checkpoints:
        for number, batch in Feed(draw, device).stream(0):
            step(batch, 64, 1e-3, 0.1)
            state.images += 64
            if number == 19:
                expected = {name: value.clone() for name, value in state.tensors().items()}
                checkpoints.save(state, Ledger())
        checkpoints.finish()
        other = TrainingState(copy.deepcopy(learner.network), training, execution)
        checkpoints.restore(other)
    assert other.images == 20 * 64
    for name, value in other.tensors().items():
        assert torch.equal(value, expected[name]), name
    assert {v.device.type for moments in other.optimizer.state.values() for v in moments.values()} == {"cuda"}


def test_a_feed_hands_over_every_batch_in_order_and_unmixed() -> None:
    """The device is kept busy, so that room would be used again too early if it could be."""
    device = torch.device("cuda")
    busy = torch.randn(2000, 2000, device=device)

    def draw(number: int) -> Batch | None:
        if number == 40:
            return None
        rows = 5 if number == 39 else 1000
        return {
            "x": torch.full((rows, 100), float(number)),
            "half": torch.full((rows,), number, dtype=torch.int64),
            "wide": torch.full((rows,), number + 0.5, dtype=torch.float64),
            "flag": torch.tensor([number % 2 == 0] * rows),
            "there": torch.full((rows,), float(number), device=device),
            "scalar": torch.tensor(float(number)),
        }

    found, sums = [], []
    for number, batch in Feed(draw, device).stream(3):
        for _ in range(5):
            busy = busy @ busy * 1e-3
        found.append(number)
        assert {value.device.type for value in batch.values()} == {"cuda"}
        assert len(batch["x"]) == (5 if number == 39 else 1000)
        wrong = sum((batch[name] != number).sum() for name in ("x", "half", "there", "scalar"))
        wrong = wrong + (batch["wide"] != number + 0.5).sum() + (batch["flag"] != (number % 2 == 0)).sum()
        sums.append(wrong)
    assert found == list(range(3, 40))
    assert torch.stack(sums).sum().item() == 0


def test_a_draw_that_fails_raises_in_the_reader() -> None:
    def draw(number: int) -> Batch | None:
        if number == 7:
            raise ValueError("no such shard")
        return {"x": torch.zeros(2)}

    seen = []
    with pytest.raises(ValueError, match="no such shard"):
        for number, _ in Feed(draw, torch.device("cuda")).stream(0):
            seen.append(number)
    assert seen == list(range(7))
    assert "atoll-feed" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("after", [0, 1, 6])
def test_leaving_early_ends_the_feeds_thread(after: int) -> None:
    drawn = []

    def draw(number: int) -> Batch | None:
        drawn.append(number)
        return {"x": torch.zeros(2)}

    for number, _ in Feed(draw, torch.device("cuda")).stream(0):
        if number == after:
            break
    assert "atoll-feed" not in {thread.name for thread in threading.enumerate()}
    assert len(drawn) < after + 12, "it draws a few ahead, no more"


def test_memory_that_cannot_be_pinned_is_memory_all_the_same() -> None:
    """A refusal by CUDA is not left for the next kernel to fail of."""
    cuda = torch.device("cuda", 0)
    first = [pinned_bytes(1000, cuda) for _ in range(8)]
    assert all(buffer.is_pinned() for buffer in first)
    cudart = torch.cuda.cudart()
    assert cudart.cudaHostRegister(first[0].data_ptr(), 1000, 0) != cudart.cudaError.success
    forget_last_error(cuda)
    assert torch.ones((), device=cuda).item() == 1


def test_an_expert_stays_within_the_memory_it_was_given(tmp_path: Path) -> None:
    network = DiTConfig(latent=(4, 32, 32), patch=2, width=384, depth=8, heads=6, condition="labels", classes=3)
    order = tiny_order(tmp_path / "run", network=network, images=512, batch=256)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert train(order, tmp_path / "expert", resources=Resources("cuda", memory=4.0)) is not None
    assert torch.cuda.max_memory_reserved() <= 3.0 * GIB


def test_a_card_without_its_number_is_held_too() -> None:
    torch.cuda.empty_cache()  # what is kept of other tests would be given without asking
    try:
        stay_within(torch.device("cuda"), 1.0)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(int(1.5 * GIB), dtype=torch.uint8, device="cuda")
    finally:
        stay_within(torch.device("cuda"), None)


def test_real_lack_of_memory_ends_in_a_smaller_micro_batch(tmp_path: Path) -> None:
    """A card that is made small: activations of 256 images do not fit into 3 GiB, those of a few do."""
    network = DiTConfig(latent=(4, 32, 32), patch=2, width=384, depth=8, heads=6, condition="labels", classes=3)
    order = tiny_order(tmp_path / "run", network=network, images=768, batch=256)
    learner = tiny_learner(order, "cuda")
    notes: list[str] = []

    def watch(now: Progress) -> None:
        if now.note is not None:
            notes.append(now.note)

    torch.cuda.empty_cache()
    stay_within(torch.device("cuda", 0), torch.cuda.memory_allocated() / GIB + 3 + BESIDE)
    try:
        fitted = fit(
            learner,
            learner.order.training,
            Execution(device="cuda", micro_batch=256),
            tmp_path / "state",
            identity={},
            whose="order",
            watch=watch,
        )
    finally:
        stay_within(torch.device("cuda", 0), None)
    assert notes, "256 images fitted, so nothing was tested"
    assert fitted.execution.micro_batch is not None
    assert fitted.execution.micro_batch < 256
    assert fitted.state.images == 768
    assert fitted.state.meters.read().skipped == 0
    assert len(fitted.rows) == 3
    assert saved_execution(tmp_path / "state") == fitted.execution
