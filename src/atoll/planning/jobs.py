"""What an island trains: the largest network that fits its memory and completes its budget in the hours there are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from ..artifacts import UserError
from ..models.accounting import account
from ..models.dit import DiTConfig
from ..training.memory import Fit, fits
from .islands import Island
from .recipes import Network, PlanConfig

PREDICTED = {"precision", "micro_batch", "checkpointed_blocks", "moments"}  # of a ComputeConfig, in the manifest


@dataclass(frozen=True)
class Job:
    """One cluster on one island, as predicted. The config goes into its order; the rest is for people."""

    island: Island
    size: str
    config: PlanConfig
    fit: Fit

    @property
    def hours(self) -> float:
        return self.config.training.images / self.fit.images_per_s / 3600

    def record(self, cluster: int) -> dict[str, object]:
        """A row of the manifest's table."""
        return {
            "cluster": cluster,
            "island": self.island.name,
            "size": self.size,
            **self.fit.compute.model_dump(include=PREDICTED),
            "savings": self.fit.compute.savings,
            "memory_gib": self.fit.memory_gib,
            "images_per_s": self.fit.images_per_s,
            "images": self.config.training.images,
            "hours": round(self.hours, 2),
        }


def plan_job(
    island: Island,
    hours: float,
    options: Mapping[str, PlanConfig],
    *,
    build: Callable[[Network], DiTConfig],
    explicit: Collection[str] = (),
) -> Job:
    """What an island trains on a cluster in so many hours.

    Of the options, the largest first: the first that fits and completes its budget; if none does, the last that fits,
    for as many images as there is time, unless the number of images is `explicit`.
    """
    last = None
    for name, config in options.items():
        fit = best_fit(island, build(config.network), config.training.batch)
        if fit is not None:
            last = Job(island, name, config, fit)
            if last.hours <= hours:
                return last
    if last is None:
        raise UserError(
            f"--islands {island.name}: {[*options][-1]} does not fit into {island.machine.memory:g} GiB; use a "
            "smaller size or --recipe, leave the island out, or, if it has torchao, set eight_bit = true"
        )
    training = last.config.training
    images = int(last.fit.images_per_s * 3600 * hours) // training.batch * training.batch
    if images == 0 or "training.images" in explicit:
        raise UserError(
            f"--islands {island.name}: {training.images:,} images of {last.size} need {last.hours:,.2g} hours, it has "
            f"{hours:,.2g} for each cluster; give it more, or lower --images"
        )
    shorter = training.over(images, {name.removeprefix("training.") for name in explicit})
    return replace(last, config=last.config.model_copy(update={"training": shorter}))


def best_fit(island: Island, architecture: DiTConfig, batch: int) -> Fit | None:
    """How the island would train it, by the model `atoll train` chooses with; None if it does not fit."""
    found = fits(account(architecture), island.machine, batch, eight_bit=island.eight_bit)
    return found[0] if found else None
