"""Many experts in one process (benchmarks/stacked.py) are what as many separate islands make."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.distill.posterior import Behind
from atoll.islands.expert import read_expert_card
from atoll.islands.order import read_order
from atoll.islands.train import shards_of, train
from atoll.islands.validation import Validation
from atoll.models.dit import DiT, DiTConfig
from atoll.models.router import Router, RouterConfig
from atoll.planning.recipes import OBJECTIVES
from atoll.process import Bridge, Condition, NetworkDenoiser
from atoll.training.execution import Execution
from atoll.training.recipe import Training
from atoll.training.result import load_network
from tiny_orders import CLASSES, NETWORK, TRAINING, tiny_order

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from stacked import Denoising, Distilling, Following, OnDevice, Pool, Stack, Teachers, Telling, train_stack

CPU = torch.device("cpu")
POOLED = DiTConfig(latent=(2, 8, 8), patch=2, width=64, depth=2, heads=2, condition="pooled", text_width=12)


def stirred(network: DiT | Router, seed: int) -> DiT | Router:
    """Fresh networks answer zero; stirred ones tell their experts apart."""
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=numbers))
    return network


@pytest.mark.parametrize("kind", ["none", "labels", "pooled", "router"])
def test_a_stack_answers_and_learns_as_its_networks_do_alone(kind: str) -> None:
    config = {
        "none": replace(NETWORK, condition="none", classes=None, activation="silu"),
        "labels": NETWORK,
        "pooled": POOLED,
        "router": POOLED,
    }[kind]
    networks = [
        stirred(Router(RouterConfig(trunk=config, clusters=5)) if kind == "router" else DiT(config), seed)
        for seed in range(3)
    ]
    stack = Stack(networks, device=CPU, precision=torch.float64)
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, *config.latent, generator=numbers, dtype=torch.float64)
    time = 999 * torch.rand(3, 4, generator=numbers, dtype=torch.float64)
    dropped = torch.tensor([[True, False, False, False]] * 3)
    given = {
        "none": {},
        "labels": {"labels": torch.randint(0, CLASSES, (3, 4), generator=numbers), "dropped": dropped},
        "pooled": {"pooled": torch.randn(3, 4, 12, generator=numbers, dtype=torch.float64), "dropped": dropped},
    }["pooled" if kind == "router" else kind]
    answer = stack(x, time, given)
    answer.square().sum().backward()
    gradients = stack.tensors(stack.weights.grad)
    for k, network in enumerate(networks):
        network.double().zero_grad()
        alone = network(x[k], time[k], Condition(**{n: v[k] for n, v in given.items()}) if given else None)
        torch.testing.assert_close(answer[k], alone, rtol=1e-9, atol=1e-9)
        alone.square().sum().backward()
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(gradients[name][k].double(), parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_experts_of_a_stack_are_as_good_as_those_of_separate_islands(tmp_path: Path) -> None:
    objectives = [OBJECTIVES["flow"], OBJECTIVES["ddpm"]]
    orders, val_losses = [], []
    for k, objective in enumerate(objectives):
        place = tiny_order(tmp_path / f"run{k}", images=3840, decay="linear", seed=k)
        order, run = read_order(place)
        order = order.model_copy(update={"objective": objective})
        place.write_bytes(order.to_bytes())
        artifact = train(place, tmp_path / f"expert{k}", sheets=False)
        assert artifact is not None
        network = load_network(lambda: DiT(NETWORK), NETWORK, artifact, "cpu")
        validation = Validation.fixed(shards_of(order, run, "validation"), order.training.seed)
        card = read_expert_card(artifact)
        orders.append((order, run, validation, card))
        val_losses.append(validation.measure(network, card, Execution()))

    order, run, *_ = orders[0]
    samples = shards_of(order, run, "train")
    every = torch.arange(len(samples))
    pool = Pool(samples.latents(every), labels=samples.condition(every, torch.zeros(len(every))).labels)
    torch.manual_seed(0)
    trained = train_stack(
        [DiT(NETWORK) for _ in objectives],
        Denoising(objectives, NETWORK.time_scale),
        pool,
        [every] * 2,
        order.training,
        seeds=[0, 1],
    )
    for (_, _, validation, card), state, island in zip(orders, trained.states, val_losses, strict=True):
        network = DiT(NETWORK)
        network.load_state_dict(state, strict=False)
        stacked = validation.measure(network, card, Execution())
        fresh = validation.measure(DiT(NETWORK), card, Execution())
        assert stacked == pytest.approx(island, rel=0.05), "as good as an island's"
        assert stacked < 0.65 * fresh, "and far better than nothing"


def test_routers_of_a_stack_learn_to_tell_clusters_apart() -> None:
    numbers = torch.Generator().manual_seed(3)
    clusters = torch.arange(240) % 3
    latents = torch.randn(3, 2, 8, 8, generator=numbers)[clusters] + 0.3 * torch.randn(240, 2, 8, 8, generator=numbers)
    trunk = replace(NETWORK, condition="none", classes=None)
    trained = train_stack(
        [Router(RouterConfig(trunk=trunk, clusters=3))],
        Telling(clusters, trunk.time_scale),
        Pool(latents),
        [torch.arange(240)],
        TRAINING.model_copy(update={"images": 6400, "decay": "linear"}),
        seeds=[0],
    )
    first, last = trained.rows[0]["loss"][0], trained.rows[-1]["loss"][0]
    assert last < 0.4 < first, "far below ln 3 over all times, t near 1 included"


@pytest.mark.parametrize("heard", ["as a whole", "by kind", "all as noise", "by the data"])
@pytest.mark.parametrize("truth", [0.0, 0.25])
def test_a_student_of_a_stack_is_taught_by_the_teacher_of_each_samples_own_cluster(truth: float, heard: str) -> None:
    """Against teachers asked one by one, each through its bridge; clusters of unequal size count as if samples were
    drawn from all data. The teachers of two objectives answer in two groups, and not in the order of clusters. By its
    kind the noise teacher is heard for 1 / (2 - (1 - t)^2) of what it says, and so are others that are taken for one;
    beside the data for (1 - t)^2, and the rest is the mean of the samples of its cluster and class, or of any class.
    """
    objectives, limit = [OBJECTIVES["flow"], OBJECTIVES["ddpm"], OBJECTIVES["flow"]], 5.0
    teachers = [stirred(DiT(POOLED), seed) for seed in range(3)]
    student, flow, shares = stirred(DiT(POOLED), 9), OBJECTIVES["flow"], torch.tensor([0.5, 0.3, 0.2])
    numbers = torch.Generator().manual_seed(1)
    x0, eps = torch.randn(2, 3, 4, *POOLED.latent, generator=numbers).unbind(0)
    u = torch.rand(3, 4, generator=numbers, dtype=torch.float64)
    given = {"pooled": torch.randn(3, 4, 12, generator=numbers), "dropped": torch.tensor([[True, *[False] * 3]] * 3)}
    stacks = [
        Stack([teachers[k] for k in some], device=CPU, precision=torch.float32).requires_grad_(False)
        for some in ([2, 0], [1])
    ]
    taken_for = OBJECTIVES["ddpm"] if heard == "all as noise" else None
    doubted = {"as a whole": [], "by kind": [1], "all as noise": [0, 1, 2], "by the data": [1]}[heard]
    trust = {"as a whole": "whole", "by the data": "data"}.get(heard, "kind")
    latents = torch.randn(60, *POOLED.latent, generator=numbers) / 4  # near enough to be taken for each other
    rows, classes = torch.tensor([[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]), torch.arange(60) // 3 % 2
    x0 = latents[rows]
    noise_rows = torch.arange(1, 60, 3)
    behind = Behind.of(noise_rows, torch.arange(60) % 3, classes, lambda some: latents[some], seed=0)
    groups = [
        Teachers.of(stack, torch.tensor(some), OBJECTIVES[name], POOLED.time_scale, limit, taken_for)
        for stack, some, name in zip(stacks, ([2, 0], [1]), ("flow", "ddpm"), strict=True)
    ]
    known = OnDevice.of(behind, latents) if trust == "data" else None
    task = Distilling(groups, shares, flow, POOLED.time_scale, truth, trust, known)
    stack = Stack([student], device=CPU, precision=torch.float32)
    losses = task.loss(stack, x0, eps, u, given, rows)
    expected = 0.0
    for k, (teacher, objective) in enumerate(zip(teachers, objectives, strict=True)):
        t, condition = flow.times(u[k]), Condition(**{name: value[k] for name, value in given.items()})
        x = flow.noisy(x0[k], eps[k], t)
        own = NetworkDenoiser(teacher, objective.schedule, objective.kind, POOLED.time_scale)
        share, truths = torch.ones(4, dtype=torch.float64), eps[k] - x0[k]
        if k in doubted:
            share = (1 - t) ** 2 if trust == "data" else 1 / (2 - (1 - t) ** 2)
        if k in doubted and trust == "data":
            truths = torch.stack([velocity_of_mean(x[i], t[i], latents, noise_rows, i, classes) for i in range(4)])
        kept = (1 - truth) * share.float().view(4, 1, 1, 1)
        target = kept * Bridge(own, limit=limit)(x, t, condition).value + (1 - kept) * truths
        answer = student(x, t * POOLED.time_scale, condition)
        expected += shares[k] * torch.nn.functional.mse_loss(answer, target)
    assert losses.shape == (1, 12)
    torch.testing.assert_close(losses.mean(), expected)
    losses.mean().backward()
    assert all(stack.weights.grad is None for stack in stacks)
    assert stack.weights.grad is not None


def test_a_student_without_data_learns_what_was_said_on_the_way() -> None:
    """At the state, time and prompt of each row, dropped where the trajectory's was, whatever is drawn later."""
    student = stirred(DiT(POOLED), 9)
    numbers = torch.Generator().manual_seed(1)
    states, target = torch.randn(2, 10, *POOLED.latent, generator=numbers).unbind(0)
    t, dropped = torch.rand(10, generator=numbers, dtype=torch.float64), torch.arange(10) % 3 == 0
    text, rows = torch.randn(10, 12, generator=numbers), torch.tensor([[7, 0, 3, 4]])
    task = Following(t, target, dropped, POOLED.time_scale)
    given = {"pooled": text[rows], "dropped": torch.ones(1, 4, dtype=torch.bool)}
    stack = Stack([student], device=CPU, precision=torch.float32)
    losses = task.loss(stack, states[rows], torch.zeros(0), torch.zeros(1, 4), given, rows)
    own = rows[0]
    answer = student(states[own], t[own] * POOLED.time_scale, Condition(pooled=text[own], dropped=dropped[own]))
    torch.testing.assert_close(losses, (answer - target[own]).square().flatten(1).mean(1)[None])


