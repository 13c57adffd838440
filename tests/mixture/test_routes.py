"""Routes: against rules typed out row by row, and the draws of `fixed` against their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll.artifacts import UserError
from atoll.mixture import Fixed, Full, Threshold, TopK, parse_route
from atoll.sampling import ImageRoute, Route

B, K = 64, 8


def router_weights(dtype: torch.dtype = torch.float64) -> Tensor:
    logits = 2.0 * torch.randn(B, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.softmax(logits, dim=1).to(dtype)


def times(value: float = 0.5) -> Tensor:
    return torch.full((B,), value, dtype=torch.float64)


def largest(row: list[float]) -> list[int]:
    return sorted(range(K), key=lambda k: -row[k])


RULES: list[tuple[Route, Callable[[list[float]], set[int]]]] = [
    (Full(), lambda row: set(range(K))),
    (TopK(1), lambda row: set(largest(row)[:1])),
    (TopK(3), lambda row: set(largest(row)[:3])),
    (TopK(20), lambda row: set(range(K))),
    (Threshold(0.2), lambda row: {k for k in range(K) if row[k] >= 0.2} or {largest(row)[0]}),
    (Threshold(1.0), lambda row: {largest(row)[0]}),
]


@pytest.mark.parametrize(("route", "rule"), RULES, ids=lambda v: repr(v) if isinstance(v, Full | TopK) else None)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_experts_of_the_rule_and_their_shares(route: Route, rule: Callable, dtype: torch.dtype) -> None:
    weights = router_weights(dtype)
    routed = route(weights, times())
    assert routed.dtype == dtype
    for row, result in zip(weights.tolist(), routed.tolist(), strict=True):
        chosen = rule(row)
        total = sum(row[k] for k in chosen)
        expected = [row[k] / total if k in chosen else 0.0 for k in range(K)]
        assert result == pytest.approx(expected, rel=1e-5, abs=1e-12)
        assert {k for k in range(K) if result[k] > 0} == chosen


@pytest.mark.parametrize("route", [Full(), TopK(2), Threshold(0.2)], ids=repr)
def test_weights_need_not_be_normalized(route: Route) -> None:
    torch.testing.assert_close(route(7.0 * router_weights(), times()), route(router_weights(), times()))


def test_equal_weights_go_to_the_lower_index() -> None:
    equal = torch.full((2, K), 1 / K)
    assert TopK(2)(equal, times()[:2]).tolist() == [[0.5, 0.5, 0, 0, 0, 0, 0, 0]] * 2
    assert Threshold(0.9)(equal, times()[:2])[:, 0].tolist() == [1.0, 1.0]


def test_fixed_draws_once_as_the_first_weights_say_and_stays_with_it() -> None:
    count = 40_000
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(count, 4)
    bound = Fixed().bind(slice(0, count), range(count))
    first = bound(weights, torch.ones(count, dtype=torch.float64))
    assert torch.equal(first.sum(1), torch.ones(count))
    for share, found in zip(weights[0].tolist(), first.mean(0).tolist(), strict=True):
        assert abs(found - share) <= 4.5 * math.sqrt(share * (1 - share) / count)
    for time in (1.0, 0.5, 0.0):
        assert torch.equal(bound(weights.flip(1), torch.full((count,), time, dtype=torch.float64)), first)


def test_fixed_depends_on_the_image_and_not_on_its_batch_or_on_other_batches() -> None:
    weights, seeds = router_weights(), list(range(100, 100 + B))
    route = Fixed()
    whole = route.bind(slice(0, B), seeds)(weights, times(1.0))
    part = route.bind(slice(10, 20), seeds[10:20])(weights[10:20], times(1.0)[10:20])
    assert torch.equal(part, whole[10:20])
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    shuffled = route.bind(slice(0, B), [seeds[i] for i in order])(weights[order], times(1.0))
    assert torch.equal(shuffled, whole[order])
    others = route.bind(slice(0, B), [s + 1000 for s in seeds])(weights, times(1.0))
    assert not torch.equal(others, whole), "bound again, it draws again"


def test_seeds_of_64_bits_and_below_zero_are_seeds_too() -> None:
    drawn = Fixed().bind(slice(0, 4), [0, -1, 2**63, 2**64 - 2])(torch.full((4, 2), 0.5), times()[:4])
    assert torch.equal(drawn.sum(1), torch.ones(4))


def test_only_routes_that_need_it_are_bound() -> None:
    for route in (Full(), TopK(1), Threshold(0.1)):
        assert not isinstance(route, ImageRoute)
    assert isinstance(Fixed(), ImageRoute)


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("full", Full()),
        ("top-1", TopK(1)),
        ("top-12", TopK(12)),
        ("threshold-0.2", Threshold(0.2)),
    ],
)
def test_names(text: str, route: Route) -> None:
    assert parse_route(text) == route


@pytest.mark.parametrize(
    "text",
    [
        "",
        "top",
        "top-",
        "top-0",
        "top--1",
        "top-2.5",
        "top-two",
        "threshold",
        "threshold-0",
        "threshold-1.5",
        "threshold-nan",
        "full-2",
        "Full",
        "fixed-1",
        "best",
    ],
)
def test_anything_else_is_one_line_that_names_the_choices(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_route(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "\n" not in message
    for choice in ("full", "top-K", "threshold-P", "fixed"):
        assert choice in message


def test_an_unbound_fixed_route_is_named() -> None:
    with pytest.raises(ValueError, match=r"fixed needs one seed per row \(3\)"):
        Fixed()(router_weights()[:3], times()[:3])
