"""Without an expert the model is that of the data without its cluster, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.diffusion import Condition, Denoiser, Kind, LinearFlow, Prediction
from atoll.mixture import Denoisers, Full, Mixture, parse_route
from atoll.mixture.missing import RouterAmong, without_missing
from atoll.sampling import Route, Sampling, generate
from closed_form import ExactDenoiser, ExactRouter, GaussianWorld
from gaussian_world import WORLD, relative_error, states

TIMES = [0.02, 0.3, 0.6, 0.9, 0.98]


def without(*missing: int) -> GaussianWorld:
    """The world as it would be if these clusters had never been."""
    left = ~torch.isin(WORLD.clusters, torch.tensor(missing))
    return GaussianWorld(
        weights=WORLD.weights[left] / WORLD.weights[left].sum(),
        means=WORLD.means[left],
        covariances=WORLD.covariances[left],
        clusters=WORLD.clusters[left],
        labels=WORLD.labels[left],
    )


class Missing(ExactDenoiser):
    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        raise AssertionError("a missing expert ran")


def experts(*missing: int) -> list[Denoiser]:
    kinds = [Missing if k in missing else ExactDenoiser for k in range(4)]
    return [kind(WORLD.cluster(k), LinearFlow(), Kind.VELOCITY) for k, kind in enumerate(kinds)]


def present(*missing: int) -> Tensor:
    return torch.tensor([k not in missing for k in range(4)])


def mixture(*missing: int, route: Route = Full()) -> Mixture:
    return Mixture(Denoisers(experts(*missing)), RouterAmong(ExactRouter(WORLD), present(*missing)), route)


@pytest.mark.parametrize("missing", [(2,), (0, 3), (0, 1, 3)])
def test_it_is_the_ideal_model_of_what_is_left(missing: tuple[int, ...]) -> None:
    truth = ExactDenoiser(without(*missing), LinearFlow(), Kind.VELOCITY)
    x, t = states(16, TIMES)
    condition = Condition(labels=torch.arange(len(x)) % 2)
    for given in (None, condition):
        assert relative_error(mixture(*missing)(x, t, given).value, truth(x, t, given).value).max() < 1e-9


@pytest.mark.parametrize("text", ["top-1", "top-2", "top-4", "threshold-0.2", "fixed"])
@pytest.mark.parametrize("weights", ["own", "conditional"])
def test_no_route_runs_a_missing_expert_and_weights_sum_to_one(text: str, weights: str) -> None:
    x, t = states(32, TIMES)
    mix = mixture(0, 3, route=parse_route(text))
    given = mix.route(mix.routed(x, t, None), t, range(len(x)))
    assert (given[:, [0, 3]] == 0).all()
    torch.testing.assert_close(given.sum(1), torch.ones(len(x), dtype=torch.float64))
    sampling = Sampling(steps=3, guidance=2.0, guidance_weights=weights)  # type: ignore[arg-type]
    labels = Condition(labels=torch.arange(8) % 2)
    assert generate(mix, (6,), range(8), labels, sampling).isfinite().all()


def test_two_of_the_best_are_two_of_those_who_are_there() -> None:
    x, t = states(64, [0.7])
    mix = mixture(1, route=parse_route("top-2"))
    assert (mix.route(mix.routed(x, t, None), t, range(len(x))) > 0).sum(1).eq(2).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_who_had_all_of_it_leaves_equal_shares(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal
    rows = [[0.0, 0.0, 1.0, 0.0], [smallest / 4, 0.0, 1.0, 0.0], [smallest, 0.0, 1.0, 0.0], [0.0, 0.25, 0.5, 0.25]]
    present = torch.tensor([True, True, False, True])
    shared = without_missing(torch.tensor(rows, dtype=dtype), present)
    third = 1 / 3
    expected = [[third, third, 0, third], [third, third, 0, third], [1.0, 0, 0, 0], [0, 0.5, 0, 0.5]]
    torch.testing.assert_close(shared, torch.tensor(expected, dtype=dtype))


def test_a_router_sure_of_the_missing_one_still_gives_an_image() -> None:
    def sure(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return torch.nn.functional.one_hot(torch.full((len(x),), 2), 4).to(x.dtype)

    x, t = states(4, [0.5])
    found = Mixture.of(experts(2), RouterAmong(sure, present(2)))(x, t, None).value
    expected = torch.stack([experts(2)[k](x, t, None).value for k in (0, 1, 3)]).mean(0)
    torch.testing.assert_close(found, expected)
