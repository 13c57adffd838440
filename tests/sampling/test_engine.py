"""The engine: guidance, routes that keep something, and any number of requests in each other's company."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.diffusion import Condition, Kind, LinearFlow, Prediction
from atoll.mixture import Fixed, Mixture, TopK, parse_route
from atoll.mixture.mixture import RouterFunction
from atoll.sampling import SOLVERS, Engine, Request, Sampling, generate, stream
from atoll.sampling.grids import uniform
from atoll.sampling.noise import initial_noise
from closed_form import ExactDenoiser, ExactRouter
from gaussian_world import WORLD

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 12
TIMES = uniform(STEPS, LinearFlow())
TRUTH = ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY)
EXPERTS = [ExactDenoiser(WORLD.cluster(k), LinearFlow(), Kind.VELOCITY) for k in range(4)]
ROUTER = ExactRouter(WORLD)
LABELS = Condition(labels=torch.arange(6) % 2)


class Counted:
    """A router that records its times and numbers of rows."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rows: list[int] = []

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        self.times.append(t[0].item())
        self.rows.append(len(x))
        return ROUTER(x, t, condition)


def mixture(route: str = "top-1", router: RouterFunction = ROUTER) -> Mixture:
    return Mixture.of(EXPERTS, router, parse_route(route))


def euler(velocity: object, count: int) -> Tensor:
    """Euler's method typed out; velocity(i, x, t [B]) -> [B, ...]."""
    x = initial_noise(range(count), (6,))
    for i, (t, s) in enumerate(itertools.pairwise(TIMES.tolist())):
        x = (x + (s - t) * velocity(i, x, torch.full((count,), t, dtype=torch.float64))).float()  # type: ignore[operator]
    return x


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("interval", [None, (0.2, 0.8)])
@pytest.mark.parametrize("model", [TRUTH, mixture("full")], ids=["denoiser", "mixture"])
def test_guidance_is_its_formula_inside_its_interval(model: object, scale: float, interval: object) -> None:
    """An exact mixture guides as the exact model of all data does: each branch has its own weights."""

    def velocity(i: int, x: Tensor, t: Tensor) -> Tensor:
        conditional, unconditional = (TRUTH(x, t, c).value for c in (LABELS, LABELS.null()))
        inside = interval is None or 0.2 <= t[0] <= 0.8
        return unconditional + scale * (conditional - unconditional) if inside else conditional

    sampling = Sampling(steps=STEPS, solver="euler", guidance=scale, guidance_interval=interval)  # type: ignore[arg-type]
    found = generate(model, (6,), range(6), LABELS, sampling)  # type: ignore[arg-type]
    torch.testing.assert_close(found, euler(velocity, 6), rtol=0, atol=2e-5)


def test_conditional_weights_guide_every_expert_and_save_half_of_the_router() -> None:
    def velocity(i: int, x: Tensor, t: Tensor) -> Tensor:
        weights = ROUTER(x, t, LABELS)
        parts = [torch.stack([expert(x, t, c).value for expert in EXPERTS], 1) for c in (LABELS, LABELS.null())]
        return (weights[:, :, None] * (parts[1] + 3.0 * (parts[0] - parts[1]))).sum(1)

    router = Counted()
    sampling = Sampling(steps=STEPS, solver="euler", guidance=3.0, guidance_weights="conditional")
    found = generate(mixture("full", router), (6,), range(6), LABELS, sampling)
    torch.testing.assert_close(found, euler(velocity, 6), rtol=0, atol=2e-5)
    assert router.rows == [6] * STEPS


@pytest.mark.parametrize(
    ("guidance", "interval", "rows"), [(1.0, None, [6, 6]), (3.0, None, [12, 12]), (3.0, (0.6, 1.0), [12, 6])]
)
def test_both_branches_are_one_call_and_none_without_guidance(guidance: float, interval: object, rows: object) -> None:
    seen: list[int] = []

    class Recorded(ExactDenoiser):
        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            seen.append(len(x))
            return super().__call__(x, t, condition)

    sampling = Sampling(steps=2, solver="euler", guidance=guidance, guidance_interval=interval)  # type: ignore[arg-type]
    generate(Recorded(WORLD, LinearFlow(), Kind.VELOCITY), (6,), range(6), LABELS, sampling)
    assert seen == rows


@pytest.mark.parametrize("every", [1, 2, 5, STEPS])
@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_the_router_runs_at_every_nth_time_of_the_grid(solver: str, every: int) -> None:
    router = Counted()
    sampling = Sampling(steps=STEPS, solver=solver, guidance=1.0, route_every=every)
    generate(mixture("full", router), (6,), range(3), None, sampling)
    due = TIMES[:-1][::every].tolist()
    twice = due if solver == "euler" else [t for t in due for _ in range(2 if t < 1.0 else 1)]
    assert router.times == pytest.approx(twice)


