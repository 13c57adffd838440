"""Match clusters with islands: who trains which cluster, with which network, for how long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..artifacts import UserError
from ..models.accounting import account
from ..models.dit import DiTConfig
from ..models.presets import SIZES, parse
from ..training.memory import Fit, fits
from .islands import Island
from .mix import Mix
from .recipes import Network

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
    """An island for every cluster: the largest cluster first, to whoever has most work to give per cluster taken.

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
        best = max(asked or able, key=lambda i: i.machine.tflops * i.hours / (taken[i.name] + 1))
        taken[best.name] += 1
        chosen[cluster] = best
    return chosen


def plan_job(
    island: Island,
    shared: int,
    cluster: int,
    *,
    network: Network,
    images: int,
    batch: int,
    samples: int,
    build: Callable[[Network], DiTConfig],
) -> tuple[Job, Network]:
    """The network and budget for one cluster of `samples` bytes on an island that trains `shared` clusters in all.

    Without a size asked for: the largest that fits and sees `images` images in the hours there are; if none gets
    that far, the smallest that fits, for as many images as it can.
    """
    hours = island.hours / shared
    options = [(name, sized(network, name)) for name in sizes_at(network.patch)]
    if island.size is not None:
        options = [(island.size, asked_for(network, island))]
    fitting = [
        (name, choice, found)
        for name, choice in options
        if (found := best_fit(island, build(choice), batch, samples=samples))
    ]
    if not fitting:
        raise UserError(refusal(island, network, batch, build))
    reach = [option for option in fitting if option[2].images_per_s * hours * 3600 >= images]
    name, choice, found = reach[0] if reach else fitting[-1]
    budget = int(min(images, found.images_per_s * hours * 3600)) // batch * batch
    if budget == 0:
        raise UserError(f"--islands {island.name}: {hours:g} hours are not enough for one step; offer more hours")
    used = budget / found.images_per_s / 3600
    cost = None if island.price is None else used * island.price
    return Job(cluster, island.name, name, found, budget, used, cost), choice


def best_fit(island: Island, architecture: DiTConfig, batch: int, *, samples: int = 0) -> Fit | None:
    """How the island would train it, by the model `atoll train` chooses with; None if it does not fit."""
    found = fits(account(architecture), island.machine, batch, samples=samples, eight_bit=island.eight_bit)
    return found[0] if found else None


def sizes_at(patch: int) -> list[str]:
    """Named sizes, the largest first."""
    by_size = sorted(SIZES, key=lambda name: -(SIZES[name].width ** 2) * SIZES[name].depth)
    return [f"{name}/{patch}" for name in by_size]


def sized(network: Network, name: str) -> Network:
    size, patch = parse(name)
    return network.model_copy(update={"width": size.width, "depth": size.depth, "heads": size.heads, "patch": patch})


def asked_for(network: Network, island: Island) -> Network:
    try:
        return sized(network, str(island.size))
    except ValueError as error:
        raise UserError(f"--islands {island.name}: {error}") from error


def refusal(island: Island, network: Network, batch: int, build: Callable[[Network], DiTConfig]) -> str:
    """One line that says what does not fit, and what would."""
    largest = largest_fit(island, network, batch, build)
    name = island.size or sizes_at(network.patch)[-1]
    what = f"--islands {island.name}: {name} does not fit into {island.machine.memory:g} GiB"
    what += f"; the largest that does is {largest}" if largest else ", and no smaller size does"
    extended = island.model_copy(update={"eight_bit": True})
    helps = best_fit(extended, build(sized(network, name)), batch) is not None
    return f"{what}; with the extra torchao it would: install it there and say eight_bit: true" if helps else what


def largest_fit(island: Island, network: Network, batch: int, build: Callable[[Network], DiTConfig]) -> str | None:
    """The largest named size that fits on an island, at the patch it asked for; None if it is too small for any."""
    patch = asked_for(network, island).patch if island.size is not None else network.patch
    return next((n for n in sizes_at(patch) if best_fit(island, build(sized(network, n)), batch)), None)
