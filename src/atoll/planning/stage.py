"""The plan stage: a partition becomes one work order per cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..artifacts import Artifact, ArtifactWriter, Reference, Store, UserError, load_if_same
from ..data.space import LatentConfig, TextConfig
from ..islands.expert import read_expert_card
from ..islands.initialization import mismatch
from ..islands.order import Order, ShardRef
from ..models.dit import DiTConfig
from ..models.presets import shape
from ..partition.report import read_clusters
from ..registry.versions import reference_to
from ..training.seeds import seed_from
from .islands import Island, match
from .jobs import Job, plan_job
from .objectives import assign_objectives, high_frequency_energy, objective_names
from .recipes import Network, PlanConfig, name_for, recipe, suitable_recipes

KIND = "orders"
MONOLITH = "monolith"


def plan(
    data: str | Path | Store,
    partition: str | Path | Store,
    out: str | Path | Store,
    config: PlanConfig | None = None,
    *,
    islands: Sequence[Island] = (),
    recipes: Callable[[str], PlanConfig] | None = None,
    explicit: Collection[str] = (),
    init: Artifact | None = None,
) -> Artifact:
    """Write one order per cluster to `out`; without a config, by the recipe that fits the data.

    With `islands`, the budget of each order follows from the machine that will take it; with `recipes` (a recipe by its
    name, changed as the user wants) its size, too. Settings that are `explicit`, such as `training.images`, hold or are
    refused. What is predicted of each job is in the manifest. With `init`, an expert of the run, orders begin from its
    weights where their objective allows it. An order names its shards by digest and by their path relative to the run,
    so the partition and the orders must lie side by side.
    """
    origin, cut = open_parents(data, partition, Store.at(out))
    clusters = int(cut.config["clusters"])
    config = config or recipe(name_for(origin.config, clusters), origin.config["latent"]["shape"])
    jobs = plan_jobs(origin, cut, config, islands, recipes, explicit) if islands else {}
    fixed = {k: job.island.objective for k, job in jobs.items() if job.island.objective is not None}
    energy = [0.0] * clusters
    if config.objectives and len(set(objective_names(config.objectives))) > 1:  # only then: shards may be far away
        latent = LatentConfig.model_validate(origin.config["latent"])
        energy = [high_frequency_energy(cut, k, latent) for k in range(clusters)]
    names = assign_objectives(config.objectives, config.known, energy, fixed)
    begin = None if init is None else reference_to(Store.at(out).parent, init)
    settings = {
        **config.model_dump(mode="json"),
        "chosen": names,
        "islands": [jobs[k].record(k) for k in sorted(jobs)],
        "init": None if begin is None else begin.model_dump(),
    }
    configs = [jobs[k].config if k in jobs else config for k in range(clusters)]
    orders = [make_order(origin, cut, k, name, configs[k]) for k, name in enumerate(names)]
    if init is not None:
        orders = begin_from(init, begin, orders)
    return write_orders(out, orders, settings, origin, cut)


def plan_monolith(
    data: str | Path | Store,
    partition: str | Path | Store,
    out: str | Path | Store,
    config: PlanConfig,
    *,
    objective: str = "flow",
) -> Artifact:
    """Write `monolith.json` to `out`: one network on all clusters, to compare with or for experts to begin from.

    By DDM's protocol: an expert's steps and learning rate, K times its batch. So large a batch takes a higher rate, and
    where an expert's is too low this one's is further off: compare at several rates (docs/science.md).
    """
    origin, cut = open_parents(data, partition, Store.at(out))
    clusters, training = int(cut.config["clusters"]), config.training
    update = {key: getattr(training, key) * clusters for key in ("images", "batch", "warmup_images", "ema_images")}
    update["seed"] = seed_from(training.seed, "order", MONOLITH)
    changed = {"training": training.model_copy(update=update), "shards": shard_refs(cut, "clusters/")}
    like = make_order(origin, cut, 0, objective, config)
    order = validated(like.model_copy(update={"name": MONOLITH, "cluster": None, **changed}))
    return write_orders(out, [order], order.model_dump(mode="json"), origin, cut)


def write_orders(
    out: str | Path | Store,
    orders: Sequence[Order],
    settings: dict[str, Any],
    data: Artifact,
    partition: Artifact,
    parents: Mapping[str, str] | None = None,
) -> Artifact:
    """The artifact of these orders, if it is not there already; data and partition are parents of all."""
    parents = {"data": data.digest, "partition": partition.digest, **(parents or {})}
    if (there := load_if_same(out, KIND, settings, parents)) is not None:
        return there
    with ArtifactWriter(out, KIND) as writer:
        for order in orders:
            (writer.folder / f"{order.name}.json").write_bytes(order.to_bytes())
        return writer.commit(config=settings, parents=parents, license=data.manifest.license)


def open_parents(data: str | Path | Store, partition: str | Path | Store, out: Store) -> tuple[Artifact, Artifact]:
    """Data and partition; refuse a partition of other data, and orders that could not name their shards."""
    origin, cut = Artifact.open(data, "data"), Artifact.open(partition, "partition")
    if cut.manifest.parents.get("data") != origin.digest:
        raise UserError(
            f"{cut.store}: was not made from {origin.store}; pass --partition with the one that was, "
            "or the data this one was made from"
        )
    if out.parent != cut.store.parent:
        raise UserError(f"--out {out}: orders must lie beside the partition, in {cut.store.parent}")
    return origin, cut


def plan_jobs(
    data: Artifact,
    partition: Artifact,
    config: PlanConfig,
    islands: Sequence[Island],
    recipes: Callable[[str], PlanConfig] | None,
    explicit: Collection[str],
) -> dict[int, Job]:
    """By cluster its island, and what it trains there."""
    counts = train_counts(partition)
    matched = match(islands, counts)
    shared = Counter(island.name for island in matched.values())
    jobs = {}
    for k, island in matched.items():
        if island.size is not None:
            options = {island.size: with_size(island, config)}
        elif recipes is None:
            options = {f"{config.network.width}x{config.network.depth}": config}
        else:
            options = {name: recipes(name) for name in suitable_recipes(counts[k])}
        jobs[k] = plan_job(
            island,
            island.hours_for_each(shared[island.name]),
            options,
            build=partial(architecture, data.config),
            explicit=explicit,
        )
    return jobs


def with_size(island: Island, config: PlanConfig) -> PlanConfig:
    """A plan with the size that the islands file has for an island."""
    try:
        size = shape(str(island.size))
    except ValueError as error:
        raise UserError(f"--islands {island.name}: {error}") from error
    return config.model_copy(update={"network": config.network.model_copy(update=size)})


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


def validated(order: Order) -> Order:
    """A changed copy, with what pydantic checks and computes."""
    return Order.model_validate(order.model_dump())


def begin_from(init: Artifact, named: Reference | None, orders: Sequence[Order]) -> list[Order]:
    """The orders, those that can begin from the expert `init` naming it; at least one must be able to."""
    card = read_expert_card(init)
    reasons = [mismatch(order, card) for order in orders]
    if all(reasons):
        raise UserError(f"--init {init.store}: {reasons[0]}")
    return [o if reason else o.model_copy(update={"init": named}) for o, reason in zip(orders, reasons, strict=True)]


def train_counts(partition: Artifact) -> list[int]:
    """Training images of every cluster."""
    return [cluster["train"] for cluster in read_clusters(partition)["clusters"]]


def shard_refs(partition: Artifact, under: str) -> tuple[ShardRef, ...]:
    """The train and validation shards below a folder of the partition, by path relative to the run."""
    return tuple(
        ShardRef(
            path=f"{partition.store.name}/{name}",
            sha256=partition.manifest.files[name].sha256,
            split="train" if Path(name).name.startswith("train-") else "validation",
        )
        for name in partition.names(under)
    )


def architecture(data: Mapping[str, Any], network: Network) -> DiTConfig:
    """The network for this data: its condition follows from what the data has."""
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
