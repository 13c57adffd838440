"""The mixture against the closed form, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.ensemble import Full, Mixture, Oracle, Route, Sampled, Threshold, TopK, parse_route
from atoll.evaluation.closed_form import ExactDenoiser, ExactRouter
from atoll.process import (
    EDM,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Denoiser,
    GuidedDenoiser,
    Kind,
    LinearFlow,
    PerImageDenoiser,
    Prediction,
    Schedule,
)
from atoll.router.uniform import UniformRouter
from atoll.sampling import Guided
from gaussian_world import PRODUCT, WORLD, covered, relative_error, states

TIMES = [0.001, 0.005, 0.011, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.93, 0.98, 0.987, 0.992, 0.999]
ROUTES = ["full", "top-1", "top-2", "threshold-0.2", "nucleus-0.9", "sampled", "fixed", "oracle"]
TRUTH = ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY)
ROUTER = ExactRouter(WORLD)
# each expert of another schedule and kind
MIXED: list[tuple[Schedule, Kind]] = [
    (DDPMBetas("cosine"), Kind.EPSILON),
    (LinearFlow(), Kind.VELOCITY),
    (EDM(), Kind.X0),
    (CosineVP(), Kind.V),
]


def mixture(trained: list[tuple[Schedule, Kind]], route: Route = Full(), limit: float | None = None) -> Mixture:
    experts = [Bridge(ExactDenoiser(WORLD.cluster(k), *how), limit=limit) for k, how in enumerate(trained)]
    return Mixture(experts, ROUTER, route)


class Counted:
    """A denoiser that remembers how it was asked."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser, self.schedule, self.kind = denoiser, denoiser.schedule, denoiser.kind
        self.asked: list[Tensor] = []

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        assert len(x) == len(t)
        assert condition is None or len(condition) == len(x)
        self.asked.append(x)
        return self.denoiser(x, t, condition)


