"""The distillation stage: the experts of a run's model become one dense network, an expert without a cluster.

DDM's way: each training sample is answered by the expert of its own cluster, and no router is asked. The experts may be
of any schedule and kind, since each is asked through its bridge; where errors of what one predicts grow on that way,
the data answers with it. Or, without data, by the whole mixture on its own trajectories.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..artifacts import Artifact, Store, UserError, canonical_json, differences, find, sanitize
from ..data.index import Index
from ..data.text import text_encoder
from ..diffusion import Condition, Objective
from ..islands.expert import KIND, ExpertCard, Teacher, all_licenses
from ..islands.order import Order
from ..islands.validation import MOST_SAMPLES, Validation
from ..mixture.routes import TopK, parse_route
from ..models.accounting import flops_forward
from ..models.dit import DiT
from ..registry.checks import Checks
from ..registry.signatures import check_signed
from ..registry.versions import Version, open_ensemble, open_reference, place_of
from ..router.task import ClusteredSamples
from ..runtime.load import Ensemble, check_digest, load_ensemble
from ..runtime.placing import OpenedExpert, Placed, Placement, answering_bytes, open_expert
from ..runtime.weights import Precision
from ..training.artifact import finished, seeded, train_artifact
from ..training.checkpoint import CONFIG, saved_compute
from ..training.compute import ComputeConfig, best_device, usable
from ..training.distributed import local_device, world_size
from ..training.loop import Watch
from ..training.memory import GIB, reachable
from ..training.resources import Resources
from .learning import StudentTask
from .lessons import TRAJECTORIES, DataLessons, Lessons, OwnExperts, Questions, SampledLessons, Trust
from .plan import (
    USUAL_TRUST,
    Cost,
    DistillPlan,
    StartFrom,
    TrustIn,
    all_trajectories,
    cost_of,
    mean_forward,
    usual_trajectories,
)
from .posterior import BYTES_AT_WORK, Behind
from .start import MOST_MEASURED, Candidate, Start, able, alike, average_start, best_start

MADE_BY = "plan or other teachers"
MOST_RECORD_BYTES = 2**24
RECORD = "distillation.json"  # in a student's folder: its plan, what was spent, where it began
READ = ("condition", "classes", "vocabulary", "text_width", "text_length")  # of an architecture: what it is asked with
TEACHERS_SHARE = 0.5  # of a card's memory that experts may take; the student trains in the rest


@dataclass(frozen=True)
class Teachers:
    """The experts that serve a run's model, by cluster, and the orders they were trained for."""

    run: Store
    version: Version
    experts: Mapping[int, OpenedExpert]
    orders: tuple[Order, ...]

    @staticmethod
    def of(run: Store) -> Teachers:
        """Every one of them, verified as for sampling; a cluster without its expert has nobody to teach it."""
        version = open_ensemble(run)
        check_signed(run, version)
        checks = Checks(run)
        checks.check(version.model_copy(update={"experts": ()}))
        if empty := version.empty_clusters():
            raise UserError(f"{run}: no expert serves cluster {empty[0]}, so nobody can teach it; admit one first")
        experts = {}
        for member in version.serving:
            expert = open_expert(place_of(run, member))
            checks.check_member(version, member)
            check_digest(run, member, expert.digest)
            experts[member.cluster] = expert
        ordered = checks.orders_of(version)
        orders = tuple(ordered[member.order] for member in version.serving if member.order in ordered)
        return Teachers(run, version, experts, orders)

    def candidates(self, sizes: Mapping[int, int]) -> list[Candidate]:
        places = {member.cluster: place_of(self.run, member) for member in self.version.serving}
        return [Candidate(k, places[k], expert, sizes[k]) for k, expert in self.experts.items()]

    def trust(self, objective: Objective, rule: TrustIn) -> Trust:
        """How far a student with this objective hears them."""
        return Trust(objective, [(e.card.schedule, e.card.kind) for _, e in sorted(self.experts.items())], rule)

    def card(self, plan: DistillPlan, data: Artifact | None) -> ExpertCard:
        """Of a student from random weights."""
        named = tuple(Teacher(cluster=k, digest=e.digest, license=e.card.license) for k, e in self.experts.items())
        licenses = [None if data is None else data.manifest.license, *(teacher.license for teacher in named)]
        return ExpertCard(
            architecture=plan.network,
            schedule=plan.objective.schedule,
            kind=plan.objective.kind,
            latent=self.version.latent,
            text=self.version.text,
            images=plan.training.images,
            partition=self.version.partition.digest,
            license=all_licenses(licenses),
            teachers=named,
            class_names=self.version.class_names,
        )


