"""The plan stage: a partition becomes one work order per cluster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..artifacts import Artifact, ArtifactWriter, Reference, Store, UserError, load_if_same
from ..data.space import LatentConfig, TextConfig
from ..islands.expert import read_expert_card
from ..islands.initialization import mismatch
from ..islands.order import Order, ShardRef
from ..models.dit import DiTConfig
from ..training.seeds import seed_from
from .assign import Job, Option, asked_for, best_fit, match, plan_job, refusal
from .islands import Island
from .mix import detail_of, read_mix
from .recipes import Network, PlanConfig, recipe, recipe_for, recipes_worth

KIND = "orders"
Change = Callable[[PlanConfig], PlanConfig]


def plan(
    data: str | Path | Store,
    partition: str | Path | Store,
    out: str | Path | Store,
    config: PlanConfig | None = None,
    *,
    islands: Sequence[Island] = (),
    change: Change = lambda config: config,
    insisted: Collection[str] = (),
    init: Artifact | None = None,
) -> Artifact:
    """Write one order per cluster to `out`; without a config, by the recipe that fits the data.

    With `islands`, the budget of each order follows from the machine that will take it, and its size too unless
    `config` gives it or it is `insisted` on (`network.depth`); how it is predicted to train there (execution, memory,
    hours, cost) is in the manifest. `change` is what the user tells to change in any recipe. With `init`, an expert of
    the run, orders begin from its weights where their objective allows it. An order names its shards by digest and by
    their path relative to the run, so the partition and the orders must lie side by side.
    """
    origin, cut = Artifact.open(data, "data"), Artifact.open(partition, "partition")
    check_places(origin, cut, Store.at(out))
    wanted = Wanted(origin, cut, config, change, frozenset(insisted))
    too_small = islands_too_small(wanted, islands)
    choices = choose(wanted, islands, too_small)
    settings = {
        **wanted.usual.model_dump(mode="json"),
        "chosen": [choice.objective for choice in choices],
        "islands": [choice.job.record() for choice in choices if choice.job is not None],
        **({"too_small": too_small} if too_small else {}),
        "init": None if init is None else reference(Store.at(out), init).model_dump(),
    }
    digests = {"data": origin.digest, "partition": cut.digest}
    if (there := load_if_same(out, KIND, settings, digests)) is not None:
        return there

    orders = [make_order(origin, cut, k, choice.objective, choice.config) for k, choice in enumerate(choices)]
    orders = orders if init is None else begun_from(init, orders, Store.at(out))
    with ArtifactWriter(out, KIND) as draft:
        for order in orders:
            (draft.folder / f"{order.name}.json").write_bytes(order.to_bytes())
        return draft.commit(config=settings, parents=digests, license=origin.manifest.license)


def reference(out: Store, init: Artifact) -> Reference:
    """An expert by its path in the run that the orders in `out` belong to."""
    run = out.parent.url.rstrip("/") + "/"
    if not init.store.url.startswith(run):
        raise UserError(f"--init {init.store}: lies outside the run {out.parent}; copy it there first")
    return Reference(path=init.store.url.removeprefix(run), digest=init.digest)


def begun_from(init: Artifact, orders: Sequence[Order], out: Store) -> list[Order]:
    """The orders, those that can begin from the expert `init` naming it; at least one must be able to."""
    card, named = read_expert_card(init), reference(out, init)
    reasons = [mismatch(order, card) for order in orders]
    if all(reasons):
        raise UserError(f"--init {init.store}: {reasons[0]}")
    return [
        order if reason else order.model_copy(update={"init": named})
        for order, reason in zip(orders, reasons, strict=True)
    ]


@dataclass(frozen=True)
class Wanted:
    """What the user wants, of which data: a config, or what to change in whichever recipe fits."""

    data: Artifact
    partition: Artifact
    config: PlanConfig | None
    change: Change
    insisted: frozenset[str]

    @cached_property
    def usual(self) -> PlanConfig:
        """What is trained where no island has its own."""
        clusters = int(self.partition.config["clusters"])
        return self.config or self.change(recipe_for(self.data.config, clusters))

    def options(self, island: Island, images: int) -> list[Option]:
        """What an island may train on a cluster of so many images, the largest first."""
        if island.size is not None:
            return [asked_for(island, self.usual)]
        fixed = self.config is not None or any(name.startswith("network.") for name in self.insisted)
        if fixed or self.data.config["source"]["kind"] == "digits":
            return [Option(f"{self.usual.network.width}x{self.usual.network.depth}", self.usual)]
        latent = self.data.config["latent"]["shape"]
        return [Option(name, self.change(recipe(name, latent))) for name in recipes_worth(images)]

    def build(self, network: Network) -> DiTConfig:
        return architecture(self.data.config, network)

    @cached_property
    def counts(self) -> list[int]:
        """Training images of every cluster."""
        return [size["train"] for size in json.loads(self.partition.read("sizes.json"))["clusters"]]


def check_places(data: Artifact, partition: Artifact, out: Store) -> None:
    """Refuse a partition of other data, and orders that could not name their shards."""
    if partition.manifest.parents.get("data") != data.digest:
        raise UserError(
            f"{partition.store}: was not made from {data.store}; pass --partition with the one that was, "
            "or the data this one was made from"
        )
    if out.parent != partition.store.parent:
        raise UserError(f"--out {out}: orders must lie beside the partition, in {partition.store.parent}")


@dataclass(frozen=True)
class Choice:
    """What one cluster trains: the plan's settings, or what its island can do of them."""

    objective: str
    config: PlanConfig
    job: Job | None = None


