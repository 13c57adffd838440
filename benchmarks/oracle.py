"""The closed-form tables: bridged, mixed and literal velocities against the truth (`make oracle`).

The world is a Gaussian mixture (atoll.evaluation.closed_form): six dimensions, four clusters of unequal weight, three
tilted components each. Ideal experts, the ideal router and the ideal model of all data are closed forms there, so
every number below is an error against the truth and not against another model. About a minute on one core.

    python benchmarks/oracle.py [--results benchmarks/results/oracle.csv]
    python benchmarks/oracle_figure.py docs/process.svg
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from atoll.diffusion import (
    VE,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Denoiser,
    Kind,
    LinearFlow,
    Schedule,
    noisy,
)
from atoll.mixture import Mixture
from atoll.sampling import SOLVERS, Sampling, generate
from atoll.sampling.protocols import Unrouted
from atoll.sampling.solvers import GridPath

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from closed_form import ExactDenoiser, ExactRouter, GaussianWorld, ImperfectDenoiser
from paper_fusion import PaperFusion
from records import write_record

WORLD = GaussianWorld.random(dimensions=6, clusters=4, components=3, seed=0)
# for counting samples by component: eight of them, too far apart to be mistaken for each other
APART = GaussianWorld.random(dimensions=4, clusters=4, components=2, spread=8.0, seed=3)
REFERENCE = LinearFlow()
TRUTH = ExactDenoiser(WORLD, REFERENCE, Kind.VELOCITY)
SCHEDULES: dict[str, Schedule] = {
    "linear flow": LinearFlow(),
    "cosine VP": CosineVP(),
    "DDPM linear": DDPMBetas("linear"),
    "DDPM scaled linear": DDPMBetas("scaled_linear"),
    "DDPM cosine": DDPMBetas("cosine"),
    "VE": VE(),
}
TRAINED: list[tuple[Schedule, Kind]] = [
    (DDPMBetas("cosine"), Kind.EPSILON),
    (LinearFlow(), Kind.VELOCITY),
    (VE(), Kind.X0),
    (CosineVP(), Kind.V),
]
TIMES = [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1.0]


def states(times: list[float], count: int = 256) -> tuple[Tensor, Tensor]:
    """`count` noisy samples of the world on the reference path at each time, float64."""
    generator = torch.Generator().manual_seed(1)
    t = torch.tensor(times, dtype=torch.float64).repeat_interleave(count)
    x0, _ = WORLD.sample(len(t), generator)
    return noisy(REFERENCE, x0, torch.randn(x0.shape, generator=generator, dtype=torch.float64), t), t


def errors(denoiser: Denoiser, x: Tensor, t: Tensor) -> Tensor:
    """|velocity - truth| / |truth| per sample, the truth in float64."""
    answer, truth = denoiser(x, t, None).value.double(), TRUTH(x.double(), t, None).value
    return (answer - truth).norm(dim=1) / truth.norm(dim=1)


def over_time(denoiser: Denoiser, times: list[float]) -> list[float]:
    """The median error at each of the times."""
    x, t = states(times)
    return errors(denoiser, x, t).reshape(len(times), -1).median(dim=1).values.tolist()


def digits(value: float) -> float:
    return float(f"{value:.2e}")


def shown(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0e}" if value < 0.001 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def exactness(console: Console) -> dict[str, Any]:
    """Every schedule x kind as expert, on 61 times from 0.001 to 0.999."""
    times = [0.001, 0.002, 0.005, *[i / 60 for i in range(1, 60)], 0.995, 0.998, 0.999]
    x, t = states(times, count=16)
    ends, t_ends = states([0.0, 1e-6, 1 - 1e-6, 1.0, *times], count=4)
    table = Table(title="Bridged velocity of an ideal expert against the true one: largest relative error")
    for heading in (
        "schedule",
        "covers t",
        *[f"{kind}" for kind in Kind],
        "float32",
        "bf16",
        "clean side",
        "noise side",
    ):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    found: dict[str, Any] = {}
    for name, schedule in SCHEDULES.items():
        first, last = (REFERENCE.time_at(torch.tensor([end])).item() for end in reversed(schedule.band))
        inside = (t >= first) & (t <= last)
        bridges = {kind: Bridge(ExactDenoiser(WORLD, schedule, kind), limit=None) for kind in Kind}
        all_errors = {kind: errors(bridge, x, t) for kind, bridge in bridges.items()}
        exact = {str(kind): digits(e[inside].max().item()) for kind, e in all_errors.items()}
        single = max(errors(bridge, x.float(), t)[inside].max().item() for bridge in bridges.values())
        finite = all(bool(b(ends.bfloat16(), t_ends, None).value.isfinite().all()) for b in bridges.values())
        beside = torch.stack(list(all_errors.values())).amax(0)
        clean, noise = (beside[side].max().item() if side.any() else 0.0 for side in (t < first, t > last))
        found[name] = {
            "covers": [digits(first), digits(last)],
            "float64": exact,
            "float32": digits(single),
            "bfloat16_finite": finite,
            "outside_clean_side": digits(clean),
            "outside_noise_side": digits(noise),
        }
        table.add_row(
            name,
            f"{first:.4f} .. {last:.4f}",
            *[shown(e) for e in exact.values()],
            shown(single),
            "finite" if finite else "NOT FINITE",
            *[shown(e) if e else "-" for e in (clean, noise)],
        )
    console.print(table)
    console.print("Columns of kinds: float64, inside the band. Last two: outside it, where the expert is asked at the")
    console.print("band's end; off by what that end still holds of noise next to the finest detail, or of signal.\n")
    return found


def mixing(console: Console) -> dict[str, Any]:
    """Four ideal experts of four objectives, mixed by the ideal router, against the ideal model of all data."""

    def mixed(wrap: Callable[[Denoiser], Denoiser], trained: list[tuple[Schedule, Kind]]) -> Mixture:
        experts = [wrap(ExactDenoiser(WORLD.cluster(k), *how)) for k, how in enumerate(trained)]
        return Mixture.of(experts, ExactRouter(WORLD))

    papers = [(CosineVP(), Kind.EPSILON)] * 2 + [(LinearFlow(), Kind.VELOCITY)] * 2
    rows = {
        "four objectives, bridged": mixed(lambda d: Bridge(d, limit=None), TRAINED),
        "four objectives, bridged, limit 100": mixed(Bridge, TRAINED),
        "2 cosine epsilon + 2 flow, bridged": mixed(lambda d: Bridge(d, limit=None), papers),
        "2 cosine epsilon + 2 flow, literal": mixed(papers),
    }
    found = {name: [digits(e) for e in over_time(mixture, TIMES)] for name, mixture in rows.items()}
    print_over_time(console, "Ideal experts mixed by the ideal router: median relative error of the velocity", found)
    console.print("VE covers t = 0.002 .. 0.9877, DDPM cosine 0.0064 .. 1: beyond, the first two rows are the band's.")
    console.print("Literal: our reading of the HDDM paper, which gives no formula.\n")
    return {"times": TIMES, "median_error": found}


def imperfect(console: Console) -> dict[str, Any]:
    """How an expert's own error reaches the velocity, by kind and time."""
    found: dict[str, list[float]] = {}

    def row(name: str, denoiser: Denoiser) -> None:
        found[name] = [digits(e) for e in over_time(denoiser, TIMES)]

    def off(kind: Kind, share: float) -> Denoiser:
        return ImperfectDenoiser(ExactDenoiser(WORLD, CosineVP(), kind), share)

    for kind in Kind:
        row(f"{kind}, 1 % off, no limit", Bridge(off(kind, 0.01), limit=None))
    for share in (0.01, 0.001, 0.0):
        row(f"epsilon, {100 * share:g} % off, limit 100", Bridge(off(Kind.EPSILON, share)))
    row("epsilon, 1 % off, limit 10", Bridge(off(Kind.EPSILON, 0.01), limit=10.0))
    for share in (0.01, 0.001, 0.0):
        row(f"epsilon, {100 * share:g} % off, literal", PaperFusion(off(Kind.EPSILON, share)))
    title = "An imperfect expert on the cosine path: median relative error of the velocity"
    print_over_time(console, title, found)
    console.print(
        "epsilon and score carry their error times sigma/alpha. The limit L bounds that at L times the error and"
    )
    console.print(
        "costs an ideal expert about 1/L, where t > L / (1 + L) only. The literal recipe is bounded too, and wrong"
    )
    console.print(
        "however good the expert. x0 at small t: the last step multiplies its error by t, so it does no harm.\n"
    )
    return {"times": TIMES, "median_error": found}