@dataclass(frozen=True)
class Desk:
    """Where a distillation is computed: the device, what experts may take of it, and how exactly they answer."""

    device: torch.device
    placement: Placement
    precision: Precision

    @staticmethod
    def at(resources: Resources, state: Path) -> Desk:
        saved = saved_compute(state)
        before = saved.device if saved is not None and usable(saved.device) else None
        device = torch.device(local_device(best_device(resources.wanted_device or before)))
        resources.check_memory_of(str(device))
        if device.type != "cuda":
            return Desk(device, Placement((device,), graphs=False), "float32")
        room = min(reachable(device), resources.memory or float("inf"))
        return Desk(device, Placement((device,), TEACHERS_SHARE * room, graphs=False), "bfloat16")

    def at_work(self, experts: Iterable[OpenedExpert], rows: int) -> float:
        """GiB of a card in which experts answer to so many rows, whoever of them is asked for how many."""
        if self.device.type != "cuda":
            return 0.0
        return max(answering_bytes(expert.card.architecture, rows, self.precision) for expert in experts) / GIB


def distill(
    run: Store,
    out: Path,
    plan: DistillPlan,
    *,
    resources: Resources = Resources(),
    checkpoint_seconds: float | None = None,
    watch: Watch | None = None,
) -> Artifact | None:
    """Train a student of a run's experts and leave it in `out`; the same call resumes, or finds it done.

    Of several processes that train together all but the first return None.
    """
    resources.check()
    teachers = Teachers.of(run)
    check_fits(plan, teachers)
    plan = as_begun(settled(plan, teachers), plan, teachers, out)
    parents = parents_of(plan, teachers)
    check_plan_of(out, plan)
    if (done := finished(out, KIND, parents, MADE_BY)) is not None:
        return done
    state = out / "state"
    desk = Desk.at(resources, state)
    school = sampled_school(teachers, plan, desk) if plan.states == "samples" else data_school(teachers, plan, desk)

    def build(compute: ComputeConfig, device: str) -> StudentTask:
        school.settle(device)
        start = started(plan, teachers, school, compute, torch.device(device), state)
        card = school.card if start is None else grown(school.card, start)
        network: DiT = seeded(lambda numbers: DiT(plan.network, numbers), plan.training.seed)
        if start is not None:
            network.load_state_dict(dict(start.weights))
        told = {"plan": plan.model_dump(mode="json"), "operations": school.cost.model_dump(), "start": card.origin}
        files = {RECORD: canonical_json(told)}
        return StudentTask(network, card, plan.objective, school.lessons, school.validation, files)

    return train_artifact(
        out,
        KIND,
        build,
        architecture=plan.network,
        training=plan.training,
        identity=plan.identity(),
        parents=parents,
        what=MADE_BY,
        resources=left_for_student(resources, school, desk),
        notes=[*filter(None, (school.cost.sentence(), told_trust(plan, teachers), told_trajectories(plan)))],
        checkpoint_seconds=checkpoint_seconds,
        watch=watch,
    )


