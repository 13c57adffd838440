"""Size a run to data, machine and hours before anything is done: what to train, and how long each stage takes.

Times are of a reference core of 0.08 TFLOP/s, or of a GPU as its data sheet has it. `pace` is how much longer they take
here, measured by training the chosen network for a second.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..artifacts import UserError
from ..data.prepare import PrepareConfig
from ..data.sources import Source
from ..models.accounting import account
from ..models.autoencoders import TRANSFORMS, load_autoencoder
from ..models.dit import DiT, DiTConfig
from ..partition.config import PartitionConfig
from ..planning.assign import Option, best_fit, plan_job
from ..planning.islands import Island
from ..planning.objectives import assign_objectives, objective_names
from ..planning.recipes import OBJECTIVES, Network, PlanConfig, recipe, suitable_recipes
from ..training.machines import GIB, Machine
from ..training.memory import Fit
from .settings import Asked, EvalConfig, RunSettings

CORE_TFLOPS = 0.08
MAX_CLUSTERS, IMAGES_PER_CLUSTER, MIN_PER_CLUSTER = 8, 80, 20  # by default; at least, where -k names them
FEW_IMAGES = 5_000  # experts of the smallest recipe trained on fewer have been refused by `admit`
PREPARED_PER_S = {"cpu": 70.0, "cuda": 1500.0, "mps": 300.0}  # images; per core of a CPU (EfficientNet-Lite0, 64 px)
START_SECONDS, MEASURE_SECONDS = 8.0, 10.0  # of a process: imports, reading shards; of an evaluation without samples
ADMIT_IMAGES = 3000  # training images that take as long as the checks of one expert
TRAIN_SHARE, SAMPLE_SHARE = 0.8, 0.12  # of the hours after prepare, partition and admit; the rest is the router's
WORKER_GIB = 0.6  # of a process that samples, without the experts
TOKENS_SIDE = 8  # of a latent: as many tokens as small networks on a CPU can afford


class Stage(NamedTuple):
    name: str
    what: str
    seconds: float


@dataclass(frozen=True)
class DatasetSummary:
    """What the listing of a source shows, without decoding anything."""

    images: int
    latent: tuple[int, int, int]
    built_in: bool = False  # small and clustered by pixels, which takes no time

    @staticmethod
    def of(origin: Source, prepare: PrepareConfig) -> DatasetSummary:
        shape = load_autoencoder(prepare.autoencoder).latent_shape
        size = prepare.size or origin.default_size
        return DatasetSummary(origin.count(), shape(origin.channels, size), origin.built_in)

    def architecture(self, network: Network) -> DiTConfig:
        """Without a condition: it is known after prepare, and costs next to nothing."""
        return DiTConfig(latent=self.latent, **network.model_dump())


def default_autoencoder(channels: int, size: int) -> str:
    """Low frequencies of blocks, about 8 x 8 of them: no download, and better than pixels with small networks."""
    fitting = [name for name, side in TRANSFORMS.items() if not size % side and size // side >= TOKENS_SIDE]
    return fitting[-1] if channels == 3 and fitting else "pixels"


def this_island(machine: Machine, hours: float) -> Island:
    """This machine as one that takes orders; a CPU is planned for as one of reference cores."""
    tflops = CORE_TFLOPS if machine.kind == "cpu" else machine.tflops
    name = {"cpu": f"CPU {machine.cores} cores", "mps": "M1"}.get(machine.kind)
    rates = {"memory": machine.memory, "tflops": tflops, "bandwidth": machine.bandwidth}
    return Island(name="here", gpu=name, hours=hours, bfloat16=machine.bfloat16, **rates)


def size_run(
    origin: Source, asked: Asked, machine: Machine, *, pace: float = 1.0, compare: bool = False
) -> RunSettings:
    """All settings of a run: the largest recipe that suits the data and completes its budget in the hours.

    Without -k, there are fewer experts where each would train on too few images.
    """
    how = origin.config.model_copy(update={"labels": "folder"}) if origin.class_folders else origin.config
    size = asked.size or origin.default_size
    prepare = PrepareConfig(source=how, size=asked.size, autoencoder=default_autoencoder(origin.channels, size))
    data = DatasetSummary.of(origin, prepare)
    most = count_clusters(origin.place, asked, data.images)
    fewest = 2 if asked.clusters is None and asked.objectives is None else most
    for clusters in range(most, fewest - 1, -1):
        try:
            plan, samples = allocate_budget(data, asked, machine, clusters, pace, compare)
        except UserError:
            if clusters == fewest:
                raise
            continue
        if plan.training.images >= FEW_IMAGES:
            break
    # every cluster needs some images that its expert does not see
    holdout = max(prepare.holdout, round(min(0.2, 12 * clusters / data.images), 2))
    training = plan.training.model_copy(update={"seed": asked.seed})
    evaluation = EvalConfig(steps=25, count=samples, batch=50)
    return RunSettings(
        source=origin.place,
        asked=asked,
        compare=compare,
        prepare=prepare.model_copy(update={"holdout": holdout}) if holdout > prepare.holdout else prepare,
        partition=PartitionConfig(clusters=clusters, seed=asked.seed),
        plan=plan.model_copy(update={"objectives": asked.objectives or f"{clusters}flow", "training": training}),
        evaluation=evaluation,
        comparison=evaluation,
    )


def count_clusters(source: str, asked: Asked, images: int) -> int:
    """How many experts: -k, as many as --objectives names, or as many as the images allow."""
    if images < 2 * MIN_PER_CLUSTER:
        raise UserError(f"{source}: has {images} {'image' if images == 1 else 'images'}; a run needs some hundreds")
    named = None if asked.objectives is None else len(objective_names(asked.objectives))
    clusters = asked.clusters or named or max(2, min(MAX_CLUSTERS, images // IMAGES_PER_CLUSTER))
    assign_objectives(asked.objectives, OBJECTIVES, [0.0] * clusters)
    option = f"--objectives {asked.objectives}" if asked.clusters is None else f"-k {asked.clusters}"
    if clusters < 2:
        raise UserError(f"{option}: names one expert, a run has two or more; name more, or use `atoll plan`")
    if clusters * MIN_PER_CLUSTER > images:
        raise UserError(f"{option}: {images:,} images are too few; give at most -k {images // MIN_PER_CLUSTER}")
    return clusters


def allocate_budget(
    data: DatasetSummary, asked: Asked, machine: Machine, clusters: int, pace: float, compare: bool
) -> tuple[PlanConfig, int]:
    """What each expert trains on, and how many samples are measured, in the hours that there are."""
    hours = 1.0 if asked.hours is None else asked.hours
    if not 0 < hours < math.inf:
        raise UserError(f"--hours {hours:g}: give the time that all of it may take, such as 0.5")
    names = suitable_recipes(int(0.9 * data.images / clusters)) if asked.recipe is None else [asked.recipe]
    options = [Option(name, recipe(name, data.latent)) for name in names]

    def job_in(seconds: float) -> tuple[Fit, PlanConfig]:
        island = this_island(machine, seconds / pace / 3600)
        try:
            job, plan = plan_job(island, clusters, 0, options, samples=0, build=data.architecture)
        except UserError as error:
            given = f"--hours {hours:g} for latents of {'x'.join(map(str, data.latent))}"
            reason = str(error).removeprefix("--islands here: ")
            raise UserError(f"{given}: {reason}, or choose a smaller --size") from error
        return job.fit, plan

    share = TRAIN_SHARE / (2 if compare else 1)
    used = pace * (prepare_seconds(data, machine) + partition_seconds(data) + START_SECONDS * (3 + clusters))
    left = 3600 * hours - used
    if left > 0:
        admit = pace * clusters * ADMIT_IMAGES / job_in(share * left)[0].images_per_s
        used, left = used + admit, left - admit
    if left <= 0:
        raise UserError(
            f"--hours {hours:g}: is over before {data.images:,} images are prepared and {clusters} experts started "
            f"and admitted; give more than {used / 3600:.2g}, or a smaller -k or --size"
        )
    fit, plan = job_in(share * left)
    affordable = SAMPLE_SHARE * left * fit.images_per_s * machine.cores / pace / sample_cost(EvalConfig(steps=25))
    return plan, max(100, min(1000, int(affordable) // 10 * 10))


def prepare_seconds(data: DatasetSummary, machine: Machine) -> float:
    encoding = 0.0 if data.built_in else data.images / (PREPARED_PER_S[machine.kind] * machine.cores)
    return START_SECONDS + encoding


def partition_seconds(data: DatasetSummary) -> float:
    return 4.0 + data.images / 2000


def sample_cost(evaluation: EvalConfig) -> float:
    """Training images that take as long as one sample: guidance evaluates twice, without a backward pass."""
    experts = sum(2 if route == "top-2" else 1 for route in evaluation.routes)
    return evaluation.steps * 2 * experts * len(evaluation.guidances) / 3


def sampling_workers(evaluation: EvalConfig, cores: int, memory: float, experts: float) -> int:
    """Processes that sample batches side by side, one per core; `memory` and the `experts` that each loads in GiB."""
    batches = -(-evaluation.count // evaluation.batch)
    return max(1, min(cores, batches, int(memory / (WORKER_GIB + experts))))


def predicted(
    settings: RunSettings, data: DatasetSummary, machine: Machine, batch: int | None = None
) -> tuple[DiTConfig, Fit]:
    """The network of a run, and how it would train here at a pace of 1, in its own batches by default."""
    architecture = data.architecture(settings.plan.network)
    fit = best_fit(this_island(machine, 1.0), architecture, batch or settings.plan.training.batch)
    if fit is None:
        raise UserError(f"{settings.source}: these experts do not fit into {machine.memory:.1f} GiB")
    return architecture, fit


def measure_pace(settings: RunSettings, origin: Source, machine: Machine, seconds: float = 1.0) -> float:
    """Train the run's network on noise, every core busy, and compare with the prediction. 1 on CUDA: it compiles."""
    if machine.kind == "cuda":
        return 1.0
    batch, threads = min(16, settings.plan.training.batch), torch.get_num_threads()
    architecture, fit = predicted(settings, DatasetSummary.of(origin, settings.prepare), machine, batch)
    network = DiT(architecture).to(machine.kind)
    optimizer = torch.optim.AdamW(network.parameters())
    x, t, a = torch.randn(batch, *architecture.latent), torch.rand(batch), torch.randn(1024, 1024)
    times: list[float] = []

    def keep_busy() -> None:
        while len(times) < 3 or times[-1] - times[1] < seconds:
            a @ a  # long enough that threads do not wait for each other in Python

    torch.set_num_threads(1)
    with ThreadPoolExecutor(machine.cores) as others:
        for _ in range(machine.cores - 1 if machine.kind == "cpu" else 0):
            others.submit(keep_busy)
        while len(times) < 3 or times[-1] - times[1] < seconds:  # the first steps are slow
            network(x.to(machine.kind), t.to(machine.kind)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
    torch.set_num_threads(threads)
    return fit.images_per_s * (times[-1] - times[1]) / (batch * (len(times) - 2))


def forecast(settings: RunSettings, origin: Source, machine: Machine, pace: float = 1.0) -> list[Stage]:
    """Every stage of a run, and about how long it takes on this machine."""
    data = DatasetSummary.of(origin, settings.prepare)
    architecture, fit = predicted(settings, data, machine)
    clusters, images, rate = settings.partition.clusters, settings.plan.training.images, fit.images_per_s
    million = account(architecture).parameters / 1e6
    evaluation, models = settings.evaluated, 2 if settings.compare else 1
    train = -(-clusters // machine.cores) * (images / rate + START_SECONDS)
    train += clusters * images / rate if settings.compare else 0
    workers = sampling_workers(evaluation, machine.cores, machine.memory, clusters * million * 4e6 / GIB)
    samples = models * evaluation.count * sample_cost(evaluation) / rate / workers
    parallel = machine.cores if machine.kind == "cpu" else 1
    stages = [
        Stage(
            "prepare",
            f"{data.images:,} images to latents of {'x'.join(map(str, data.latent))}",
            prepare_seconds(data, machine),
        ),
        Stage("partition", f"{clusters} clusters", partition_seconds(data)),
        Stage("plan", f"one order each, {settings.plan.objectives or f'{clusters}flow'}", 2.0),
        Stage(
            "train",
            f"{clusters} experts of {million:.1f}M weights, {images:,} images each, {parallel} at a time",
            train,
        ),
        Stage("admit", "validation on images that no expert has seen", clusters * ADMIT_IMAGES / rate),
        Stage("router", "weights the experts", START_SECONDS / 2 + 0.1 * (settings.router_images or images) / rate),
        Stage(
            "evaluate",
            f"{evaluation.count:,} samples for each of {len(evaluation.routes)} routes",
            MEASURE_SECONDS + samples,
        ),
    ]
    return [stage._replace(seconds=pace * stage.seconds) for stage in stages]
