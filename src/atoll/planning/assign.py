"""Match clusters with islands: which island trains which cluster, with which network, for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..artifacts import UserError
from ..models.accounting import account
from ..models.dit import DiTConfig
from ..models.presets import parse
from ..training.memory import Fit, fits
from .islands import Island
from .recipes import Network, PlanConfig

PREDICTED = {"precision", "micro_batch", "checkpointed_blocks", "moments"}  # of a ComputeConfig, in the manifest


@dataclass(frozen=True)
class Job:
    """One cluster on one island, as predicted. Size and budget go into its order; the rest is for people."""

    cluster: int
    island: str
    size: str
    fit: Fit
    images: int
    hours: float
    cost: float | None

    def record(self) -> dict[str, object]:
        """A row of the manifest's table."""
        return {
            "cluster": self.cluster,
            "island": self.island,
            "size": self.size,
            **self.fit.compute.model_dump(include=PREDICTED),
            "savings": self.fit.compute.savings,
            "memory_gib": self.fit.memory_gib,
            "images_per_s": self.fit.images_per_s,
            "images": self.images,
            "hours": round(self.hours, 2),
            "cost": None if self.cost is None else round(self.cost, 2),
        }


@dataclass(frozen=True)
class Option:
    """Something an island could train."""

    name: str
    config: PlanConfig


def match(islands: Sequence[Island], sizes: Sequence[int]) -> dict[int, Island]:
    """An island for every cluster of `sizes` [K]: each island gets one before any gets two, then by strength.

    Clusters that an island names go first, and to such an island; then the largest first.
    """
    named = {k for island in islands for k in island.clusters or ()}
    if bad := sorted(k for k in named if not 0 <= k < len(sizes)):
        raise UserError(f"--islands: cluster {bad[0]} does not exist, the partition has 0 to {len(sizes) - 1}")
    chosen: dict[int, Island] = {}
    for cluster in sorted(range(len(sizes)), key=lambda k: (k not in named, -sizes[k], k)):
        able = [island for island in islands if island.clusters is None or cluster in island.clusters]
        if not able:
            raise UserError(f"--islands: no island takes cluster {cluster}; leave out `clusters` of one")
        taken = Counter(island.name for island in chosen.values())
        chosen[cluster] = max(
            able, key=lambda i: (i.clusters is not None, not taken[i.name], i.strength / (taken[i.name] + 1))
        )
    return chosen


def plan_job(
    island: Island,
    shared: int,
    cluster: int,
    options: Sequence[Option],
    *,
    build: Callable[[Network], DiTConfig],
    explicit: Collection[str] = (),
) -> tuple[Job, PlanConfig]:
    """What a cluster trains on an island that trains `shared` clusters in all, and for how long.

    Of the options, the largest first: the first that fits and completes its budget in the hours there are; if none
    does, the last that fits, for as many images as there is time, unless the number of images is `explicit`.
    """
    hours = island.hours_for_each(shared)
    fitting = [
        (option, fit)
        for option in options
        if (fit := best_fit(island, build(option.config.network), option.config.training.batch))
    ]
    if not fitting:
        raise UserError(
            f"--islands {island.name}: {options[-1].name} does not fit into {island.machine.memory:g} GiB; use a "
            "smaller size or --recipe, leave the island out, or, if it has torchao, set eight_bit = true"
        )

    def seconds(pair: tuple[Option, Fit]) -> float:
        return pair[0].config.training.images / pair[1].images_per_s

    option, fit = next((pair for pair in fitting if seconds(pair) <= 3600 * hours), fitting[-1])
    training, images = option.config.training, option.config.training.images
    if seconds((option, fit)) > 3600 * hours:
        images = int(fit.images_per_s * 3600 * hours) // training.batch * training.batch
        if images == 0 or "training.images" in explicit:
            raise UserError(
                f"--islands {island.name}: {training.images:,} images of {option.name} need "
                f"{seconds((option, fit)) / 3600:,.2g} hours, it has {hours:,.2g} for cluster {cluster}; "
                "give it more, or lower --images"
            )
    used = images / fit.images_per_s / 3600
    cost = None if island.price is None else used * island.price
    kept = {name.removeprefix("training.") for name in explicit}
    config = option.config.model_copy(update={"training": training.over(images, kept)})
    return Job(cluster, island.name, option.name, fit, images, used, cost), config


def best_fit(island: Island, architecture: DiTConfig, batch: int) -> Fit | None:
    """How the island would train it, by the model `atoll train` chooses with; None if it does not fit."""
    found = fits(account(architecture), island.machine, batch, eight_bit=island.eight_bit)
    return found[0] if found else None


def option_of_size(island: Island, config: PlanConfig) -> Option:
    """The size that the islands file has for an island, trained as `config` has it."""
    try:
        size, patch = parse(str(island.size))
    except ValueError as error:
        raise UserError(f"--islands {island.name}: {error}") from error
    shape = {"width": size.width, "depth": size.depth, "heads": size.heads, "patch": patch}
    return Option(str(island.size), config.model_copy(update={"network": config.network.model_copy(update=shape)}))