def check_fits(plan: DistillPlan, teachers: Teachers) -> None:
    """Refuse what cannot be, before anything is written."""
    version = teachers.version
    if tuple(plan.network.latent) != tuple(version.latent.shape):
        raise UserError(f"network.latent {plan.network.latent}: the experts' latents are {version.latent.shape}")
    for name in READ:
        asked = getattr(plan.network, name)
        theirs = {getattr(expert.card.architecture, name) for expert in teachers.experts.values()}
        if asked not in theirs:
            known = " or ".join(map(str, theirs))
            raise UserError(f"network.{name} {asked}: a student reads what its teachers read, and they have {known}")
    able(teachers.candidates(dict.fromkeys(teachers.experts, 1)), plan)
    if plan.states == "data":
        try:
            open_reference(teachers.run, version.data, "data")
            open_reference(teachers.run, version.partition, "partition")
        except UserError as error:
            raise UserError(f"{error}; --from-samples needs no data") from error
        if plan.trajectories is not None:
            raise UserError(
                f"--set trajectories={plan.trajectories}: has a meaning with --from-samples only; leave it out"
            )
        return
    if plan.truth:
        raise UserError(f"--truth {plan.truth:g}: with --from-samples there is no data to take it from; leave it out")
    if plan.trust in ("kind", "data"):
        raise UserError(f"--set trust={plan.trust}: with --from-samples there is no data to say the rest; leave it out")
    if plan.start == "best":
        raise UserError("--start best: is measured on data; with --from-samples use average, or leave it out")
    if version.text is not None and not plan.prompts:
        raise UserError("--from-samples: these experts read text; give --prompts FILE with a prompt in each line")
    if version.text is None and plan.prompts:
        raise UserError("--prompts: these experts read no text; leave it out")
    if version.text is not None and version.text.kind == "words":
        text_encoder(version.text).encode(plan.prompts)  # every word must be one that they know


def settled(plan: DistillPlan, teachers: Teachers) -> DistillPlan:
    """The plan with nothing left open, so that the student's record says what was done."""
    route = teachers.version.route if plan.states == "samples" and plan.route is None else plan.route
    trajectories = None
    if plan.states == "samples":
        trajectories = min(plan.trajectories or usual_trajectories(plan), all_trajectories(plan))
    start, trust = plan.start or usual_start(plan, teachers), settled_trust(plan, teachers)
    return plan.model_copy(update={"route": route, "trajectories": trajectories, "start": start, "trust": trust})


def as_begun(plan: DistillPlan, asked: DistillPlan, teachers: Teachers, out: Path) -> DistillPlan:
    """The plan, or, if nobody asks for a `trust` now, that of the student in `out` that was begun with another."""
    record, artifact = out / "state" / CONFIG, find(out)
    if asked.trust is not None or (artifact is None and not record.exists()):
        return plan
    made = artifact.manifest.parents if artifact is not None else json.loads(record.read_bytes()).get("parents", {})
    before = [plan.model_copy(update={"trust": rule}) for rule in ("kind", "whole")]
    return next((each for each in before if made == parents_of(each, teachers)), plan)


def check_plan_of(out: Path, plan: DistillPlan) -> None:
    """Refuse to put a student where one of another plan lies, by the settings that differ.

    Where no plan can be read, it is left to `finished` to refuse it.
    """
    there = find(out)
    entry = None if there is None else there.manifest.files.get(RECORD)
    if there is None or entry is None or there.manifest.parents.get("plan") == plan.digest():
        return
    if entry.bytes > MOST_RECORD_BYTES:
        return
    try:
        made = DistillPlan.model_validate(json.loads(there.read(RECORD))["plan"])
    except (ValueError, TypeError, KeyError, RecursionError):  # a stranger's, or of another edition
        return
    changed = differences(made.model_dump(mode="json"), plan.model_dump(mode="json"))
    raise UserError(
        f"{out}: holds a student of another plan ({'; '.join(map(sanitize, changed[:4]))}); "
        "choose another --out, or ask for what it had"
    )


def told_trust(plan: DistillPlan, teachers: Teachers) -> str:
    """A line about teachers that are not heard as a whole, or nothing."""
    assert plan.trust is not None, "settled"
    if plan.trust == "whole":
        return ""
    doubted = teachers.trust(plan.objective, plan.trust).doubted()
    count = f"{len(doubted)} of {len(teachers.experts)} teachers predict what makes larger errors in what it learns"
    instead = {"kind": "up to half of the target is the sample's own", "data": "the data answers with them"}
    return f"{count}: there {instead[plan.trust]}"


