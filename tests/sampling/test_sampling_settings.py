"""How to sample: one object, the same in Python, on the command line and in a file; refused where it cannot be."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from atoll.artifacts import UserError
from atoll.cli import command_of
from atoll.evaluation.samples import SampleSettings
from atoll.sampling import Sampling

OTHER = Sampling(
    steps=7,
    solver="heun",
    grid="shifted-2.5",
    guidance=1.5,
    guidance_interval=(0.1, 0.9),
    guidance_weights="conditional",
    route="fixed",
    route_every=4,
    precision="bfloat16",
)

MISTAKES: list[tuple[str, Any, str]] = [
    ("steps", 0, "--steps 0: "),
    ("steps", 2.5, "--steps 2.5: "),
    ("steps", True, "--steps True: "),
    ("solver", "rk45", "--solver rk45: not known; use one of euler"),
    ("grid", "karras", "--grid karras: not known; use uniform, log-snr or shifted-S"),
    ("grid", "shifted-0", "--grid shifted-0: "),
    ("guidance", float("nan"), "--guidance nan: "),
    ("guidance", "two", "--guidance two: "),
    ("guidance_interval", (0.9, 0.1), "--guidance-interval 0.9 0.1: use two times"),
    ("guidance_interval", (0.1,), "--guidance-interval 0.1: "),
    ("guidance_interval", (0.0, 1.5), "--guidance-interval 0.0 1.5: "),
    ("guidance_weights", "both", "--guidance-weights both: use own or conditional"),
    ("route", 2, "--route 2: "),
    ("route_every", 0, "--route-every 0: "),
    ("precision", "float16", "--precision float16: use auto, float32, bfloat16"),
]


@pytest.mark.parametrize(("name", "value", "words"), MISTAKES, ids=str)
def test_what_cannot_be_is_refused_with_option_value_and_fix(name: str, value: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        Sampling(**{name: value})
    assert str(caught.value).startswith(words)
    assert "use " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_field_can_be_wrong() -> None:
    assert {name for name, *_ in MISTAKES} == {each.name for each in fields(Sampling)}


@pytest.mark.parametrize("sampling", [Sampling(), OTHER], ids=["default", "other"])
def test_a_file_holds_it_and_gives_it_back(sampling: Sampling) -> None:
    settings = SampleSettings(prompts=("a",), sampling=sampling)
    written = settings.model_dump_json()
    assert SampleSettings.model_validate_json(written) == settings
    values = json.loads(written)["sampling"]
    assert set(values) == {each.name for each in fields(Sampling)}
    assert Sampling(**values) == sampling, "a list for a pair is fine"
    assert hash(Sampling(**values)) == hash(sampling)


def test_a_file_with_a_wrong_value_or_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="--steps 0"):
        SampleSettings.model_validate({"prompts": ["a"], "sampling": {"steps": 0}})
    with pytest.raises(ValueError, match="color"):
        SampleSettings.model_validate({"prompts": ["a"], "sampling": {"color": "red"}})


def test_it_stays_as_it_is() -> None:
    with pytest.raises(FrozenInstanceError):
        OTHER.steps = 8  # type: ignore[misc]


def test_precision_follows_the_device_unless_it_is_named() -> None:
    assert Sampling().precision_on("cpu") == Sampling().precision_on("mps") == "float32"
    assert Sampling().precision_on("cuda:1") == "bfloat16"
    assert Sampling(precision="float32").precision_on("cuda") == "float32"
    assert Sampling(precision="bfloat16").precision_on("cpu") == "bfloat16"


@pytest.mark.parametrize(("name", "own"), [("sample", set()), ("evaluate", {"route", "guidance"})])
def test_every_field_is_an_option_of_its_own(name: str, own: set[str]) -> None:
    """So that a new field needs no second line."""
    options = {parameter.name: parameter for parameter in command_of(name).params}
    assert "sampling" not in options
    for each in fields(Sampling):
        assert options[each.name].opts == [f"--{each.name.replace('_', '-')}"]
        if each.name not in own:
            default = "" if each.default is None else f" (default: {each.default})"
            assert options[each.name].help == each.metadata["help"] + default
