"""The whole pipeline on handwritten digits: calls the stages in order, and nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .artifacts import Artifact, Store
from .data.prepare import PrepareConfig, prepare
from .data.progress import Progress
from .ensemble.changes import register_monolith, register_orders, register_router
from .ensemble.versions import find_ensemble
from .evaluation.evaluate import Arm, EvaluationPlan, arms_for, evaluate, monolith_arms
from .evaluation.report import write_report
from .exchange.admit import admit
from .islands.launch import Island, hand_out, run_islands
from .partition.config import PartitionConfig
from .partition.stage import partition
from .planning.monolith import NAME as MONOLITH
from .planning.monolith import plan_monolith
from .planning.recipes import PlanConfig, recipe
from .planning.stage import plan
from .router.recipes import router_plan
from .router.train import train_router
from .sampling import Sampling
from .training.resources import Resources

DEVICE = "cpu"  # bit-exact everywhere, and fast enough for 8x8 images


@dataclass(frozen=True)
class Size:
    """How much of everything: the demo's own size, or a tiny one that tests can kill and resume in seconds."""

    orders: PlanConfig
    router_images: int
    samples: int
    steps: int


def demo_size() -> Size:
    return Size(recipe("digits"), router_images=76_800, samples=1000, steps=50)


def tiny_size() -> Size:
    orders = recipe("digits")
    small = {"images": 640, "batch": 32, "warmup_images": 64, "ema_images": 64}
    training = orders.training.model_copy(update=small)
    # such an expert has learned nothing yet, and is admitted all the same
    acceptance = orders.acceptance.model_copy(update={"gaussians": 1000.0})
    orders = orders.model_copy(update={"training": training, "acceptance": acceptance})
    return Size(orders, router_images=1280, samples=40, steps=4)


def demo(
    run: Store, *, seed: int = 0, compare: bool = False, size: Size | None = None, show: Progress
) -> dict[str, Any]:
    """Make a run out of the built-in digits and return its evaluation; whatever is there already is kept."""
    size = size or demo_size()
    version = find_ensemble(run)
    compare = compare or (version is not None and version.monolith is not None)  # once compared, always compared
    cores = min(2, os.cpu_count() or 1)
    orders = size.orders.model_copy(
        update={"mix": "2ddpm:6flow", "training": size.orders.training.model_copy(update={"seed": seed})}
    )

    data = prepare("digits", run.child("data"), PrepareConfig(), progress=show)
    clusters = partition(
        run.child("data"), run.child("partition"), PartitionConfig(clusters=8, seed=seed), progress=show
    )
    planned = plan(data.store, clusters.store, run.child("orders"), orders)
    register_orders(run, data, clusters, planned)

    names = [f"{k:02d}" for k in range(8)]
    islands = [hand_out(run, name, run.path / "islands" / name) for name in names]
    others = [hand_out_monolith(run, data, clusters, orders)] if compare else []
    train_islands([*others, *islands], cores, show)
    for monolith in others:
        register_monolith(run, Artifact.open(monolith.expert, "expert"))
    for done, island in enumerate(islands):
        admit(run, island.expert)
        show("admitting experts", done + 1, len(islands))

    router = fit_router(run, data, clusters, "router", size, seed, blind=False, show=show)
    register_router(run, router)
    sampling = Sampling(steps=size.steps)
    arms = arms_for(["top-1", "top-2"], [2.0], sampling=sampling)
    if compare:
        fit_router(run, data, clusters, "router-blind", size, seed, blind=True, show=show)
        arms = comparison_arms(sampling)

    evaluation = evaluate(
        run,
        EvaluationPlan(arms=arms, count=size.samples, seed=seed, feature_scale=16.0),
        run,
        device=DEVICE,
        progress=lambda arm, done, total: show(f"painting {arm}", done, total),
    )
    write_report(run, evaluation, run)
    return evaluation


def comparison_arms(sampling: Sampling) -> tuple[Arm, ...]:
    """Four routes at guidance 1 and 2, the blind router beside them, and the monolith."""
    routes, guidances = ["top-1", "top-2", "threshold-0.2", "full"], [2.0, 1.0]
    blind = arms_for(["top-1", "top-2"], guidances, router="router-blind", sampling=sampling)
    return arms_for(routes, guidances, sampling=sampling) + blind + monolith_arms(guidances, sampling=sampling)


def hand_out_monolith(run: Store, data: Artifact, clusters: Artifact, orders: PlanConfig) -> Island:
    """One expert on everything, by DDM's protocol, to compare with."""
    folder = f"orders-{MONOLITH}"
    plan_monolith(data.store, clusters.store, run.child(folder), orders)
    return hand_out(run, MONOLITH, run.path / "islands" / MONOLITH, orders=folder)


def train_islands(islands: list[Island], cores: int, show: Progress) -> None:
    """All islands, the longest first and as many at a time as there are cores; one bar over all of their images."""
    seen = {island.name: island.images if island.done else 0 for island in islands}
    total = sum(island.images for island in islands)

    def on_progress(name: str, images: int, _: int) -> None:
        seen[name] = images
        show(f"{len(islands)} islands", sum(seen.values()), total)

    run_islands(islands, parallel=cores, device=DEVICE, on_progress=on_progress)
    for island in islands:
        on_progress(island.name, island.images, total)


def fit_router(
    run: Store, data: Artifact, clusters: Artifact, name: str, size: Size, seed: int, *, blind: bool, show: Progress
) -> Artifact:
    plan = router_plan(data, clusters, blind=blind, seed=seed)
    training = plan.training.model_copy(update={"images": size.router_images})
    return train_router(
        data,
        clusters,
        run.path / name,
        plan.model_copy(update={"training": training}),
        resources=Resources(device=DEVICE),
        checkpoint_seconds=5.0,
        watch=lambda now: show(f"the {name}", now.images, now.total),
    )
