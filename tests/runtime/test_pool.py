"""Experts in slots: the same answers as one by one, whatever their size and objective, and whoever is there."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.artifacts import UserError
from atoll.diffusion import Condition
from atoll.mixture import Mixture, parse_route
from atoll.runtime.graphs import Runner
from atoll.runtime.pool import ExpertPool
from atoll.runtime.residency import Residency, UnreadableExperts
from atoll.sampling import SOLVERS, Engine, Request, Sampling, generate
from tiny_experts import LATENT, Router, plain, pool, question, stored, write_experts


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four experts of different patch, width, depth, variant, schedule and kind."""
    return write_experts(tmp_path_factory.mktemp("experts"))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def mixture(places: list[Path], route: str, slots: int | None = None, **how: object) -> Mixture:
    return Mixture(pool(places, slots, **how), Router(), parse_route(route))  # type: ignore[arg-type]


def images(model: Mixture, sampling: Sampling, count: int = 6, batch: int = 64) -> Tensor:
    _, _, condition = question(count)
    return generate(model, LATENT, range(10, 10 + count), condition, sampling, batch=batch)


@pytest.mark.parametrize("slots", [4, 2, 1])
@pytest.mark.parametrize("route", ["top-1", "top-2", "full"])
def test_experts_of_any_size_and_objective_run_side_by_side(places: list[Path], route: str, slots: int) -> None:
    """As each alone; with less room than experts, too."""
    x, t, condition = question(9)
    with torch.no_grad():
        expected = Mixture.of(plain(places), Router(), parse_route(route))(x, t, condition).value
        for _ in range(2):
            found = mixture(places, route, slots)(x, t, condition).value
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_expert_of_the_pool_is_a_denoiser(places: list[Path]) -> None:
    x, t, condition = question(4)
    experts = pool(places)
    with torch.no_grad():
        for k, alone in enumerate(plain(places)):
            assert torch.equal(experts[k](x, t, condition).value, alone(x, t, condition).value)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("slots", [1, 2])
def test_experts_that_take_turns_give_the_images_of_lockstep(places: list[Path], solver: str, slots: int) -> None:
    """Bit for bit: padded rows do not depend on their company, and parts are summed in one order."""
    for route, weights in (("top-1", "own"), ("top-2", "own"), ("fixed", "conditional")):
        sampling = Sampling(
            steps=4,
            solver=solver,
            guidance=2.0,
            guidance_interval=(0.2, 0.9),
            guidance_weights=weights,  # type: ignore[arg-type]
            route_every=2,
        )
        expected = images(mixture(places, route), sampling)
        for batch in (64, 4):
            assert torch.equal(images(mixture(places, route, slots), sampling, batch=batch), expected)


def test_in_turns_an_expert_is_copied_seldom(places: list[Path]) -> None:
    turns = mixture(places, "top-1", 2)
    images(turns, Sampling(steps=12, guidance=1.0))
    assert isinstance(turns.experts, ExpertPool)
    assert turns.experts.residency.fetched <= 8, "in lockstep nearly every step needs every expert"


def test_a_seed_gives_the_same_image_alone_and_in_random_company(places: list[Path]) -> None:
    """Difference exactly 0 on a CPU: other solvers, routes, scales and numbers of images, admitted at random rounds."""
    numbers = random.Random(3)
    experts = pool(places)
    model = Mixture(experts, Router(), parse_route("top-1"))

    def request(number: int) -> Request:
        own = random.Random(number)
        sampling = Sampling(
            steps=own.randint(2, 6),
            solver=own.choice(list(SOLVERS)),
            guidance=own.choice([1.0, 2.0, 3.5]),
            route_every=own.choice([1, 2]),
        )
        count = own.choice([1, 1, 2, 3])
        _, _, condition = question(count, seed=number)
        route = parse_route(own.choice(["top-1", "top-2", "full", "threshold-0.2", "fixed"]))
        return Request(range(number * 10, number * 10 + count), condition, sampling, route)

    def finished(requests: list[Request]) -> list[Request]:
        engine, waiting = Engine(model, LATENT, max_images=16), list(requests)
        while waiting or len(engine):
            if waiting and (len(engine) == 0 or numbers.random() < 0.5):
                engine.admit(waiting.pop())
            engine.round()
        return requests

    together = finished([request(number) for number in range(24)])
    for number, one in enumerate(together):
        (alone,) = finished([request(number)])
        assert one.latents is not None
        assert alone.latents is not None
        assert torch.equal(one.latents, alone.latents)


