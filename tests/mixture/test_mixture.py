"""The mixture against the closed form, and what it costs."""

from __future__ import annotations

import pytest
import torch
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
    Prediction,
    Schedule,
)
from atoll.mixture import Denoisers, Full, Mixture, Threshold, TopK, parse_route
from atoll.mixture.mixture import rows_by_expert
from atoll.sampling import Route, Routed
from closed_form import ExactDenoiser, ExactRouter
from gaussian_world import PRODUCT, WORLD, covered, relative_error, states

TIMES = [0.001, 0.005, 0.011, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.93, 0.98, 0.987, 0.992, 0.999]
ROUTES = ["full", "top-1", "top-2", "threshold-0.2", "fixed"]
TRUTH = ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY)
ROUTER = ExactRouter(WORLD)
# each expert of another schedule and kind
MIXED: list[tuple[Schedule, Kind]] = [
    (DDPMBetas("cosine"), Kind.EPSILON),
    (LinearFlow(), Kind.VELOCITY),
    (VE(), Kind.X0),
    (CosineVP(), Kind.V),
]


def mixture(trained: list[tuple[Schedule, Kind]], route: Route = Full(), limit: float | None = None) -> Mixture:
    return Mixture(Denoisers(experts_of(trained, limit)), ROUTER, route)


def experts_of(trained: list[tuple[Schedule, Kind]], limit: float | None = None) -> list[Bridge]:
    return [Bridge(ExactDenoiser(WORLD.cluster(k), *how), limit=limit) for k, how in enumerate(trained)]


