"""One optimizer step, on a small diffusion transformer: cut, guarded, checkpointed, compiled, shared by processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.islands.task import ExpertTask
from atoll.models.dit import DiTConfig
from atoll.training.checkpoint import Meters, TrainingState
from atoll.training.compute import ComputeConfig
from atoll.training.config import TrainConfig
from atoll.training.distributed import Group
from atoll.training.loop import Batch, Step, micro_batches
from tiny_orders import LATENT, tiny_order, tiny_task

NETWORK = DiTConfig(latent=LATENT, patch=2, width=16, depth=3, heads=2, condition="labels", classes=3)
BATCH = 12


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), network=NETWORK, batch=BATCH, samples=60, warmup_images=0)


def task_of(order: Path, seed: int = 0) -> ExpertTask:
    """As if trained a while: no layer is silent."""
    task = tiny_task(order)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in task.network.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=numbers))
    return task


class Trained:
    """A task with its state and step; `take` trains on the batch that comes next."""

    def __init__(self, order: Path, training: TrainConfig | None = None, **compute: object) -> None:
        self.task = task_of(order)
        self.training = training or self.task.order.training
        chosen = ComputeConfig.model_validate(compute)
        self.state = TrainingState(self.task.network, self.training, chosen)
        self.step = Step(self.task, self.state, self.training, chosen, Group())

    def batch(self, size: int = BATCH) -> Batch:
        return self.task.batch(self.state.images, size, slice(0, size))

    def take(self, batch: Batch | None = None) -> None:
        batch = self.batch() if batch is None else batch
        self.step(batch, len(batch["x0"]))
        self.state.images += len(batch["x0"])

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.task.network.parameters() if p.grad is not None]

    def tensors(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.state.tensors().items()}


@pytest.mark.parametrize("size", [BATCH, 7])
@pytest.mark.parametrize("micro_batch", [1, 5, 100])
def test_micro_batches_give_the_whole_batchs_gradient(order: Path, micro_batch: int, size: int) -> None:
    """Against autograd on the mean loss of the batch, full or short."""
    # unclipped, since the optimizer leaves the clipped gradient where it found the other
    training = task_of(order).order.training.model_copy(update={"gradient_clip": None})
    trained = Trained(order, training, micro_batch=micro_batch)
    batch, network = trained.batch(size), trained.task.network
    loss = trained.task.loss(network, batch).mean()
    expected = torch.autograd.grad(loss, list(network.parameters()))
    trained.take(batch)
    for gradient, mean in zip(trained.gradients(), expected, strict=True):
        torch.testing.assert_close(gradient, mean, rtol=1e-4, atol=1e-6)
    counts = trained.state.meters.read()
    assert counts.skipped == 0
    assert counts.loss == pytest.approx(loss.item(), rel=1e-5)


def test_a_step_is_adamw_and_the_average_follows(order: Path) -> None:
    """Against torch's clip_grad_norm_ and AdamW, and the average's formula."""
    training = task_of(order).order.training.model_copy(update={"gradient_clip": 0.05, "weight_decay": 0.1})
    trained, other = Trained(order, training), task_of(order).network
    groups = [
        {"params": [p for p in other.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in other.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas)
    averages = {name: value.detach().clone() for name, value in other.named_parameters()}
    for _ in range(4):
        batch, rate = trained.batch(), trained.state.ema.rate(trained.state.images + BATCH, BATCH)
        optimizer.zero_grad()
        trained.task.loss(other, batch).mean().backward()
        assert torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05) > 0.05, "nothing was clipped"
        optimizer.step()
        averages = {n: torch.lerp(averages[n], p.detach(), rate) for n, p in other.named_parameters()}
        trained.take(batch)
    for name, value in trained.task.network.named_parameters():
        torch.testing.assert_close(value, other.get_parameter(name), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trained.state.ema.tensors[name], averages[name], rtol=1e-4, atol=1e-5)
    kept = trained.state.averaged_weights()
    assert kept.keys() == trained.task.network.state_dict().keys()


@pytest.mark.parametrize("moments", ["float32", "8-bit"])
@pytest.mark.parametrize("bad", ["loss nan", "loss inf", "gradient"])
def test_a_step_that_is_not_finite_leaves_everything_but_its_count(order: Path, bad: str, moments: str) -> None:
    trained = Trained(order, moments=moments)
    trained.take()
    before = trained.tensors()
    spoiled = trained.batch()
    if bad == "gradient":  # the loss is finite
        weight = trained.task.network.patches.project.weight
        hook = weight.register_hook(lambda gradient: gradient * float("inf"))
    else:
        spoiled["x0"][3, 0, 0, 0] = float(bad.split()[1])
    trained.step(spoiled, BATCH)
    if bad == "gradient":
        hook.remove()
    after = trained.tensors()
    meters = after.pop("meters")
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert (meters - before["meters"]).tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    trained.take()
    counts = trained.state.meters.read()
    assert (counts.skipped, counts.longest_row) == (1, 1)


def test_checkpointed_blocks_change_no_bit(order: Path) -> None:
    plain, again = Trained(order), Trained(order, checkpointed_blocks=2)
    assert [block.recompute for block in again.task.network.blocks] == [True, True, False]
    for _ in range(3):
        plain.take()
        again.take()
    expected = plain.tensors()
    assert all(torch.equal(value, expected[name]) for name, value in again.tensors().items())


@pytest.mark.slow  # half a minute of g++
def test_blocks_are_compiled_once_for_all_and_compute_the_same(order: Path) -> None:
    """Also with a left-over micro-batch and a short last batch, which are not worth a compilation of their own."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain = Trained(order, micro_batch=5)
    compiled = Trained(order, micro_batch=5, compile="blocks")
    for size in (BATCH, BATCH, 7):
        for each in (plain, compiled):
            each.take(each.batch(size))
    assert counters["stats"]["unique_graphs"] == 1, "every block, or every shape, had a compilation of its own"
    losses = [each.state.meters.read().loss for each in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for mine, expected in zip(compiled.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()


def test_micro_batches_cover_the_batch_once() -> None:
    assert [list(range(10))[part] for part in micro_batches(10, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert micro_batches(10, None) == [slice(0, 10)]


@pytest.mark.parametrize(("batch", "size"), [(32, 2), (7, 3), (2, 3), (1, 8)])
def test_the_rows_of_a_group_are_the_batch_once(batch: int, size: int) -> None:
    """A process without rows computes one that counts for nothing, since all must take part in the exchange."""
    rows = [range(batch)[Group(rank, size).rows(batch)] for rank in range(size)]
    assert all(rows)
    counted = [row for rank, own in enumerate(rows) if not Group(rank, size).idle(batch) for row in own]
    assert counted == list(range(batch))


def test_a_mean_over_a_million_steps_keeps_its_digits() -> None:
    """float32 would stop counting at 2^24, and round the sum long before."""
    meters = Meters(torch.device("cpu"))
    meters.values[0], meters.values[1] = 0.1 * 2**25, 2**25
    meters.add(torch.tensor(0.1), torch.tensor(1.0))
    assert meters.values[1] == 2**25 + 1
    assert meters.read().loss == pytest.approx(0.1, rel=1e-9)
