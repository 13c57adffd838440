"""The papers' claims on photographs: monolith, experts and routes, arm by arm, on one GPU.

    python benchmarks/tables.py run --set /tmp/photographs --out $OUT/tables.json --seeds 0 1 2 --tables A --seconds 560
    python benchmarks/tables.py run ... --tables A.main B S          # one part of a table: TABLE.PART
    python benchmarks/tables.py report benchmarks/results/tables-h200.json        # writes BENCHMARKS.md

`run` goes through a fixed list of models to train and arms to sample, in the order of what they say, and stops before
something that would not end within --seconds. What is finished is in the set's folder (weights, and the record, which
is copied to --out after every entry), so the same command goes on. Nothing here is chosen by looking at results: sizes,
budgets, learning rates, guidances, prompts and seeds are the constants below.

The regime is that of two pilots: a network short of capacity, DDM's protocol (equal steps, the experts' batch an eighth
of the monolith's, so equal images), routers at DDM's share of the cost (router/recipes.py: at most 8 % of an expert's
step; 4 % of the training), text by minilm. The Frechet distance is that of EfficientNet-Lite0 features to the data
set's 10,000 validation images, at 10,000 samples; its intervals are bootstrapped with the same draws in every arm.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.data.space import LatentSpace
from atoll.ensemble import AskedEvery, Fixed, Mixture, parse_route
from atoll.ensemble.record import WatchedRoute
from atoll.evaluation.scores import SCORES, Sets
from atoll.evaluation.scores.classifier import Classifier
from atoll.evaluation.scores.frechet import FrechetReference
from atoll.evaluation.sheet import INK, expert_colour
from atoll.islands.expert import ExpertCard, bridged
from atoll.islands.validation import MOST_SAMPLES, TIMES, Validation
from atoll.models.accounting import flops_forward
from atoll.models.autoencoders import load_autoencoder
from atoll.models.dit import DiT, DiTConfig
from atoll.models.feature_extractors import load_extractor
from atoll.models.router import Router, RouterConfig, cluster_weights
from atoll.planning.recipes import OBJECTIVES
from atoll.process import Condition, Denoiser, LinearFlow, NetworkDenoiser, PaperFusion, fixed_times, velocity_error
from atoll.router.recipes import blinded, router_network
from atoll.sampling import Sampling, generate
from atoll.training.execution import Execution
from atoll.training.recipe import Training
from atoll.training.seeds import generator, seed_from
from photograph_set import VALIDATION_EVERY, read_set
from stacked import Denoising, Distilling, Pool, Stack, Telling, Trained, train_stack

CLUSTERS = 8
ROUTER_SHARE = 0.04  # of the experts' training, in operations: DDM's
BRANCH = 0.25  # of all images, seen by the common start of branched experts
NOISE_EXPERTS = 2  # of the mixed ensemble: on the clusters with most detail, as `atoll plan` deals them
STUDENT_SHARE = 1 / 3  # of the monolith's training, in operations: DDM's, the teachers' answers counted
CURVE = (0.125, 0.25, 0.5)  # of the training, where quality is measured on the way
RESAMPLES = 20
PAPER = {  # what the papers say of the ratio, where they say it
    ("A", "flow8", "top-1", 1.0): "DDM 0.77 (guidance 3, 9.84 / 12.81)",
    ("A", "flow8", "top-2", 1.0): "DDM 0.80; Paris 0.76",
    ("A", "flow8", "full", 1.0): "DDM 0.82; Paris 1.62",
    ("B", "mixed", "top-1", 1.0): "HDDM 0.954 (guidance 7.5)",
    ("S", "student", None, 1.0): "DDM 0.99 of the monolith",
}


@dataclass(frozen=True)
class Scale:
    """Everything that decides how much is computed."""

    width: int = 192
    depth: int = 6
    heads: int = 3
    patch: int = 1
    batch: int = 128  # of one expert
    steps: int = 12_000
    learning_rate: float = 4e-4
    router_batch: int = 1024
    samples: int = 10_000
    sample_batch: int = 5_000
    sampling_steps: int = 50
    guidances: tuple[float, ...] = (1.5, 2.0, 3.0)
    beyond: tuple[float, ...] = (4.5, 6.0)  # added after seed 0: both models were best at the end of `guidances`
    text_samples: int = 2_000
    warm_up: float = 0.04  # of the budget
    average: float = 0.02  # half-life of the weights' average, of the budget


SCALES = {
    "photographs": Scale(),
    "small": Scale(width=128, depth=4, heads=2),  # table C
    "large": Scale(width=256, depth=8, heads=4),
    "toy": Scale(
        *(32, 1, 2, 4, 8, 24),
        router_batch=32,
        samples=48,
        sample_batch=32,
        sampling_steps=3,
        guidances=(2.0,),
        beyond=(),
        text_samples=16,
    ),  # that it runs, in seconds on a CPU
}


@dataclass(frozen=True)
class Arm:
    """One way to sample. `compared` is the arm it is divided by."""

    table: str
    model: str  # monolith, flow8, branched, mixed, or one of STUDENTS
    route: str | None = None
    guidance: float = 1.0
    router: str | None = "router"
    fusion: str = "bridge"
    prompts: str = "train"  # or: text, captions and descriptions that no training has seen
    compared: str = "monolith"
    after: float = 1.0  # this share of the training

    @property
    def weights(self) -> str:
        return named_after(self.model, self.after)

    @property
    def name(self) -> str:
        parts = [self.weights, self.route, None if self.router in (None, "router") else self.router]
        parts += [None if self.fusion == "bridge" else self.fusion, f"g{self.guidance:g}"]
        parts += [None if self.prompts == "train" else self.prompts]
        return "-".join(part for part in parts if part)


def named_after(model: str, share: float) -> str:
    return model if share == 1.0 else f"{model}@{share:g}"


def monolith(table: str, guidance: float = 1.0, prompts: str = "train", after: float = 1.0) -> Arm:
    return Arm(table, "monolith", guidance=guidance, router=None, prompts=prompts, after=after)


def table_a(scale: Scale) -> dict[str, list[Arm]]:
    """In parts, the most telling first."""
    guided = scale.guidances
    return {
        "main": [
            *(monolith("A", g) for g in (1.0, *guided)),
            *(Arm("A", "flow8", "top-1", g) for g in (1.0, *guided)),
            *(Arm("A", "flow8", route) for route in ("fixed", "top-2")),
        ],
        "text": [
            monolith("A", guided[-1], "text"),
            Arm("A", "flow8", "top-1", guided[-1], prompts="text"),
        ],
        "curve": [
            arm for share in CURVE for arm in (monolith("A", after=share), Arm("A", "flow8", "top-1", after=share))
        ],
        "beyond": [
            *(monolith("A", g) for g in scale.beyond),
            *(Arm("A", "flow8", "top-1", g) for g in scale.beyond),
        ],
        "branched": [*(Arm("A", "branched", "top-1", g) for g in (1.0, *guided)), Arm("A", "branched", "fixed")],
        "full": [Arm("A", "flow8", "full")],
        "blind": [Arm("A", "flow8", "top-1", router="blind")],
    }


def table_b(scale: Scale) -> dict[str, list[Arm]]:
    return {
        "main": [Arm("B", "mixed", "top-1", g, compared="flow8") for g in (1.0, *scale.guidances)],
        "fusion": [
            Arm("B", "mixed", "top-1", fusion="paper", compared="flow8"),
            *(Arm("B", "mixed", "top-2", fusion=fusion, compared="flow8") for fusion in FUSIONS),
        ],
    }


def table_d(scale: Scale) -> dict[str, list[Arm]]:
    routes = ("threshold-0.2", "top-3", "sampled", "nucleus-0.9")
    return {"main": [Arm("D", "flow8", route) for route in routes]}


def table_s(scale: Scale) -> dict[str, list[Arm]]:
    """One dense network out of eight, at one expert's cost per step; `alone` is the same compute without teachers."""
    guidances = (1.0, *scale.guidances)
    return {
        name: [Arm("S", student, guidance=g, router=None) for student in students for g in guidances]
        for name, students in {
            "main": ("student", "alone"),
            "best": ("student-best",),
            "average": ("student-average",),
        }.items()
    }


