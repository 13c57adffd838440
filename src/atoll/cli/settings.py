"""Settings of a stage: defaults, then a TOML file, then flags, then --set; checked by the stage's own model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..artifacts import UserError, explain

Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(
    defaults: Settings,
    *,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Settings:
    """`defaults` with what the file, the flags (None: not given) and `a.b=c` overrides say instead.

    What nobody has set is left to the model, whose default for one setting may depend on another.
    """
    changes = [] if file is None else [read_toml(file)]
    changes += [nested(name, value) for name, value in (flags or {}).items() if value is not None]
    changes.append(parse_overrides(overrides))
    values = defaults.model_dump()
    for change in changes:
        values = merge(values, change)
    touched = defaults.model_fields_set.union(*changes)
    values = {name: value for name, value in values.items() if name in touched}
    try:
        return type(defaults).model_validate(values)
    except ValidationError as error:
        raise UserError(f"settings: {explain(error)}; correct it in the file or with --set") from error


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`a.b=c` texts as one nested table."""
    values: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise UserError(f"--set {override}: write it as name=value, such as --set training.batch=32")
        values = merge(values, nested(name, parse_value(text)))
    return values


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"--config {path}: no such file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not valid TOML ({error})") from error


def parse_value(text: str) -> Any:
    """A TOML value, `none`, or else the text as it stands: `--set network.activation=silu` needs no quotes."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_count(option: str, text: str) -> int:
    """`96000`, `96_000`, `2M`, `1.5k`."""
    number, factor = text.strip().lower().replace("_", "").replace(",", ""), 1.0
    for letter, thousand in (("k", 1e3), ("m", 1e6), ("b", 1e9)):
        if number.endswith(letter):
            number, factor = number[:-1], thousand
    try:
        count = float(number) * factor
    except ValueError:
        count = 0.0
    if not 1 <= count < 1e15 or count != round(count):
        raise UserError(f"{option} {text}: give a whole number, such as 96000, 500k or 2M")
    return round(count)


def nested(name: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 -> {"a": {"b": 1}}."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def merge(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new` in their place, tables merged; an unknown name is left for the model to refuse."""
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, Mapping) else value
    return merged
