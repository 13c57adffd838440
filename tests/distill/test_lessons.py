"""What a student is taught, against closed forms and against experts asked one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Store
from atoll.data.stream import sample_order
from atoll.diffusion import (
    EDM,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Denoiser,
    Kind,
    LinearFlow,
    Objective,
    Prediction,
    Schedule,
    combine,
    convert,
    linear_form,
    noisy,
    tells_only,
)
from atoll.distill.lessons import (
    TRAJECTORIES,
    DataLessons,
    OwnExperts,
    Questions,
    SampledLessons,
    Trust,
    corrected,
    taught,
    weight_of,
)
from atoll.distill.plan import DistillPlan, TrustIn, student_plan
from atoll.distill.stage import Desk, Teachers, data_school, settled
from atoll.islands.expert import load_expert
from atoll.mixture.mixture import Denoisers, Mixture, Rows
from atoll.registry.versions import place_of
from atoll.runtime.pool import ExpertPool
from atoll.training.config import TrainConfig
from atoll.training.memory import GIB
from atoll.training.resources import Resources
from atoll.training.seeds import batch_numbers
from closed_form import ExactDenoiser, ExactRouter
from gaussian_world import WORLD, name, relative_error
from tiny_experts import plain, pool, question, write_experts

CPU = torch.device("cpu")
TEACHERS: list[tuple[Schedule, Kind]] = [
    (LinearFlow(), Kind.VELOCITY),
    (CosineVP(), Kind.EPSILON),
    (EDM(), Kind.X0),
    (CosineVP(), Kind.V),
]
STUDENTS = [
    (LinearFlow(), Kind.VELOCITY),
    (CosineVP(), Kind.EPSILON),
    (EDM(), Kind.X0),
    (LinearFlow(), Kind.X0),
    (CosineVP(), Kind.V),
]
TRAINING = TrainConfig(images=4096, batch=100, learning_rate=1e-3, ema_images=100, seed=3)


def exact_teachers() -> list[Denoiser]:
    """The ideal expert of every cluster, each of another schedule and kind, on the reference path."""
    return [
        Bridge(ExactDenoiser(WORLD.cluster(k), schedule, kind), onto=LinearFlow(), limit=None)
        for k, (schedule, kind) in enumerate(TEACHERS)
    ]


@pytest.mark.parametrize(("schedule", "kind"), STUDENTS, ids=name)
def test_exact_teachers_of_any_objective_give_the_exact_target(schedule: Schedule, kind: Kind) -> None:
    """For a sample of cluster k it is E[p x0 + q eps | x, cluster k] on the student's path: nothing of the others."""
    numbers = torch.Generator().manual_seed(1)
    x0, component = WORLD.sample(240, numbers)
    clusters = WORLD.clusters[component]
    t = 0.02 + 0.9 * torch.rand(240, generator=numbers, dtype=torch.float64)
    x = noisy(schedule, x0, torch.randn(x0.shape, generator=numbers, dtype=torch.float64), t)
    condition = Condition(labels=WORLD.labels[component], dropped=torch.rand(240, generator=numbers) < 0.3)

    objective = Objective(schedule=schedule, kind=kind)
    target = taught(OwnExperts(Denoisers(exact_teachers())).about(clusters), objective, x, t, condition)
    for k in range(4):
        mine = clusters == k
        known = WORLD.cluster(k).posterior(x[mine], t[mine], schedule, condition[mine])
        truth = combine(kind, schedule, t[mine], known.x0, known.eps).value
        assert relative_error(target[mine], truth).max() < 1e-7


@pytest.mark.parametrize(("schedule", "kind"), STUDENTS, ids=name)
def test_the_mean_lesson_is_what_the_whole_world_says(schedule: Schedule, kind: Kind) -> None:
    """A state may come from any cluster, by p(k | x, t, c): the mean of its targets, what a squared error finds, is
    the answer of the whole world, with the condition and without it."""
    numbers = torch.Generator().manual_seed(2)
    x0, component = WORLD.sample(100, numbers)
    t = 0.02 + 0.9 * torch.rand(100, generator=numbers, dtype=torch.float64)
    x = noisy(schedule, x0, torch.randn(x0.shape, generator=numbers, dtype=torch.float64), t)
    condition = Condition(labels=WORLD.labels[component], dropped=torch.rand(100, generator=numbers) < 0.3)
    known = WORLD.posterior(x, t, schedule, condition)

    objective, experts = Objective(schedule=schedule, kind=kind), OwnExperts(Denoisers(exact_teachers()))
    targets = [taught(experts.about(torch.full((100,), k)), objective, x, t, condition) for k in range(4)]
    mean = (torch.stack(targets, -1) * known.clusters[:, None, :]).sum(-1)
    truth = combine(kind, schedule, t, known.x0, known.eps).value
    assert relative_error(mean, truth).max() < 1e-7


