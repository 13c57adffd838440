"""The papers' claims on photographs: monolith, experts and routes, arm by arm, on one GPU.

    python benchmarks/tables.py run --set /tmp/photographs --out $OUT/tables.json --seeds 0 1 2 --tables A --seconds 560
    python benchmarks/tables.py run ... --tables A.main B S          # one part of a table: TABLE.PART
    python benchmarks/tables.py report benchmarks/results/tables-h200*.json       # writes BENCHMARKS.md

`run` goes through the list of models to train and arms to sample in benchmarks/table_plan.py, in the order of what
they say, and stops before something that would not end within --seconds. What is finished is in the set's folder
(weights, and the record, named as --out is, which is copied there after every entry), so the same command goes on.
Two of them, with records of their own, may share a set and a card: one compiles or waits for the host while the other
trains. Nothing is chosen by looking at results: sizes, budgets, learning rates, guidances, prompts and seeds are the
plan's constants.

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
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.data.space import LatentConfig
from atoll.distill.lessons import Questions, SampledLessons
from atoll.distill.plan import DistillPlan
from atoll.distill.posterior import Behind
from atoll.ensemble import AskedEvery, Fixed, Mixture, parse_route
from atoll.ensemble.record import WatchedRoute
from atoll.evaluation.scores import SCORES, Sets
from atoll.evaluation.scores.classifier import Classifier
from atoll.evaluation.scores.frechet import FrechetReference
from atoll.evaluation.sheet import INK, expert_color
from atoll.islands.expert import ExpertCard, bridged
from atoll.islands.validation import MOST_SAMPLES, TIMES, Validation
from atoll.models.accounting import flops_forward
from atoll.models.autoencoders import load_autoencoder
from atoll.models.dit import DiT, DiTConfig
from atoll.models.feature_extractors import load_extractor
from atoll.models.router import Router, RouterConfig, cluster_weights
from atoll.process import Condition, Denoiser, LinearFlow, NetworkDenoiser, PaperFusion, fixed_times, velocity_error
from atoll.router.recipes import blinded, router_network
from atoll.sampling import Sampling, generate
from atoll.training.execution import Execution
from atoll.training.recipe import Training
from atoll.training.seeds import generator, seed_from
from photograph_set import VALIDATION_EVERY, read_set
from provenance import commit
from stacked import Denoising, Distilling, Following, OnDevice, Pool, Stack, Teachers, Telling, Trained, train_stack
from table_plan import (
    CLUSTERS,
    CURVE,
    ENSEMBLES,
    MODELS,
    NOISE_EXPERTS,
    OBJECTIVES,
    RESAMPLES,
    SCALES,
    STUDENT_SHARE,
    TABLES,
    Arm,
    Model,
    Scale,
    expert_network,
    monolith,
    named_after,
    needed,
    recipe,
    recipe_of,
    router_recipe,
    schedule,
)
from table_report import curve_figure, merged, report

TRAJECTORY: int = DistillPlan.model_fields["steps"].default  # states of one
WALKED_AT_ONCE = 3_000  # trajectories; `atoll distill` walks fewer, for smaller cards

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
        self.partitions = {name: each for name, each in tensors.items() if name.startswith("clusters")}
        every = torch.arange(count)
        held = every % VALIDATION_EVERY == 0
        self.train_rows, self.validation_rows = every[~held], every[held]
        self.space = LatentConfig(
            autoencoder=space["autoencoder"], shape=self.shape, mean=tuple(space["mean"]), std=tuple(space["std"])
        )
        name = space["autoencoder"]
        self.autoencoder = load_autoencoder(name if name == "pixels" else str(folder / "taef2"))
        self.extractor = load_extractor(space.get("extractor", "efficientnet-lite0"), str(device))
        features = torch.from_numpy(np.load(folder / "features.npy"))
        self.train_features, self.real_features = features[:count].to(device), features[count:].to(device)
        classes = len(self.meta["names"])
        self.classifier = Classifier.fitted(self.train_features, own, classes)

    def expert(self, size: str = "") -> DiTConfig:
        return expert_network(self.scale.of_size(size), self.shape, self.text.shape[1])

    def trunk(self, router: str) -> DiTConfig:
        """A router's, by DDM's share of the cost of the experts it chooses from."""
        model = MODELS[router]
        network = router_network(self.expert(model.size))
        return blinded(network) if model.blind else network

    def clusters(self, partition: str = "clusters") -> Tensor:
        """The cluster of every training image [N], on the device."""
        return self.partitions[partition].to(self.device)

    def objectives(self, name: str) -> list[str]:
        """By cluster, of a model of flow experts or an ensemble with others among them."""
        found = ["flow"] * CLUSTERS
        if name in ENSEMBLES:
            for k in self.by_detail[: ENSEMBLES[name].count]:
                found[k] = ENSEMBLES[name].objective
        return found

    def cluster_rows(self, partition: str = "clusters") -> list[Tensor]:
        """The images of each cluster that are trained on."""
        own = self.partitions[partition][self.train_rows]
        return [self.train_rows[own == k] for k in range(int(own.max()) + 1)]

    @cached_property
    def by_detail(self) -> list[int]:
        """The clusters, those with most detail first, as planning/mix.py measures it."""
        detail = []
        for rows in self.cluster_rows():
            some = self.pool.latents[rows[:256].to(self.device)].double()
            detail.append((some.diff(dim=-1).square().mean() + some.diff(dim=-2).square().mean()).item())
        return sorted(range(CLUSTERS), key=lambda k: -detail[k])

    def seats(self, model: Model) -> list[tuple[str, int]]:
        """Objective and cluster of each of a model's experts."""
        whole = model.most_detailed == CLUSTERS
        places = list(range(model.count)) if whole else sorted(self.by_detail[: model.most_detailed])
        return [(objective, k) for objective in model.objectives for k in places]

    @cached_property
    def train_captions(self) -> Tensor:
        """Rows of the text table that some class is trained with."""
        return torch.tensor([row for row, kind in enumerate(self.meta["kinds"]) if kind == "train"])

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