def test_between_two_runs_the_last_weights_hold() -> None:
    kept: list[Tensor] = []

    def velocity(i: int, x: Tensor, t: Tensor) -> Tensor:
        if i % 4 == 0:
            kept[:] = [ROUTER(x, t, None)]
        return sum(kept[0][:, k, None] * EXPERTS[k](x, t, None).value for k in range(4))  # type: ignore[return-value]

    sampling = Sampling(steps=STEPS, solver="euler", guidance=1.0, route_every=4)
    found = generate(mixture("full"), (6,), range(6), None, sampling)
    torch.testing.assert_close(found, euler(velocity, 6), rtol=0, atol=2e-5)


def test_a_branch_that_has_no_weights_yet_gets_them_and_the_other_keeps_its_own() -> None:
    router = Counted()
    # guided from step 6 (t = 0.5) on: the router runs there for the unconditional branch alone
    sampling = Sampling(steps=STEPS, solver="euler", guidance=3.0, guidance_interval=(0.1, 0.5), route_every=4)
    generate(mixture("top-1", router), (6,), range(4), LABELS[:4], sampling)
    assert router.times == pytest.approx(TIMES[[0, 4, 6, 8]].tolist())
    assert router.rows == [4, 4, 4, 8]


def test_fixed_is_drawn_from_the_conditional_branch_and_shared_by_both() -> None:
    def router(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """Expert 1 or 2 by label for conditional rows, expert 3 for the others."""
        assert condition is not None
        assert condition.labels is not None
        dropped = torch.zeros(len(x), dtype=torch.bool) if condition.dropped is None else condition.dropped
        return torch.nn.functional.one_hot(torch.where(dropped, 3, 1 + condition.labels), 4).double()

    sampling = Sampling(steps=3, solver="euler", guidance=2.0)
    for step in stream(Mixture.of(EXPERTS, router, Fixed()), (6,), Request(range(6), LABELS, sampling)):
        assert step.chosen.argmax(1).tolist() == [1, 2] * 3


def requests() -> list[Request]:
    """All solvers, with routes, steps and scales of their own."""
    made = []
    for number, solver in enumerate([*SOLVERS, *SOLVERS]):
        sampling = Sampling(
            steps=4 + number,
            solver=solver,
            guidance=(1.0, 2.0, 3.5)[number % 3],
            guidance_interval=(0.2, 0.9) if number % 4 == 0 else None,
            route_every=1 + number % 2,
            guidance_weights="conditional" if number % 5 == 0 else "own",
        )
        route = (TopK(1), TopK(2), Fixed())[number % 3]
        count = 1 + number % 3
        seeds = range(100 * number, 100 * number + count)
        made.append(Request(seeds, Condition(labels=torch.arange(count) % 2), sampling, route))
    return made


def finished(*requests: Request, max_images: int = 64) -> tuple[Request, ...]:
    """Admitted one after another, with a round in between."""
    engine = Engine(mixture(), (6,), max_images=max_images)
    for request in requests:
        engine.admit(request)
        engine.round()
    while len(engine):
        engine.round()
    return requests


def test_requests_in_company_are_those_alone() -> None:
    """With room for some of them only."""
    for one, other in zip(finished(*requests(), max_images=7), requests(), strict=True):
        torch.testing.assert_close(one.latents, finished(other)[0].latents, rtol=0, atol=1e-5)


def test_a_cancelled_request_leaves_and_the_others_end_as_before() -> None:
    engine = Engine(mixture(), (6,))
    kept, dropped = requests()[:2]
    engine.admit(kept)
    engine.admit(dropped)
    engine.round()
    engine.cancel(dropped)
    assert len(engine) == len(kept)
    while len(engine):
        engine.round()
    assert dropped.latents is None
    torch.testing.assert_close(kept.latents, finished(requests()[0])[0].latents, rtol=0, atol=1e-6)


def test_the_example_of_a_route_of_ones_own() -> None:
    """Against the rule typed out: the fewest experts, most likely first, that reach p together."""
    Nucleus = runpy.run_path(str(EXAMPLES / "nucleus_route.py"))["Nucleus"]
    weights = torch.softmax(2 * torch.randn(50, 8, generator=torch.Generator().manual_seed(0)).double(), 1)
    for row, kept in zip(weights.tolist(), Nucleus(0.7)(weights, torch.ones(50), range(50)).tolist(), strict=True):
        chosen: list[int] = []
        for k in sorted(range(8), key=lambda k: -row[k]):
            if sum(row[j] for j in chosen) < 0.7:
                chosen.append(k)
        assert kept == pytest.approx([row[k] / sum(row[j] for j in chosen) if k in chosen else 0.0 for k in range(8)])
    (request,) = finished(Request(range(6), LABELS, Sampling(steps=2), Nucleus(0.5)))
    assert request.latents is not None
    assert request.latents.isfinite().all()
