"""Match clusters with islands: who trains which cluster, with which network, for how long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..artifacts import UserError
from ..models.accounting import account
from ..models.dit import DiTConfig
from ..models.presets import parse
from ..training.memory import Fit, fits
from .islands import Island
from .mix import Mix
from .recipes import RECIPES, Network, PlanConfig

PREDICTED = ("precision", "micro_batch", "recomputed_blocks", "moments", "average")  # of an execution, in the manifest


@dataclass(frozen=True)
class Job:
    """One cluster on one island, as predicted; size and budget go into its order, the rest is for people."""

    cluster: int
    island: str
    size: str
    fit: Fit
    images: int
    hours: float
    cost: float | None

    def record(self) -> dict[str, object]:
        """For the manifest and the table a person reads."""
        return {
            "cluster": self.cluster,
            "island": self.island,
            "size": self.size,
            **self.fit.execution.model_dump(include=set(PREDICTED)),
            "memory_gib": self.fit.memory_gib,
            "images_per_s": self.fit.images_per_s,
            "images": self.images,
            "hours": round(self.hours, 2),
            "cost": None if self.cost is None else round(self.cost, 2),
        }


def match(
    islands: Sequence[Island], sizes: Sequence[int], mix: Mix | None = None, too_small: Collection[str] = ()
) -> dict[int, Island]:
    """An island for every cluster: the largest cluster first, to whoever has none yet, and then to whoever has most
    work to give per cluster taken.

    An island that insists on an objective takes no more clusters than the mix has of it. Islands named in `too_small`
    take none. One cluster after another without looking back: where islands insist on clusters and objectives both, it
    may refuse what a search would find.
    """
    taken = {island.name: 0 for island in islands}
    chosen: dict[int, Island] = {}
    # clusters somebody asked for go first, or a greedy choice could leave them nobody
    wanted = {k for island in islands for k in island.clusters or ()}
    if bad := sorted(k for k in wanted if not 0 <= k < len(sizes)):
        raise UserError(f"--islands: cluster {bad[0]} does not exist, the partition has 0 to {len(sizes) - 1}")
    for cluster in sorted(range(len(sizes)), key=lambda k: (k not in wanted, -sizes[k], k)):
        willing = [island for island in islands if island.clusters is None or cluster in island.clusters]
        if not willing:
            raise UserError(f"--islands: nobody takes cluster {cluster}; let an island leave out `clusters`")
        fitting = [island for island in willing if island.name not in too_small]
        if not fitting:
            names = ", ".join(island.name for island in willing)
            raise UserError(f"--islands: nobody takes cluster {cluster}, nothing fits on {names}; add a larger island")
        insisted = [island.objective for island in chosen.values() if island.objective is not None]
        able = [i for i in fitting if mix is None or i.objective is None or mix.allows(cluster, i.objective, insisted)]
        if not able:
            assert mix is not None, "without a mix whoever fits is able"
            wishes = ", ".join(f"{island.name} on {island.objective}" for island in fitting)
            raise UserError(
                f"--mix {mix.text}: leaves nobody for cluster {cluster}, islands insist: {wishes}; "
                "change the mix, or leave out their `objective`"
            )
        asked = [island for island in able if island.clusters is not None]
        best = max(asked or able, key=lambda i: (not taken[i.name], i.strength / (taken[i.name] + 1)))
        taken[best.name] += 1
        chosen[cluster] = best
    return chosen


def plan_job(
    island: Island,
    shared: int,
    cluster: int,
    options: Sequence[Option],
    *,
    samples: int,
    build: Callable[[Network], DiTConfig],
    insisted: Collection[str] = (),
) -> tuple[Job, PlanConfig]:
    """What one cluster of `samples` bytes trains on an island that trains `shared` clusters in all, and for how long.

    Of the options, the largest first: the first that fits and gets through its budget in the hours there are; if none
    gets that far, the last that fits, for as many images as it can, unless somebody insists on how many.
    """
    hours = island.hours_for_each(shared)
    fitting = [
        (option, found)
        for option in options
        if (found := best_fit(island, build(option.config.network), option.config.training.batch, samples=samples))
    ]
    if not fitting:
        raise UserError(refusal(island, options, build))

    def reached(found: Fit) -> float:
        return found.images_per_s * hours * 3600

    chosen, found = next((pair for pair in fitting if reached(pair[1]) >= pair[0].config.training.images), fitting[-1])
    config, training = chosen.config, chosen.config.training
    budget = training.images
    if reached(found) < budget:
        if "training.images" in insisted:
            need = budget / found.images_per_s / 3600
            raise UserError(
                f"--islands {island.name}: {budget:,} images of {chosen.name} need {need:,.1f} hours, it has "
                f"{hours:,.3g} for cluster {cluster}; ask for fewer images, or offer more hours"
            )
        budget = int(reached(found)) // training.batch * training.batch
    if budget == 0:
        raise UserError(f"--islands {island.name}: {hours:.2g} hours are not enough for one step; offer more hours")
    kept = {name.removeprefix("training.") for name in insisted}
    used = budget / found.images_per_s / 3600
    cost = None if island.price is None else used * island.price
    job = Job(cluster, island.name, chosen.name, found, budget, used, cost)
    return job, config.model_copy(update={"training": training.over(budget, kept)})


def best_fit(island: Island, architecture: DiTConfig, batch: int, *, samples: int = 0) -> Fit | None:
    """How the island would train it, by the model `atoll train` chooses with; None if it does not fit."""
    found = fits(account(architecture), island.machine, batch, samples=samples, eight_bit=island.eight_bit)
    return found[0] if found else None


@dataclass(frozen=True)
class Option:
    """Something an island could train."""

    name: str
    config: PlanConfig


def asked_for(island: Island, config: PlanConfig) -> Option:
    """The size an island insists on, trained as `config` says."""
    try:
        size, patch = parse(str(island.size))
    except ValueError as error:
        raise UserError(f"--islands {island.name}: {error}") from error
    shape = {"width": size.width, "depth": size.depth, "heads": size.heads, "patch": patch}
    return Option(str(island.size), config.model_copy(update={"network": config.network.model_copy(update=shape)}))


def refusal(island: Island, options: Sequence[Option], build: Callable[[Network], DiTConfig]) -> str:
    """One line that says what does not fit, and what would."""
    last, memory = options[-1], f"{island.machine.memory:g} GiB"
    batch = last.config.training.batch
    what = f"--islands {island.name}: {last.name} does not fit into {memory}"
    shape = build(last.config.network)
    smaller = [(name, RECIPES[name].plan(shape.latent).network) for name in reversed(RECIPES)]
    smaller = [(name, network) for name, network in smaller if network.width < shape.width]
    largest = next((name for name, network in smaller if best_fit(island, build(network), batch)), None)
    what += f"; the largest that does is {largest}" if largest else ", and nothing smaller does"
    extended = island.model_copy(update={"eight_bit": True})
    helps = best_fit(extended, shape, batch) is not None
    return f"{what}; with the extra torchao it would: install it there and say eight_bit: true" if helps else what
