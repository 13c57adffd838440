"""A run sized to the data and the machine: what to train, how long each stage takes, all before anything is done."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..artifacts import UserError
from ..data.prepare import PrepareConfig
from ..data.sources import Source
from ..models.accounting import account
from ..models.autoencoders import TRANSFORMS, load_autoencoder
from ..models.dit import DiTConfig
from ..partition.config import PartitionConfig
from ..planning.assign import Job, Option, best_fit, plan_job
from ..planning.islands import Island
from ..planning.objectives import assign_objectives, objective_names
from ..planning.recipes import OBJECTIVES, Network, PlanConfig, recipe, suitable_recipes
from ..training.machines import GIB, Machine
from .settings import Asked, Painting, RunSettings

USUAL_HOURS = 1.0
MOST_CLUSTERS, IMAGES_PER_CLUSTER = 8, 80  # fewer clusters where an expert would see fewer images
FEWEST_PER_CLUSTER = 20  # asked for by name; with fewer, some clusters have nothing to be judged by
PREPARED_PER_S = {"cpu": 70.0, "cuda": 1500.0, "mps": 300.0}  # images, on a CPU per core (EfficientNet-Lite0, 64 px)
START_SECONDS = 8.0  # of a process: importing torch, reading shards
MEASURING_SECONDS = 10.0  # of an evaluation, beside its painting; with the report
CORE_TFLOPS = 0.08  # of the core that such seconds were measured on
SHARE = 0.8  # of the hours that are left beside prepare and admit, for the experts; the rest for router and evaluation
FEW_IMAGES = 5_000  # to train the smallest recipe on: experts of fewer have been refused by `admit`
JUDGED = 3000  # as long as training on so many images takes what `admit` measures and paints of one expert
PAINTING_SHARE = 0.12
PAINTED_TOGETHER = 50  # images: few enough to be shared out, enough to be fast
PAINTER_GIB = 0.6  # of a process that paints, without the experts
STEPS = 25
TRANSFORMED_SIDE = 8  # of a latent: as many tokens as small networks on a CPU can afford
UNSEEN = 8  # images of a small cluster that no island sees
FEWEST, MOST = 100, 1000  # samples to measure by


@dataclass(frozen=True)
class Look:
    """What a glance at a source tells, without decoding anything."""

    images: int
    latent: tuple[int, int, int]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    name: str
    what: str
    seconds: float


def with_enough_unseen(prepare: PrepareConfig, images: int, clusters: int) -> PrepareConfig:
    """Of few images a larger share is kept apart: every cluster needs some that its expert has not seen."""
    share = round(min(0.2, UNSEEN * 1.5 * clusters / images), 2)
    return prepare if share <= prepare.holdout else prepare.model_copy(update={"holdout": share})


def prepare_settings(origin: Source, size: int | None) -> PrepareConfig:
    """How to prepare: of a folder whose images all lie in folders, these are the classes."""
    how = origin.config.model_copy(update={"labels": "folder"}) if origin.class_folders else origin.config
    autoencoder = transform_for(origin.channels, size or origin.default_size)
    return PrepareConfig(source=how, size=size, autoencoder=autoencoder)


def transform_for(channels: int, size: int) -> str:
    """What to train on where nobody named an autoencoder: low frequencies of blocks, about 8 x 8 of them.

    They need no download, and small networks paint far better in them than in plain pixels (docs/log.md).
    """
    fitting = [name for name, side in TRANSFORMS.items() if not size % side and size // side >= TRANSFORMED_SIDE]
    return fitting[-1] if channels == 3 and fitting else "pixels"


def look_at(origin: Source, prepare: PrepareConfig) -> Look:
    """Count images in the listing, and ask the autoencoder for the shape of its latents."""
    size = prepare.size or origin.default_size
    latent = load_autoencoder(prepare.autoencoder).latent_shape(origin.channels, size)
    return Look(origin.count(), latent, origin.classes or ())


def as_island(machine: Machine, hours: float) -> Island:
    """This machine as one that takes orders."""
    said = {"memory": machine.memory, "tflops": machine.tflops, "bandwidth": machine.bandwidth}
    name = {"cpu": f"CPU {machine.cores} cores", "mps": "M1"}.get(machine.kind)
    return Island(name="here", gpu=name, hours=hours, bfloat16=machine.bfloat16, **said)


def size_run(origin: Source, asked: Asked, machine: Machine, *, compare: bool) -> RunSettings:
    """All settings of a run: the largest recipe that suits the data and gets done in the hours there are.

    Where nobody says how many experts there are to be, they are fewer where each would learn too little in the time.
    """
    prepare = prepare_settings(origin, asked.size)
    look, source = look_at(origin.reconfigured(prepare.source), prepare), origin.place
    most = clusters_for(source, asked, look.images)
    fewest = 2 if asked.clusters is None and asked.objectives is None else most
    for clusters in range(most, fewest - 1, -1):
        try:
            share = share_out(look, asked, machine, clusters, compare=compare)
        except UserError:
            if clusters == fewest:
                raise
            continue
        if share.plan.training.images >= FEW_IMAGES:
            break
    training = share.plan.training.model_copy(update={"seed": asked.seed})
    painting = Painting(steps=STEPS, count=share.samples, batch=PAINTED_TOGETHER)
    return RunSettings(
        source=source,
        asked=asked,
        prepare=with_enough_unseen(prepare, look.images, clusters),
        partition=PartitionConfig(clusters=clusters, seed=asked.seed),
        plan=share.plan.model_copy(update={"objectives": asked.objectives or f"{clusters}flow", "training": training}),
        evaluation=painting,
        comparison=painting,
    )


@dataclass(frozen=True)
class Share:
    """What so many experts do with the hours: their training, and how many samples are painted to measure them."""

    plan: PlanConfig
    samples: int


def share_out(look: Look, asked: Asked, machine: Machine, clusters: int, *, compare: bool) -> Share:
    """Share the hours out among training, admission and painting; refuse too few of them."""
    hours = USUAL_HOURS if asked.hours is None else asked.hours
    if not 0 < hours < math.inf:
        raise UserError(f"--hours {hours:g}: give the time that all of it may take, such as 0.5")
    names = suitable_recipes(int(0.9 * look.images / clusters)) if asked.recipe is None else [asked.recipe]
    options = [Option(name, recipe(name, look.latent)) for name in names]

    def build(network: Network) -> DiTConfig:
        # what it is conditioned on is known after prepare, and costs next to nothing
        return DiTConfig(latent=look.latent, **network.model_dump())

    def job_in(seconds: float) -> tuple[Job, PlanConfig]:
        try:
            return plan_job(as_island(machine, seconds / 3600), clusters, 0, options, samples=0, build=build)
        except UserError as error:
            given = f"--hours {hours:g} for latents of {'x'.join(map(str, look.latent))}"
            reason = str(error).removeprefix("--islands here: ")
            raise UserError(f"{given}: {reason}, or choose a smaller --size") from error

    training = SHARE / (2 if compare else 1)
    before = prepare_seconds(look, machine) + partition_seconds(look, machine)
    before += pace(machine) * START_SECONDS * (3 + clusters)
    left = 3600 * hours - before
    if left > 0:
        judging = clusters * JUDGED / job_in(training * left)[0].fit.images_per_s
        before, left = before + judging, left - judging
    if left <= 0:
        raise UserError(
            f"--hours {hours:g}: is over before {look.images:,} images are prepared and {clusters} experts started "
            f"and judged; give more than {before / 3600:.2g}, or a smaller -k or --size"
        )
    job, plan = job_in(training * left)
    return Share(plan, samples_to_paint(job.fit.images_per_s * machine.cores, PAINTING_SHARE * left))


def clusters_for(source: str, asked: Asked, images: int) -> int:
    """How many experts: as told, or as many as the images allow. What cannot be is better known before the work."""
    if images < 2 * FEWEST_PER_CLUSTER:
        raise UserError(f"{source}: has {images} {'image' if images == 1 else 'images'}; a run needs some hundreds")
    named = None if asked.objectives is None else len(objective_names(asked.objectives))
    clusters = asked.clusters or named or max(2, min(MOST_CLUSTERS, images // IMAGES_PER_CLUSTER))
    assign_objectives(asked.objectives, OBJECTIVES, [0.0] * clusters)
    told = f"--objectives {asked.objectives}" if asked.clusters is None else f"-k {asked.clusters}"
    if clusters < 2:
        raise UserError(f"{told}: names one expert, a run has two or more; name more, or use `atoll plan`")
    if clusters * FEWEST_PER_CLUSTER > images:
        raise UserError(f"{told}: {images:,} images are too few; give at most -k {images // FEWEST_PER_CLUSTER}")
    return clusters


def painters_for(painting: Painting, cores: int, memory: float, experts: float) -> int:
    """Processes that paint batches side by side, one on a core; `memory` and the `experts` that each loads in GiB."""
    batches = -(-painting.count // painting.batch)
    return max(1, min(cores, batches, int(memory / (PAINTER_GIB + experts))))


def painting_cost(painting: Painting) -> float:
    """Training images that painting one costs: guidance asks twice, top-2 two experts; an answer costs a third."""
    experts = sum(2 if route == "top-2" else 1 for route in painting.routes)
    return painting.steps * 2 * experts * len(painting.guidances) / 3


def samples_to_paint(rate: float, seconds: float) -> int:
    affordable = rate * seconds / painting_cost(Painting(steps=STEPS))
    return max(FEWEST, min(MOST, int(affordable) // 10 * 10))


def pace(machine: Machine) -> float:
    """How much longer a core takes here than where its seconds were measured; those beside a GPU are all alike."""
    return CORE_TFLOPS / machine.tflops if machine.kind == "cpu" else 1.0


def prepare_seconds(look: Look, machine: Machine) -> float:
    return pace(machine) * (START_SECONDS + look.images / (PREPARED_PER_S[machine.kind] * machine.cores))


def partition_seconds(look: Look, machine: Machine) -> float:
    return pace(machine) * (4.0 + look.images / 2000)


def forecast(settings: RunSettings, origin: Source, machine: Machine, *, compare: bool) -> list[Stage]:
    """Every stage of a run, and about how long it takes on this machine."""
    look = look_at(origin, settings.prepare)
    plan, clusters = settings.plan, settings.partition.clusters
    architecture = DiTConfig(latent=look.latent, **plan.network.model_dump())
    fit = best_fit(as_island(machine, 1.0), architecture, plan.training.batch)
    if fit is None:
        raise UserError(
            f"{settings.source}: these experts do not fit into {machine.memory:.1f} GiB; use another machine"
        )
    rate = fit.images_per_s
    rounds = -(-(clusters) // machine.cores)
    islands = rounds * (plan.training.images / rate + pace(machine) * START_SECONDS)
    islands += clusters * plan.training.images / rate if compare else 0
    million = account(architecture).parameters / 1e6
    painting = settings.comparison if compare else settings.evaluation
    router = 0.1 * (settings.router_images or plan.training.images) / rate
    painters = painters_for(painting, machine.cores, machine.memory, clusters * million * 4e6 / GIB)
    arms = painting.count * painting_cost(painting) / rate / painters * (2 if compare else 1)
    what = f"{clusters} experts of {million:.1f}M weights, {plan.training.images:,} images each"
    return [
        Stage(
            "prepare",
            f"{look.images:,} images to latents of {'x'.join(map(str, look.latent))}",
            prepare_seconds(look, machine),
        ),
        Stage("partition", f"{clusters} clusters", partition_seconds(look, machine)),
        Stage("plan", f"one order each, {plan.objectives or f'{clusters}flow'}", 2.0),
        Stage("train", f"{what}, {machine.cores if machine.kind == 'cpu' else 1} at a time", islands),
        Stage("admit", "measured on images no expert has seen", clusters * JUDGED / rate),
        Stage("router", "learns which expert to ask when", pace(machine) * START_SECONDS / 2 + router),
        Stage(
            "evaluate",
            f"{painting.count:,} samples for each of {len(painting.routes)} routes, and a report",
            pace(machine) * MEASURING_SECONDS + arms,
        ),
    ]
