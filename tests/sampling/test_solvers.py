"""Solvers: order of convergence against an independent integrator, and step by step against diffusers."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from scipy.integrate import solve_ivp
from torch import Tensor

from atoll.artifacts import UserError
from atoll.diffusion import Condition, CosineVP, Denoiser, Kind, LinearFlow, Prediction, Schedule
from atoll.sampling import SOLVERS, Sampling
from atoll.sampling.grids import log_snr, uniform
from atoll.sampling.protocols import Unrouted
from atoll.sampling.solvers import GridPath, StepNoise
from closed_form import ExactDenoiser
from gaussian_world import SCHEDULES, WORLD, name, states

TRUTH = ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY)


def solve(solver: str, denoiser: Denoiser, x: Tensor, times: Tensor, noise: StepNoise = torch.zeros) -> Tensor:
    """The state at the end of the grid."""
    model, weights = Unrouted(denoiser), torch.ones(len(x), 1)
    walk = SOLVERS[solver](x, GridPath(denoiser.schedule, times), noise)
    state, t = next(walk)
    while True:
        velocity = model.velocity(state, torch.full((len(x),), t, dtype=torch.float64), None, weights)
        try:
            state, t = walk.send(velocity.to(x.dtype))
        except StopIteration as end:
            return end.value


@cache
def start_and_end(schedule: Schedule) -> tuple[Tensor, Tensor]:
    """States at t = 0.95 and where the flow takes them by t = 0.05, by scipy's eighth-order Runge-Kutta."""
    x, _ = states(64, [0.95], schedule=schedule)
    model = ExactDenoiser(WORLD, schedule, Kind.VELOCITY)

    def flow(t: float, flat: object) -> object:
        state = torch.tensor(flat).view_as(x)
        return model(state, torch.full((len(x),), t, dtype=torch.float64), None).value.flatten().numpy()

    solved = solve_ivp(flow, (0.95, 0.05), x.flatten().numpy(), method="DOP853", rtol=1e-9, atol=1e-11)
    return x, torch.tensor(solved.y[:, -1]).view_as(x)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2), ("unipc", 3)])
@pytest.mark.parametrize("schedule", [LinearFlow(), CosineVP()], ids=name)
def test_the_error_falls_with_the_order_of_the_solver(schedule: Schedule, solver: str, order: int) -> None:
    x, end = start_and_end(schedule)
    model = ExactDenoiser(WORLD, schedule, Kind.VELOCITY)
    errors = []
    for steps in (50, 100, 200, 400):
        times = torch.linspace(0.95, 0.05, steps + 1, dtype=torch.float64)
        reached = solve(solver, model, x, times)
        errors.append((reached - end).norm(dim=1).median().item())
    orders = [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(errors)]
    assert orders == pytest.approx([order] * 3, abs=0.35 if solver == "unipc" else 0.25), f"errors {errors}"


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
@pytest.mark.parametrize("kind", Kind, ids=name)
def test_every_solver_takes_every_denoiser_from_end_to_end(schedule: Schedule, kind: Kind, solver: str) -> None:
    """Pure noise to the end of the path, on its own schedule: finite, and near the data."""
    model = ExactDenoiser(WORLD, schedule, kind)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, generator=generator, dtype=torch.float64)
    times = log_snr(25, schedule)
    start = schedule.sigma(times[:1]).item() * x
    reached = solve(solver, model, start, times, lambda index: torch.randn(x.shape, generator=generator))
    assert reached.isfinite().all()
    assert reached.abs().max() < 5
    assert 0.5 < reached.std() < 1.5


