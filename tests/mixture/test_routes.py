"""Routes: against rules typed out row by row, and the draws of `fixed` against their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from atoll.artifacts import UserError
from atoll.mixture import Fixed, Full, Threshold, TopK, parse_route
from atoll.sampling import Route

B, K = 64, 8


def router_weights(dtype: torch.dtype = torch.float64) -> Tensor:
    logits = 2.0 * torch.randn(B, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.softmax(logits, dim=1).to(dtype)


def routed(route: Route, weights: Tensor, seeds: Sequence[int] = range(B)) -> Tensor:
    return route(weights, torch.full((len(weights),), 0.5, dtype=torch.float64), seeds)


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
    found = routed(route, weights)
    assert found.dtype == dtype
    for row, result in zip(weights.tolist(), found.tolist(), strict=True):
        chosen = rule(row)
        total = sum(row[k] for k in chosen)
        expected = [row[k] / total if k in chosen else 0.0 for k in range(K)]
        assert result == pytest.approx(expected, rel=1e-5, abs=1e-12)
        assert {k for k in range(K) if result[k] > 0} == chosen


@pytest.mark.parametrize("route", [Full(), TopK(2), Threshold(0.2)], ids=repr)
def test_weights_need_not_be_normalized(route: Route) -> None:
    torch.testing.assert_close(routed(route, 7.0 * router_weights()), routed(route, router_weights()))


def test_equal_weights_go_to_the_lower_index() -> None:
    equal = torch.full((2, K), 1 / K)
    assert routed(TopK(2), equal).tolist() == [[0.5, 0.5, 0, 0, 0, 0, 0, 0]] * 2
    assert routed(Threshold(0.9), equal)[:, 0].tolist() == [1.0, 1.0]


def test_fixed_draws_as_the_weights_are() -> None:
    count = 40_000
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(count, 4)
    drawn = routed(Fixed(), weights, range(count))
    assert torch.equal(drawn.sum(1), torch.ones(count))
    for share, found in zip(weights[0].tolist(), drawn.mean(0).tolist(), strict=True):
        assert abs(found - share) <= 4.5 * math.sqrt(share * (1 - share) / count)


def test_fixed_depends_on_the_image_and_not_on_its_batch() -> None:
    weights, seeds = router_weights(), [0, -1, 2**63, 2**64 - 2, *range(100, 96 + B)]
    whole = routed(Fixed(), weights, seeds)
    assert torch.equal(routed(Fixed(), weights[10:20], seeds[10:20]), whole[10:20])
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    assert torch.equal(routed(Fixed(), weights[order], [seeds[i] for i in order]), whole[order])
    assert not torch.equal(routed(Fixed(), weights, [s // 2 + 1000 for s in seeds]), whole)
    with pytest.raises(ValueError, match=r"fixed needs the seeds of the 3 images, got 0"):
        routed(Fixed(), weights[:3], ())


def test_names() -> None:
    routes = {"full": Full(), "top-1": TopK(1), "top-12": TopK(12), "threshold-0.2": Threshold(0.2), "fixed": Fixed()}
    assert {text: parse_route(text) for text in routes} == routes


NO_ROUTES = "|top|top-|top-0|top--1|top-2.5|threshold|threshold-0|threshold-1.5|threshold-nan|full-2|Full|fixed-1|best"


@pytest.mark.parametrize("text", NO_ROUTES.split("|"))
def test_anything_else_is_one_line_that_names_the_choices(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_route(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "\n" not in message
    for choice in ("full", "top-K", "threshold-P", "fixed"):
        assert choice in message
