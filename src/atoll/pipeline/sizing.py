"""Size a run to data, machine and hours before anything is done: what to train, and how long each stage takes.

Times are of a reference core that trains at 0.05 TFLOP/s, or of a GPU as its data sheet has it. `pace` is how much
longer they take here, measured by training the chosen network for a second.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Event
from typing import NamedTuple

import torch

from ..artifacts import UserError
from ..data.config import PrepareConfig
from ..data.sources import Source
from ..models.accounting import account
from ..models.autoencoders import TRANSFORMS, load_autoencoder
from ..models.dit import DiT, DiTConfig
from ..partition.methods import PartitionConfig
from ..planning.objectives import assign_objectives, objective_names
from ..planning.recipes import OBJECTIVES, Network, PlanConfig, recipe, suitable_recipes
from ..training.memory import GIB, Machine, fits
from .settings import Asked, EvalConfig, RunSettings

CORE_TFLOPS = 0.125  # of which training reaches 0.05
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
class Site:
    """A data set, of which only the listing is read, on a machine."""

    origin: Source
    prepare: PrepareConfig
    machine: Machine

    @cached_property
    def images(self) -> int:
        return self.origin.count()

    @cached_property
    def latent(self) -> tuple[int, int, int]:
        shape = load_autoencoder(self.prepare.autoencoder).latent_shape
        return shape(self.origin.channels, self.prepare.size or self.origin.default_size)

    @property
    def prepare_seconds(self) -> float:
        rate = PREPARED_PER_S[self.machine.kind] * self.machine.cores
        return START_SECONDS + (0.0 if self.origin.built_in else self.images / rate)

    @property
    def partition_seconds(self) -> float:
        return 4.0 + self.images / 2000

    def architecture(self, network: Network) -> DiTConfig:
        """Without a condition: it is known after prepare, and costs next to nothing."""
        return DiTConfig(latent=self.latent, **network.model_dump())

    def rate(self, network: Network, batch: int) -> float:
        """Training images per second of one expert at a pace of 1; 0 if it does not fit."""
        machine = replace(self.machine, tflops=CORE_TFLOPS) if self.machine.kind == "cpu" else self.machine
        found = fits(account(self.architecture(network)), machine, batch, eight_bit=False)
        return found[0].images_per_s if found else 0.0

    def rate_of(self, settings: RunSettings, batch: int | None = None) -> float:
        """The same of a run's experts, in their own batches by default."""
        rate = self.rate(settings.plan.network, batch or settings.plan.training.batch)
        if not rate:
            raise UserError(f"{settings.source}: these experts do not fit into {self.machine.memory:.1f} GiB")
        return rate


