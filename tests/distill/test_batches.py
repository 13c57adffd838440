"""What a student learns from, against closed forms and against experts evaluated one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.artifacts import Store
from atoll.diffusion import (
    VE,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Denoiser,
    Kind,
    LinearFlow,
    Objective,
    Schedule,
    combine,
    convert,
    noisy,
)
from atoll.distill.batches import generated_batches, own_experts, teacher_target, trust_of
from atoll.distill.plan import DistillPlan, student_plan
from atoll.distill.stage import Teachers, batches_of_data
from atoll.islands.expert import load_expert
from atoll.mixture.mixture import Denoisers
from atoll.models.dit import DiTConfig
from atoll.registry.versions import place_of
from atoll.training.config import TrainConfig
from closed_form import ExactDenoiser
from gaussian_world import WORLD, name, relative_error
from tiny_experts import plain, pool, question, write_experts

CPU = torch.device("cpu")
TEACHERS: list[tuple[Schedule, Kind]] = [
    (LinearFlow(), Kind.VELOCITY),
    (CosineVP(), Kind.EPSILON),
    (VE(), Kind.X0),
    (CosineVP(), Kind.V),
]
STUDENTS = [
    (LinearFlow(), Kind.VELOCITY),
    (CosineVP(), Kind.EPSILON),
    (VE(), Kind.X0),
    (CosineVP(), Kind.V),
]


@pytest.mark.parametrize(("schedule", "kind"), STUDENTS, ids=name)
def test_exact_teachers_of_any_objective_give_the_exact_target(schedule: Any, kind: Kind) -> None:
    """For a sample of cluster k it is that of cluster k's posterior; the mean over clusters that of the whole world."""
    numbers = torch.Generator().manual_seed(1)
    x0, component = WORLD.sample(120, numbers)
    clusters = WORLD.clusters[component]
    t = 0.02 + 0.9 * torch.rand(120, generator=numbers, dtype=torch.float64)
    x = noisy(schedule, x0, torch.randn(x0.shape, generator=numbers, dtype=torch.float64), t)
    condition = Condition(labels=WORLD.labels[component], dropped=torch.rand(120, generator=numbers) < 0.3)
    experts: list[Denoiser] = [
        Bridge(ExactDenoiser(WORLD.cluster(k), *process), onto=LinearFlow(), limit=None)
        for k, process in enumerate(TEACHERS)
    ]
    objective = Objective(schedule=schedule, kind=kind)
    target = teacher_target(own_experts(Denoisers(experts), clusters), objective, x, t, condition)
    for k in range(4):
        mine = clusters == k
        known = WORLD.cluster(k).posterior(x[mine], t[mine], schedule, condition[mine])
        assert relative_error(target[mine], combine(kind, schedule, t[mine], known.x0, known.eps).value).max() < 1e-7
    of_each = [
        teacher_target(own_experts(Denoisers(experts), torch.full((120,), k)), objective, x, t, condition)
        for k in range(4)
    ]
    known = WORLD.posterior(x, t, schedule, condition)
    mean = (torch.stack(of_each, -1) * known.clusters[:, None, :]).sum(-1)
    assert relative_error(mean, combine(kind, schedule, t, known.x0, known.eps).value).max() < 1e-7


def test_a_group_at_a_time_is_as_one_by_one(tmp_path: Path) -> None:
    """Each teacher runs once, on its own rows, in whatever order they come."""
    places = write_experts(tmp_path)
    x, t, condition = question(37)
    clusters = torch.randint(4, (37,), generator=torch.Generator().manual_seed(5))
    together = own_experts(pool(places), clusters)(x, t, condition).value
    experts = plain(places)
    with torch.no_grad():
        for row, cluster in enumerate(clusters.tolist()):
            here = slice(row, row + 1)
            alone = experts[cluster](x[here], t[here], condition[here]).value
            assert (together[here] - alone).abs().max() <= 1e-6 * alone.abs().max() + 1e-6


