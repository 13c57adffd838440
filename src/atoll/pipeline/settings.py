"""run.toml: everything a run decides, written once. The same file gives the same orders anywhere."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..artifacts import Store, UserError, differences, explain
from ..data.config import PrepareConfig
from ..partition.methods import LARGEST_SEED, PartitionConfig
from ..planning.recipes import RECIPES, PlanConfig
from ..registry.status import SETTINGS

NAME = SETTINGS
HEAD = """\
# What `atoll run` does here, decided once. The same file in another folder gives the same orders anywhere:
# put it there and run `atoll run SOURCE --out FOLDER`.
"""


class Asked(BaseModel):
    """What the user asked for, from which the rest was chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    clusters: int | None = Field(None, ge=2, description="experts (default: 8, fewer for few images or little time)")
    hours: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="time all of it may take here (default: 1)"
    )
    size: int | None = Field(None, gt=0, le=4096, description="side of the square images (default: 64)")
    objectives: str | None = Field(None, description="such as 2ddpm:6flow (default: all flow)")
    recipe: str | None = Field(None, description=f"{', '.join(RECIPES)} (default: by data, machine and hours)")
    format: str | None = Field(None, description="of the source, as in `atoll prepare`")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="of everything")


class EvalConfig(BaseModel):
    """What is sampled to measure the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    routes: tuple[str, ...] = ("top-1", "top-2")
    guidances: tuple[float, ...] = (2.0,)
    steps: int = Field(50, gt=0)
    count: int = Field(1000, gt=1, description="samples per configuration")
    batch: int = Field(500, gt=0, description="samples at a time, by one process")
    blind: bool = Field(False, description="measure a router that does not see the prompt, too")


class RunSettings(BaseModel):
    """All of run.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    compare: bool = Field(False, description="train a monolith too, and compare")
    asked: Asked = Asked()
    prepare: PrepareConfig
    partition: PartitionConfig
    plan: PlanConfig
    router_images: int | None = Field(None, gt=0, description="None: as many as an expert sees")
    evaluation: EvalConfig
    comparison: EvalConfig = Field(description="with --compare, against a monolith")

    @property
    def evaluated(self) -> EvalConfig:
        return self.comparison if self.compare else self.evaluation

    def to_toml(self) -> str:
        # what is not set is left to the stages, whose defaults may depend on the data
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
        raise UserError(f"{run}/{NAME}: not valid TOML ({error}); fix it, or choose another --out") from error
    except ValidationError as error:
        raise UserError(f"{run}/{NAME}: {explain(error)}; fix it, or choose another --out") from error


def write_once(run: Store, settings: RunSettings) -> RunSettings:
    """Write run.toml, or find the same there. A comparison may be added later, and is never dropped."""
    there = read_run(run)
    settings = settings.model_copy(update={"compare": settings.compare or (there is not None and there.compare)})
    if there is not None:
        same = there.model_copy(update={"compare": settings.compare})
        if changed := differences(same.model_dump(mode="json"), settings.model_dump(mode="json")):
            raise UserError(
                f"{run}/{NAME}: was begun with other settings ({', '.join(changed[:4])}); choose another --out, or "
                "leave out what differs"
            )
    if there is None or there.compare != settings.compare:
        run.write(NAME, settings.to_toml().encode())
    return settings


def toml_lines(table: Mapping[str, Any], below: str = "") -> Iterator[str]:
    """A nested table as TOML, a line for each value: `plan.training.images = 200000`."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from toml_lines(value, f"{below}{key}.")
        else:
            yield f"{below}{key} = {json.dumps(value, ensure_ascii=False)}"  # JSON's values are TOML's, too
