"""`fit`: to the end of the budget, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from toys import TRAINING, ToyTask, fitted, same

from apple_device import APPLE, AppleDevice
from atoll.artifacts import UserError
from atoll.training import StopRequested
from atoll.training.checkpoint import saved_compute
from atoll.training.compute import ComputeConfig
from atoll.training.loop import AHEAD, MOST_SKIPPED, Batch, Progress, on_device, prefetched


def test_it_learns_what_there_is_to_learn(tmp_path: Path) -> None:
    done = fitted(tmp_path, training=TRAINING.model_copy(update={"images": 6400, "decay": "linear"}))
    expected = torch.eye(4)[:3].flip(0)
    assert torch.allclose(done.state.averaged_weights()["blocks.0.weight"], expected, atol=0.05)
    assert done.rows[-1]["loss"] == pytest.approx(0.01, rel=0.3)  # the noise's variance


def test_rows_are_the_mean_loss_of_their_steps_and_a_val_loss(tmp_path: Path) -> None:
    losses: list[Tensor] = []

    class Telling(ToyTask):
        def loss(self, network: nn.Module, batch: Batch) -> Tensor:
            found = super().loss(network, batch)
            losses.append(found.detach().mean())
            return found

    done = fitted(tmp_path, Telling(), TRAINING.model_copy(update={"images": 16 * 100 + 3}))
    assert len(done.rows) == 40
    assert [row["images"] for row in done.rows][-1] == 1603
    ends = [-(-row["images"] // 16) for row in done.rows]
    for start, end, row in zip([0, *ends], ends, done.rows, strict=False):
        assert row["loss"] == pytest.approx(torch.stack(losses[start:end]).mean().item(), rel=1e-5)
        assert row["val_loss"] > 0


@pytest.mark.parametrize("images", [640, 100, 7, 16])
def test_every_image_of_the_budget_is_seen_once_in_order(tmp_path: Path, images: int) -> None:
    learner = ToyTask()
    done = fitted(tmp_path, learner, TRAINING.model_copy(update={"images": images}))
    assert done.state.images == images
    starts = range(0, images, 16)
    assert learner.drawn == [(start, min(16, images - start)) for start in starts]


@pytest.mark.parametrize("images", [640, 100])
@pytest.mark.parametrize("steps", [1, 3, 6, 7, 40])
def test_stopped_anywhere_it_goes_on_bit_for_bit(tmp_path: Path, steps: int, images: int) -> None:
    """A signal at any step, the last one included: it is saved, and the same call ends like an unbroken one."""
    training = TRAINING.model_copy(update={"images": images})
    unbroken = fitted(tmp_path / "unbroken", training=training)
    last = min(16 * steps, images)

    class Told(ToyTask):
        def batch(self, images: int, size: int, rows: slice) -> Batch:
            if images + size == last:  # in the midst of a step, which is ended first
                os.kill(os.getpid(), signal.SIGTERM)
            return super().batch(images, size, rows)

    with pytest.raises(StopRequested, match=f"after {last} images"):
        fitted(tmp_path / "broken", Told(), training)
    learner = ToyTask()
    assert same(fitted(tmp_path / "broken", learner, training), unbroken)
    assert [images for images, _ in learner.drawn] == list(range(last, images, 16))


class Failing(ToyTask):
    """Raises once from its loss, its measure or the optimizer."""

    def __init__(self, where: str, when: int, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.where, self.when, self.error = where, when, error
        self.calls = {"loss": 0, "report": 0}

    def _called(self, where: str) -> None:
        self.calls[where] += 1
        if where == self.where and self.calls[where] == self.when:
            raise self.error()

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        found = super().loss(network, batch)
        self._called("loss")
        return found

    def report(self, images: int, compute: ComputeConfig) -> dict[str, float]:
        self._called("report")
        return super().report(images, compute)


def no_memory() -> Exception:
    return torch.OutOfMemoryError("tried to allocate more than there is")


@pytest.mark.parametrize(("where", "when"), [("loss", 1)])
def test_out_of_memory_at_the_first_step_halves_the_micro_batch(tmp_path: Path, where: str, when: int) -> None:
    """The end is that of an unbroken run but for rounding."""
    unbroken = fitted(tmp_path / "unbroken")
    learner = Failing(where, when, no_memory)
    notes: list[str] = []

    def watch(now: Progress) -> None:
        if now.note is not None:
            notes.append(now.note)

    done = fitted(tmp_path / "broken", learner, watch=watch)
    assert notes == ["out of memory: micro-batch 8"]
    assert done.compute.micro_batch == 8
    assert saved_compute(tmp_path / "broken") == done.compute
    assert [row["images"] for row in done.rows] == [row["images"] for row in unbroken.rows]
    for name, value in unbroken.state.tensors().items():
        torch.testing.assert_close(done.state.tensors()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("where", "when"), [("loss", 3), ("report", 2)])
def test_out_of_memory_later_is_one_line_and_the_same_call_resumes(tmp_path: Path, where: str, when: int) -> None:
    unbroken = fitted(tmp_path / "unbroken")
    with pytest.raises(UserError, match=r"out of memory on cpu after \d+ images: .* it resumes") as caught:
        fitted(tmp_path / "broken", Failing(where, when, no_memory))
    assert "\n" not in str(caught.value)
    done = fitted(tmp_path / "broken")
    for name, value in unbroken.state.tensors().items():
        assert torch.equal(done.state.tensors()[name], value)


class Spoiled(ToyTask):
    """Not finite in some steps."""

    def __init__(self, steps: set[int]) -> None:
        super().__init__()
        self.steps = steps

    def batch(self, images: int, size: int, rows: slice) -> Batch:
        drawn = super().batch(images, size, rows)
        if images // 16 in self.steps:
            drawn["x"][0] = float("nan")
        return drawn


def test_steps_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    seen: list[Progress] = []
    done = fitted(tmp_path, Spoiled({4, 5, 6, 20}), watch=seen.append)
    assert seen[-1].skipped == 4
    assert [row["images"] for row in done.rows if row["loss"] is None] == [80, 96, 112, 336]
    assert all(value.isfinite().all() for value in done.state.tensors().values())


def test_a_run_whose_steps_are_all_lost_ends_in_one_line(tmp_path: Path) -> None:
    learner = Spoiled(set(range(12, 40)))
    with pytest.raises(UserError, match=f"of {MOST_SKIPPED} steps in a row was not finite, after 272 images") as caught:
        fitted(tmp_path, learner)
    assert "\n" not in str(caught.value)
    assert learner.drawn[-1] == (256, 16), "it ended as soon as it knew"


def test_progress_says_where_training_stands(tmp_path: Path) -> None:
    seen: list[Progress] = []
    fitted(tmp_path, watch=seen.append)
    assert [now.images for now in seen] == list(range(16, 656, 16))
    assert all(now.total == 640 for now in seen)
    assert seen[0].rate is None, "the first steps, in which kernels are compiled, do not count"
    assert seen[-1].rate is not None
    assert seen[-1].rate > 0
    assert seen[20].seconds_left is not None
    assert seen[20].seconds_left == pytest.approx((640 - 336) / seen[20].rate)  # type: ignore[operator]
    assert seen[-1].seconds_left == 0
    assert None not in {now.loss for now in seen}
    assert None not in {now.val_loss for now in seen}


def test_state_left_as_found(tmp_path: Path) -> None:
    """A training in a server or a notebook: thread count, random state and signal handlers stay as they were."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    task, seen = ToyTask(), set()
    state = torch.get_rng_state()
    try:
        fitted(tmp_path, task, watch=lambda _: seen.add(torch.get_num_threads()))
        assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_it_trains_outside_the_main_thread(tmp_path: Path) -> None:
    """Where signal handlers cannot be set."""
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(fitted, tmp_path / "thread").result()
    assert same(done, fitted(tmp_path / "main"))