def test_one_step_of_each_by_hand() -> None:
    """A denoiser that always answers x0 = 2 on the linear path, from t = 0.8 to 0.4."""

    class Constant:
        schedule, kind = LinearFlow(), Kind.VELOCITY

        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            return Prediction(Kind.VELOCITY, (x - 2.0) / t[:, None])  # x = (1 - t) 2 + t eps

    x = torch.tensor([[1.0]], dtype=torch.float64)
    times = torch.tensor([0.8, 0.4], dtype=torch.float64)
    eps = (1.0 - 0.2 * 2.0) / 0.8
    exact = 0.6 * 2.0 + 0.4 * eps  # straight line: Euler and the rest agree
    for solver in ("euler", "heun", "dpmpp_2m", "unipc"):
        assert solve(solver, Constant(), x, times).item() == pytest.approx(exact, rel=1e-12)
    # DDPM's posterior of x_0.4 given x_0.8 and x0, typed out: mean and spread
    alpha, sigma, alpha_, sigma_ = 0.2, 0.8, 0.6, 0.4
    spread = sigma_**2 * (1 - (alpha * sigma_ / (alpha_ * sigma)) ** 2)
    mean = alpha_ * 2.0 + math.sqrt(sigma_**2 - spread) * eps
    noise = torch.tensor([[0.7]], dtype=torch.float64)
    stepped = solve("stochastic", Constant(), x, times, lambda index: noise).item()
    assert stepped == pytest.approx(mean + math.sqrt(spread) * 0.7, rel=1e-12)


def test_euler_steps_are_those_of_diffusers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)
    scheduler.set_timesteps(20)
    times = scheduler.sigmas.double()
    x, _ = states(16, [1.0])
    theirs = x.float()
    for step, timestep in enumerate(scheduler.timesteps):
        t = times[step].expand(len(x))
        theirs = scheduler.step(TRUTH(theirs, t, None).value, timestep, theirs).prev_sample
    ours = solve("euler", TRUTH, x.float(), times)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["dpmsolver++", "sde-dpmsolver++"])
def test_dpm_solver_steps_are_those_of_diffusers(algorithm: str) -> None:
    """Same sigmas, same model, same noise: the same samples after 20 steps from pure noise to data."""
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0, algorithm_type=algorithm
    )
    scheduler.set_timesteps(20)
    times = scheduler.sigmas.double()
    assert times[-1] == 0
    generator = torch.Generator().manual_seed(4)
    x, _ = states(16, [times[0].item()])
    noises = torch.randn(20, *x.shape, generator=generator)
    theirs = x.float()
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = TRUTH(theirs, times[step].expand(len(x)), None).value
        theirs = scheduler.step(velocity, timestep, theirs, variance_noise=noises[step]).prev_sample
    solver = "dpmpp_2m" if algorithm == "dpmsolver++" else "stochastic"
    ours = solve(solver, TRUTH, x.float(), times, lambda index: noises[index])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_unipc_steps_are_those_of_diffusers() -> None:
    """From t < 1, where both use their second order from the second step on."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0, solver_order=2, solver_type="bh2"
    )
    scheduler.set_timesteps(20)
    times = scheduler.sigmas.double()
    x, _ = states(16, [times[0].item()])
    theirs = x.float()
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = TRUTH(theirs, times[step].expand(len(x)), None).value
        theirs = scheduler.step(velocity, timestep, theirs).prev_sample
    ours = solve("unipc", TRUTH, x.float(), times)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_heun_needs_no_velocity_of_clean_samples() -> None:
    evaluated: list[float] = []

    class Recorded(ExactDenoiser):
        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            evaluated.extend(t.unique().tolist())
            return super().__call__(x, t, condition)

    x, _ = states(2, [1.0])
    solve("heun", Recorded(WORLD, LinearFlow(), Kind.VELOCITY), x, uniform(4, LinearFlow()))
    assert evaluated == [1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25]


def test_the_state_keeps_its_precision() -> None:
    x, _ = states(4, [1.0])
    for dtype in (torch.float32, torch.float64):
        assert solve("dpmpp_2m", TRUTH, x.to(dtype), uniform(3, LinearFlow())).dtype == dtype


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="--solver rk4: not known; use one of euler, heun, dpmpp_2m, stochastic, unipc"):
        Sampling(solver="rk4")
    for times in ([1.0], [0.0, 1.0], [1.0, 0.5, 0.5]):
        with pytest.raises(ValueError, match="at least two falling times"):
            GridPath(LinearFlow(), torch.tensor(times))
    with pytest.raises(ValueError, match=r"must lie in 0 \.\. 1, got 999\.0"):
        GridPath(LinearFlow(), torch.tensor([999.0, 0.0]))