def test_rounded_weights_give_nearly_the_same(places: list[Path]) -> None:
    x, t, condition = question(16)
    with torch.no_grad():
        wanted = [expert(x, t, condition).value for expert in plain(places)]
        for settings, most in (
            ({"int8": True}, 0.01),
            ({"precision": "bfloat16"}, 0.02),
            ({"precision": "bfloat16", "int8": True}, 0.03),
        ):
            experts = pool(places, **settings)  # type: ignore[arg-type]
            found = [experts[k](x, t, condition).value for k in range(4)]
            errors = [error(a, b) for a, b in zip(found, wanted, strict=True)]
            assert 1e-5 < min(errors) < max(errors) < most, settings
            assert all(value.dtype == torch.float32 for value in found)


def test_rounding_takes_the_memory_it_says(places: list[Path]) -> None:
    wide, half, eighth = (
        stored(places[3], precision, int8=int8).layout.nbytes  # type: ignore[arg-type]
        for precision, int8 in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    )
    assert 0.5 <= half / wide < 0.55
    assert 0.5 < eighth / half < 0.75, "a small network has much outside its blocks"


def test_an_autocast_outside_changes_nothing(places: list[Path]) -> None:
    x, t, condition = question(2)
    expert = pool(places)[0]
    with torch.no_grad():
        wanted = expert(x, t, condition).value
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(expert(x, t, condition).value, wanted)


@pytest.mark.parametrize("rows", [1, 3, 5, 11])
def test_rows_are_padded_to_few_shapes_and_answered_in_pieces(places: list[Path], rows: int) -> None:
    """What a graph would compute: whole shapes only."""
    seen: list[int] = []

    def function(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        seen.append(len(x))
        assert condition is not None
        assert condition.dropped is not None
        assert condition.tokens is not None
        return x * t.float()[:, None, None, None] + condition.tokens.mean((1, 2))[:, None, None, None]

    replayed = Runner(function, torch.device("cpu"), graphs=True, shapes=(2, 4))
    x, t, condition = question(12)
    some = torch.randperm(12, generator=torch.Generator().manual_seed(rows))[:rows]
    tokens = condition.tokens
    assert tokens is not None
    wanted = x * t.float()[:, None, None, None] + tokens.mean((1, 2))[:, None, None, None]
    assert torch.equal(replayed(x, t, condition, some), wanted[some])
    assert set(seen) <= {2, 4}
    assert sum(seen) < rows + 2
    assert torch.equal(replayed(x[:rows], t[:rows], condition[:rows]), wanted[:rows])
    room = torch.empty(rows, *x.shape[1:])
    assert replayed(x, t, condition, some, room) is room
    assert torch.equal(room, wanted[some])


def test_an_answer_outlives_the_next_question(places: list[Path]) -> None:
    replayed = Runner(lambda x, t, condition: x + 0.0, torch.device("cpu"), graphs=True)
    first = replayed(torch.ones(2, 1), torch.zeros(2), None)
    replayed(torch.zeros(2, 1), torch.zeros(2), None)
    assert torch.equal(first, torch.ones(2, 1))


def test_padding_changes_velocities_by_rounding_alone(places: list[Path]) -> None:
    x, t, condition = question(9)
    with torch.no_grad():
        expected = Mixture.of(plain(places), Router(), parse_route("top-2"))(x, t, condition).value
        found = mixture(places, "top-2", 2, graphs=True)(x, t, condition).value
    assert error(found, expected) < 1e-5


def test_experts_spread_over_devices(places: list[Path]) -> None:
    """As far as a machine without any can show: the CPU, twice. test_pool_on_cuda.py has the rest."""
    x, t, condition = question(6)
    with torch.no_grad():
        found = mixture(places, "top-2", devices=("cpu", "cpu"))(x, t, condition).value
        assert torch.equal(found, mixture(places, "top-2")(x, t, condition).value)


def test_in_lockstep_experts_in_memory_run_first(places: list[Path]) -> None:
    """With room for three of four, each call copies the one that is missing, not all of them."""
    experts = pool(places, 3)
    x, t, condition = question(8)
    model = Mixture(experts, Router(), parse_route("full"))
    with torch.no_grad():
        for _ in range(5):
            model(x, t, condition)
    assert experts.residency.fetched <= 3 + 5


def test_a_cluster_without_an_expert_is_named(places: list[Path]) -> None:
    x, t, condition = question(2)
    experts = replace(pool(places), numbers={0: 0, 2: 2, 3: 3})
    with pytest.raises(UserError, match="cluster 1: has no expert"):
        experts[1](x, t, condition)


def test_the_experts_that_cannot_be_read_are_named(places: list[Path]) -> None:
    good, bad = stored(places[0]), stored(places[1])
    path = bad.file.path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        for slots in (2, 1):
            with pytest.raises(UnreadableExperts, match=r"model\.safetensors: corrupt, sha256 is") as caught:
                Residency([good, bad], slots, [torch.device("cpu")])
            assert list(caught.value.reasons) == [1]
    finally:
        path.write_bytes(before)