def islands_too_small(wanted: Wanted, islands: Sequence[Island]) -> dict[str, float]:
    """The islands on which nothing fits, with their memory in GiB; not all of them, or there is nobody to plan for.

    One that insists on a size is not left out, but refused.
    """

    def fits(island: Island) -> bool:
        options = wanted.options(island.model_copy(update={"size": None}), min(wanted.counts))
        return any(best_fit(island, wanted.build(o.config.network), o.config.training.batch) for o in options)

    small = [island for island in islands if not fits(island)]
    if islands and len(small) == len(islands):
        raise UserError(refusal(small[0], wanted.options(small[0], min(wanted.counts)), wanted.build))
    return {island.name: island.machine.memory for island in small}


def choose(wanted: Wanted, islands: Sequence[Island], too_small: Collection[str]) -> list[Choice]:
    """One choice per cluster: the recipe's, or what the cluster's island can do."""
    config, partition = wanted.usual, wanted.partition
    clusters = int(partition.config["clusters"])
    mix = read_mix(config.mix, config.known, clusters)
    several = len(set(mix.names)) > 1  # else nothing hangs on it, and shards may be far away
    detail = [detail_of(partition, k) if several else 0.0 for k in range(clusters)]
    if not islands:
        return [Choice(objective, config) for objective in mix.deal(detail)]
    for island in islands:
        if island.objective is not None and island.objective not in config.known:
            known = ", ".join(sorted(config.known))
            raise UserError(f"--islands {island.name}: unknown objective {island.objective!r}; use {known}")
    matched = match(islands, wanted.counts, mix, too_small)
    chosen = mix.deal(detail, {k: i.objective for k, i in matched.items() if i.objective is not None})
    shared = Counter(island.name for island in matched.values())
    choices = []
    for k, objective in enumerate(chosen):
        island = matched[k]
        job, fitted = plan_job(
            island,
            shared[island.name],
            k,
            wanted.options(island, wanted.counts[k]),
            samples=train_bytes(partition, k),
            build=wanted.build,
            insisted=wanted.insisted,
        )
        choices.append(Choice(objective, fitted, job))
    return choices


def make_order(data: Artifact, partition: Artifact, cluster: int, objective: str, config: PlanConfig) -> Order:
    """The order for one cluster."""
    return Order(
        name=f"{cluster:02d}",
        cluster=cluster,
        clusters=int(partition.config["clusters"]),
        data=data.digest,
        partition=partition.digest,
        latent=LatentConfig.model_validate(data.config["latent"]),
        text=None if data.config["text"] is None else TextConfig.model_validate(data.config["text"]),
        shards=shard_refs(partition, f"clusters/{cluster:02d}/"),
        architecture=architecture(data.config, config.network),
        objective=config.known[objective],
        training=config.training.model_copy(update={"seed": seed_from(config.training.seed, "order", cluster)}),
        acceptance=config.acceptance,
        license=data.manifest.license,
    )


def shard_refs(partition: Artifact, under: str) -> tuple[ShardRef, ...]:
    """The train and validation shards below a folder of the partition, by path relative to the run."""
    names = [name for name in partition.names(under) if name.endswith(".safetensors")]
    return tuple(
        ShardRef(
            path=f"{partition.store.name}/{name}",
            sha256=partition.manifest.files[name].sha256,
            split="train" if Path(name).name.startswith("train-") else "validation",
        )
        for name in names
    )


def train_bytes(partition: Artifact, cluster: int) -> int:
    """Bytes of a cluster's train shards: what they take in memory, but for a header."""
    listed = partition.manifest.files
    names = partition.names(f"clusters/{cluster:02d}/train-")
    return sum(listed[name].bytes for name in names if name.endswith(".safetensors"))


def architecture(data: Mapping[str, Any], network: Network) -> DiTConfig:
    """The network for this data: what it is conditioned on follows from what the data has."""
    text = None if data["text"] is None else TextConfig.model_validate(data["text"])
    known: dict[str, Any] = {"condition": "none"}
    if text is not None and text.kind == "words":
        known = {"condition": "words", "vocabulary": len(text.vocabulary or ()), "text_length": text.length}
    elif text is not None and text.kind == "tokens":
        known = {"condition": "tokens", "text_width": text.width, "text_length": text.length}
    elif text is not None:
        known = {"condition": "pooled", "text_width": text.width}
    elif data.get("labels") is not None:
        known = {"condition": "labels", "classes": data["labels"]}
    try:
        return DiTConfig(latent=tuple(data["latent"]["shape"]), **network.model_dump(), **known)
    except ValueError as error:
        raise UserError(f"network: {error}") from error
