"""Experts in slots: the same answers as one by one, whatever their size and objective, and whoever is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.ensemble import Mixture, parse_route
from atoll.ensemble.groups import asked, grouped
from atoll.ensemble.replay import SHAPES, Replayed, padded
from atoll.ensemble.residency import Residency, UnreadableExperts
from atoll.process import Condition
from tiny_experts import Router, engine, plain, question, stored, write_experts


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four experts of different patch, width, depth, variant, schedule and kind."""
    return write_experts(tmp_path_factory.mktemp("experts"))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("slots", [4, 2, 1])
@pytest.mark.parametrize("route", ["top-1", "top-2", "full"])
def test_experts_of_any_size_and_objective_answer_side_by_side(places: list[Path], route: str, slots: int) -> None:
    """Bit for bit as if each were asked alone; with less room than experts, too."""
    x, t, condition = question(9)
    with torch.no_grad():
        expected = Mixture(plain(places), Router(), parse_route(route)).guided(x, t, condition, 2.0).value
        mixture = Mixture(engine(places, slots).denoisers, Router(), parse_route(route))
        for _ in range(2):
            assert torch.equal(mixture.guided(x, t, condition, 2.0).value, expected)


def test_an_expert_alone_is_a_denoiser(places: list[Path]) -> None:
    x, t, condition = question(3)
    with torch.no_grad():
        for mine, alone in zip(engine(places).denoisers, plain(places), strict=True):
            assert torch.equal(mine(x, t, condition).value, alone(x, t, condition).value)


def test_rounded_weights_answer_nearly_the_same(places: list[Path]) -> None:
    x, t, condition = question(16)
    with torch.no_grad():
        wanted = [expert(x, t, condition).value for expert in plain(places)]
        for settings, most in (
            ({"int8": True}, 0.01),
            ({"precision": "bfloat16"}, 0.02),
            ({"precision": "bfloat16", "int8": True}, 0.03),
        ):
            found = [expert(x, t, condition).value for expert in engine(places, **settings).denoisers]  # type: ignore[arg-type]
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
    (expert, *_) = engine(places).denoisers
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

    replayed = Replayed(function, torch.device("cpu"), shapes=(2, 4), record=False)
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
    replayed = Replayed(lambda x, t, condition: x + 0.0, torch.device("cpu"), record=False)
    first = replayed(torch.ones(2, 1), torch.zeros(2), None)
    replayed(torch.zeros(2, 1), torch.zeros(2), None)
    assert torch.equal(first, torch.ones(2, 1))


def test_shapes_waste_little() -> None:
    wasted = [padded(rows) / rows for rows in range(1, SHAPES[-1] + 1)]
    assert min(wasted) == 1.0
    assert max(wasted) < 1.13
    assert max(padded(rows) - rows for rows in range(1, 17)) == 0, "groups of a top-1 batch of 64 are of this size"


def test_padding_changes_answers_by_rounding_alone(places: list[Path]) -> None:
    x, t, condition = question(9)
    with torch.no_grad():
        expected = Mixture(plain(places), Router(), parse_route("top-2"))(x, t, condition).value
        denoisers = engine(places, 2, graphs=True, shapes=(4, 8)).denoisers
        assert error(Mixture(denoisers, Router(), parse_route("top-2"))(x, t, condition).value, expected) < 1e-5


def test_experts_spread_over_devices(places: list[Path]) -> None:
    """As far as a machine without any can show: the CPU, twice. test_cuda.py has the rest."""
    spread = engine(places, devices=("cpu", "cpu"))
    x, t, condition = question(6)
    with torch.no_grad():
        expected = Mixture(plain(places), Router(), parse_route("top-2"))(x, t, condition).value
        assert torch.equal(Mixture(spread.denoisers, Router(), parse_route("top-2"))(x, t, condition).value, expected)


def test_in_step_the_experts_that_are_there_go_first(places: list[Path]) -> None:
    """With room for three of four, each step fetches the one that is missing, not all of them."""
    turns = engine(places, 3)
    x, t, condition = question(8)
    mixture = Mixture(turns.denoisers, Router(), parse_route("full"))
    with torch.no_grad():
        for _ in range(5):
            mixture(x, t, condition)
    assert turns.residency.fetched <= 3 + 5


def test_groups_are_those_of_the_weights(places: list[Path]) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    x, t, condition = question(4)
    groups = grouped(weights, x, t, condition)
    assert [(group.expert, group.count) for group in groups] == [(0, 2), (1, 3)]
    assert [group.rows.tolist() for group in groups if group.rows is not None] == [[1, 3], [0, 1, 2]]
    (whole,) = grouped(torch.ones(4, 1), x, t, condition)
    assert whole.rows is None
    spoilt = grouped(torch.full((4, 1), torch.nan), x, t, condition)
    assert [group.count for group in spoilt] == [4], "a router that says NaN is not passed over in silence"


def test_denoisers_of_an_engine_and_others_are_asked_together(places: list[Path]) -> None:
    one, other = engine(places[:2]).denoisers, plain(places[2:])
    x, t, condition = question(4)
    weights = torch.full((4, 4), 0.25)
    with torch.no_grad():
        groups = grouped(weights, x, t, condition)
        found = asked([*one, *other], groups)
        for value, expert in zip(found, plain(places), strict=True):
            assert torch.equal(value, expert(x, t, condition).value)


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