FUSIONS = ("bridge", "paper")
STUDENTS = ("student", "student-best", "student-average", "alone")
TABLES = {"A": table_a, "B": table_b, "D": table_d, "S": table_s}


# -- the data, on the device --------------------------------------------------------------------------------


class World:
    """The prepared set, on the device, and what is measured against it."""

    def __init__(self, folder: Path, device: torch.device, scale: Scale) -> None:
        self.device, self.scale, self.folder = device, scale, folder
        tensors, self.meta = read_set(folder)
        space = json.loads((folder / "space.json").read_text())
        count = self.meta["train"]
        latents = torch.from_numpy(np.load(folder / "latents.npy"))
        self.shape = tuple(latents.shape[1:])
        self.labels = tensors["labels"].to(device)
        self.text = tensors["text"].to(device)
        first, texts = tensors["first"].to(device), tensors["count"].to(device)
        own = self.labels[:count]
        self.pool = Pool(latents[:count].to(device), text=self.text, first=first[own], count=texts[own])
        self.first = tensors["first"]
        self.clusters = tensors["clusters"].to(device)
        every = torch.arange(count)
        held = every % VALIDATION_EVERY == 0
        self.train_rows, self.validation_rows = every[~held], every[held]
        self.cluster_rows = [self.train_rows[(tensors["clusters"][self.train_rows] == k)] for k in range(CLUSTERS)]
        self.space = LatentSpace(
            autoencoder=space["autoencoder"], shape=self.shape, mean=tuple(space["mean"]), std=tuple(space["std"])
        )
        name = space["autoencoder"]
        self.autoencoder = load_autoencoder(name if name == "pixels" else str(folder / "taef2"))
        self.extractor = load_extractor(space.get("extractor", "efficientnet-lite0"), str(device))
        features = torch.from_numpy(np.load(folder / "features.npy"))
        self.train_features, self.real_features = features[:count].to(device), features[count:].to(device)
        classes = len(self.meta["names"])
        self.classifier = Classifier.fitted(self.train_features, own, classes)
        self.expert = expert_network(scale, self.shape, self.text.shape[1])
        trunk = router_network(self.expert)
        self.routers = {"router": trunk, "blind": blinded(trunk)}

    @cached_property
    def noise_clusters(self) -> list[int]:
        """The clusters with most detail, as planning/mix.py measures it: those of the noise experts."""
        detail = []
        for rows in self.cluster_rows:
            some = self.pool.latents[rows[:256].to(self.device)].double()
            detail.append((some.diff(dim=-1).square().mean() + some.diff(dim=-2).square().mean()).item())
        return sorted(sorted(range(CLUSTERS), key=lambda k: -detail[k])[:NOISE_EXPERTS])

    def prompts(self, kind: str) -> tuple[Tensor, Tensor, list[str]]:
        """Rows of the text table, the class each stands for, and its kind, one per image.

        train: the first caption of each class in turn. text: captions no training has seen, of every kind, in turn.
        """
        classes = torch.tensor(self.meta["classes"])
        if kind == "train":
            wanted = torch.arange(self.scale.samples) % len(self.first)
            return self.first[wanted], wanted, ["train"] * len(wanted)
        by_kind = [
            [i for i, k in enumerate(self.meta["kinds"]) if k == name] for name in ("template", "synonym", "paraphrase")
        ]
        each = self.scale.text_samples // len(by_kind)
        rows = torch.tensor([group[i % len(group)] for group in by_kind if group for i in range(each)])
        return rows, classes[rows], [self.meta["kinds"][int(row)] for row in rows]

    @torch.inference_mode()
    def painted(self, latents: Tensor) -> Tensor:
        """uint8 [N, 3, S, S] on the CPU."""
        parts = torch.split(latents, 1000)
        return torch.cat([self.autoencoder.decode(self.space.restore(part)).cpu() for part in parts])

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        return torch.cat([self.extractor.extract(p.to(self.device)).float() for p in torch.split(images, 1000)])


def expert_network(scale: Scale, latent: tuple[int, int, int], text_width: int) -> DiTConfig:
    return DiTConfig(
        latent=latent,
        patch=scale.patch,
        width=scale.width,
        depth=scale.depth,
        heads=scale.heads,
        condition="pooled",
        text_width=text_width,
    )


