"""One optimizer step, on a small diffusion transformer: cut, guarded, recomputed, compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.islands.learning import ExpertLearner
from atoll.models.dit import DiTConfig
from atoll.training.execution import Execution
from atoll.training.recipe import Training
from atoll.training.state import TrainingState
from atoll.training.step import Batch, Step, micro_batches
from atoll.training.team import Team
from tiny_orders import LATENT, tiny_learner, tiny_order

NETWORK = DiTConfig(latent=LATENT, patch=2, width=16, depth=3, heads=2, condition="labels", classes=3)
BATCH = 12


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), network=NETWORK, batch=BATCH, samples=60)


def learner_of(order: Path, seed: int = 0) -> ExpertLearner:
    """As if trained a while: no layer is silent."""
    learner = tiny_learner(order)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.network.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=numbers))
    return learner


class Trained:
    """A learner with its state and step; `take` trains on the batch that comes next."""

    def __init__(self, order: Path, training: Training | None = None, **execution: object) -> None:
        self.learner = learner_of(order)
        self.training = training or self.learner.order.training
        chosen = Execution.model_validate(execution)
        self.state = TrainingState(self.learner.network, self.training, chosen)
        self.step = Step(self.learner, self.state, self.training, chosen, Team())

    def batch(self, size: int = BATCH) -> Batch:
        return self.learner.draw(self.state.images, size, slice(0, size))

    def take(self, batch: Batch | None = None) -> None:
        batch = self.batch() if batch is None else batch
        self.step(batch, len(batch["x0"]), 1e-3, 0.25)
        self.state.images += len(batch["x0"])

    def gradients(self) -> list[Tensor]:
        found = [p.grad for p in self.learner.network.parameters() if p.grad is not None]
        assert len(found) == len(list(self.learner.network.parameters()))
        return [gradient.clone() for gradient in found]

    def tensors(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.state.tensors().items()}


@pytest.mark.parametrize("size", [BATCH, 7])
@pytest.mark.parametrize("micro_batch", [1, 4, 5, 12, 100])
def test_micro_batches_give_the_whole_batchs_gradient(order: Path, micro_batch: int, size: int) -> None:
    """Against autograd on the mean loss of the batch, full or short."""
    # unclipped, since the optimizer leaves the clipped gradient where it found the other
    training = learner_of(order).order.training.model_copy(update={"gradient_clip": None})
    trained = Trained(order, training, micro_batch=micro_batch)
    batch = trained.batch(size)
    expected = torch.autograd.grad(
        trained.learner.loss(trained.learner.network, batch).mean(), list(trained.learner.network.parameters())
    )
    loss = trained.learner.loss(trained.learner.network, batch).mean().item()
    trained.take(batch)
    for gradient, mean in zip(trained.gradients(), expected, strict=True):
        torch.testing.assert_close(gradient, mean, rtol=1e-4, atol=1e-6)
    counts = trained.state.meters.read()
    assert (counts.steps, counts.skipped) == (1, 0)
    assert counts.loss == pytest.approx(loss, rel=1e-5)


def test_a_step_is_adamw_and_the_average_follows(order: Path) -> None:
    """Against torch's clip_grad_norm_ and AdamW, and the average's formula."""
    training = learner_of(order).order.training.model_copy(update={"gradient_clip": 0.05, "weight_decay": 0.1})
    trained = Trained(order, training)
    other = learner_of(order).network
    start = {name: value.detach().clone() for name, value in other.named_parameters()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in other.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in other.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=training.betas,
    )
    averages = dict(start)
    for _ in range(4):
        batch = trained.batch()
        optimizer.zero_grad()
        trained.learner.loss(other, batch).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        assert norm > 0.05, "nothing was clipped, so clipping is not tested"
        optimizer.step()
        averages = {n: torch.lerp(averages[n], p.detach(), 0.25) for n, p in other.named_parameters()}
        trained.take(batch)
    for name, value in trained.learner.network.named_parameters():
        torch.testing.assert_close(value, other.get_parameter(name), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trained.state.ema.tensors[name], averages[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("moments", ["float32", "8-bit"])
@pytest.mark.parametrize("bad", ["loss nan", "loss inf", "gradient"])
def test_a_step_that_is_not_finite_leaves_everything_but_its_count(order: Path, bad: str, moments: str) -> None:
    trained, other = Trained(order, moments=moments), Trained(order, moments=moments)
    for each in (trained, other):
        each.take()
        each.take()
    before = trained.tensors()
    spoiled = trained.batch()
    if bad == "gradient":  # the loss is finite
        hook = trained.learner.network.patches.project.weight.register_hook(lambda gradient: gradient * float("inf"))
    else:
        spoiled["x0"][3, 0, 0, 0] = float(bad.split()[1])
    trained.step(spoiled, BATCH, 1e-3, 0.25)
    if bad == "gradient":
        hook.remove()
    after = trained.tensors()
    meters = after.pop("meters")
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert (meters - before["meters"]).tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    trained.take()
    other.take()
    expected = other.tensors()
    assert all(torch.equal(value, expected[name]) for name, value in trained.tensors().items() if name != "meters")
    counts = trained.state.meters.read()
    assert (counts.steps, counts.skipped, counts.longest_row) == (3, 1, 1)


@pytest.mark.parametrize("recomputed", [1, 3])
def test_recomputed_blocks_change_no_bit(order: Path, recomputed: int) -> None:
    plain, again = Trained(order), Trained(order, recomputed_blocks=recomputed)
    assert [block.recompute for block in again.learner.network.blocks] == [i < recomputed for i in range(3)]
    for _ in range(3):
        plain.take()
        again.take()
    expected = plain.tensors()
    for name, value in again.tensors().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow  # half a minute of g++
def test_blocks_are_compiled_once_for_all_and_compute_the_same(order: Path) -> None:
    """Also with a left-over micro-batch and a short last batch, which are not worth a compilation of their own."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain = Trained(order, micro_batch=5)
    compiled = Trained(order, micro_batch=5, compiling="blocks")
    for size in (BATCH, BATCH, 7):
        for each in (plain, compiled):
            each.take(each.batch(size))
    assert counters["stats"]["unique_graphs"] == 1, "every block, or every shape, had a compilation of its own"
    losses = [each.state.meters.read().loss for each in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for mine, expected in zip(compiled.gradients(), plain.gradients(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.slow  # a minute of g++
def test_a_process_compiles_for_more_shapes_than_torchs_eight(order: Path) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    sizes = range(2, 11)
    for size in sizes:
        Trained(order, micro_batch=size, compiling="blocks").take()
    assert counters["stats"]["unique_graphs"] == len(sizes) > 8
    torch._dynamo.reset()


def test_micro_batches_cover_the_batch_once() -> None:
    assert [list(range(10))[part] for part in micro_batches(10, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert micro_batches(10, None) == [slice(0, 10)]


@pytest.mark.parametrize(("batch", "size"), [(32, 2), (7, 3), (2, 3), (1, 8)])
def test_a_teams_parts_are_the_batch_once(batch: int, size: int) -> None:
    """Who gets no row computes on one that counts for nothing, since all must take part in the exchange."""
    team = [Team(rank, size) for rank in range(size)]
    assert [row for member in team for row in range(batch)[member.part(batch)]] == list(range(batch))
    drawn = [range(batch)[member.drawn_part(batch)] for member in team]
    assert all(len(rows) > 0 for rows in drawn)
    assert sum(len(rows) for member, rows in zip(team, drawn, strict=True) if not member.idle(batch)) == batch