def told_trajectories(plan: DistillPlan) -> str:
    """A line about what comes before the first step of a student without data, or nothing."""
    if plan.trajectories is None:
        return ""
    return f"states of {plan.trajectories:,} trajectories are shuffled together, and walked before they are learned"


def settled_trust(plan: DistillPlan, teachers: Teachers) -> TrustIn:
    """By the data, where there is any, some teachers are in doubt, and nobody wants it otherwise."""
    wanted = plan.trust or USUAL_TRUST
    nothing = plan.states == "samples" or not teachers.trust(plan.objective, wanted).doubted()
    return "whole" if nothing else wanted


def usual_start(plan: DistillPlan, teachers: Teachers) -> StartFrom:
    """The best teacher, if any has the student's architecture and process, and unseen data tells which one it is.

    Without data the average of those that have.
    """
    of_its_kind = alike(teachers.candidates(dict.fromkeys(teachers.experts, 1)), plan)
    if plan.states == "samples":
        return "average" if len(of_its_kind) > 1 else "random"
    if not of_its_kind:
        return "random"
    data = open_reference(teachers.run, teachers.version.data, "data")
    return "best" if len(Index.of(data).rows("validation")) > 0 else "random"


def parents_of(plan: DistillPlan, teachers: Teachers) -> dict[str, str]:
    """Digests of all that a student is made of."""
    version = teachers.version
    made = {"plan": plan.digest(), "partition": version.partition.digest}
    made |= {f"teacher-{k:02d}": expert.digest for k, expert in teachers.experts.items()}
    if plan.states == "data":
        return made | {"data": version.data.digest}
    if version.router is None:
        raise UserError(f"--from-samples: {teachers.run} has no router yet; train one with `atoll router`")
    return made | {"router": version.router.digest}


@dataclass
class School:
    """Lessons, and all around them."""

    lessons: Lessons
    card: ExpertCard
    cost: Cost
    sizes: Mapping[int, int]  # training samples by cluster
    at_work: float  # GiB in which they answer
    clustered: ClusteredSamples | None = None
    validation: Validation | None = None

    def settle(self, device: str) -> None:
        """Embed texts on the device."""
        if self.clustered is not None:
            self.clustered.shards.text_device = device

    def validation_of(self, plan: DistillPlan, most: int) -> Validation | None:
        rows = torch.zeros(0) if self.clustered is None else self.clustered.rows("validation")
        if self.clustered is None or len(rows) == 0:
            return None
        return Validation.fixed(self.clustered.shards, plan.training.seed, rows, most)