def uniform_router(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
    return x.new_full((len(x), 4), 0.25)


class Counted:
    """A denoiser that records its inputs."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser, self.schedule, self.kind = denoiser, denoiser.schedule, denoiser.kind
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        assert len(x) == len(t)
        assert condition is None or len(condition) == len(x)
        self.seen.append(x)
        return self.denoiser(x, t, condition)


def seeded(text: str, count: int) -> Route:
    """A route for rows of these seeds, whoever calls the mixture."""
    route = parse_route(text)
    return lambda weights, t, seeds: route(weights, t, range(count))


@pytest.mark.parametrize("offset", range(0, len(PRODUCT), 2))
def test_ideal_experts_of_different_objectives_add_up_to_the_ideal_model_of_all_data(offset: int) -> None:
    """Every schedule and kind takes part, each time next to three others."""
    trained = [PRODUCT[(offset + 7 * k) % len(PRODUCT)] for k in range(WORLD.cluster_count)]
    x, t = states(16, TIMES)
    error = relative_error(mixture(trained)(x, t, None).value, TRUTH(x, t, None).value)
    inside = torch.stack([covered(schedule, t) for schedule, _ in trained]).all(0)
    assert inside.sum() >= 16 * 5
    assert error[inside].max() < 1e-9


def test_the_identity_holds_with_a_condition_inside() -> None:
    x, t = states(16, [0.02, 0.3, 0.6, 0.9, 0.98])
    condition = Condition(labels=torch.arange(len(x)) % 2)
    answer = mixture(MIXED)(x, t, condition).value
    assert relative_error(answer, TRUTH(x, t, condition).value).max() < 1e-9
    # a router that does not see the condition breaks it
    blind = Mixture.of(experts_of(MIXED), lambda x, t, condition: ROUTER(x, t, None))
    assert relative_error(blind(x, t, condition).value, TRUTH(x, t, condition).value).max() > 0.1


def test_float32_and_bfloat16() -> None:
    x, t = states(16, TIMES)
    truth = TRUTH(x, t, None).value
    inside = torch.stack([covered(schedule, t) for schedule, _ in MIXED]).all(0)
    single = mixture(MIXED)(x.float(), t, None).value
    assert single.dtype == torch.float32
    assert relative_error(single, truth)[inside].max() < 1e-3
    x, t = states(4, [0.0, 1e-6, *TIMES, 1 - 1e-6, 1.0])
    for trained in (MIXED, [(CosineVP(), Kind.SCORE), (LinearFlow(), Kind.X0), *MIXED[:2]]):
        half = mixture(trained)(x.bfloat16(), t, None).value
        assert half.dtype == torch.float32
        assert half.isfinite().all()


@pytest.mark.parametrize("text", ROUTES)
def test_identical_experts_are_one_expert_whatever_the_route(text: str) -> None:
    x, t = states(8, TIMES)
    same = Mixture.of([TRUTH] * 4, ROUTER, seeded(text, len(x)))
    assert relative_error(same(x, t, None).value, TRUTH(x, t, None).value).max() < 1e-12


@pytest.mark.parametrize("text", ROUTES)
def test_a_router_that_is_certain_gives_exactly_that_expert(text: str) -> None:
    """Bit for bit: nothing of the others, and no rounding of its own."""
    x, t = states(8, TIMES)
    experts = experts_of(MIXED)
    for k, expert in enumerate(experts):
        certain = torch.nn.functional.one_hot(torch.tensor(k), 4).double()
        sure = Mixture.of(experts, lambda x, t, c, w=certain: w.expand(len(x), -1), seeded(text, len(x)))
        assert torch.equal(sure(x, t, None).value, expert(x, t, None).value)


@pytest.mark.parametrize("text", ROUTES)
def test_a_route_is_the_sum_over_the_experts_it_picks(text: str) -> None:
    x, t = states(8, TIMES)
    mix = mixture(MIXED, seeded(text, len(x)))
    every = torch.stack([expert(x, t, None).value for expert in experts_of(MIXED)], dim=1)  # [B, K, D]
    expected = (mix.route(mix.routed(x, t, None), t, ())[:, :, None] * every).sum(1)
    torch.testing.assert_close(mix(x, t, None).value, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("text", "experts_per_row"), [("top-1", 1), ("top-2", 2), ("fixed", 1)])
def test_an_expert_runs_once_on_its_own_rows_and_on_no_others(text: str, experts_per_row: int) -> None:
    x, t = states(16, TIMES)
    counted = [Counted(expert) for expert in experts_of(MIXED)]
    mix = Mixture.of(counted, ROUTER, seeded(text, len(x)))
    mix(x, t, None)
    assert all(len(expert.seen) <= 1 for expert in counted)
    assert sum(len(expert.seen[0]) for expert in counted if expert.seen) == experts_per_row * len(x)
    used = mix.route(mix.routed(x, t, None), t, ()) > 0
    for k, expert in enumerate(counted):
        if used[:, k].any():
            assert torch.equal(expert.seen[0], x[used[:, k]])
        else:
            assert not expert.seen


def test_an_expert_that_takes_the_whole_batch_gets_it_without_a_copy() -> None:
    x, t = states(16, [0.3])
    counted = [Counted(TRUTH) for _ in range(4)]
    Mixture.of(counted, uniform_router)(x, t, None)
    assert all(expert.seen[0] is x for expert in counted)
    alone = [Counted(TRUTH) for _ in range(4)]
    Mixture.of(alone, uniform_router, TopK(1))(x, t, None)
    assert [len(expert.seen) for expert in alone] == [1, 0, 0, 0]
    assert alone[0].seen[0] is x


def test_rows_are_those_of_the_weights() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    rows = rows_by_expert(weights)
    assert [(k, count) for k, _, count in rows] == [(0, 2), (1, 3)]
    assert [which.tolist() for _, which, _ in rows if which is not None] == [[1, 3], [0, 1, 2]]
    assert rows_by_expert(torch.ones(4, 1)) == [(0, None, 4)]
    assert rows_by_expert(torch.full((4, 1), torch.nan)) == [(0, None, 4)], "NaN is computed, not left out"


def test_a_mixture_is_a_denoiser_and_a_routed_sum() -> None:
    mix = mixture(MIXED)
    assert isinstance(mix, Denoiser)
    assert isinstance(mix, Routed)
    assert (mix.kind, mix.schedule) == (Kind.VELOCITY, LinearFlow())


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="at least one expert"):
        Mixture.of([], ROUTER)
    raw = ExactDenoiser(WORLD, LinearFlow(), Kind.EPSILON)
    with pytest.raises(ValueError, match=r"expert 1 gives epsilon on LinearFlow.*put it behind a Bridge"):
        Mixture.of([TRUTH, raw], ROUTER)
    elsewhere = ExactDenoiser(WORLD, CosineVP(), Kind.VELOCITY)
    with pytest.raises(ValueError, match="expert 1 gives velocity on CosineVP"):
        Mixture.of([TRUTH, elsewhere], ROUTER)
    x, t = states(2, [0.5])
    with pytest.raises(ValueError, match=r"shape \[2, 4\], 2 rows and 3 experts need \[2, 3\]"):
        Mixture.of([TRUTH] * 3, uniform_router)(x, t, None)


def test_threshold_mixes_only_what_reaches_it() -> None:
    x, t = states(32, [0.8])
    mix = mixture(MIXED, Threshold(0.2))
    used = (mix.route(mix.routed(x, t, None), t, ()) > 0).sum(1)
    assert used.min() >= 1
    assert used.max() <= 5
    assert len(used.unique()) > 1
