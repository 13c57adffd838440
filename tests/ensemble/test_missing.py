"""Without an expert the model is that of the data without its cluster, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.artifacts import UserError
from atoll.ensemble import Full, Mixture, Route, parse_route
from atoll.ensemble.missing import MissingExpert, RouterAmong, shared_out
from atoll.evaluation.closed_form import ExactDenoiser, ExactRouter, GaussianWorld
from atoll.process import Condition, Denoiser, Kind, LinearFlow
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


def mixture(*missing: int, route: Route = Full()) -> Mixture:
    experts: list[Denoiser] = [
        MissingExpert(k, LinearFlow()) if k in missing else ExactDenoiser(WORLD.cluster(k), LinearFlow(), Kind.VELOCITY)
        for k in range(4)
    ]
    return Mixture(experts, RouterAmong(ExactRouter(WORLD), missing), route)


@pytest.mark.parametrize("missing", [(2,), (0, 3), (0, 1, 3)])
def test_it_is_the_ideal_model_of_what_is_left(missing: tuple[int, ...]) -> None:
    truth = ExactDenoiser(without(*missing), LinearFlow(), Kind.VELOCITY)
    x, t = states(16, TIMES)
    condition = Condition(labels=torch.arange(len(x)) % 2)
    for given in (None, condition):
        assert relative_error(mixture(*missing)(x, t, given).value, truth(x, t, given).value).max() < 1e-9
    conditional, unconditional = (truth(x, t, c).value for c in (condition, condition.null()))
    guided = mixture(*missing).guided(x, t, condition, 3.0, weights="own").value
    assert relative_error(guided, unconditional + 3.0 * (conditional - unconditional)).max() < 1e-9


@pytest.mark.parametrize("text", ["top-1", "top-2", "top-4", "threshold-0.2", "nucleus-1.0", "sampled"])
@pytest.mark.parametrize("weights", ["own", "conditional"])
def test_no_route_asks_who_is_not_there_and_all_weight_is_given(text: str, weights: str) -> None:
    x, t = states(32, TIMES)
    condition = Condition(labels=torch.arange(len(x)) % 2)
    mix = mixture(0, 3, route=parse_route(text)).bind(slice(0, len(x)), range(len(x)))
    given = mix.weights(x, t, condition)
    assert (given[:, [0, 3]] == 0).all()
    torch.testing.assert_close(given.sum(1), torch.ones(len(x), dtype=torch.float64))
    guided = mix.guided(x, t, condition, 2.0, weights=weights)  # type: ignore[arg-type]
    assert guided.value.isfinite().all()  # a missing expert that is asked raises


def test_two_of_the_best_are_two_of_those_who_are_there() -> None:
    x, t = states(64, [0.7])
    assert (mixture(1, route=parse_route("top-2")).weights(x, t, None) > 0).sum(1).eq(2).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_who_had_all_of_it_leaves_equal_shares(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal
    rows = [[0.0, 0.0, 1.0, 0.0], [smallest / 4, 0.0, 1.0, 0.0], [smallest, 0.0, 1.0, 0.0], [0.0, 0.25, 0.5, 0.25]]
    present = torch.tensor([True, True, False, True])
    shared = shared_out(torch.tensor(rows, dtype=dtype), present)
    third = 1 / 3
    expected = [[third, third, 0, third], [third, third, 0, third], [1.0, 0, 0, 0], [0, 0.5, 0, 0.5]]
    torch.testing.assert_close(shared, torch.tensor(expected, dtype=dtype))


def test_a_router_sure_of_the_missing_one_still_gives_an_image() -> None:
    def sure(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return torch.nn.functional.one_hot(torch.full((len(x),), 2), 4).to(x.dtype)

    x, t = states(4, [0.5])
    experts = [MissingExpert(k, LinearFlow()) if k == 2 else mixture().denoisers[k] for k in range(4)]
    answer = Mixture(experts, RouterAmong(sure, [2]))(x, t, None).value
    expected = torch.stack([experts[k](x, t, None).value for k in (0, 1, 3)]).mean(0)
    torch.testing.assert_close(answer, expected)


def test_the_true_cluster_of_a_missing_expert_is_asked_for_in_vain() -> None:
    x, t = states(4, [0.5])
    mix = mixture(1, route=parse_route("oracle", clusters=[0, 1, 2, 3])).bind(slice(0, 4), range(4))
    with pytest.raises(UserError, match="cluster 1: has no expert"):
        mix(x, t, None)
