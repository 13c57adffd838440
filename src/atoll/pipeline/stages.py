"""Do what run.toml says: one stage after another, each with its own function. What is there already is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..artifacts import Artifact, Store, UserError
from ..data.prepare import prepare
from ..data.progress import Progress
from ..data.sources import Source
from ..ensemble.changes import register_monolith, register_orders, register_router
from ..ensemble.checks import Checks
from ..ensemble.status import ISLANDS
from ..ensemble.versions import find_ensemble, open_ensemble
from ..evaluation.evaluate import Arm, EvaluationPlan, arms_for, evaluate, monolith_arms
from ..evaluation.report import write_report
from ..exchange.admission import admit
from ..executor import Executor, default_workers
from ..islands.launch import Island, hand_out, over_all, places_for, run_islands
from ..partition.stage import partition
from ..planning.stage import MONOLITH, plan, plan_monolith
from ..router.recipes import router_plan
from ..router.train import train_router
from ..sampling import Sampling
from ..training.machines import GIB, free_memory_gib, usable_cores
from ..training.resources import Resources
from ..training.result import WEIGHTS
from .settings import Painting, RunSettings
from .sizing import painters_for

STAGES = ("prepare", "partition", "plan", "train", "admit", "router", "evaluate")
ROUTER, BLIND = "router", "router-blind"


def carry_out(
    run: Store,
    settings: RunSettings,
    origin: Source,
    *,
    device: str,
    show: Progress,
    compare: bool = False,
    until: str = STAGES[-1],
    prepared: Callable[[Artifact], None] = lambda data: None,
) -> dict[str, Any] | None:
    """Every stage up to `until`; the evaluation, if it came so far. The same call goes on after a stop of any kind.

    `prepared` is told of the data as soon as it is there: hours before the end.
    """
    last = STAGES.index(until)
    compare = compare or was_compared(run)
    seed = settings.asked.seed

    # starting a worker takes longer than all digits
    workers = 1 if origin.built_in else default_workers(device)
    data = prepare(
        origin, run.child("data"), settings.prepare, executor=Executor(workers), device=device, progress=show
    )
    prepared(data)
    if last < STAGES.index("partition"):
        return None
    clusters = partition(data.store, run.child("partition"), settings.partition, progress=show)
    if last < STAGES.index("plan"):
        return None
    orders = plan(data.store, clusters.store, run.child("orders"), settings.plan)
    register_orders(run, data, clusters, orders)
    if last < STAGES.index("train"):
        return None

    names = [f"{k:02d}" for k in range(settings.partition.clusters)]
    islands = [hand_out(run, name, run.path / ISLANDS / name) for name in names]
    others = [hand_out_monolith(run, data, clusters, settings)] if compare else []
    train_islands([*others, *islands], device, show)  # the longest first
    if last < STAGES.index("admit"):
        return None
    for monolith in others:
        register_monolith(run, Artifact.open(monolith.expert, "expert"))
    admit_all(run, islands, show)
    if last < STAGES.index("router"):
        return None

    painting = settings.comparison if compare else settings.evaluation
    register_router(run, fit_router(run, data, clusters, ROUTER, settings, device, show))
    if compare and painting.blind:
        fit_router(run, data, clusters, BLIND, settings, device, show)
    if last < STAGES.index("evaluate"):
        return None

    what = EvaluationPlan(
        arms=arms_of(painting, compare),
        count=painting.count,
        batch=painting.batch,
        seed=seed,
        feature_scale=painting.feature_scale,
    )
    show("measuring the real images", 0, None)
    evaluation = evaluate(
        run,
        what,
        run,
        device=device,
        executor=Executor(painters_here(painting, device, islands)),
        progress=lambda arm, done, total: show(f"painting {arm}", done, total),
    )
    write_report(run, evaluation, run)
    return evaluation


def painters_here(painting: Painting, device: str, islands: list[Island]) -> int:
    """As many processes as paint at a time: on a CPU each with one thread, and with all experts in its memory."""
    if torch.device(device).type != "cpu":
        return 1
    experts = sum((island.expert / WEIGHTS).stat().st_size for island in islands) / GIB
    return painters_for(painting, usable_cores(), free_memory_gib(), experts)


def was_compared(run: Store) -> bool:
    """Whether the run has a monolith: once compared, always compared."""
    version = find_ensemble(run)
    return version is not None and version.monolith is not None


def arms_of(painting: Painting, compare: bool) -> tuple[Arm, ...]:
    """Every route at every guidance; compared, a blind router's and the monolith's beside them."""
    sampling, guidances = Sampling(steps=painting.steps), painting.guidances
    arms = arms_for(painting.routes, guidances, sampling=sampling)
    if compare and painting.blind:
        arms += arms_for(["top-1", "top-2"], guidances, router=BLIND, sampling=sampling)
    return arms + (monolith_arms(guidances, sampling=sampling) if compare else ())


def hand_out_monolith(run: Store, data: Artifact, clusters: Artifact, settings: RunSettings) -> Island:
    """One expert on everything, by DDM's protocol, to compare with."""
    folder = f"orders-{MONOLITH}"
    plan_monolith(data.store, clusters.store, run.child(folder), settings.plan)
    return hand_out(run, MONOLITH, run.path / ISLANDS / MONOLITH, orders=folder)


def train_islands(islands: list[Island], device: str, show: Progress) -> None:
    """All islands, as many at a time as pay; one bar over all of their images."""
    watch = over_all(islands, lambda done, total: show(f"{len(islands)} islands", done, total))
    run_islands(islands, places=places_for(islands, device), on_progress=watch)
    for island in islands:
        watch(island.name, island.images, island.images)


def admit_all(run: Store, islands: list[Island], show: Progress) -> None:
    """Check every expert as an untrusted contribution. The model does without a refused one; see quarantine/.

    A short training on a small cluster may well fail: that must not cost the run of all others.
    """
    refused: list[UserError] = []
    show("admitting experts", 0, len(islands))  # judging the first one is none of the islands' time
    for done, island in enumerate(islands):
        try:
            admit(run, island.expert)
        except UserError as error:
            refused.append(error)
        show("admitting experts", done + 1, len(islands))
    if len(refused) == len(islands):
        raise UserError(f"no expert is good enough for a model: {refused[0]}, with more --hours and another --out")


def fit_router(
    run: Store, data: Artifact, clusters: Artifact, name: str, settings: RunSettings, device: str, show: Progress
) -> Artifact:
    version = open_ensemble(run)
    orders = [order for order in Checks(run).orders_of(version).values() if order.cluster is not None]
    what = router_plan(data, clusters, blind=name == BLIND, seed=settings.asked.seed, experts=orders)
    if settings.router_images is not None:
        training = what.training.over(settings.router_images)
        what = what.model_copy(update={"training": training})
    return train_router(
        data,
        clusters,
        run.path / name,
        what,
        resources=Resources(device=device),
        checkpoint_seconds=5.0,
        watch=lambda now: show(f"the {name}", now.images, now.total),
    )