# -- training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """One thing to train: which networks, on what, by which recipe."""

    task: Any
    networks: list[Any]
    members: list[Tensor]
    training: Training
    beside: Sequence[Stack] = ()
    pool: Pool | None = None  # instead of the world's


def lesson(world: World, name: str, seed: int, store: Store) -> Lesson:
    torch.manual_seed(seed_from(seed, name, "weights"))
    model, every = MODELS[name], world.train_rows
    expert, training = world.expert(model.size), recipe_of(model, world.scale)
    if model.learns == "clusters":
        trunk = world.trunk(name)
        task = Telling(world.clusters(model.partition), trunk.time_scale)
        network = Router(RouterConfig(trunk=trunk, clusters=model.count))
        return Lesson(task, [network], [every], router_recipe(world.scale, expert))
    if model.learns == "teachers":
        return student_lesson(world, model, seed, store)
    if model.learns == "everything":
        return Lesson(Denoising([OBJECTIVES["flow"]], expert.time_scale), [DiT(expert)], [every], training)
    seats, rows = world.seats(model), world.cluster_rows(model.partition)
    networks = [DiT(expert) for _ in seats]
    if model.start is not None:
        (start,) = store.weights(model.start, seed)
        networks = [filled(network, start) for network in networks]
    task = Denoising([OBJECTIVES[objective] for objective, _ in seats], expert.time_scale)
    return Lesson(task, networks, [rows[k] for _, k in seats], training)


