"""Settings: every one with its meaning, wrong names with the near ones, and numbers as people write them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from atoll.artifacts import UserError
from atoll.cli import main
from atoll.cli.options import Settings, described, merge, names_in, parse_setting, parse_value, with_settings
from atoll.diffusion.objective import AnySchedule, Objective, TimeDensity, Weighting
from atoll.models.dit import DiTConfig
from atoll.models.router import RouterConfig
from atoll.planning.recipes import DIGITS, RECIPES, PlanConfig, recipe
from atoll.router.recipes import router_network, router_training
from atoll.router.train import RouterPlan
from atoll.training.config import TrainConfig

LATENT = (3, 32, 32)


def router_of(name: str) -> RouterPlan:
    """The router that is trained beside experts of a recipe."""
    usual = recipe(name, LATENT)
    trunk = router_network(DiTConfig(latent=LATENT, **usual.network.model_dump()))
    return RouterPlan(network=RouterConfig(trunk=trunk, clusters=8), training=router_training(trunk, usual.training))


def all_settings() -> Iterator[tuple[str, BaseModel]]:
    for name in (*RECIPES, DIGITS):
        yield f"plan of {name}", recipe(name, LATENT)
        yield f"router of {name}", router_of(name)


def test_every_setting_has_a_meaning() -> None:
    for what, settings in all_settings():
        shown = list(described(settings))
        assert {name for name, _, _ in shown} == {name for name, _ in names_in(settings.model_dump())}
        for name, _, meaning in shown:
            assert 3 < len(meaning) <= 55, f"{what}: {name} has no meaning that fits a line"
    meanings = {held.name: held.metadata["help"] for held in fields(Objective)}
    for part, things in (("schedule", AnySchedule), ("density", TimeDensity), ("weighting", Weighting)):
        for thing in get_args(things):
            assert next(held.default for held in fields(thing) if held.name == "name") in meanings[part]
            assert all(held.name == "name" or held.metadata.get("help") for held in fields(thing))


@pytest.mark.parametrize("command", ["plan", "router"])
def test_print_config_prints_a_file_for_config_and_does_nothing(
    command: str, planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(planned.rglob("*"))
    place = str(planned / "data" if command == "plan" else planned)
    main([command, place, "--print-config", "--set", "training.images=500k"])
    printed = capsys.readouterr().out
    assert re.search("^training.images = 500000 +# budget: images seen in all$", printed, re.MULTILINE)
    assert tomllib.loads(printed)["training"]["images"] == 500_000
    (tmp_path / "settings.toml").write_text("\n".join(line for line in printed.splitlines() if "trunk" not in line))
    if command == "plan":
        main([command, place, "--config", str(tmp_path / "settings.toml"), "--print-config"])
        assert capsys.readouterr().out == printed
    assert sorted(planned.rglob("*")) == before


WRONG = [
    ("plan", "network.widht=1", "did you mean network.width"),
    ("plan", "trunk.width=1", "did you mean network.width?"),
    ("plan", "objective.flow.density.men=1", "did you mean objective.flow.density.mean"),
    ("plan", "objective.flow.density.std=-1", "flow.density.logit-normal: std of a logit-normal density must be"),
    ("plan", "objective.flow.density.name=gauss", "expected tags: 'uniform', 'logit-normal', 'shifted' (got"),
    ("plan", "objective.flow.density.name=shifted", "objective.flow.density.shifted.shift: field required"),
    ("plan", "objective.flw.kind=v", "did you mean objective.flow"),
    ("plan", "objective.flow.kind=score", "the target is unbounded"),
    ("plan", "bananas=1", "there are objectives, network.*, training.*, objective.*, acceptance.*"),
    ("router", "network.trunk.widht=1", "did you mean network.trunk.width"),
    ("router", "width=1", "did you mean network.trunk.width?"),
    ("router", "training.images=many", "training.images: input should be a valid integer"),
    *(("plan", f"training.images={text}", "training.images") for text in ("0", "1.5", "1.0001k", "nan", "2MM", "none")),
]


@pytest.mark.parametrize(("command", "setting", "words"), WRONG)
def test_a_wrong_setting_is_one_line_with_the_near_ones(command: str, setting: str, words: str) -> None:
    settings: BaseModel = recipe("laptop", LATENT) if command == "plan" else router_of("laptop")
    with pytest.raises(UserError) as refused:
        Settings(parse_setting(setting)).over(settings)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "setting", ["network.clusters=2", "network.trunk.latent=[1,4,4]", "network.trunk.vocabulary=3"]
)
def test_a_router_is_for_the_data_there_is(setting: str, planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["router", str(planned), "--print-config", "--set", setting])
    assert refused.value.code == 2
    assert f"{setting.partition('=')[0]}: follows from the data and the partition" in capsys.readouterr().err


def set_over(base: PlanConfig, *texts: str) -> Any:
    """The density of flow with these settings over a recipe."""
    changes: dict[str, Any] = {}
    for text in texts:
        changes = merge(changes, parse_setting(f"objective.flow.density.{text}"))
    return Settings(changes).over(base).objective["flow"].density


def test_another_kind_of_table_keeps_nothing_of_the_one_before() -> None:
    """A mean and a deviation are a logit-normal's, and would be in the way of every other density."""
    base = recipe("laptop", LATENT)
    assert set_over(base, "name=uniform") == base.objective["ddpm"].density
    assert set_over(base, "name=shifted", "shift=3").shift == 3
    wide = set_over(base, "std=2")
    assert (wide.mean, wide.std) == (0.0, 2.0)


