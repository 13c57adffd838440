"""run.toml: everything a run decides, written once. The same file gives the same orders anywhere."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import Store, UserError, differences, explain
from ..data.prepare import PrepareConfig
from ..ensemble.status import SETTINGS
from ..partition.config import PartitionConfig
from ..planning.recipes import PlanConfig

NAME = SETTINGS
HEAD = """\
# What `atoll run` does here, decided once. The same file in another folder gives the same orders anywhere:
# put it there and run `atoll run SOURCE --out FOLDER`.
"""


class Asked(BaseModel):
    """What the user asked for, from which the rest was chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    hours: float | None = None
    clusters: int | None = None
    size: int | None = None
    objectives: str | None = None
    recipe: str | None = None
    seed: int = 0
    format: str | None = None


class Painting(BaseModel):
    """What is sampled to measure the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    routes: tuple[str, ...] = ("top-1", "top-2")
    guidances: tuple[float, ...] = (2.0,)
    steps: int = Field(50, gt=0)
    count: int = Field(1000, gt=1, description="samples of every way")
    batch: int = Field(500, gt=0, description="of them painted at a time, each batch by one process")
    feature_scale: float = Field(1.0, gt=0)
    blind: bool = Field(False, description="measure a router that does not see the prompt, too")


class RunSettings(BaseModel):
    """All of run.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    asked: Asked = Asked()
    prepare: PrepareConfig
    partition: PartitionConfig
    plan: PlanConfig
    router_images: int | None = Field(None, gt=0, description="None: as many as an expert sees")
    evaluation: Painting
    comparison: Painting = Field(description="with --compare, beside a monolith")

    def to_toml(self) -> str:
        # what nobody has set is left to the stages, whose defaults may depend on the data
        content = self.model_dump(mode="json", exclude_none=True)
        for name in ("prepare", "partition"):
            content[name] = getattr(self, name).model_dump(mode="json", exclude_none=True, exclude_unset=True)
        return HEAD + "\n" + "\n".join(toml_lines(content)) + "\n"


def read_run(run: Store) -> RunSettings | None:
    """The settings of a run that was begun; None if there is none."""
    try:
        content = run.read(NAME)
    except FileNotFoundError:
        return None
    try:
        return RunSettings.model_validate(tomllib.loads(content.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{run}/{NAME}: not valid TOML ({error}); mend it, or choose another --out") from error
    except ValidationError as error:
        raise UserError(f"{run}/{NAME}: {explain(error)}; mend it, or choose another --out") from error


def write_once(run: Store, settings: RunSettings) -> RunSettings:
    """Write run.toml, or find that it says the same."""
    there = read_run(run)
    if there is None:
        run.write(NAME, settings.to_toml().encode())
        there = read_run(run)
        assert there is not None
    if changed := differences(there.model_dump(mode="json"), settings.model_dump(mode="json")):
        raise UserError(
            f"{run}/{NAME}: was begun with other settings ({', '.join(changed[:4])}); choose another --out, or leave "
            "out what differs"
        )
    return there


def toml_lines(table: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """A nested table as TOML: values first, then tables under their full names."""
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if name and (values or not table):
        yield ""
        yield f"[{name}]"
    for key, value in values.items():
        yield f"{key} = {json.dumps(value, ensure_ascii=False)}"  # JSON's texts, numbers and lists are TOML's, too
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from toml_lines(value, f"{name}.{key}" if name else key)