def default_autoencoder(channels: int, size: int) -> str:
    """Low frequencies of blocks, about 8 x 8 of them: no download, and better than pixels with small networks."""
    fitting = [name for name, side in TRANSFORMS.items() if not size % side and size // side >= TOKENS_SIDE]
    return fitting[-1] if channels == 3 and fitting else "pixels"


def size_run(
    origin: Source, asked: Asked, machine: Machine, *, pace: float = 1.0, compare: bool = False
) -> RunSettings:
    """All settings of a run: the largest recipe that suits the data and completes its budget in the hours.

    Without -k, there are fewer experts where each would train on too few images.
    """
    autoencoder = default_autoencoder(origin.channels, asked.size or origin.default_size)
    prepare = PrepareConfig(source=origin.config, size=asked.size, autoencoder=autoencoder)
    site = Site(origin, prepare, machine)
    most = count_clusters(origin.place, asked, site.images)
    fewest = 2 if asked.clusters is None and asked.objectives is None else most
    for clusters in range(most, fewest - 1, -1):
        try:
            plan, samples = allocate_budget(site, asked, clusters, pace, compare)
        except UserError:
            if clusters == fewest:
                raise
            continue
        if plan.training.images >= FEW_IMAGES:
            break
    # every cluster needs some images that its expert does not see
    holdout = max(prepare.holdout, round(min(0.2, 12 * clusters / site.images), 2))
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


def allocate_budget(site: Site, asked: Asked, clusters: int, pace: float, compare: bool) -> tuple[PlanConfig, int]:
    """What each expert trains on, and how many samples are measured: the first recipe that completes its budget.

    If none does, the smallest that fits, for as many images as there is time.
    """
    hours = 1.0 if asked.hours is None else asked.hours
    names = suitable_recipes(int(0.9 * site.images / clusters)) if asked.recipe is None else [asked.recipe]
    started = pace * (site.prepare_seconds + site.partition_seconds + START_SECONDS * (3 + clusters))
    plans = [recipe(name, site.latent) for name in names]
    fitting = [(plan, rate) for plan in plans if (rate := site.rate(plan.network, plan.training.batch))]
    if not fitting:
        latent = "x".join(map(str, site.latent))
        raise UserError(
            f"--hours {hours:g} for latents of {latent}: {names[-1]} does not fit into {site.machine.memory:g} GiB; "
            "use a smaller --recipe or --size"
        )
    for plan, rate in fitting:
        used = started + pace * clusters * ADMIT_IMAGES / rate
        seconds = TRAIN_SHARE * (3600 * hours - used) / (2 if compare else 1) / -(-clusters // site.machine.cores)
        images = int(seconds * rate / pace) // plan.training.batch * plan.training.batch
        if images >= plan.training.images:
            break
    if images <= 0:
        raise UserError(
            f"--hours {hours:g}: is over before {site.images:,} images are prepared and {clusters} experts started "
            f"and admitted; give more than {used / 3600:.3g}, or a smaller -k or --size"
        )
    sampling = SAMPLE_SHARE * (3600 * hours - used) * rate * site.machine.cores / pace
    samples = int(sampling / sample_cost(EvalConfig(steps=25)))
    training = plan.training.over(min(images, plan.training.images))
    return plan.model_copy(update={"training": training}), max(100, min(1000, samples // 10 * 10))


def sample_cost(evaluation: EvalConfig) -> float:
    """Training images that take as long as one sample: guidance evaluates twice, without a backward pass."""
    experts = sum(2 if route == "top-2" else 1 for route in evaluation.routes)
    return evaluation.steps * 2 * experts * len(evaluation.guidances) / 3


def sampling_workers(evaluation: EvalConfig, cores: int, memory: float, experts: float) -> int:
    """Processes that sample batches side by side, one per core; `memory` and the `experts` that each loads in GiB."""
    batches = -(-evaluation.count // evaluation.batch)
    return max(1, min(cores, batches, int(memory / (WORKER_GIB + experts))))


def measure_pace(settings: RunSettings, origin: Source, machine: Machine, seconds: float = 1.0) -> float:
    """Train the run's network on noise, every core busy, and compare with the prediction. 1 on CUDA: it compiles."""
    if machine.kind == "cuda":
        return 1.0
    site, batch = Site(origin, settings.prepare, machine), min(16, settings.plan.training.batch)
    predicted, architecture = site.rate_of(settings, batch), site.architecture(settings.plan.network)
    threads, times, over = torch.get_num_threads(), list[float](), Event()

    def keep_busy(a: torch.Tensor) -> None:
        while not over.is_set():
            a @ a  # long enough that threads do not wait for each other in Python

    with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(machine.cores) as others:
        network = DiT(architecture).to(machine.kind)
        optimizer = torch.optim.AdamW(network.parameters())
        x, t = torch.randn(batch, *architecture.latent).to(machine.kind), torch.rand(batch).to(machine.kind)
        torch.set_num_threads(1)
        try:
            for _ in range(machine.cores - 1 if machine.kind == "cpu" else 0):
                others.submit(keep_busy, torch.randn(1024, 1024))
            while len(times) < 3 or times[-1] - times[1] < seconds:  # the first steps are slow
                network(x, t).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                times.append(time.perf_counter())
        finally:
            over.set()
            torch.set_num_threads(threads)
    return predicted * (times[-1] - times[1]) / (batch * (len(times) - 2))


def forecast(settings: RunSettings, origin: Source, machine: Machine, pace: float = 1.0) -> list[Stage]:
    """Every stage of a run, and about how long it takes on this machine."""
    site = Site(origin, settings.prepare, machine)
    rate = site.rate_of(settings)
    clusters, images = settings.partition.clusters, settings.plan.training.images
    million = account(site.architecture(settings.plan.network)).parameters / 1e6
    evaluation, models = settings.evaluated, 2 if settings.compare else 1
    train = -(-clusters // machine.cores) * (images / rate + START_SECONDS)
    train += clusters * images / rate if settings.compare else 0
    workers = sampling_workers(evaluation, machine.cores, machine.memory, clusters * million * 4e6 / GIB)
    samples = models * evaluation.count * sample_cost(evaluation) / rate / workers
    router = START_SECONDS / 2 + 0.1 * (settings.router_images or images) / rate
    parallel = machine.cores if machine.kind == "cpu" else 1
    experts = f"{clusters} experts of {million:.1f}M weights, {images:,} images each, {parallel} at a time"
    data = f"{site.images:,} images to latents of {'x'.join(map(str, site.latent))}"
    stages = [
        Stage("prepare", data, site.prepare_seconds),
        Stage("partition", f"{clusters} clusters", site.partition_seconds),
        Stage("plan", f"one order each, {settings.plan.objectives or f'{clusters}flow'}", 2.0),
        Stage("train", experts, train),
        Stage("admit", "validation on images that no expert has seen", clusters * ADMIT_IMAGES / rate),
        Stage("router", "weights the experts", router),
        Stage(
            "evaluate", f"{evaluation.count:,} samples by {len(evaluation.routes)} routes", MEASURE_SECONDS + samples
        ),
    ]
    return [stage._replace(seconds=pace * stage.seconds) for stage in stages]