def test_batches_are_drawn_ahead_in_order_by_one_thread() -> None:
    """A text encoder serves one thread: the tokenizers and lazily loaded weights behind it do not lock."""
    inside, threads, drawn = threading.Semaphore(1), set(), []

    def draw(number: int) -> Batch:
        assert inside.acquire(blocking=False), "two batches were drawn at once"
        threads.add(threading.get_ident())
        time.sleep(0.002)
        drawn.append(number)
        inside.release()
        return {"x": torch.full((2,), float(number))}

    found = []
    for batch in prefetched(draw, range(0, 100, 10), torch.device("cpu")):
        found.append(batch["x"][0].item())
        assert len(drawn) <= len(found) + AHEAD + 1
    assert found == [float(number) for number in range(0, 100, 10)]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_batch_that_cannot_be_drawn_raises_in_the_loop() -> None:
    def draw(number: int) -> Batch:
        if number == 2:
            raise ValueError("no such shard")
        return {}

    found = prefetched(draw, range(5), torch.device("cpu"))
    assert [next(found), next(found)] == [{}, {}]
    with pytest.raises(ValueError, match="no such shard"):
        next(found)


def test_float64_is_narrowed_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"t": torch.rand(3, dtype=torch.float64), "row": torch.arange(3)}
    monkeypatch.setattr("atoll.diffusion.schedule.WITHOUT_FLOAT64", ("mps", APPLE.type))
    with AppleDevice():
        batch = on_device(drawn, APPLE)
    assert {name: value.dtype for name, value in batch.items()} == {"t": torch.float32, "row": torch.int64}
    assert on_device(drawn, torch.device("cpu"))["t"].dtype is torch.float64