def test_file_then_options_then_set(tmp_path: Path) -> None:
    """The later over the earlier; what is not set is the model's, and an option is one line: the field's name."""

    class Stage(BaseModel):
        size: int | None = Field(64, description="side of the images")
        kind: Literal["a", "b"] = Field("a", description="which one")
        training: TrainConfig = TrainConfig(images=10, batch=2, learning_rate=1.0, ema_images=1, seed=0)

    found: list[Settings] = []
    app = typer.Typer()

    @app.command()
    @with_settings(Stage, "size -s", "kind", "training.images")
    def stage(place: str, *, settings: Settings) -> None:
        found.append(settings)

    (tmp_path / "a.toml").write_text("size = 1\nkind = 'b'\n[training]\nbatch = 5\nimages = 7\n")
    runner = CliRunner()
    options = ["here", "--config", str(tmp_path / "a.toml"), "-s", "2", "--images", "1.5k", "--set", "size=none"]
    assert runner.invoke(app, options).exit_code == 0
    result = found[0].over(Stage())
    assert (result.size, result.kind, result.training.images, result.training.batch) == (None, "b", 1500, 5)
    assert found[0].names == {"size", "kind", "training.images", "training.batch"}
    help = runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert re.search(r"--size +-s +<number> +side of the images", help)
    assert "side of the images (default: 64)" in help
    with pytest.raises(UserError, match=r"--kind: input should be 'a' or 'b' \(got 'c'\); correct it"):
        runner.invoke(app, ["here", "--kind", "c"], catch_exceptions=False)
        found[1].over(Stage())


def test_warm_up_and_average_keep_their_fraction_of_a_budget() -> None:
    plan = router_of("laptop")
    half = Settings({"training": {"images": plan.training.images // 2, "ema_images": 7}}).over_plan(plan).training
    assert (half.warmup_images, half.ema_images) == (plan.training.warmup_images // 2, 7)


VALUES: dict[str, object] = {"500k": 500_000, "1.5M": 1_500_000, "96,000": 96_000, "96_000": 96_000, "0.32k": 320}
VALUES |= {"3": 3, "0.1": 0.1, "1e-3": 1e-3, "true": True, "none": None, "silu": "silu", "[1, 2]": [1, 2]}
VALUES |= {"2ddpm:6flow": "2ddpm:6flow", "16b-ish": "16b-ish"}


def test_values_as_people_write_them() -> None:
    assert {text: parse_value(text) for text in VALUES} == VALUES