# -- training -----------------------------------------------------------------------------------------------


def recipe(scale: Scale, *, share: float = 1.0, experts: int = 1) -> Training:
    """One expert's training for a share of the budget, or as many experts' as one network's."""
    images = round(scale.steps * share) * scale.batch * experts
    return Training(
        images=images,
        batch=scale.batch * experts,
        learning_rate=scale.learning_rate,
        warmup_images=round(scale.warm_up * images),
        decay="linear",
        ema_images=max(1, round(scale.average * images)),
        seed=0,
    )


def router_recipe(scale: Scale, expert: DiTConfig) -> Training:
    """As many images as make the router's training ROUTER_SHARE of the experts'."""
    whole = recipe(scale, experts=CLUSTERS).images * flops_forward(expert)
    steps = max(4, int(ROUTER_SHARE * whole / flops_forward(router_network(expert)) / scale.router_batch))
    images = steps * scale.router_batch
    return Training(
        images=images,
        batch=scale.router_batch,
        learning_rate=1e-3,
        warmup_images=images // 25,
        decay="linear",
        ema_images=max(1, images // 50),
        seed=0,
    )


@dataclass(frozen=True)
class Lesson:
    """One thing to train: which networks, on what, by which recipe."""

    task: Any
    networks: list[Any]
    members: list[Tensor]
    training: Training
    beside: Sequence[Stack] = ()


NEEDS = {
    "branched": ["start"],
    "mixed": ["flow8"],
    "student": ["flow8"],
    "student-best": ["flow8"],
    "student-average": ["flow8"],
}


def lesson(world: World, name: str, seed: int, store: Store) -> Lesson:
    torch.manual_seed(seed_from(seed, name, "weights"))
    scale, every = world.scale, world.train_rows
    flow, noise = OBJECTIVES["flow"], OBJECTIVES["ddpm"]
    if name in ("router", "blind"):
        trunk = world.routers[name]
        task = Telling(world.clusters, trunk.time_scale)
        network = Router(RouterConfig(trunk=trunk, clusters=CLUSTERS))
        return Lesson(task, [network], [every], router_recipe(scale, world.expert))
    if name in ("student", "student-best", "student-average"):
        return student_lesson(world, name.removeprefix("student").removeprefix("-"), seed, store)
    if name in ("monolith", "start", "alone"):
        share = {"start": BRANCH, "alone": STUDENT_SHARE}.get(name, 1.0)
        training = recipe(scale, share=share, experts=CLUSTERS)
        return Lesson(Denoising([flow], world.expert.time_scale), [DiT(world.expert)], [every], training)
    places = world.noise_clusters if name == "mixed" else list(range(CLUSTERS))
    networks = [DiT(world.expert) for _ in places]
    if name == "branched":
        (start,) = store.weights("start", seed)
        for network in networks:
            network.load_state_dict(start, strict=False)
    objectives = [noise if name == "mixed" else flow for _ in places]
    training = recipe(scale, share=1.0 - BRANCH if name == "branched" else 1.0)
    return Lesson(
        Denoising(objectives, world.expert.time_scale), networks, [world.cluster_rows[k] for k in places], training
    )


def student_lesson(world: World, start: str, seed: int, store: Store) -> Lesson:
    """A step with teachers costs 4 forwards of one network, one without costs 3: fewer steps, equal operations."""
    states, flow = store.weights("flow8", seed), OBJECTIVES["flow"]
    precision = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    teachers = Stack([filled(DiT(world.expert), s) for s in states], device=world.device, precision=precision)
    teachers.requires_grad_(False)
    sizes = torch.tensor([float(len(rows)) for rows in world.cluster_rows])
    shares = sizes / sizes.sum()
    student = DiT(world.expert)
    if start == "best":
        student = filled(student, min(states, key=lambda state: error_on_everything(world, state)))
    elif start == "average":
        mean = {key: sum(w * s[key] for w, s in zip(shares, states, strict=True)) for key in states[0]}
        student = filled(student, mean)
    task = Distilling(teachers, shares.to(world.device), flow, world.expert.time_scale)
    training = recipe(world.scale, share=STUDENT_SHARE * 3 / 4)
    return Lesson(task, [student], world.cluster_rows, training, beside=[teachers])


def filled(network: DiT, state: dict[str, Any]) -> DiT:
    network.load_state_dict(state, strict=False)
    return network


@torch.no_grad()
def error_on_everything(world: World, state: dict[str, Tensor]) -> float:
    """The yardstick of one expert over validation images of all clusters."""
    denoiser = expert_denoiser(world, state, "flow", 0, "bridge")
    rows = world.validation_rows[:: max(1, len(world.validation_rows) // 2000)].to(world.device)
    x0 = world.pool.latents[rows].float()
    eps = torch.randn(x0.shape, generator=generator(0, "validation")).to(world.device)
    times = fixed_times(TIMES).repeat(-(-len(rows) // TIMES))[: len(rows)].to(world.device)
    condition = Condition(pooled=world.text[world.pool.first[rows]])
    return velocity_error(denoiser, x0, eps, times, condition).mean().item()


class Store:
    """Finished weights and the record, in the set's folder; a copy of the record where it is wanted."""

    def __init__(self, folder: Path, scale_name: str, out: Path) -> None:
        self.folder, self.out = folder / f"tables-{scale_name}", out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record_path = self.folder / "tables.json"
        if out.exists() and not self.record_path.exists():
            shutil.copy(out, self.record_path)
        empty: dict[str, Any] = {"models": {}, "arms": {}}
        self.record = json.loads(self.record_path.read_text()) if self.record_path.exists() else empty

    def path(self, name: str, seed: int) -> Path:
        return self.folder / f"{name}-s{seed}.safetensors"

    def weights(self, name: str, seed: int) -> list[dict[str, Tensor]]:
        tensors = load_file(self.path(name, seed))
        count = 1 + max(int(key.partition("/")[0]) for key in tensors)
        return [
            {key.partition("/")[2]: value for key, value in tensors.items() if key.startswith(f"{k}/")}
            for k in range(count)
        ]

    def keep(self, name: str, seed: int, trained: Trained, training: Training, wall: float) -> None:
        for share, states in {**trained.kept, 1.0: trained.states}.items():
            save_file(
                {f"{k}/{key}": value for k, state in enumerate(states) for key, value in state.items()},
                self.path(named_after(name, share), seed),
            )
        self.record["models"][f"{name}-s{seed}"] = {
            "training": training.model_dump(),
            "networks": len(trained.states),
            "commit": commit(),
            "images_per_s": round(trained.images_per_s),
            "seconds": round(wall, 1),
            "fused": trained.fused,
            "loss": trained.rows,
        }
        self.save()

    def save(self) -> None:
        text = json.dumps(self.record, indent=1) + "\n"
        self.record_path.write_text(text)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(text)


def commit() -> str:
    """Of this code; a machine without its history is told by ATOLL_COMMIT."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("ATOLL_COMMIT") or found.stdout.strip() or "unknown"


def trained_model(world: World, store: Store, name: str, seed: int) -> None:
    if store.path(name, seed).exists():
        return
    for needed in NEEDS.get(name, []):
        trained_model(world, store, needed, seed)
    began = time.monotonic()
    chosen = lesson(world, name, seed, store)
    cuda = world.device.type == "cuda"

    def watch(done: int, total: int, rate: float) -> None:
        if done * 4 // total > (done - total // 40) * 4 // total:
            print(f"  {name}-s{seed}: {done:,} of {total:,} images each, {rate:,.0f} images/s", flush=True)

    trained = train_stack(
        chosen.networks,
        chosen.task,
        world.pool,
        chosen.members,
        chosen.training,
        seeds=[seed_from(seed, name, k) % 2**31 for k in range(len(chosen.members))],
        compiling=cuda,
        precision=torch.bfloat16 if cuda else torch.float32,
        beside=chosen.beside,
        keep_after=CURVE if name in ("monolith", "flow8") else (),
        watch=watch,
    )
    store.keep(name, seed, trained, chosen.training, time.monotonic() - began)
    if name in ("router", "blind"):
        store.record["models"][f"{name}-s{seed}"]["accuracy"] = accuracy(world, store, name, seed)
        store.save()
    print(f"{name}-s{seed}: {trained.images_per_s:,.0f} images/s, {time.monotonic() - began:.0f} s", flush=True)


@torch.no_grad()
def accuracy(world: World, store: Store, name: str, seed: int) -> dict[str, float]:
    """Share of validation images whose likeliest cluster is their own, by time; told the first caption of the class."""
    router, rows = load_router(world, store, name, seed), world.validation_rows.to(world.device)
    condition = Condition(pooled=world.text[world.pool.first[rows]])
    found = {}
    for t in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
        x0 = world.pool.latents[rows].float()
        eps = torch.randn(x0.shape, generator=generator(0, "accuracy")).to(world.device)
        times = torch.full((len(rows),), t, dtype=torch.float64, device=world.device)
        weights = router((1 - t) * x0 + t * eps, times, condition)
        found[f"{t:g}"] = (weights.argmax(1) == world.clusters[rows]).float().mean().item()
    return found


# -- sampling and measuring ---------------------------------------------------------------------------------


def placed(world: World, network: Any, state: dict[str, Tensor]) -> Any:
    network.load_state_dict(state, strict=False)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return network.to(world.device, dtype).eval().requires_grad_(False)


def load_router(world: World, store: Store, name: str, seed: int) -> Any:
    trunk = world.routers[name]
    (state,) = store.weights(name, seed)
    network = placed(world, Router(RouterConfig(trunk=trunk, clusters=CLUSTERS)), state)
    return lambda x, t, condition: cluster_weights(network, trunk.time_scale, x, t, condition)


def expert_denoiser(world: World, state: dict[str, Tensor], objective: str, cluster: int, fusion: str) -> Denoiser:
    network, chosen = placed(world, DiT(world.expert), state), OBJECTIVES[objective]
    card = ExpertCard(
        architecture=world.expert, schedule=chosen.schedule, kind=chosen.kind, latent=world.space, images=0
    )
    if objective == "flow":
        return bridged(network, card, LinearFlow())
    if fusion == "paper":
        return PaperFusion(NetworkDenoiser(network, chosen.schedule, chosen.kind, world.expert.time_scale))
    execution = Execution(device=str(world.device))
    limit = validation_of(world, cluster).best_limit(network, card, execution)
    print(f"  noise expert of cluster {cluster}: asked at sigma/alpha <= {limit:g}")
    return bridged(network, card.model_copy(update={"bridge_limit": limit}), LinearFlow())


def validation_of(world: World, cluster: int) -> Validation:
    """As islands/validation.py makes it, for one cluster."""
    own = world.validation_rows[(world.clusters[world.validation_rows.to(world.device)] == cluster).cpu()]
    rows = own[:MOST_SAMPLES].repeat_interleave(TIMES)
    x0 = world.pool.latents[rows.to(world.device)].float().cpu()
    eps = torch.randn(x0.shape, generator=generator(0, "validation"))
    condition = Condition(pooled=world.text[world.pool.first[rows.to(world.device)]].cpu())
    return Validation(x0, eps, fixed_times(TIMES).repeat(len(rows) // TIMES), condition)


def denoisers_of(world: World, store: Store, arm: Arm, seed: int) -> list[Denoiser]:
    states = store.weights("flow8" if arm.model == "mixed" else arm.weights, seed)
    kinds = ["flow"] * len(states)
    if arm.model == "mixed":
        for k, state in zip(world.noise_clusters, store.weights("mixed", seed), strict=True):
            states[k], kinds[k] = state, "ddpm"
    return [
        expert_denoiser(world, state, kind, k, arm.fusion)
        for k, (state, kind) in enumerate(zip(states, kinds, strict=True))
    ]


def assembled(world: World, store: Store, arm: Arm, seed: int, watch: Any = None) -> tuple[Denoiser, Sampling]:
    sampling = Sampling(steps=world.scale.sampling_steps, solver="euler", guidance=arm.guidance, route=arm.route)
    denoisers = denoisers_of(world, store, arm, seed)
    if arm.route is None:
        return denoisers[0], sampling
    assert arm.router is not None
    router, route = load_router(world, store, arm.router, seed), parse_route(arm.route)
    if isinstance(route, Fixed):  # decided at the first step: later answers are of no use
        router = AskedEvery(router, sampling.times(LinearFlow()), sampling.steps)
    return Mixture(denoisers, router, route if watch is None else WatchedRoute(route, watch)), sampling


def sample(world: World, store: Store, arm: Arm, seed: int, rows: Tensor, watch: Any = None) -> Tensor:
    """Latents of all prompts of an arm; image i has the same noise in every arm of every seed."""
    denoiser, sampling = assembled(world, store, arm, seed, watch)
    # cuDNN plans anew for every shape it has not seen, and the groups of top-1 have another size at every step
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return generate(
            denoiser,
            world.shape,
            list(range(len(rows))),
            Condition(pooled=world.text[rows.to(world.device)]),
            steps=sampling.steps,
            solver=sampling.solver,
            guidance=sampling.guidance,
            batch=world.scale.sample_batch,
            device=world.device,
        )


def frechet_job(features: str, reference: str, resamples: int) -> list[float]:
    """A worker's: the distance and its resamples. Each worker makes the reference once."""
    if reference not in _REFERENCES:
        _REFERENCES[reference] = FrechetReference.of(np.load(reference))
    return _REFERENCES[reference].distances(np.load(features), resamples, seed=0)


_REFERENCES: dict[str, FrechetReference] = {}


class AtOnce(Executor):
    """No workers: what is submitted is done."""

    def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


class Measuring:
    """Distances on the host's cores while the card goes on; every other score on the card."""

    def __init__(self, world: World, store: Store, workers: int) -> None:
        self.world, self.store = world, store
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
        spawn = multiprocessing.get_context("spawn")  # a fork of a process that uses a card is of no use
        self.pool: Executor = ProcessPoolExecutor(workers, mp_context=spawn) if workers else AtOnce()
        self.reference = store.folder / "reference.npy"
        np.save(self.reference, world.real_features.cpu().numpy())
        self.waiting: dict[str, tuple[Future[list[float]], Path]] = {}
        if "floor" not in store.record["arms"]:
            self.submit("floor", world.real_features[: len(world.real_features) // 2])
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before

    def submit(self, key: str, features: Tensor) -> None:
        path = self.store.folder / f"features-{key}.npy"
        np.save(path, features.float().cpu().numpy())
        self.waiting[key] = self.pool.submit(frechet_job, str(path), str(self.reference), RESAMPLES), path

    def collect(self, *, wait: bool) -> None:
        for key, (future, path) in list(self.waiting.items()):
            if wait or future.done():
                found = future.result()
                entry = self.store.record["arms"].setdefault(key, {})
                entry |= {"frechet": found[0], "resampled": found[1:]}
                path.unlink()
                del self.waiting[key]
                self.store.save()
                print(f"  {key}: Frechet distance {found[0]:.2f}", flush=True)

    @torch.no_grad()
    def scores(self, images: Tensor, wanted: Tensor, kinds: Sequence[str]) -> tuple[dict[str, Any], Tensor]:
        world = self.world
        features, asked = world.features(images), wanted.to(world.device)
        sets = Sets(features, world.real_features, world.train_features, asked, world.classifier)
        found: dict[str, Any] = {}
        for name, function in SCORES.items():
            if name != "frechet":
                found |= function(sets)
        if len(set(kinds)) > 1:
            right = world.classifier.ranked(features) == asked[:, None]
            for kind in sorted(set(kinds)):
                which = torch.tensor([k == kind for k in kinds], device=world.device)
                found[f"agreement_{kind}"] = right[which][:, 0].float().mean().item()
                found[f"agreement_5_{kind}"] = right[which].any(1).float().mean().item()
        return found, features


def measured_arm(world: World, store: Store, measuring: Measuring, arm: Arm, seed: int) -> None:
    key = f"{arm.name}-s{seed}"
    began = time.monotonic()
    rows, wanted, kinds = world.prompts(arm.prompts)
    latents = sample(world, store, arm, seed, rows)
    seconds = time.monotonic() - began
    images = world.painted(latents)
    scores, features = measuring.scores(images, wanted, kinds)
    store.record["arms"][key] = {
        **asdict(arm),
        "seed": seed,
        "commit": commit(),
        "samples": len(rows),
        "sampling": asdict(Sampling(steps=world.scale.sampling_steps, solver="euler", guidance=arm.guidance)),
        "seconds": round(seconds, 1),
        "flops": flops_of(world, arm),
        **scores,
    }
    store.save()
    if arm.prompts == "train":
        measuring.submit(key, features)
    shown = {name: round(value, 4) for name, value in scores.items()}
    print(f"{key}: {seconds:.0f} s sampling, {time.monotonic() - began:.0f} s in all, {shown}", flush=True)


def flops_of(world: World, arm: Arm) -> dict[str, float]:
    """Training in all, and one image's sampling: the router inside both."""
    expert, router = flops_forward(world.expert), flops_forward(world.routers["router"])
    training = 3.0 * recipe(world.scale, experts=CLUSTERS).images * expert * arm.after
    if arm.model in STUDENTS:
        training *= STUDENT_SHARE
    sampling = float(expert * world.scale.sampling_steps)
    if arm.route is not None:
        training += 3.0 * router_recipe(world.scale, world.expert).images * router
        asked = 1 if arm.route == "fixed" else world.scale.sampling_steps
        experts = {"full": CLUSTERS, "top-2": 2, "top-3": 3}.get(arm.route, 1)
        sampling = sampling * experts + asked * router
    return {"training": training, "sampling": sampling * (1 if arm.guidance == 1.0 else 2)}


# -- a sheet for people -------------------------------------------------------------------------------------

SHEET = (
    *("a photo of a goldfish", "a small orange fish", "a photo of a king penguin", "an orange and black butterfly"),
    *("a big cat with a mane", "a yellow vehicle that takes children to school", "waves on a sandy beach"),
    *("a snowy mountain peak", "a round italian dish with cheese and tomato", "a photo of a golden retriever"),
)


def sheet(world: World, store: Store, seed: int, guidance: float, path: Path, columns: int = 6) -> None:
    """The ensemble's images beside the monolith's from the same noise; the frame has the colour of the expert that
    painted most of the image, black for the monolith."""
    from PIL import Image, ImageDraw

    known = world.meta["captions"]
    chosen = [line for line in SHEET if line in known] or known[:2]
    rows = torch.tensor([known.index(line) for line in chosen for _ in range(columns)])
    shares = torch.zeros(len(rows), CLUSTERS)

    def watch(which: Any, t: Tensor, weights: Tensor, after: Tensor) -> None:
        shares[which] += after[: len(shares[which])].float().cpu()

    ours = Arm("A", "flow8", "top-1", guidance)
    pictures = [world.painted(sample(world, store, ours, seed, rows, watch))]
    pictures.append(world.painted(sample(world, store, monolith("A", guidance), seed, rows)))
    colours = [[expert_colour(int(k)) for k in shares.argmax(1)], [INK] * len(rows)]
    side, frame, gap, top = 64, 4, 12, 16
    tile = side + 2 * frame
    width = 2 * columns * tile + gap
    canvas = Image.new("RGB", (width, len(chosen) * (tile + top)), "white")
    draw = ImageDraw.Draw(canvas)
    for i, line in enumerate(chosen):
        y = i * (tile + top)
        draw.text((4, y + 2), line, fill="#1f2933")
        for half in range(2):
            for column in range(columns):
                x = half * (columns * tile + gap) + column * tile
                index = i * columns + column
                draw.rectangle((x, y + top, x + tile - 1, y + top + tile - 1), fill=colours[half][index])
                image = Image.fromarray(pictures[half][index].permute(1, 2, 0).numpy()).resize((side, side))
                canvas.paste(image, (x + frame, y + top + frame))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)


# -- the whole ----------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    scale, device = SCALES[arguments.scale], torch.device(arguments.device)
    world = World(arguments.set, device, scale)
    store = Store(arguments.set, arguments.scale, arguments.out)
    measuring = Measuring(world, store, arguments.workers)
    describe(world, store, measuring, arguments.scale)
    print(f"ready after {time.monotonic() - began:.0f} s", flush=True)

    def left() -> float:
        return arguments.seconds - (time.monotonic() - began)

    for model_or_arm, seed in schedule(arguments.tables, arguments.seeds, scale):
        measuring.collect(wait=False)
        if isinstance(model_or_arm, str):
            if store.path(model_or_arm, seed).exists():
                continue
            need = expected_seconds(world, model_or_arm, arguments.images_per_s)
            if need > left() - arguments.reserve:
                print(f"stopped before {model_or_arm}-s{seed}: {need:.0f} s expected, {left():.0f} s left")
                break
            trained_model(world, store, model_or_arm, seed)
        else:
            if f"{model_or_arm.name}-s{seed}" in store.record["arms"]:
                continue
            if left() < arguments.reserve:
                print(f"stopped before {model_or_arm.name}-s{seed}: {left():.0f} s left")
                break
            measured_arm(world, store, measuring, model_or_arm, seed)
    else:
        print("all done")
    if arguments.sheet is not None and store.path("flow8", arguments.seeds[0]).exists():
        sheet(world, store, arguments.seeds[0], arguments.sheet_guidance, arguments.sheet)
    measuring.collect(wait=True)
    measuring.pool.shutdown()
    print(f"{time.monotonic() - began:.0f} s")


def describe(world: World, store: Store, measuring: Measuring, name: str) -> None:
    """What all numbers of the record rest on; what the autoencoder alone makes of the validation images."""
    gpu = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    real = world.classifier.ranked(world.real_features)
    labels = world.labels[world.meta["train"] :]
    store.record["about"] = {
        "scale": {"name": name, **asdict(world.scale)},
        "expert": asdict(world.expert),
        "expert_flops": flops_forward(world.expert),
        "router": asdict(world.routers["router"]),
        "router_flops": flops_forward(world.routers["router"]),
        "cluster_sizes": world.meta["cluster_sizes"],
        "noise_clusters": world.noise_clusters,
        "device": gpu,
        "torch": torch.__version__,
        "extractor": world.extractor.id,
        "autoencoder": world.space.autoencoder,
        "text": world.meta["text_encoder"],
        "classifier_on_real": (real[:, 0] == labels).float().mean().item(),
        "classifier_on_real_5": (real == labels[:, None]).any(1).float().mean().item(),
        "chance": 1.0 / len(world.meta["names"]),
    }
    if "autoencoder" not in store.record["arms"]:
        count = world.meta["train"]
        latents = torch.from_numpy(np.load(world.folder / "latents.npy")[count:]).float().to(world.device)
        scores, features = measuring.scores(world.painted(latents), labels.cpu(), ["real"])
        store.record["arms"]["autoencoder"] = scores
        measuring.submit("autoencoder", features)
    store.save()


def schedule(tables: Sequence[str], seeds: Sequence[int], scale: Scale) -> list[tuple[str | Arm, int]]:
    """Models and arms: all seeds of the most telling part first, each model just before its first arm."""
    found: list[tuple[str | Arm, int]] = []
    seen: set[tuple[str, int]] = set()
    for asked in tables:
        table, _, only = asked.partition(".")
        for part, group in TABLES[table](scale).items():
            for seed in seeds if only in ("", part) else ():
                for arm in group:
                    for model in (*NEEDS.get(arm.model, []), arm.model, arm.router if arm.route else None):
                        if model is not None and (model, seed) not in seen:
                            seen.add((model, seed))
                            found.append((model, seed))
                    found.append((arm, seed))
    return found


def expected_seconds(world: World, name: str, images_per_s: float) -> float:
    """By a rate of training for experts of this size; 25 s to compile and record."""
    scale = world.scale
    whole = recipe(scale, experts=CLUSTERS).images / images_per_s
    share = {"start": BRANCH, "branched": 1.0 - BRANCH, "mixed": NOISE_EXPERTS / CLUSTERS, "router": 0.2, "blind": 0.2}
    share |= dict.fromkeys(STUDENTS, STUDENT_SHARE)
    return 25.0 * (world.device.type == "cuda") + whole * share.get(name, 1.0)


# -- the report ---------------------------------------------------------------------------------------------


def report(record: dict[str, Any], source: str) -> str:
    """BENCHMARKS.md."""
    about, arms = record["about"], {k: {"after": 1.0, **a} for k, a in record["arms"].items() if "model" in a}
    seeds = sorted({arm["seed"] for arm in arms.values()})
    sizes = ", ".join(f"{n:,}" for n in about["cluster_sizes"])
    scale = about["scale"]
    commits = dict.fromkeys(entry["commit"] for entry in (*record["models"].values(), *arms.values()))
    floor = record["arms"].get("floor", {}).get("frechet")
    lines = [
        "# Benchmarks: the papers' claims on photographs",
        "",
        f"Generated by `python benchmarks/tables.py report {source}`; do not edit. {about['device']}, torch "
        f"{about['torch']}, commits {', '.join(commits)}.",
        "",
        f"Tiny ImageNet, 64 px, latents of `{about['autoencoder']}`; AdaLN-Single transformer of width "
        f"{scale['width']}, depth {scale['depth']}, patch {scale['patch']}, text by `{about['text']}`. "
        f"Clusters of {sizes} images by "
        f"EfficientNet-Lite0 features. Monolith {scale['steps']:,} steps x {scale['batch'] * CLUSTERS}, experts "
        f"{scale['steps']:,} steps x {scale['batch']} each: equal images. Router: "
        f"{about['router_flops'] / about['expert_flops']:.1%} of an expert's step, {ROUTER_SHARE:.0%} of the training. "
        f"{scale['samples']:,} samples, {scale['sampling_steps']} Euler steps, seeds {', '.join(map(str, seeds))}.",
        "",
        "FD is the Frechet distance of EfficientNet-Lite0 features to the 10,000 validation images"
        + (f" (half of those against all: {floor:.1f})" if floor else "")
        + ". The ratio divides by the arm it is compared with at the same guidance and seed; in brackets the 95 % "
        "interval from resampling both with the same draws. Agreement: a linear classifier of real features sees the "
        f"class asked for (on real images {about['classifier_on_real']:.0%}, by chance {about['chance']:.1%}).",
    ]
    for table in TABLES:
        own = [a for a in arms.values() if a["table"] == table or (a["model"] == "monolith" and table == "A")]
        own = [a for a in own if a["prompts"] == "train" and a["after"] == 1.0 and "frechet" in a]
        if own:
            lines += ["", f"## Table {table}", "", *table_lines(table, own, arms)]
    lines += best_lines(arms)
    lines += curve_lines(arms)
    lines += text_lines(arms)
    lines += model_lines(record["models"])
    return "\n".join(lines) + "\n"


def arm_key(arm: dict[str, Any]) -> tuple[Any, ...]:
    return arm["model"], arm["route"], arm["router"], arm["fusion"], arm["guidance"]


def rival_of(arm: dict[str, Any], arms: dict[str, Any]) -> dict[str, Any] | None:
    """The arm it is divided by: of the same seed and guidance, and the same route where that has one."""
    for other in arms.values():
        same = (
            all(other[field] == arm[field] for field in ("seed", "guidance", "after")) and other["prompts"] == "train"
        )
        if other["model"] != arm["compared"] or not same or "frechet" not in other or other is arm:
            continue
        if arm["compared"] == "monolith" or (other["route"], other["router"]) == (arm["route"], arm["router"]):
            return other
    return None


def ratio(arm: dict[str, Any], rival: dict[str, Any]) -> tuple[float, float, float]:
    """Ratio of distances and its 95 % interval, from paired resamples recentred on the ratio."""
    value = arm["frechet"] / rival["frechet"]
    draws = np.array(arm["resampled"]) / np.array(rival["resampled"])
    spread = 1.96 * draws.std(ddof=1)
    return value, value - spread, value + spread


def table_lines(table: str, own: list[dict[str, Any]], arms: dict[str, Any]) -> list[str]:
    lines = [
        "| model | route | guidance | FD by seed | ratio by seed | paper | agreement | diversity | precision / recall "
        "| training PFLOP | sampling GFLOP |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys(arm_key(arm) for arm in own):
        group = sorted((a for a in own if arm_key(a) == key), key=lambda a: a["seed"])
        first = group[0]
        ratios = []
        for arm in group:
            rival = rival_of(arm, arms)
            if rival is not None:
                value, low, high = ratio(arm, rival)
                ratios.append(f"{value:.3f} [{low:.3f}, {high:.3f}]")
        name = first["model"] + (", blind router" if first["router"] == "blind" else "")
        name += ", literal fusion" if first["fusion"] == "paper" else ""

        def mean(field: str, group: list[dict[str, Any]] = group) -> float:
            return float(np.mean([arm[field] for arm in group]))

        distances = " / ".join(f"{a['frechet']:.1f}" for a in group)
        paper = PAPER.get((table, first["model"], first["route"], first["guidance"]), "")
        if first["router"] == "blind" or first["fusion"] == "paper":
            paper = ""
        more = "more than " if (first["route"] or "").startswith("threshold") else ""  # several experts now and then
        lines.append(
            f"| {name} | {first['route'] or '-'} | {first['guidance']:g} | "
            f"{distances} | {' / '.join(ratios) or '1'} | {paper} | "
            f"{mean('agreement'):.1%} | {mean('diversity'):.3f} | {mean('precision'):.2f} / {mean('recall'):.2f} | "
            f"{first['flops']['training'] / 1e15:.2f} | {more}{first['flops']['sampling'] / 1e9:.1f} |"
        )
    return lines


def best_lines(arms: dict[str, Any]) -> list[str]:
    """Each arm at its own best guidance, by seed."""
    usable = [a for a in arms.values() if a["prompts"] == "train" and "frechet" in a and a["fusion"] == "bridge"]
    usable = [a for a in usable if a["after"] == 1.0]
    kinds = [("monolith", None), ("flow8", "top-1"), ("branched", "top-1"), ("mixed", "top-1")]
    kinds += [(student, None) for student in STUDENTS]
    lines = [
        "",
        "## Each at its best guidance",
        "",
        "| model | seed | guidance | FD | ratio |",
        "|---|---|---|---|---|",
    ]
    for model, route in kinds:
        for seed in sorted({a["seed"] for a in usable}):
            found = {
                m: min(
                    (
                        a
                        for a in usable
                        if (a["model"], a["route"], a["seed"]) == (m, r, seed) and a["router"] != "blind"
                    ),
                    key=lambda a: a["frechet"],
                    default=None,
                )
                for m, r in ((model, route), ("monolith", None))
            }
            best, rival = found[model], found["monolith"]
            if best is not None and rival is not None:
                value, low, high = ratio(best, rival)
                lines.append(
                    f"| {model} | {seed} | {best['guidance']:g} | {best['frechet']:.1f} | "
                    + ("1 |" if model == "monolith" else f"{value:.3f} [{low:.3f}, {high:.3f}] |")
                )
    return lines if len(lines) > 5 else []


def curve_lines(arms: dict[str, Any]) -> list[str]:
    """Does the gap grow with training? Averaged weights on the way, before the learning rate has come down."""
    usable = [a for a in arms.values() if a["prompts"] == "train" and "frechet" in a and a["guidance"] == 1.0]
    ours = [a for a in usable if (a["model"], a["route"], a["router"]) == ("flow8", "top-1", "router")]
    ours = [a for a in ours if any(a["seed"] == b["seed"] and b["after"] < 1.0 for b in ours)]
    if not ours:
        return []
    lines = ["", "## On the way", "", "| share of the training | seed | monolith FD | flow8 top-1 FD | ratio |"]
    lines += ["|---|---|---|---|---|"]
    for arm in sorted(ours, key=lambda a: (a["seed"], a["after"])):
        rival = rival_of(arm, arms)
        if rival is not None:
            value, low, high = ratio(arm, rival)
            lines.append(
                f"| {arm['after']:g} | {arm['seed']} | {rival['frechet']:.1f} | {arm['frechet']:.1f} | "
                f"{value:.3f} [{low:.3f}, {high:.3f}] |"
            )
    return lines


def curve_figure(record: dict[str, Any]) -> str:
    """SVG: distance against images seen in all, of every seed that was measured on the way."""
    from atoll.evaluation.figures import lines

    arms = [{"after": 1.0, **arm} for arm in record["arms"].values() if "model" in arm]
    whole = recipe(Scale(), experts=CLUSTERS).images / 1e6
    curves = {}
    for title, model, route in (("monolith", "monolith", None), ("8 experts, top-1", "flow8", "top-1")):
        own = [a for a in arms if (a["model"], a["route"], a["guidance"], a["prompts"]) == (model, route, 1.0, "train")]
        own = [a for a in own if a["router"] != "blind" and "frechet" in a]
        for seed in sorted({a["seed"] for a in own if a["after"] < 1.0}):
            points = sorted((whole * a["after"], a["frechet"]) for a in own if a["seed"] == seed)
            curves[f"{title}, seed {seed}"] = tuple(zip(*points, strict=True))
    colours = {name: INK if name.startswith("monolith") else expert_colour(0) for name in curves}
    dashed = [name for name in curves if name.endswith(str(max((a["seed"] for a in arms), default=0)))]
    return lines(curves, x="images seen, millions", y="Frechet distance", colours=colours, dashed=dashed)


def text_lines(arms: dict[str, Any]) -> list[str]:
    found = [a for a in arms.values() if a["prompts"] == "text"]
    if not found:
        return []
    lines = [
        "",
        "## Text that no training has seen",
        "",
        "Share of images in which the classifier sees the class asked for first / among its five likeliest.",
        "",
        "| model | guidance | seed | new template | new synonym | description without the name |",
        "|---|---|---|---|---|---|",
    ]
    for arm in found:
        cells = " | ".join(
            f"{arm.get(f'agreement_{kind}', float('nan')):.1%} / {arm.get(f'agreement_5_{kind}', float('nan')):.1%}"
            for kind in ("template", "synonym", "paraphrase")
        )
        lines.append(f"| {arm['model']} {arm['route'] or ''} | {arm['guidance']:g} | {arm['seed']} | {cells} |")
    return lines


def model_lines(models: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Training",
        "",
        "| what | networks | images each | images/s in all | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, model in models.items():
        lines.append(
            f"| {name} | {model['networks']} | {model['training']['images']:,} | {model['images_per_s']:,} | "
            f"{model['seconds']:g} |"
        )
    routers = {name: model["accuracy"] for name, model in models.items() if "accuracy" in model}
    if routers:
        times = list(next(iter(routers.values())))
        lines += ["", "How often a router is right, by t, on images kept from training:", ""]
        lines += [f"| router | {' | '.join(times)} |", "|---|" + "---|" * len(times)]
        lines += [f"| {name} | {' | '.join(f'{a[t]:.0%}' for t in times)} |" for name, a in routers.items()]
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    running.add_argument("--set", type=Path, default=Path("/tmp/photographs"))
    running.add_argument("--out", type=Path, required=True)
    parts = [f"{table}.{part}" for table, made in TABLES.items() for part in made(SCALES["photographs"])]
    running.add_argument("--tables", nargs="+", choices=[*TABLES, *parts], default=["A"], metavar="TABLE[.PART]")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--scale", choices=list(SCALES), default="photographs")
    running.add_argument("--device", default="cuda")
    running.add_argument("--seconds", type=float, default=560.0, help="begin nothing that would end later")
    running.add_argument("--reserve", type=float, default=45.0, help="seconds kept for what runs beside")
    running.add_argument("--images-per-s", type=float, default=100_000.0, help="expected of training, all experts")
    running.add_argument("--workers", type=int, default=12)
    running.add_argument("--sheet", type=Path, help="a picture of samples, to be written here")
    running.add_argument("--sheet-guidance", type=float, default=3.0)
    reporting = verbs.add_parser("report")
    reporting.add_argument("record", type=Path)
    reporting.add_argument("--to", type=Path, default=Path("BENCHMARKS.md"))
    reporting.add_argument("--curve", type=Path, help="SVG of quality against training, to be written here")
    arguments = parser.parse_args(words)
    if arguments.verb == "run":
        run(arguments)
    else:
        record = json.loads(arguments.record.read_text())
        arguments.to.write_text(report(record, str(arguments.record)))
        if arguments.curve is not None:
            arguments.curve.write_text(curve_figure(record))


if __name__ == "__main__":
    main()