def print_over_time(console: Console, title: str, rows: dict[str, list[float]]) -> None:
    table = Table(title=title)
    table.add_column("t =")
    for time in TIMES:
        table.add_column(f"{time:g}", justify="right")
    for name, values in rows.items():
        table.add_row(name, *[shown(value) for value in values])
    console.print(table)


def convergence(console: Console) -> dict[str, Any]:
    """Order from the median error over samples, t from 0.95 to 0.05, against 6400 steps of Heun."""
    x, _ = states([0.95], count=64)

    def reached(solver: str, steps: int) -> Tensor:
        times = torch.linspace(0.95, 0.05, steps + 1, dtype=torch.float64)
        weights = torch.ones(len(x), 1)
        walk = SOLVERS[solver](x, GridPath(REFERENCE, times), lambda step: torch.zeros_like(x))
        state, t = next(walk)
        while True:
            velocity = Unrouted(TRUTH).velocity(state, torch.full((len(x),), t, dtype=torch.float64), None, weights)
            try:
                state, t = walk.send(velocity)
            except StopIteration as end:
                return end.value

    end = reached("heun", 6400)
    table = Table(title="Solvers: median distance to the true end point, t from 0.95 to 0.05")
    for heading in ("solver", "50 steps", "100", "200", "400", "order"):
        table.add_column(heading, justify="left" if heading == "solver" else "right")
    found = {}
    for solver in ("euler", "heun", "dpmpp_2m", "unipc"):
        distances = [(reached(solver, n) - end).norm(dim=1).median().item() for n in (50, 100, 200, 400)]
        orders = [math.log2(a / b) for a, b in itertools.pairwise(distances)]
        found[solver] = {"distances": [digits(d) for d in distances], "orders": [round(o, 3) for o in orders]}
        table.add_row(solver, *[f"{d:.1e}" for d in distances], " ".join(f"{o:.2f}" for o in orders))
    console.print(table, "")
    return found