def velocity_of_mean(
    x: torch.Tensor, t: torch.Tensor, latents: torch.Tensor, rows: torch.Tensor, place: int, classes: torch.Tensor
) -> torch.Tensor:
    """Of the samples that may lie behind the state of the noise teacher's sample at `place`; the first one's class is
    dropped."""
    some = latents[rows if place == 0 else rows[classes[rows] == classes[rows[place]]]].double()
    odds = torch.softmax(-(x - (1 - t) * some).flatten(1).square().sum(1) / (2 * t**2), 0)
    mean = torch.tensordot(odds, some, 1)
    return ((x - (1 - t) * mean) / t - mean).float()


def test_a_stack_keeps_what_it_was_on_the_way() -> None:
    pool = Pool(
        torch.randn(40, *POOLED.latent),
        text=torch.randn(1, 12),
        first=torch.zeros(40).long(),
        count=torch.ones(40).long(),
    )
    numbers = {"learning_rate": 1e-3, "decay": "constant", "ema_images": 1, "seed": 0}
    task, members = Denoising([OBJECTIVES["flow"]], POOLED.time_scale), [torch.arange(40)]
    torch.manual_seed(0)
    network = DiT(POOLED)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    kept = {}
    for steps in (200, 100):
        network.load_state_dict(state)
        training = Training(images=4 * steps, batch=4, **numbers)
        kept[steps] = train_stack([network], task, pool, members, training, seeds=[0], keep_after=(0.5,))
    for name, value in kept[100].states[0].items():
        assert torch.equal(kept[200].kept[0.5][0][name], value), "what a training half as long ends with"