def test_a_group_at_a_time_is_as_one_by_one(tmp_path: Path) -> None:
    """Each teacher runs once, on its own rows, in whatever order they come."""
    places = write_experts(tmp_path)
    x, t, condition = question(37)
    clusters = torch.randint(4, (37,), generator=torch.Generator().manual_seed(5))
    together = OwnExperts(pool(places)).about(clusters)(x, t, condition).value
    experts = plain(places)
    with torch.no_grad():
        for row, cluster in enumerate(clusters.tolist()):
            here = slice(row, row + 1)
            alone = experts[cluster](x[here], t[here], condition[here]).value
            assert (together[here] - alone).abs().max() <= 1e-6 * alone.abs().max() + 1e-6


def test_a_teacher_runs_once_for_a_batch(tiny_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the samples, and however many micro-batches the student makes of it."""
    teachers, plan = tiny_teachers(tiny_demo)
    asked: list[tuple[int, int]] = []
    velocities = ExpertPool.velocities

    def counted(
        self: ExpertPool, x: torch.Tensor, t: torch.Tensor, c: Condition | None, rows: Sequence[Rows]
    ) -> list[torch.Tensor]:
        asked.extend((k, count) for k, _, count in rows)
        return velocities(self, x, t, c, rows)

    monkeypatch.setattr(ExpertPool, "velocities", counted)
    data_school(teachers, plan, Desk.at(Resources("cpu"), tiny_demo / "nowhere")).lessons.draw(0, 200, slice(0, 200))
    assert sorted(expert for expert, _ in asked) == list(range(8))
    assert sum(rows for _, rows in asked) == 200


def test_teachers_that_take_turns_say_the_same(tiny_demo: Path) -> None:
    """With memory for two of the eight, as in sampling."""
    teachers, plan = tiny_teachers(tiny_demo)
    desk = Desk.at(Resources("cpu"), tiny_demo / "nowhere")
    narrow = replace(desk, placement=replace(desk.placement, memory=1e6 / GIB))
    roomy, turns = (data_school(teachers, plan, each).lessons for each in (desk, narrow))
    assert isinstance(turns, DataLessons)
    engine = turns.experts.experts
    assert isinstance(engine, ExpertPool)
    assert len(engine.residency.slots) == 2
    together, one_by_one = (lessons.draw(0, 64, slice(0, 64)) for lessons in (roomy, turns))
    assert all(torch.equal(together[name], one_by_one[name]) for name in together)


def tiny_teachers(run: Path) -> tuple[Teachers, DistillPlan]:
    teachers = Teachers.of(Store.at(run))
    return teachers, settled(student_plan(teachers.orders, objective="ddpm"), teachers)


def test_lessons_of_a_real_run_are_its_experts_own_answers(tiny_demo: Path) -> None:
    """States are noisy samples, some without their prompt; each is answered by the expert of its own cluster."""
    teachers, plan = tiny_teachers(tiny_demo)
    school = data_school(teachers, plan, Desk.at(Resources("cpu"), tiny_demo / "nowhere"))
    lessons = school.lessons
    assert isinstance(lessons, DataLessons)
    whole = lessons.draw(64, 48, slice(0, 48))
    part = lessons.draw(64, 48, slice(10, 30))
    assert all(torch.allclose(part[key], whole[key][10:30], atol=1e-5) for key in whole)
    assert 0 < int(whole["dropped"].sum()) < 24

    clusters = asked_clusters(lessons, 64, 48)
    assert len(clusters.unique()) > 3
    condition, objective = Condition.of(whole), plan.objective
    for member in teachers.version.serving:
        rows = clusters == member.cluster
        if not bool(rows.any()):
            continue
        expert = load_expert(place_of(teachers.run, member)).denoiser(LinearFlow())
        with torch.no_grad():
            answer = Bridge(expert, onto=objective.schedule)(whole["x"][rows], whole["t"][rows], condition[rows])
        truth = convert(answer, objective.kind, objective.schedule, whole["x"][rows], whole["t"][rows]).value
        assert (whole["target"][rows] - truth).abs().max() < 1e-5


@pytest.mark.parametrize(("schedule", "kind"), STUDENTS, ids=name)
def test_a_share_of_the_truth_is_of_the_samples_own_target(schedule: Schedule, kind: Kind, tiny_demo: Path) -> None:
    """At a share of 1 nothing but what training on the data learns, at 0 the experts alone, between them the mean."""
    teachers, plan = tiny_teachers(tiny_demo)
    objective = Objective(schedule=schedule, kind=kind)
    drawn = {}
    for share in (0.0, 0.25, 1.0):
        told = plan.model_copy(update={"truth": share, "objective": objective})
        school = data_school(teachers, told, Desk.at(Resources("cpu"), tiny_demo / "nowhere"))
        drawn[share] = school.lessons.draw(0, 48, slice(0, 48))
    assert all(torch.equal(drawn[share][key], drawn[0.0][key]) for share in drawn for key in ("x", "t", "weight"))
    lessons = school.lessons
    assert isinstance(lessons, DataLessons)
    numbers = batch_numbers(plan.training.seed, 0, 48, lessons.latent, slice(0, 48))
    rows = lessons.clustered.rows("train")
    rows = rows[sample_order(len(rows), plan.training.seed, 0, 48)]
    x0 = lessons.clustered.shards.latents(rows)
    own = objective.target(x0, numbers.eps, drawn[1.0]["t"]).value
    torch.testing.assert_close(drawn[1.0]["target"], own)
    assert not torch.allclose(drawn[0.0]["target"], own)
    mean = 0.75 * drawn[0.0]["target"] + 0.25 * own
    torch.testing.assert_close(drawn[0.25]["target"], mean)


FLOW = Objective(schedule=LinearFlow(), kind=Kind.VELOCITY)


BETAS = DDPMBetas("scaled_linear")
PROCESSES = [(schedule, kind) for schedule in (LinearFlow(), CosineVP(), BETAS, EDM()) for kind in Kind]


@pytest.mark.parametrize(
    ("schedule", "kind", "w"),
    [
        (LinearFlow(), Kind.VELOCITY, torch.ones_like),
        (CosineVP(), Kind.V, torch.ones_like),
        (CosineVP(), Kind.EPSILON, lambda t: (1 - t) ** 2),
        (LinearFlow(), Kind.SCORE, lambda t: (1 - t) ** 2),
        (EDM(), Kind.VELOCITY, lambda t: (1 - t) ** 2),
        (EDM(), Kind.X0, lambda t: t**2),
    ],
    ids=name,
)
def test_what_a_teachers_answers_are_worth(
    schedule: Schedule, kind: Kind, w: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """By hand, for a student of velocities on the linear path: v = (eps - x) / (1 - t) = (x - x0) / t. In whatever unit
    noise is told, it is noise."""
    t = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)
    torch.testing.assert_close(weight_of(schedule, kind, FLOW, t), w(t))


@pytest.mark.parametrize(("schedule", "kind"), PROCESSES, ids=name)
def test_answers_are_worth_less_as_their_errors_grow(schedule: Schedule, kind: Kind) -> None:
    """By the bridge's own formula: an error of 1 in the x0 or the noise that a teacher tells, at the time it is asked
    at, is g in the velocity that a student learns. Beyond the teacher's band, too, and at both ends of time."""
    told = tells_only(kind, schedule)
    t = torch.tensor([0.0, 1e-3, 0.02, 0.2, 0.5, 0.8, 0.98, 1.0], dtype=torch.float64)
    weight = weight_of(schedule, kind, FLOW, t)
    if told is None:
        assert torch.equal(weight, torch.ones_like(t))
        return
    s, x = schedule.time_at(LinearFlow().log_snr(t)), torch.zeros(8, 1)
    velocity = (torch.full_like(t, -1.0), torch.ones_like(t))
    g = linear_form(Prediction(told, torch.ones(8, 1, dtype=torch.float64)), schedule, x.double(), s, velocity)
    torch.testing.assert_close(weight, (1 / g[:, 0] ** 2).clamp(max=1), rtol=1e-6, atol=1e-6)


def test_whom_students_doubt() -> None:
    """Who learns noise hears out teachers of noise, velocity and v; who learns velocity or v only those of both."""
    processes: list[tuple[Schedule, Kind]] = [*TEACHERS, (BETAS, Kind.EPSILON)]
    for schedule, kind in ((CosineVP(), Kind.EPSILON), (EDM(), Kind.SCORE)):
        assert Trust(Objective(schedule=schedule, kind=kind), processes, "data").doubted() == [2]
    for schedule, kind in ((LinearFlow(), Kind.VELOCITY), (CosineVP(), Kind.V)):
        assert Trust(Objective(schedule=schedule, kind=kind), processes, "data").doubted() == [1, 2, 4]


@pytest.mark.parametrize(("rule", "heard_for"), [("kind", 1 / (2 - 0.3**2)), ("data", 0.3**2)])
def test_doubt_leaves_the_mean_lesson_as_it_is(rule: TrustIn, heard_for: float) -> None:
    """Truth and ideal teachers agree in the mean, so whatever the share at a time, a student learns the same: the mean
    over the samples that may lie behind a state is the teacher's own answer."""
    numbers = torch.Generator().manual_seed(3)
    x0, component = WORLD.sample(200_000, numbers)
    mine = WORLD.clusters[component] == 1  # the noise teacher's
    x0, eps = x0[mine], torch.randn(x0[mine].shape, generator=numbers, dtype=torch.float64)
    t = torch.full((len(x0),), 0.7, dtype=torch.float64)
    x = noisy(LinearFlow(), x0, eps, t)
    answer = taught(OwnExperts(Denoisers(exact_teachers())).about(torch.ones(len(x0)).long()), FLOW, x, t, None)
    share = Trust(FLOW, TEACHERS, rule).share(torch.ones(len(x0)).long(), t)
    target = corrected(answer, FLOW.target(x0, eps, t).value, 0.0, share)
    excess = target - answer
    assert share[0] == pytest.approx(heard_for)
    assert excess.abs().mean() > 0.1, "single lessons have the truth's noise"
    # least squares on the state finds nothing in it
    design = torch.cat([x.flatten(1), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    found = torch.linalg.lstsq(design, excess.flatten(1)).solution
    assert found.abs().max() < 0.02


def test_lessons_of_a_real_run_hear_noise_teachers_less(tiny_demo: Path) -> None:
    """Rows of its noise experts have their share of the sample's own target, or of the mean of what may lie behind
    them, those of flow experts nothing of it."""
    teachers, plan = tiny_teachers(tiny_demo)
    plan = plan.model_copy(update={"objective": FLOW})
    drawn = {}
    for trust, truth in (*product(("kind", "data"), (0.0, 0.5)), ("whole", 0.0), ("whole", 1.0), ("data", 1.0)):
        told = plan.model_copy(update={"trust": trust, "truth": truth})
        lessons = data_school(teachers, told, Desk.at(Resources("cpu"), tiny_demo / "nowhere")).lessons
        drawn[trust, truth] = lessons.draw(0, 96, slice(0, 96))
        parts = [lessons.draw(0, 96, slice(first, first + 32))["target"] for first in (0, 32, 64)]
        torch.testing.assert_close(torch.cat(parts), drawn[trust, truth]["target"], msg="by parts it is the same")
    assert isinstance(lessons, DataLessons)
    noise = torch.tensor([teachers.experts[k].card.kind is Kind.EPSILON for k in range(8)])
    its = noise[asked_clusters(lessons, 0, 96)]
    assert 0 < int(its.sum()) < 96
    answer, own, mean = (drawn[key]["target"] for key in (("whole", 0.0), ("whole", 1.0), ("data", 1.0)))
    w = torch.where(its, (1 - drawn["whole", 0.0]["t"]) ** 2, 1.0).float().view(-1, 1, 1, 1)
    for rule, share, truth_there in (("kind", 1 / (2 - w), own), ("data", w, mean)):
        assert torch.equal(drawn[rule, 0.0]["target"][~its], answer[~its])
        for truth in (0.0, 0.5):
            kept = (1 - truth) * share
            torch.testing.assert_close(drawn[rule, truth]["target"], kept * answer + (1 - kept) * truth_there)
    assert torch.equal(mean[~its], own[~its])
    near_noise = its & (drawn["whole", 0.0]["t"] > 0.8)
    assert (mean - own)[near_noise].abs().mean() > 0.1, "there other samples may lie behind a state, too"


def test_lessons_mean_over_the_samples_of_a_clusters_own_condition(tiny_demo: Path) -> None:
    """Row by row, by the textbook's formula in float64 over the very samples: of the cluster, with the same caption,
    or with any where the caption is dropped."""
    teachers, plan = tiny_teachers(tiny_demo)
    told = plan.model_copy(update={"objective": FLOW, "trust": "data", "truth": 1.0})
    lessons = data_school(teachers, told, Desk.at(Resources("cpu"), tiny_demo / "nowhere")).lessons
    assert isinstance(lessons, DataLessons)
    batch = lessons.draw(0, 96, slice(0, 96))
    clustered, train = lessons.clustered, lessons.clustered.rows("train")
    rows = train[sample_order(len(train), plan.training.seed, 0, 96)]
    captions = clustered._index.captions
    x0, seen = clustered.shards.latents(train).double(), {True: 0, False: 0}
    for place, row in enumerate(rows.tolist()):
        k, dropped = int(clustered.clusters[row]), bool(batch["dropped"][place])
        if teachers.experts[k].card.kind is not Kind.EPSILON:
            continue
        same = [int(clustered.clusters[r]) == k and (dropped or captions[r] == captions[row]) for r in train.tolist()]
        t, x = float(batch["t"][place]), batch["x"][place].double()
        some = x0[torch.tensor(same)]
        p = torch.softmax(-((x - (1 - t) * some) ** 2).flatten(1).sum(1) / (2 * t**2), 0)
        mean = (p.view(-1, 1, 1, 1) * some).sum(0)
        velocity = (x - (1 - t) * mean) / t - mean
        torch.testing.assert_close(batch["target"][place].double(), velocity, rtol=1e-4, atol=2e-4)
        seen[dropped] += 1
    assert min(seen.values()) > 0

    # one by one, also where nobody else may lie behind the only one; and where all samples lie on a device
    alone = torch.cat([lessons.draw(0, 96, slice(place, place + 1))["target"] for place in range(96)])
    torch.testing.assert_close(alone, batch["target"])
    lessons.resident = clustered.shards.to(CPU)
    assert torch.equal(lessons.draw(0, 96, slice(0, 96))["target"], batch["target"])


def test_samples_without_a_caption_are_not_taken_for_those_whose_caption_was_dropped(
    tiny_demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have no condition, but a caption is dropped of all samples alike, and only then all may lie behind."""
    teachers, plan = tiny_teachers(tiny_demo)
    told = plan.model_copy(update={"objective": FLOW, "trust": "data", "truth": 1.0})
    lessons = data_school(teachers, told, Desk.at(Resources("cpu"), tiny_demo / "nowhere")).lessons
    assert isinstance(lessons, DataLessons)
    before, shards = lessons.draw(0, 96, slice(0, 96)), lessons.clustered.shards
    condition = shards.condition
    monkeypatch.setattr(shards, "condition", lambda rows, u: condition(rows, u).null())
    after = lessons.draw(0, 96, slice(0, 96))
    assert after["dropped"].all()
    assert not before["dropped"].all()
    assert torch.equal(after["target"], before["target"])


def asked_clusters(lessons: DataLessons, images: int, batch: int) -> torch.Tensor:
    """Which cluster the samples of a batch are of: found again by their states at t = 0."""
    still = DataLessons(
        Objective(schedule=LinearFlow(), kind=Kind.X0),
        lessons.training,
        lessons.clustered,
        OwnExperts(Denoisers([Still(k) for k in range(8)])),
        lessons.latent,
        CPU,
    )
    return still.draw(images, batch, slice(0, batch))["target"].flatten(1)[:, 0].round().long()


class Still:
    """Says its own number as x0, whatever it is asked."""

    schedule, kind = LinearFlow(), Kind.VELOCITY

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, x: torch.Tensor, t: torch.Tensor, condition: Condition | None) -> object:
        x0 = Prediction(Kind.X0, torch.full_like(x, self.number))
        return convert(x0, Kind.VELOCITY, self.schedule, x, t.clamp(min=1e-3))


def sampled(objective: Objective, steps: int = 20, trajectories: int = 100) -> SampledLessons:
    """Lessons on the trajectories of an ideal ensemble in six dimensions."""
    mixture = Mixture.of(exact_teachers(), ExactRouter(WORLD))
    questions = Questions(2, lambda numbers: Condition(labels=torch.tensor(numbers)), CPU)
    return SampledLessons(objective, TRAINING, mixture, questions, (6, 1, 1), steps, trajectories, CPU)


@pytest.mark.parametrize(("schedule", "kind"), STUDENTS, ids=name)
def test_states_of_the_ensembles_own_way_have_the_worlds_exact_answers(schedule: Schedule, kind: Kind) -> None:
    """Wherever a trajectory comes by, what the whole world says there is the target, in the student's words."""
    objective = Objective(schedule=schedule, kind=kind)
    lesson = sampled(objective).draw(0, 400, slice(0, 400))
    inside = lesson["t"] < 0.98
    x, t, condition = lesson["x"][inside].double(), lesson["t"][inside], Condition.of(lesson)[inside]
    known = WORLD.posterior(x, t, schedule, condition)
    truth = combine(kind, schedule, t, known.x0, known.eps).value
    error = relative_error(lesson["target"][inside], truth)
    assert error.median() < 1e-5
    assert error.quantile(0.95) < 1e-3  # float32, where clusters lie close together


@pytest.mark.parametrize("trajectories", [TRAJECTORIES, 7, TRAJECTORIES + 40])
def test_a_batch_of_samples_does_not_depend_on_how_it_is_cut(trajectories: int) -> None:
    """Walked in one group, in less, in one and a part of one."""
    lessons = sampled(Objective(schedule=LinearFlow(), kind=Kind.VELOCITY), trajectories=trajectories)
    size = trajectories * lessons.steps
    whole = lessons.draw(size - 100, 200, slice(0, 200))  # of two pools
    again = sampled(lessons.objective, trajectories=trajectories)
    pieces = [again.draw(size - 100 + start, 50, slice(0, 50)) for start in (150, 0, 50, 100)]
    joined = {key: torch.cat([pieces[i][key] for i in (1, 2, 3, 0)]) for key in whole}
    assert all(torch.equal(joined[key], whole[key]) for key in whole)
    assert not torch.equal(whole["x"][:100], whole["x"][100:])


def test_states_keep_what_their_trajectory_was_asked_for() -> None:
    """Tokens and mask of its prompt, dropped or not, whichever group it was walked in: the mixture says them."""

    def said(x: torch.Tensor, t: torch.Tensor, condition: Condition | None) -> Prediction:
        assert condition is not None
        tokens, mask, dropped = condition.tokens, condition.mask, condition.dropped
        assert tokens is not None
        assert mask is not None
        assert dropped is not None
        told = torch.stack([tokens[:, 0, 0], mask.float().sum(1), dropped.float()], 1)
        return Prediction(Kind.VELOCITY, told.repeat(1, 2)[:, :, None, None].to(x))

    def asked(numbers: list[int]) -> Condition:
        tokens = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 4, 2)
        return Condition(tokens=tokens, mask=torch.arange(4) <= torch.tensor(numbers)[:, None] % 4)

    lessons = replace(
        sampled(Objective(schedule=LinearFlow(), kind=Kind.VELOCITY), steps=3, trajectories=10),
        mixture=Mixture.of([Saying(said)], lambda x, t, condition: torch.ones(len(x), 1)),
        questions=Questions(50, asked, CPU),
        at_once=4,
    )
    drawn = lessons.draw(20, 30, slice(None))  # of two pools, in groups of 4, 4 and 2
    expected = [drawn["tokens"][:, 0, 0], drawn["mask"].float().sum(1), drawn["dropped"].float()]
    torch.testing.assert_close(drawn["target"][:, :3, 0, 0], torch.stack(expected, 1))
    assert drawn["tokens"][:, 0, 0].unique().numel() > 5


@dataclass(frozen=True, eq=False)
class Saying:
    """A denoiser that answers what it is told to."""

    answer: Callable[[torch.Tensor, torch.Tensor, Condition | None], Prediction]
    schedule: Schedule = LinearFlow()
    kind: Kind = Kind.VELOCITY

    def __call__(self, x: torch.Tensor, t: torch.Tensor, condition: Condition | None) -> Prediction:
        return self.answer(x, t, condition)


def test_walked_trajectories_end_in_the_world() -> None:
    """The cleanest states of an ideal ensemble's trajectories lie where the data does: in every cluster."""
    pool = sampled(Objective(schedule=LinearFlow(), kind=Kind.VELOCITY), steps=60).draw(0, 6000, slice(None))
    clean = pool["t"] < 0.03
    x, t = pool["x"][clean].double().flatten(1), pool["t"][clean]
    known = WORLD.posterior(x, t, LinearFlow(), None)
    assert known.clusters.argmax(1).unique().numel() == 4
    distance = (known.x0 - x).norm(dim=1) / 6**0.5
    assert distance.median() < 0.1