def student_lesson(world: World, model: Model, seed: int, store: Store) -> Lesson:
    seats = seats_of(world, store, Arm("S", model.teachers), seed)
    expert, rows, training = world.expert(), world.cluster_rows(), recipe_of(model, world.scale)
    sizes = torch.tensor([float(len(own)) for own in rows])
    shares = sizes / sizes.sum()
    student, alike = DiT(expert), [seat for seat in seats if seat.objective == "flow"]
    if model.start == "best":
        best = min(alike, key=lambda seat: error_on(world, seat, world.validation_rows))
        print(f"  a student begins at the expert of cluster {best.cluster}")
        student = filled(student, best.state)
    elif model.start == "average":
        # without data nobody knows the sizes of clusters
        own = torch.ones(len(alike)) if model.samples else shares[[seat.cluster for seat in alike]]
        weighed = list(zip(own / own.sum(), alike, strict=True))
        student = filled(student, {key: sum(w * s.state[key] for w, s in weighed) for key in alike[0].state})
    if model.samples:
        task, pool = walked(world, store, model, seed)
        return Lesson(task, [student], [torch.arange(len(pool.latents))], training, pool=pool)
    teachers = teachers_of(world, seats, world.objectives(model.heard_as or model.teachers))
    behind = None
    if model.trust == "data":
        doubted = torch.cat([each.clusters for each in teachers if each.doubted(OBJECTIVES["flow"])]).tolist()
        behind = data_behind(world, torch.cat([rows[k] for k in doubted]), seed)
    how = {"truth": model.truth, "trust": model.trust, "behind": behind}
    task = Distilling(teachers, shares.to(world.device), OBJECTIVES["flow"], expert.time_scale, **how)
    beside = [each.stack for each in teachers]
    return Lesson(task, [student], rows, training, beside=beside)