def test_batches_of_a_real_run_are_its_experts_own_predictions(tiny_demo: Path) -> None:
    """Noisy images, some without their prompt; the expert of each one's own cluster predicts."""
    teachers = Teachers.of(Store.at(tiny_demo))
    plan = student_plan(teachers.orders, objective="ddpm")
    batches, _ = batches_of_data(teachers, plan, CPU, 0.0)
    whole, part = batches.batch(64, 48, slice(0, 48)), batches.batch(64, 48, slice(10, 30))
    assert all(torch.allclose(part[key], whole[key][10:30], atol=1e-5) for key in whole)
    assert 0 < int(whole["dropped"].sum()) < 24
    own, half = (replace(batches, data_weight=weight).batch(64, 48, slice(0, 48)) for weight in (1.0, 0.5))
    torch.testing.assert_close(half["target"], (own["target"] + whole["target"]) / 2)
    less = replace(batches, trust=lambda rows, t: torch.full_like(t, 0.25)).batch(64, 48, slice(0, 48))
    whole = replace(batches, trust=lambda rows, t: torch.ones_like(t)).batch(64, 48, slice(0, 48))
    torch.testing.assert_close(less["target"], 0.75 * own["target"] + 0.25 * whole["target"])
    assert torch.equal(less["weight"], whole["weight"]), "whoever the teacher is"
    objective, errors = plan.objective, []
    for member in teachers.version.serving:
        expert = load_expert(place_of(teachers.run, member)).denoiser(LinearFlow())
        with torch.no_grad():
            prediction = Bridge(expert, onto=objective.schedule)(whole["x"], whole["t"], Condition.of(whole))
        value = convert(prediction, objective.kind, objective.schedule, whole["x"], whole["t"]).value
        errors.append((whole["target"] - value).flatten(1).abs().amax(1))
    assert torch.stack(errors).amin(0).max() < 1e-5, "every target is the prediction of one expert"


def test_generated_images_are_learned_with_the_mixture() -> None:
    exact = Bridge(ExactDenoiser(WORLD, CosineVP(), Kind.EPSILON), onto=LinearFlow(), limit=None)
    x0, component = WORLD.sample(200, torch.Generator().manual_seed(2))
    training = TrainConfig(images=4096, batch=100, learning_rate=1e-3, ema_images=100, seed=3)
    objective, network = (
        Objective(schedule=CosineVP(), kind=Kind.V),
        DiTConfig(latent=(1, 4, 4), patch=4, width=8, depth=1, heads=1),
    )
    plan = DistillPlan(network=network, objective=objective, training=training)
    batches = generated_batches(x0, Condition(labels=WORLD.labels[component]), exact, CPU, plan)
    batch = batches.batch(0, 100, slice(0, 100))
    known = WORLD.posterior(batch["x"], batch["t"], CosineVP(), Condition.of(batch))
    truth = combine(Kind.V, CosineVP(), batch["t"], known.x0, known.eps).value
    assert relative_error(batch["target"], truth).median() < 1e-5
    assert torch.equal(batch["weight"], torch.ones(100))


@pytest.mark.parametrize(
    ("schedule", "kind", "expected"),
    [
        (LinearFlow(), Kind.VELOCITY, torch.ones_like),
        (CosineVP(), Kind.V, torch.ones_like),
        (LinearFlow(), Kind.EPSILON, lambda t: (1 - t).square()),
        (DDPMBetas("linear"), Kind.EPSILON, lambda t: (1 - t).square()),
        (VE(), Kind.X0, lambda t: t.square()),
    ],
    ids=name,
)
def test_teachers_count_less_where_their_errors_grow(schedule: Schedule, kind: Kind, expected: object) -> None:
    """For a student of velocity on the linear path: w is one over the squared growth of a teacher's error."""
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    flow = Objective(schedule=LinearFlow(), kind=Kind.VELOCITY)
    torch.testing.assert_close(trust_of(schedule, kind, flow, t), expected(t), rtol=0.02, atol=1e-3)  # type: ignore[operator]
    same = Objective(schedule=CosineVP(), kind=Kind.EPSILON)
    assert torch.equal(trust_of(DDPMBetas("linear"), Kind.EPSILON, same, t), torch.ones_like(t))
