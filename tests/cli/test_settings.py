"""Settings: every one with its meaning, wrong names with the near ones, and numbers as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from atoll.cli.bars import console
from pydantic import BaseModel

from atoll.artifacts import UserError
from atoll.cli import main
from atoll.cli.settings import described, known_names, parse_count, parse_value, read_settings
from atoll.models.dit import DiTConfig
from atoll.models.router import RouterConfig
from atoll.planning.recipes import DIGITS, RECIPES, recipe
from atoll.process.objective import AnySchedule, Objective, TimeDensity, Weighting
from atoll.router.recipes import router_network, router_training
from atoll.router.train import RouterPlan

LATENT = (3, 32, 32)
CONDITIONS: list[dict[str, object]] = [
    {"condition": "none"},
    {"condition": "labels", "classes": 8},
    {"condition": "words", "vocabulary": 100, "text_length": 16},
    {"condition": "tokens", "text_width": 768, "text_length": 77},
]


def router_of(name: str, **condition: object) -> RouterPlan:
    """The router that is trained beside experts of a recipe."""
    usual = recipe(name, LATENT)
    expert = DiTConfig(latent=LATENT, **usual.network.model_dump(), **condition)  # type: ignore[arg-type]
    trunk = router_network(expert)
    return RouterPlan(network=RouterConfig(trunk=trunk, clusters=8), training=router_training(trunk, usual.training))


def all_settings() -> Iterator[tuple[str, BaseModel]]:
    for name in (*RECIPES, DIGITS):
        yield f"plan of {name}", recipe(name, LATENT)
        for condition in CONDITIONS:
            yield f"router of {name}", router_of(name, **condition)


def test_every_setting_of_every_recipe_has_a_meaning() -> None:
    for what, settings in all_settings():
        shown = list(described(settings))
        assert {name for name, _, _ in shown} == set(known_names(settings)), "none is left out"
        for name, _, meaning in shown:
            assert 3 < len(meaning) <= 55, f"{what}: {name} has no meaning that fits a line"
            assert "\n" not in meaning


def test_settings_that_no_recipe_has_are_explained_too() -> None:
    """Other paths, densities and weightings have numbers of their own, and stand in the line of what they replace."""
    meanings = {held.name: held.metadata["help"] for held in fields(Objective)}
    for part, things in (("schedule", AnySchedule), ("density", TimeDensity), ("weighting", Weighting)):
        for thing in get_args(things):
            name = next(held.default for held in fields(thing) if held.name == "name")
            assert name in meanings[part]
            for held in fields(thing):
                assert held.name == "name" or held.metadata.get("help"), f"{name}: {held.name} has no meaning"
    assert all(kind in meanings["kind"] for kind in ("x0", "epsilon", "velocity", "v", "score"))


@pytest.mark.parametrize("verb", ["plan", "router"])
def test_a_line_for_each_is_shown_and_nothing_is_done(
    verb: str, planned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # for a console that is made now,
    monkeypatch.setattr(console, "_width", 160)  # and for the one that is there
    monkeypatch.setattr(console, "_height", 100)
    before = sorted(planned.rglob("*"))
    main([verb, str(planned / "data" if verb == "plan" else planned), "--settings", "--set", "training.images=500k"])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title.strip()
    assert head.split() == ["setting", "value", "meaning"]
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in lines if line.strip()}
    assert rows["training.images"][1:] == ["500,000", "budget: images seen in all"]
    names = known_names(recipe(DIGITS) if verb == "plan" else router_of(DIGITS))
    assert set(rows) == set(names)
    assert all(len(row) == 3 for row in rows.values()), "name, value, meaning"
    assert sorted(planned.rglob("*")) == before


@pytest.mark.parametrize(
    ("verb", "setting", "said"),
    [
        ("plan", "network.widht=1", "did you mean network.width"),
        ("plan", "trunk.width=1", "did you mean network.width?"),
        ("plan", "objectives.flow.density.men=1", "did you mean objectives.flow.density.mean"),
        ("plan", "objectives.flow.density.std=-1", "objectives.flow.density: std of a logit-normal density must be"),
        ("plan", "objectives.flow.density.name=gauss", "should be 'uniform' or 'logit-normal' or 'shifted' (got"),
        ("plan", "objectives.flow.density.name=shifted", "objectives.flow.density.shift: field required"),
        ("plan", "objectives.flw.kind=v", "did you mean objectives.flow"),
        ("plan", "bananas=1", "there are mix, network.*, training.*, objectives.*, acceptance.*"),
        ("router", "network.trunk.widht=1", "did you mean network.trunk.width"),
        ("router", "width=1", "did you mean network.trunk.width?"),
        ("router", "training.lerning_rate=1", "did you mean training.learning_rate?"),
        ("router", "training.images=many", "training.images: input should be a valid integer"),
    ],
)
def test_a_wrong_setting_is_one_line_with_the_near_ones(verb: str, setting: str, said: str) -> None:
    settings: BaseModel = recipe("laptop", LATENT) if verb == "plan" else router_of("laptop")
    with pytest.raises(UserError) as refused:
        read_settings(settings, overrides=[setting])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("network.clusters=2", "network.clusters: is as the partition has it"),
        ("network.trunk.latent=[1,4,4]", "network.trunk.latent: is as the data has it"),
        ("network.trunk.vocabulary=3", "network.trunk.vocabulary: is as the data has it"),
    ],
)
def test_a_router_is_for_the_data_there_is(
    setting: str, said: str, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["router", str(planned), "--settings", "--set", setting])
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_another_thing_of_a_kind_keeps_nothing_of_the_one_before() -> None:
    """A mean and a deviation are a logit-normal's, and would be in the way of every other density."""
    base = recipe("laptop", LATENT)
    told = read_settings(base, overrides=["objectives.flow.density.name=uniform"])
    assert told.objectives["flow"].density == base.objectives["ddpm"].density
    shift = ["objectives.flow.density.name=shifted", "objectives.flow.density.shift=3"]
    assert getattr(read_settings(base, overrides=shift).objectives["flow"].density, "shift", None) == 3
    wide = read_settings(base, overrides=["objectives.flow.density.std=2"]).objectives["flow"].density
    assert (getattr(wide, "mean", None), getattr(wide, "std", None)) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("text", "count"),
    [("96000", 96_000), ("96_000", 96_000), ("96,000", 96_000), ("2M", 2_000_000), ("1.5k", 1500), ("0.32k", 320)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count("--images", text) == count


@pytest.mark.parametrize("text", ["", "many", "0", "-3", "1.5", "1.0001k", "nan", "inf", "1e30", "M", "2MM"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UserError, match="give a whole number, such as"):
        parse_count("--images", text)


def test_values_as_people_write_them() -> None:
    texts = ["500k", "1.5M", "3", "0.1", "true", "none", "silu", "[1, 2]", "2ddpm:6flow", "16b-ish"]
    assert [parse_value(text) for text in texts] == [
        *(500_000, 1_500_000, 3, 0.1, True, None, "silu", [1, 2], "2ddpm:6flow", "16b-ish"),
    ]