def walked(world: World, store: Store, model: Model, seed: int) -> tuple[Following, Pool]:
    """All lessons of a student without data, walked before it begins: the product's, on more trajectories at once."""
    mixture, _ = assembled(world, store, Arm("S", model.teachers, "top-1"), seed)
    assert isinstance(mixture, Mixture)
    training, captions = recipe_of(model, world.scale), world.train_captions
    asked = Questions(len(captions), lambda numbers: Condition(pooled=world.text[captions[numbers]]), world.device)
    at_once = min(WALKED_AT_ONCE, -(-training.images // TRAJECTORY))
    with steady_attention():
        lessons = SampledLessons(
            OBJECTIVES["flow"],
            training.model_copy(update={"seed": seed_from(seed, model.teachers, "samples") % 2**31}),
            mixture,
            asked,
            world.shape,
            TRAJECTORY,
            at_once,
            world.device,
            at_once,
        )
        parts = []
        for first in range(0, training.images, at_once * TRAJECTORY):
            count = min(at_once * TRAJECTORY, training.images - first)
            part = lessons.draw(first, count, slice(None))
            parts.append(part | {name: part[name].half() for name in ("x", "target")})  # as the pool of data is kept
    every = {name: torch.cat([part[name].to(world.device) for part in parts]) for name in parts[0]}
    assert bool((every["weight"] == 1).all()), "flow's"
    numbers = torch.arange(training.images, device=world.device)
    pool = Pool(every["x"], text=every["pooled"], first=numbers, count=torch.ones_like(numbers))
    return Following(every["t"], every["target"], every["dropped"], world.expert().time_scale), pool


def data_behind(world: World, rows: Tensor, seed: int) -> OnDevice:
    """The samples of these rows that may lie behind each other's states; captions are those of a class."""
    latents, labels = world.pool.latents, world.labels[: world.meta["train"]]
    behind = Behind.of(rows, world.partitions["clusters"], labels.cpu(), lambda some: latents[some].float().cpu(), seed)
    return OnDevice.of(behind, latents)


def teachers_of(world: World, seats: Sequence[Seat], heard_as: Sequence[str]) -> list[Teachers]:
    """In groups that answer at once: of one objective, heard as one, and asked up to the same limit."""
    expert = world.expert()
    precision = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    groups: dict[tuple[str, str, float | None], list[Seat]] = {}
    for seat in seats:
        groups.setdefault((seat.objective, heard_as[seat.cluster], limit_of(world, seat)), []).append(seat)
    found = []
    for (objective, told, limit), group in groups.items():
        stack = Stack([filled(DiT(expert), s.state) for s in group], device=world.device, precision=precision)
        stack.requires_grad_(False)
        clusters = torch.tensor([seat.cluster for seat in group], device=world.device)
        own, taken_for = OBJECTIVES[objective], OBJECTIVES[told]
        found.append(Teachers.of(stack, clusters, own, expert.time_scale, limit, heard_as=taken_for))
    return found


def filled(network: DiT, state: dict[str, Any]) -> DiT:
    network.load_state_dict(state, strict=False)
    return network


def own_error(world: World, name: str, seats: Sequence[Seat]) -> float:
    """The yardstick over unseen images, each of them asked of its own cluster's expert, or of the only network."""
    if MODELS[name].learns != "experts":
        return error_on(world, seats[0], world.validation_rows)
    clusters = world.partitions[MODELS[name].partition][world.validation_rows]
    rows = [(seat, world.validation_rows[clusters == seat.cluster]) for seat in seats]
    errors = [(error_on(world, seat, own), len(own)) for seat, own in rows if len(own)]
    return sum(error * count for error, count in errors) / sum(count for _, count in errors)


@torch.no_grad()
def error_on(world: World, seat: Seat, rows: Tensor) -> float:
    """The yardstick of one expert over these images, at most some 2,000 of them."""
    denoiser = expert_denoiser(world, seat, "bridge")
    rows = rows[:: max(1, len(rows) // 2000)].to(world.device)
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
        self.record_path = self.folder / out.name
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
            path = self.path(named_after(name, share), seed)
            unfinished = path.with_suffix(f".{os.getpid()}")
            save_file({f"{k}/{key}": v for k, state in enumerate(states) for key, v in state.items()}, unfinished)
            unfinished.rename(path)  # whole or not there: another process may wait for it
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


def trained_model(world: World, store: Store, name: str, seed: int) -> None:
    if store.path(name, seed).exists():
        return
    for other in needed(name)[:-1]:
        trained_model(world, store, other, seed)
    began = time.monotonic()
    chosen = lesson(world, name, seed, store)
    cuda = world.device.type == "cuda"

    def watch(done: int, total: int, rate: float) -> None:
        if done * 4 // total > (done - total // 40) * 4 // total:
            print(f"  {name}-s{seed}: {done:,} of {total:,} images each, {rate:,.0f} images/s", flush=True)

    trained = train_stack(
        chosen.networks,
        chosen.task,
        chosen.pool or world.pool,
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
    kept = store.record["models"][f"{name}-s{seed}"]
    if MODELS[name].learns == "clusters":
        kept["accuracy"] = accuracy(world, store, name, seed)
    else:
        kept["yardstick"] = own_error(world, name, seats_of(world, store, Arm("", name), seed))
    store.save()
    print(f"{name}-s{seed}: {trained.images_per_s:,.0f} images/s, {time.monotonic() - began:.0f} s", flush=True)


@torch.no_grad()
def accuracy(world: World, store: Store, name: str, seed: int) -> dict[str, float]:
    """Share of validation images whose likeliest cluster is their own, by time; told the first caption of the class."""
    router, rows = load_router(world, store, name, seed), world.validation_rows.to(world.device)
    clusters = world.clusters(MODELS[name].partition)[rows]
    condition = Condition(pooled=world.text[world.pool.first[rows]])
    found = {}
    for t in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
        x0 = world.pool.latents[rows].float()
        eps = torch.randn(x0.shape, generator=generator(0, "accuracy")).to(world.device)
        times = torch.full((len(rows),), t, dtype=torch.float64, device=world.device)
        weights = router((1 - t) * x0 + t * eps, times, condition)
        found[f"{t:g}"] = (weights.argmax(1) == clusters).float().mean().item()
    return found


# -- sampling and measuring ---------------------------------------------------------------------------------


def placed(world: World, network: Any, state: dict[str, Tensor]) -> Any:
    network.load_state_dict(state, strict=False)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return network.to(world.device, dtype).eval().requires_grad_(False)


def load_router(world: World, store: Store, name: str, seed: int) -> Any:
    trunk = world.trunk(name)
    (state,) = store.weights(name, seed)
    network = placed(world, Router(RouterConfig(trunk=trunk, clusters=MODELS[name].count)), state)
    return lambda x, t, condition: cluster_weights(network, trunk.time_scale, x, t, condition)


@dataclass(frozen=True, eq=False)
class Seat:
    """One expert of an ensemble: its weights, and what and where it learned."""

    state: dict[str, Tensor]
    objective: str
    cluster: int
    size: str = ""


def card_of(world: World, seat: Seat) -> ExpertCard:
    architecture, chosen = world.expert(seat.size), OBJECTIVES[seat.objective]
    return ExpertCard(
        architecture=architecture, schedule=chosen.schedule, kind=chosen.kind, latent=world.space, images=0
    )


def limit_of(world: World, seat: Seat) -> float | None:
    """Where the bridge stops asking this expert: measured for one that predicts noise, as at the end of a training."""
    card = card_of(world, seat)
    if seat.objective != "ddpm":
        return card.bridge_limit
    network = placed(world, DiT(card.architecture), seat.state)
    limit = validation_of(world, seat.cluster).best_limit(network, card, Execution(device=str(world.device)))
    print(f"  noise expert of cluster {seat.cluster}: asked at sigma/alpha <= {limit:g}")
    return limit


def expert_denoiser(world: World, seat: Seat, fusion: str) -> Denoiser:
    card = card_of(world, seat)
    network = placed(world, DiT(card.architecture), seat.state)
    if fusion == "paper" and seat.objective == "ddpm":
        return PaperFusion(NetworkDenoiser(network, card.schedule, card.kind, card.architecture.time_scale))
    return bridged(network, card.model_copy(update={"bridge_limit": limit_of(world, seat)}), LinearFlow())


def validation_of(world: World, cluster: int) -> Validation:
    """As islands/validation.py makes it, for one cluster."""
    own = world.validation_rows[world.partitions["clusters"][world.validation_rows] == cluster]
    rows = own[:MOST_SAMPLES].repeat_interleave(TIMES)
    x0 = world.pool.latents[rows.to(world.device)].float().cpu()
    eps = torch.randn(x0.shape, generator=generator(0, "validation"))
    condition = Condition(pooled=world.text[world.pool.first[rows.to(world.device)]].cpu())
    return Validation(x0, eps, fixed_times(TIMES).repeat(len(rows) // TIMES), condition)


def seats_of(world: World, store: Store, arm: Arm, seed: int) -> list[Seat]:
    """The experts of an arm, in the order of clusters; of a monolith or a student, that one."""
    if arm.model not in ENSEMBLES:
        model, states = MODELS[arm.model], store.weights(arm.weights, seed)
        if model.learns != "experts":
            return [Seat(states[0], "flow", 0, model.size)]
        return [
            Seat(state, objective, k, model.size)
            for state, (objective, k) in zip(states, world.seats(model), strict=True)
        ]
    chosen = ENSEMBLES[arm.model]
    experts = dict(enumerate(seats_of(world, store, Arm(arm.table, chosen.base), seed)))
    places = world.by_detail[: chosen.count]
    for seat in seats_of(world, store, Arm(arm.table, chosen.other), seed):
        if seat.objective == chosen.objective and seat.cluster in places:
            experts[seat.cluster] = seat
    return [experts[k] for k in range(CLUSTERS)]


def assembled(world: World, store: Store, arm: Arm, seed: int, watch: Any = None) -> tuple[Denoiser, Sampling]:
    sampling = Sampling(steps=world.scale.sampling_steps, solver="euler", guidance=arm.guidance, route=arm.route)
    denoisers = [expert_denoiser(world, seat, arm.fusion) for seat in seats_of(world, store, arm, seed)]
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
    with steady_attention():
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


def steady_attention() -> AbstractContextManager[None]:
    """cuDNN plans anew for every shape it has not seen, and the groups of top-1 have another size at every step."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


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
        self.folder = store.folder / f"features-of-{store.out.stem}"  # of its own: others may measure the same set
        self.folder.mkdir(exist_ok=True)
        self.reference = self.folder / "reference.npy"
        np.save(self.reference, world.real_features.cpu().numpy())
        self.waiting: dict[str, tuple[Future[list[float]], Path]] = {}
        if "floor" not in store.record["arms"]:
            self.submit("floor", world.real_features[: len(world.real_features) // 2])
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before

    def submit(self, key: str, features: Tensor) -> None:
        path = self.folder / f"{key}.npy"
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
    key, began = arm.key(seed), time.monotonic()
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
    """Training in all, and one image's sampling: the router inside both. All clusters count alike."""
    chosen = ENSEMBLES.get(arm.model)
    model = MODELS[chosen.base if chosen else arm.model]
    expert = float(flops_forward(world.expert(model.size)))
    if chosen is not None:
        other = flops_forward(world.expert(MODELS[chosen.other].size))
        expert += chosen.count / CLUSTERS * (other - expert)
    training = 3.0 * recipe(world.scale, batch=world.scale.batch * CLUSTERS).images * expert * arm.after
    if model.samples:
        states = recipe_of(model, world.scale).images
        training = states * (3.0 * expert + answer_flops(world, expert))
    elif model.student:
        training *= STUDENT_SHARE  # that of the teachers is in it
    sampling = expert * world.scale.sampling_steps
    if arm.route is not None:
        assert arm.router is not None
        router = flops_forward(world.trunk(arm.router))
        training += 3.0 * router_recipe(world.scale, world.expert(model.size)).images * router
        asked = 1 if arm.route == "fixed" else world.scale.sampling_steps
        experts = {"full": model.count, "top-2": 2, "top-3": 3}.get(arm.route, 1)
        sampling = sampling * experts + asked * router
    return {"training": training, "sampling": sampling * (1 if arm.guidance == 1.0 else 2)}


def answer_flops(world: World, expert: float) -> float:
    """Of a state of a trajectory: one expert and the router, and the step from pure noise, which is no lesson."""
    return (expert + flops_forward(world.trunk("router"))) * (TRAJECTORY + 1) / TRAJECTORY


# -- a sheet for people -------------------------------------------------------------------------------------

SHEET = (
    *("a photo of a goldfish", "a small orange fish", "a photo of a king penguin", "an orange and black butterfly"),
    *("a big cat with a mane", "a yellow vehicle that takes children to school", "waves on a sandy beach"),
    *("a snowy mountain peak", "a round italian dish with cheese and tomato", "a photo of a golden retriever"),
)


def sheet(world: World, store: Store, seed: int, guidance: float, path: Path, columns: int = 6) -> None:
    """The ensemble's images beside the monolith's from the same noise; the frame has the color of the expert that
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
    colors = [[expert_color(int(k)) for k in shares.argmax(1)], [INK] * len(rows)]
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
                draw.rectangle((x, y + top, x + tile - 1, y + top + tile - 1), fill=colors[half][index])
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

    for model_or_arm, seed in schedule(arguments.tables, arguments.seeds, scale, store.record["arms"]):
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
            if left() < arguments.reserve:
                print(f"stopped before {model_or_arm.key(seed)}: {left():.0f} s left")
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
        "expert": asdict(world.expert()),
        "expert_flops": flops_forward(world.expert()),
        "router": asdict(world.trunk("router")),
        "router_flops": flops_forward(world.trunk("router")),
        "cluster_sizes": world.meta["cluster_sizes"],
        "noise_clusters": sorted(world.by_detail[:NOISE_EXPERTS]),
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


def expected_seconds(world: World, name: str, images_per_s: float) -> float:
    """By a rate of training for experts of the usual size; 25 s to compile and record."""
    model = MODELS[name]
    images = recipe(world.scale, batch=world.scale.batch * CLUSTERS).images
    if model.learns == "clusters":
        share = 0.2
    elif model.student:
        share = STUDENT_SHARE
    else:
        seats = len(world.seats(model)) / model.count if model.learns == "experts" else 1.0
        share = model.share * seats * world.scale.of_size(model.size).width / world.scale.width
    return 25.0 * (world.device.type == "cuda") + images / images_per_s * share


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
    reporting.add_argument("records", type=Path, nargs="+")
    reporting.add_argument("--to", type=Path, default=Path("BENCHMARKS.md"))
    reporting.add_argument("--curve", type=Path, help="SVG of quality against training, to be written here")
    arguments = parser.parse_args(words)
    if arguments.verb == "run":
        run(arguments)
    else:
        record = merged([json.loads(path.read_text()) for path in arguments.records])
        arguments.to.write_text(report(record, " ".join(map(str, arguments.records))))
        if arguments.curve is not None:
            arguments.curve.write_text(curve_figure(record))


if __name__ == "__main__":
    main()
