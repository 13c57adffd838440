"""Images out of step: the same images as in step, whoever is loaded when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.ensemble import Mixture, parse_route
from atoll.ensemble.asking import AskedEvery
from atoll.ensemble.record import Record, WatchedRoute
from atoll.sampling import Sampling, stream
from atoll.sampling.out_of_step import paint_out_of_step
from tiny_experts import LATENT, Router, engine, plain, question, write_experts

IMAGES = 6
ROUTES = ["top-1", "top-2", "full", "sampled", "fixed", "threshold-0.3"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_experts(tmp_path_factory.mktemp("experts"))


def in_step(mixture: Mixture, sampling: Sampling, batch: int) -> Tensor:
    _, _, condition = question(IMAGES)
    latents = torch.empty(IMAGES, *LATENT)
    for rows, step in stream(mixture, LATENT, range(10, 10 + IMAGES), condition, sampling, batch=batch):
        latents[rows] = step.after
    return latents


def out_of_step(mixture: Mixture, sampling: Sampling, batch: int) -> Tensor:
    _, _, condition = question(IMAGES)
    return paint_out_of_step(mixture, LATENT, range(10, 10 + IMAGES), condition, sampling, batch=batch)


def taking_turns(places: list[Path], route: str, slots: int) -> Mixture:
    return Mixture(engine(places, slots).denoisers, Router(), parse_route(route))


@pytest.mark.parametrize("solver", ["euler", "heun", "dpmpp_2m", "stochastic"])
@pytest.mark.parametrize("slots", [1, 2])
def test_one_at_a_time_an_image_is_the_same_bit_for_bit(places: list[Path], solver: str, slots: int) -> None:
    """With one image per pass nothing differs but the order in which images and experts come."""
    sampling = Sampling(steps=4, solver=solver, guidance=2.0, guidance_interval=(0.2, 0.9))
    for weights in ("own", "conditional"):
        alone = Mixture(plain(places), Router(), parse_route("top-1"), weights)
        expected = in_step(alone, sampling, 1)
        found = out_of_step(replace(taking_turns(places, "top-1", slots), guidance_weights=weights), sampling, 1)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("route", ROUTES)
def test_any_route_with_room_for_any_number(places: list[Path], route: str) -> None:
    sampling = Sampling(steps=4, solver="dpmpp_2m", guidance=1.5)
    expected = in_step(Mixture(plain(places), Router(), parse_route(route)), sampling, IMAGES)
    for slots, batch in ((1, 64), (2, 4), (4, 2)):
        found = out_of_step(taking_turns(places, route, slots), sampling, batch)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_experts_are_fetched_seldom(places: list[Path]) -> None:
    """In step nearly every expert is wanted at every step; out of step one serves all who wait for it."""
    sampling = Sampling(steps=12, guidance=1.0)
    together, turns = engine(places, 2), engine(places, 2)
    images = [
        in_step(Mixture(together.denoisers, Router(), parse_route("top-1")), sampling, IMAGES),
        out_of_step(Mixture(turns.denoisers, Router(), parse_route("top-1")), sampling, IMAGES),
    ]
    assert (images[0] - images[1]).abs().max() < 1e-4
    assert together.residency.fetched > 12
    assert turns.residency.fetched <= 8


def test_a_router_that_is_asked_rarely_is_asked_as_rarely(places: list[Path]) -> None:
    sampling = Sampling(steps=8, guidance=1.0, route_every=4)
    router, other = Router(), Router()
    mixture = Mixture(plain(places), router, parse_route("top-1"))
    times = sampling.times(mixture.schedule)
    expected = in_step(replace(mixture, router=AskedEvery(router, times, 4)), sampling, IMAGES)
    turns = replace(taking_turns(places, "top-1", 2), router=AskedEvery(other, times, 4))
    assert (out_of_step(turns, sampling, 64) - expected).abs().max() < 1e-4
    assert router.rows == 2 * IMAGES
    assert other.rows == router.rows


def test_watchers_of_the_routing_see_the_same(places: list[Path]) -> None:
    sampling = Sampling(steps=5, guidance=2.0)
    records = []
    for mixture, paint in (
        (Mixture(plain(places), Router()), in_step),
        (Mixture(engine(places, 2).denoisers, Router()), out_of_step),
    ):
        record = Record(IMAGES, 4)
        paint(replace(mixture, route=WatchedRoute(parse_route("top-1"), record.add)), sampling, 64)
        records.append(record)
    one, other = records
    assert torch.equal(one.by_image(), other.by_image())
    assert one.by_time() == other.by_time()