def statistics(console: Console, count: int) -> dict[str, Any]:
    """Samples of the mixed ensemble of four objectives, with the default limit: are they samples of the world?"""
    experts = [Bridge(ExactDenoiser(APART.cluster(k), *how)) for k, how in enumerate(TRAINED)]
    ensemble = Mixture.of(experts, ExactRouter(APART))
    table = Table(title=f"{count:,} samples of the mixed ensemble: largest |z| over all entries")
    for heading in ("solver", "grid", "steps", "cluster shares", "means", "covariances"):
        table.add_column(heading, justify="left" if heading in ("solver", "grid") else "right")
    found = []
    runs = [("heun", "log-snr", 50), ("dpmpp_2m", "log-snr", 80), ("stochastic", "log-snr", 80)]
    runs += [("euler", "log-snr", 80), ("euler", "uniform", 50), ("euler", "uniform", 200)]
    for solver, grid, steps in runs:
        sampling = Sampling(steps=steps, solver=solver, grid=grid, guidance=1.0)
        samples = generate(ensemble, (4,), range(count), None, sampling, batch=count)
        worst = {what: round(z.abs().max().item(), 2) for what, z in APART.z_scores(samples).items()}
        found.append({"solver": solver, "grid": grid, "steps": steps, **worst})
        table.add_row(solver, grid, str(steps), *[f"{z:.1f}" for z in worst.values()])
    console.print(table)
    console.print("A true sample has |z| of about 3 at most here. Euler's bias is shown, not judged.\n")
    return {"samples": count, "largest_z": found}


def guidance(console: Console) -> dict[str, Any]:
    """Own against conditional weights for the unconditional half: how far off is the cheaper one?"""
    experts = [Bridge(ExactDenoiser(WORLD.cluster(k), *how), limit=None) for k, how in enumerate(TRAINED)]
    ensemble = Mixture.of(experts, ExactRouter(WORLD))
    times = [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98]
    x, t = states(times)
    condition = Condition(labels=torch.arange(len(x)) % 2)
    conditional, unconditional = (TRUTH(x, t, c).value for c in (condition, condition.null()))
    table = Table(title="Guidance of the mixture: median relative error against the guided ideal model")
    table.add_column("scale, weights of the unconditional half")
    for time in times:
        table.add_column(f"t = {time:g}", justify="right")
    found: dict[str, list[float]] = {}
    for scale in (2.0, 7.5):
        truth = unconditional + scale * (conditional - unconditional)
        for weights in ("own", "conditional"):
            mine = [ensemble.routed(x, t, c) for c in (condition, condition.null())]
            own = mine[1] if weights == "own" else mine[0]
            parts = ensemble.velocity(x, t, condition, mine[0]), ensemble.velocity(x, t, condition.null(), own)
            answer = parts[1] + scale * (parts[0] - parts[1])
            error = ((answer - truth).norm(dim=1) / truth.norm(dim=1)).reshape(len(times), -1)
            found[f"{scale:g}, {weights}"] = [digits(e) for e in error.median(dim=1).values.tolist()]
            table.add_row(f"{scale:g}, {weights}", *[shown(e) for e in found[f"{scale:g}, {weights}"]])
    console.print(table, "")
    return {"times": times, "median_error": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "oracle.csv")
    parser.add_argument("--samples", type=int, default=20_000, help="samples per solver in the statistics table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=None if Console().is_terminal else 150)
    results = {
        "exactness": exactness(console),
        "mixing": mixing(console),
        "imperfect": imperfect(console),
        "convergence": convergence(console),
        "guidance": guidance(console),
        "statistics": statistics(console, options.samples),
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    write_record(options.results, results)
    console.print(f"written to {options.results}")


if __name__ == "__main__":
    main()
