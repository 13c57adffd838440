"""Settings of a stage: defaults, then a TOML file, then flags, then --set; checked by the stage's own model."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from rich.table import Table

from ..artifacts import UserError, complaints_of, explain
from ..training.recipe import Training

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
    changes = told_changes(file, flags, overrides)
    values = defaults.model_dump()
    for change in changes:
        values = merge(values, change)
    touched = defaults.model_fields_set.union(*changes)
    values = {name: value for name, value in values.items() if name in touched}
    try:
        return type(defaults).model_validate(values)
    except ValidationError as error:
        near = near_names(error, known_names(defaults))
        raise UserError(f"settings: {explain(error)}; {near or 'correct it in the file or with --set'}") from error


def told_changes(
    file: Path | None = None, flags: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What the user sets, as nested tables, the later over the earlier."""
    changes = [] if file is None else [read_toml(file)]
    changes += [nested(name, value) for name, value in (flags or {}).items() if value is not None]
    return [*changes, parse_overrides(overrides)]


def names_in(table: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, Any]]:
    """(`a.b`, value) of everything a nested table sets."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from names_in(value, f"{below}{name}.")
        else:
            yield f"{below}{name}", value


def kept_shares(before: Training, told: Training, overrides: Sequence[str]) -> Training:
    """What was told to change a training; warm-up and average keep their share of another budget, unless told too."""
    changes = told_changes(overrides=overrides)
    insisted = {name.removeprefix("training.") for table in changes for name, _ in names_in(table)}
    over = before.over(told.images, insisted)
    return told.model_copy(update={name: getattr(over, name) for name in {"warmup_images", "ema_images"} - insisted})


def known_names(settings: BaseModel) -> list[str]:
    return [name for name, _ in names_in(settings.model_dump())]


def near_names(error: ValidationError, known: Sequence[str]) -> str | None:
    """Settings that somebody may have meant who named one that does not exist: `did you mean training.batch?`"""
    first = complaints_of(error)[0]
    if first["type"] == "missing":  # `objectives.flw.kind` begins a table that has nothing else
        table = ".".join(map(str, first["loc"][:-1]))
        alike = difflib.get_close_matches(table, {name.rpartition(".")[0] for name in known} - {table}, n=3, cutoff=0.7)
        begun = any(name.startswith(f"{table}.") for name in known)
        return None if begun or not alike else f"did you mean {' or '.join(alike)}?"
    if first["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        return None
    asked = ".".join(map(str, first["loc"]))
    if isinstance(first.get("input"), Mapping):  # the whole group is unknown: `trunk.width` is meant by its end
        asked = next((f"{asked}.{below}" for below, _ in names_in(first["input"])), asked)
    last = asked.rpartition(".")[2]
    ends = difflib.get_close_matches(last, {name.rpartition(".")[2] for name in known}, n=3, cutoff=0.7)
    alike = difflib.get_close_matches(asked, known, n=3, cutoff=0.7)
    alike += [name for name in known if name.rpartition(".")[2] in ends]
    if meant := list(dict.fromkeys(alike))[:4]:
        return f"did you mean {' or '.join(meant)}?"
    group = [name for name in known if name.rpartition(".")[0] == asked.rpartition(".")[0]] if "." in asked else []
    top = dict.fromkeys(name if "." not in name else f"{name.partition('.')[0]}.*" for name in known)
    return f"there are {', '.join(group or top)}"


def settings_table(settings: BaseModel, title: str) -> Table:
    """One line per setting: name, value, meaning; groups are set apart."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("meaning", style="dim")
    group = ""
    for name, value, meaning in described(settings):
        if group and group != name.partition(".")[0]:
            table.add_row()
        group = name.partition(".")[0]
        shown = "none" if value is None else str(value).lower() if isinstance(value, bool) else format_value(value)
        table.add_row(name, shown, meaning)
    return table


def format_value(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def described(settings: Any, below: str = "", meaning: str = "") -> Iterator[tuple[str, Any, str]]:
    """(name, value, meaning) of every setting; one without words of its own has those of whoever holds it."""
    if isinstance(settings, BaseModel):
        for name, field in type(settings).model_fields.items():
            yield from described(getattr(settings, name), f"{below}{name}.", field.description or meaning)
    elif isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from described(value, f"{below}{name}.", meaning)
    elif is_dataclass(settings):
        for held in fields(settings):
            said = held.metadata.get("help", meaning)
            yield from described(getattr(settings, held.name), f"{below}{held.name}.", said)
    else:
        value = getattr(settings, "value", settings)
        yield below.removesuffix("."), value, meaning


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
    """A TOML value, `none`, a count such as `500k`, or else the text as it stands: `network.activation=silu`."""
    if text == "none":
        return None
    if re.fullmatch(r"\d[\d_]*(\.\d+)?[kKmMbB]", text):
        return parse_count("--set", text)
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
    """`old` with the values of `new` in their place, tables merged; an unknown name is left for the model to refuse.

    A table that becomes another thing (`density.name`: uniform instead of logit-normal) keeps nothing of the old one.
    """
    merged = dict(old) if new.get("name", old.get("name")) == old.get("name") else {}
    for name, value in new.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, Mapping) else value
    return merged