def bound(mix: Mixture, count: int) -> Mixture:
    return mix.bind(slice(0, count), range(count))


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
    blind = Mixture(mixture(MIXED).denoisers, lambda x, t, condition: ROUTER(x, t, None))
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
    route = parse_route(text, clusters=[0, 1, 2, 3] * (len(x) // 4))
    same = bound(Mixture([TRUTH] * 4, ROUTER, route), len(x))
    assert relative_error(same(x, t, None).value, TRUTH(x, t, None).value).max() < 1e-12
    condition = Condition(labels=torch.arange(len(x)) % 2)
    guided = same.guided(x, t, condition, 3.0).value
    alone = TRUTH(x, t, condition.null()).value.lerp(TRUTH(x, t, condition).value, 3.0)
    assert relative_error(guided, alone).max() < 1e-12


@pytest.mark.parametrize("text", [text for text in ROUTES if text != "oracle"])
def test_a_router_that_is_certain_gives_exactly_that_expert(text: str) -> None:
    """Bit for bit: nothing of the others, and no rounding of its own."""
    x, t = states(8, TIMES)
    condition = Condition(labels=torch.arange(len(x)) % 2)
    mix = mixture(MIXED)
    for k, expert in enumerate(mix.denoisers):
        certain = torch.zeros(len(MIXED), dtype=torch.float64)
        certain[k] = 1.0

        def router(x: Tensor, t: Tensor, condition: Condition | None, certain: Tensor = certain) -> Tensor:
            return certain.expand(len(x), -1)

        sure = bound(Mixture(mix.denoisers, router, parse_route(text)), len(x))
        assert torch.equal(sure(x, t, None).value, expert(x, t, None).value)
        assert torch.equal(sure.guided(x, t, condition, 3.0).value, Guided(expert, 3.0)(x, t, condition).value)


@pytest.mark.parametrize("text", ROUTES)
def test_a_route_is_the_sum_over_the_experts_it_picks(text: str) -> None:
    x, t = states(8, TIMES)
    clusters = [0, 3, 2, 1] * (len(x) // 4)
    mix = bound(mixture(MIXED, parse_route(text, clusters=clusters)), len(x))
    every = torch.stack([expert(x, t, None).value for expert in mix.denoisers], dim=1)  # [B, K, D]
    expected = (mix.weights(x, t, None)[:, :, None] * every).sum(1)
    torch.testing.assert_close(mix(x, t, None).value, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("text", "experts_per_row"), [("top-1", 1), ("top-2", 2), ("sampled", 1), ("fixed", 1), ("oracle", 1)]
)
def test_an_expert_runs_once_on_its_own_rows_and_on_no_others(text: str, experts_per_row: int) -> None:
    x, t = states(16, TIMES)
    counted = [Counted(expert) for expert in mixture(MIXED).denoisers]
    route = parse_route(text, clusters=[0, 1, 2, 2] * (len(x) // 4))
    mix = bound(Mixture(counted, ROUTER, route), len(x))
    mix(x, t, None)
    assert all(len(expert.asked) <= 1 for expert in counted)
    assert sum(len(expert.asked[0]) for expert in counted if expert.asked) == experts_per_row * len(x)
    used = mix.weights(x, t, None) > 0
    for k, expert in enumerate(counted):
        if used[:, k].any():
            assert torch.equal(expert.asked[0], x[used[:, k]])
        else:
            assert not expert.asked


def test_an_expert_that_takes_the_whole_batch_gets_it_without_a_copy() -> None:
    x, t = states(16, [0.3])
    counted = [Counted(TRUTH) for _ in range(4)]
    Mixture(counted, UniformRouter(4))(x, t, None)
    assert all(expert.asked[0] is x for expert in counted)
    alone = [Counted(TRUTH) for _ in range(4)]
    Mixture(alone, UniformRouter(4), TopK(1))(x, t, None)
    assert [len(expert.asked) for expert in alone] == [1, 0, 0, 0]
    assert alone[0].asked[0] is x


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0, 7.5])
def test_guidance_with_own_weights_is_that_of_the_ideal_model(scale: float) -> None:
    x, t = states(16, [0.02, 0.3, 0.6, 0.9, 0.98])
    condition = Condition(labels=torch.arange(len(x)) % 2)
    conditional, unconditional = (TRUTH(x, t, c).value for c in (condition, condition.null()))
    expected = unconditional + scale * (conditional - unconditional)
    answer = mixture(MIXED).guided(x, t, condition, scale, weights="own").value
    assert relative_error(answer, expected).max() < 1e-9


def test_guidance_with_conditional_weights_is_that_of_every_expert_mixed() -> None:
    """sum_k p(k | x, c) (u_k + s (c_k - u_k)): close to the ideal one, cheaper, and not the same."""
    x, t = states(16, [0.02, 0.3, 0.6, 0.9, 0.98])
    condition = Condition(labels=torch.arange(len(x)) % 2)
    mix = mixture(MIXED)
    weights = ROUTER(x, t, condition)
    conditional, unconditional = (
        torch.stack([expert(x, t, c).value for expert in mix.denoisers], dim=1) for c in (condition, condition.null())
    )
    expected = (weights[:, :, None] * (unconditional + 3.0 * (conditional - unconditional))).sum(1)
    answer = mix.guided(x, t, condition, 3.0, weights="conditional").value
    assert relative_error(answer, expected).max() < 1e-9
    by_field = Mixture(mix.denoisers, ROUTER, guidance_weights="conditional").guided(x, t, condition, 3.0).value
    assert torch.equal(by_field, answer)
    assert relative_error(answer, mix.guided(x, t, condition, 3.0).value).max() > 0.01


@pytest.mark.parametrize("weights", ["own", "conditional"])
def test_both_halves_of_guidance_share_one_call_per_expert(weights: str) -> None:
    x, t = states(16, [0.02, 0.3, 0.6, 0.9, 0.98])
    condition = Condition(labels=torch.arange(len(x)) % 2)
    counted = [Counted(expert) for expert in mixture(MIXED).denoisers]
    router_rows = []

    def router(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        router_rows.append(len(x))
        return ROUTER(x, t, condition)

    Mixture(counted, router, TopK(1)).guided(x, t, condition, 3.0, weights=weights)  # type: ignore[arg-type]
    assert all(len(expert.asked) <= 1 for expert in counted)
    assert sum(len(expert.asked[0]) for expert in counted if expert.asked) == 2 * len(x)
    assert router_rows == [len(x) * (2 if weights == "own" else 1)]


def test_scale_one_is_the_plain_call_and_costs_as_much() -> None:
    x, t = states(8, [0.3, 0.6])
    condition = Condition(labels=torch.arange(len(x)) % 2)
    counted = [Counted(expert) for expert in mixture(MIXED).denoisers]
    mix = Mixture(counted, ROUTER, TopK(1))
    assert torch.equal(mix.guided(x, t, condition, 1.0).value, mix(x, t, condition).value)
    assert sum(len(x) for expert in counted for x in expert.asked) == 2 * len(x)


def test_a_mixture_is_a_denoiser_that_guides_and_can_be_bound() -> None:
    mix = mixture(MIXED)
    assert isinstance(mix, Denoiser)
    assert isinstance(mix, GuidedDenoiser)
    assert isinstance(mix, PerImageDenoiser)
    assert (mix.kind, mix.schedule) == (Kind.VELOCITY, LinearFlow())
    assert bound(mix, 4) is mix
    assert isinstance(bound(mixture(MIXED, Sampled()), 4).route, Sampled)


def test_binding_follows_the_images_of_the_batch() -> None:
    x, t = states(8, TIMES)
    clusters = torch.arange(len(x)) % len(MIXED)
    for route in (Sampled(), Oracle(clusters)):
        mix = mixture(MIXED, route)
        whole = bound(mix, len(x))(x, t, None).value
        rows = slice(13, 40)
        part = mix.bind(rows, range(13, 40))(x[rows], t[rows], None).value
        torch.testing.assert_close(part, whole[rows], rtol=1e-12, atol=1e-12)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="at least one expert"):
        Mixture([], ROUTER)
    raw = ExactDenoiser(WORLD, LinearFlow(), Kind.EPSILON)
    with pytest.raises(ValueError, match=r"expert 1 gives epsilon on LinearFlow.*put it behind a Bridge"):
        Mixture([TRUTH, raw], ROUTER)
    with pytest.raises(ValueError, match="expert 1 gives velocity on CosineVP"):
        Mixture([TRUTH, ExactDenoiser(WORLD, CosineVP(), Kind.VELOCITY)], ROUTER)
    with pytest.raises(ValueError, match="one of own, conditional, got 'both'"):
        Mixture([TRUTH] * 4, ROUTER, guidance_weights="both")  # type: ignore[arg-type]
    x, t = states(2, [0.5])
    with pytest.raises(ValueError, match="one of own, conditional, got 'both'"):
        Mixture([TRUTH] * 4, ROUTER).guided(x, t, Condition(labels=torch.zeros(2)), 2.0, weights="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \[2, 3\], 2 rows and 4 experts need \[2, 4\]"):
        Mixture([TRUTH] * 4, UniformRouter(3))(x, t, None)


def test_threshold_mixes_only_what_reaches_it() -> None:
    x, t = states(32, [0.8])
    used = (mixture(MIXED, Threshold(0.2)).weights(x, t, None) > 0).sum(1)
    assert used.min() >= 1
    assert used.max() <= 5
    assert len(used.unique()) > 1
