"""Run the stages of run.toml one after another. What is there already is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from ..artifacts import Artifact, Store, UserError
from ..data.prepare import prepare
from ..data.progress import Progress
from ..data.sources import Source
from ..evaluation.evaluate import EvaluationPlan, configurations, evaluate
from ..evaluation.report import write_report
from ..exchange.admission import admit
from ..executor import Executor, default_workers
from ..islands.launch import Island, hand_out, places_for, run_islands
from ..partition.stage import partition
from ..planning.stage import MONOLITH, plan, plan_monolith
from ..registry.changes import register_monolith, register_orders, register_router
from ..registry.checks import accepted_orders
from ..registry.status import ISLANDS
from ..registry.versions import open_ensemble
from ..router.recipes import router_plan
from ..router.train import train_router
from ..sampling import Sampling
from ..training.memory import GIB, free_memory_gib, usable_cores
from ..training.resources import Resources
from ..training.result import WEIGHTS
from .settings import RunSettings
from .sizing import sampling_workers

STAGES = ("prepare", "partition", "plan", "train", "admit", "router", "evaluate")
ROUTER, BLIND = "router", "router-blind"


def run_pipeline(
    run: Store,
    settings: RunSettings,
    origin: Source,
    *,
    device: str,
    progress: Progress,
    until: str = STAGES[-1],
    prepared: Callable[[Artifact], None] = lambda data: None,
) -> dict[str, Any] | None:
    """Every stage up to `until`; the evaluation, if it is one of them. The same call resumes after a stop of any kind.

    `prepared` is called with the data as soon as it is there, hours before the end.
    """
    done = stages_of(run, settings, origin, device, progress, prepared)
    *_, result = islice(done, STAGES.index(until) + 1)
    return result


def stages_of(
    run: Store,
    settings: RunSettings,
    origin: Source,
    device: str,
    progress: Progress,
    prepared: Callable[[Artifact], None],
) -> Iterator[dict[str, Any] | None]:
    """Yields after each of STAGES; with the last one comes the evaluation."""
    # starting a worker takes longer than all digits
    executor = Executor(1 if origin.built_in else default_workers(device))
    data = prepare(origin, run.child("data"), settings.prepare, executor=executor, device=device, progress=progress)
    prepared(data)
    yield None
    clusters = partition(data.store, run.child("partition"), settings.partition, progress=progress)
    yield None
    register_orders(run, data, clusters, plan(data.store, clusters.store, run.child("orders"), settings.plan))
    yield None
    names = [f"{k:02d}" for k in range(settings.partition.clusters)]
    jobs = [hand_out(run, name, run.path / ISLANDS / name) for name in names]
    monolith = []
    if settings.compare:  # one expert on all clusters, by DDM's protocol
        folder = f"orders-{MONOLITH}"
        plan_monolith(data.store, clusters.store, run.child(folder), settings.plan)
        monolith = [hand_out(run, MONOLITH, run.path / ISLANDS / MONOLITH, orders=folder)]
    train_jobs(monolith + jobs, device, progress)  # the longest first
    yield None
    for job in monolith:
        register_monolith(run, Artifact.open(job.expert, "expert"))
    admit_all(run, jobs, progress)
    yield None
    register_router(run, fit_router(run, data, clusters, ROUTER, settings, device, progress))
    if settings.compare and settings.evaluated.blind:
        fit_router(run, data, clusters, BLIND, settings, device, progress)
    yield None
    workers = 1
    if torch.device(device).type == "cpu":  # each with one thread, and with all experts in its memory
        experts = sum((job.expert / WEIGHTS).stat().st_size for job in jobs) / GIB
        workers = sampling_workers(settings.evaluated, usable_cores(), free_memory_gib(), experts)
    progress("measuring real images", 0, None)
    result = evaluate(
        run,
        evaluation_plan(settings),
        run,
        device=device,
        executor=Executor(workers),
        progress=lambda name, done, total: progress(f"sampling {name}", done, total),
    )
    write_report(run, result, run)
    yield result


def evaluation_plan(settings: RunSettings) -> EvaluationPlan:
    """Every route at every guidance; with a comparison those of the blind router and the monolith too."""
    asked = settings.evaluated
    sampling = Sampling(steps=asked.steps)
    found = configurations(asked.routes, asked.guidances, monolith=settings.compare, sampling=sampling)
    if settings.compare and asked.blind:
        found += configurations(["top-1", "top-2"], asked.guidances, routers=[BLIND], sampling=sampling)
    return EvaluationPlan(configurations=found, count=asked.count, batch=asked.batch, seed=settings.asked.seed)


def train_jobs(jobs: list[Island], device: str, progress: Progress) -> None:
    """All orders, as many at a time as there are places, with one bar over all of their images."""
    what = f"training {len(jobs)} experts"
    run_islands(jobs, places=places_for(jobs, device), on_progress=lambda done, total: progress(what, done, total))


def admit_all(run: Store, jobs: list[Island], progress: Progress) -> None:
    """Check every expert as an untrusted contribution. A refused one is left out; its reasons are in quarantine/.

    A short training on a small cluster may well fail: that must not cost the run of all others.
    """
    refused: list[UserError] = []
    for done, job in enumerate(jobs):
        progress("admitting experts", done, len(jobs))
        try:
            admit(run, job.expert)
        except UserError as error:
            refused.append(error)
    progress("admitting experts", len(jobs), len(jobs))
    if len(refused) == len(jobs):
        raise UserError(f"no expert is good enough for a model: {refused[0]}, with more --hours and another --out")


def fit_router(
    run: Store, data: Artifact, clusters: Artifact, name: str, settings: RunSettings, device: str, progress: Progress
) -> Artifact:
    accepted = accepted_orders(run, open_ensemble(run)).values()
    orders = [each.order for each in accepted if each.order.cluster is not None]
    plan = router_plan(data, clusters, blind=name == BLIND, seed=settings.asked.seed, experts=orders)
    if settings.router_images is not None:
        plan = plan.model_copy(update={"training": plan.training.over(settings.router_images)})
    made = train_router(
        data,
        clusters,
        run.path / name,
        plan,
        resources=Resources(device=device),
        checkpoint_seconds=5.0,
        watch=lambda now: progress(f"training the {name}", now.images, now.total),
    )
    assert made is not None, "this is the only process"
    return made