def data_school(teachers: Teachers, plan: DistillPlan, desk: Desk) -> School:
    """Samples of the data, each answered by the expert of its own cluster."""
    version = teachers.version
    data = open_reference(teachers.run, version.data, "data")
    clustered = ClusteredSamples(data, open_reference(teachers.run, version.partition, "partition"))
    clustered.shards.text_device = str(desk.device)
    counts = torch.bincount(clustered.clusters[clustered.rows("train")], minlength=version.clusters)
    sizes = dict(enumerate(counts.tolist()))
    placed = Placed(list(teachers.experts.values()), desk.placement)
    experts = OwnExperts(placed.pool(desk.precision, version.clusters, list(teachers.experts)))
    latent = tuple(version.latent.shape)
    assert plan.trust is not None, "settled"
    trust = None if plan.trust == "whole" else teachers.trust(plan.objective, plan.trust)
    behind = behind_doubted(clustered, trust, plan) if trust is not None and plan.trust == "data" else None
    lessons = DataLessons(
        plan.objective, plan.training, clustered, experts, latent, desk.device, plan.truth, trust, behind
    )
    per_image = mean_forward({k: e.card.architecture for k, e in teachers.experts.items()}, sizes)
    cost = cost_of(plan, per_image, teachers.orders)
    school = School(
        lessons,
        teachers.card(plan, data),
        cost,
        sizes,
        desk.at_work(teachers.experts.values(), -(-plan.training.batch // world_size()))
        + (BYTES_AT_WORK / GIB if behind is not None and desk.device.type == "cuda" else 0.0),
        clustered,
    )
    school.validation = school.validation_of(plan, MOST_SAMPLES)
    return school


def behind_doubted(clustered: ClusteredSamples, trust: Trust, plan: DistillPlan) -> Behind | None:
    """The training samples that may lie behind states in the clusters of teachers that are not heard as a whole."""
    rows = clustered.rows("train")
    rows = rows[torch.isin(clustered.clusters[rows], torch.tensor(trust.doubted()))]
    if len(rows) == 0:
        return None  # and no lesson will ask for any
    conditions = torch.zeros_like(clustered.clusters)
    conditions[rows] = clustered.conditions(rows, plan.network.condition)
    return Behind.of(rows, clustered.clusters, conditions, clustered.shards.latents, plan.training.seed)


def sampled_school(teachers: Teachers, plan: DistillPlan, desk: Desk) -> School:
    """The ensemble's own trajectories, answered by its mixture."""
    ensemble = load_ensemble(teachers.run, placement=desk.placement)
    if ensemble.missing:
        first = min(ensemble.missing)
        raise UserError(f"cluster {first}: its expert cannot be read ({ensemble.missing[first]}); get it again")
    assert plan.route is not None, "settled"
    assert plan.trajectories is not None, "settled"
    route = parse_route(plan.route)
    lessons = SampledLessons(
        plan.objective,
        plan.training,
        ensemble.mixture(route, precision=desk.precision),
        questions_of(teachers, plan, desk.device),
        tuple(teachers.version.latent.shape),
        plan.steps,
        plan.trajectories,
        desk.device,
    )
    asked = route.k if isinstance(route, TopK) else len(teachers.experts)
    cost = cost_of(plan, per_state(ensemble, asked, plan.steps), teachers.orders)
    return School(
        lessons,
        teachers.card(plan, None),
        cost,
        dict.fromkeys(teachers.experts, 1),
        desk.at_work(ensemble.experts, min(TRAJECTORIES, plan.trajectories)),
    )


def per_state(ensemble: Ensemble, asked: int, steps: int) -> float:
    """Operations of a state and its answer, at most: the router and `asked` experts, and the step from pure noise."""
    largest = sorted((flops_forward(e.card.architecture) for e in ensemble.experts), reverse=True)[:asked]
    return (sum(largest) + flops_forward(ensemble.router.card.architecture.trunk)) * (steps + 1) / steps


def questions_of(teachers: Teachers, plan: DistillPlan, device: torch.device) -> Questions:
    """What to ask for: the plan's prompts, or every class alike."""
    text, classes = teachers.version.text, next(iter(teachers.experts.values())).card.architecture.classes
    if text is None:
        return Questions(classes or 0, lambda numbers: Condition(labels=torch.tensor(numbers)), device)
    encoder = text_encoder(text, str(device))

    def read(numbers: list[int]) -> Condition:
        encoded = encoder.encode([plan.prompts[number] for number in numbers])
        # an encoder answers with inference tensors, which cannot be trained on
        return Condition(**{name: value.clone() for name, value in encoded.items()})

    return Questions(len(plan.prompts), read, device)


def left_for_student(resources: Resources, school: School, desk: Desk) -> Resources:
    """What the student may use: the memory of a GPU that its teachers leave."""
    if desk.device.type != "cuda":
        return resources
    return replace(resources, taken=torch.cuda.memory_allocated(desk.device) / GIB + school.at_work)


def started(
    plan: DistillPlan, teachers: Teachers, school: School, compute: ComputeConfig, device: torch.device, state: Path
) -> Start | None:
    """The weights a plan begins with; None: random ones."""
    candidates = able(teachers.candidates(school.sizes), plan)
    if plan.start == "average":
        return average_start(candidates)
    if plan.start == "best":
        return best_start(candidates, school.validation_of(plan, MOST_MEASURED), compute, device, state)
    return None


def grown(card: ExpertCard, start: Start) -> ExpertCard:
    """The card of a student that begins somewhere: it keeps the start's process, as any training that goes on does."""
    process = {"schedule": start.card.schedule, "kind": start.card.kind, "bridge_limit": start.card.bridge_limit}
    return card.model_copy(update={**process, "origin": start.origin})
