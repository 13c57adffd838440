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
from ..partition.report import read_clusters
from ..registry.versions import reference_to
from ..training.seeds import seed_from
from .assign import Job, Option, match, option_of_size, plan_job
from .islands import Island
from .objectives import assign_objectives, high_frequency_energy, objective_names
from .recipes import Network, PlanConfig, recipe_for, suitable_recipes

KIND = "orders"
MONOLITH = "monolith"
Planned = dict[int, tuple[Island, Job, PlanConfig]]


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
    config = config or recipe_for(origin.config, int(cut.config["clusters"]))
    planned = plan_islands(origin, cut, config, islands, recipes, explicit) if islands else {}
    fixed = {k: island.objective for k, (island, _, _) in planned.items() if island.objective is not None}
    energy = [0.0] * int(cut.config["clusters"])
    if len(set(objective_names(config.objectives or ""))) > 1:  # else nothing depends on it, and shards may be far away
        latent = LatentConfig.model_validate(origin.config["latent"])
        energy = [high_frequency_energy(cut, k, latent) for k in range(len(energy))]
    names = assign_objectives(config.objectives, config.known, energy, fixed)
    begin = None if init is None else reference_to(Store.at(out).parent, init)
    settings = {
        **config.model_dump(mode="json"),
        "chosen": names,
        "islands": [planned[k][1].record() for k in sorted(planned)],
        "init": None if begin is None else begin.model_dump(),
    }
    parents = {"data": origin.digest, "partition": cut.digest}
    if (there := load_if_same(out, KIND, settings, parents)) is not None:
        return there
    configs = [planned[k][2] if k in planned else config for k in range(len(names))]
    orders = [make_order(origin, cut, k, name, configs[k]) for k, name in enumerate(names)]
    if init is not None:
        orders = begin_from(init, begin, orders)
    return write_orders(out, orders, settings, parents, origin.manifest.license)


def plan_monolith(
    data: str | Path | Store,
    partition: str | Path | Store,
    out: str | Path | Store,
    config: PlanConfig,
    *,
    objective: str = "flow",
) -> Artifact:
    """Write `monolith.json` to `out`: one network on all clusters, to compare with or for experts to begin from."""
    origin, cut = open_parents(data, partition, Store.at(out))
    order = order_on_everything(origin, cut, config, MONOLITH, objective)
    settings, parents = order.model_dump(mode="json"), {"data": origin.digest, "partition": cut.digest}
    there = load_if_same(out, KIND, settings, parents)
    return there or write_orders(out, [order], settings, parents, origin.manifest.license)


def order_on_everything(data: Artifact, partition: Artifact, config: PlanConfig, name: str, objective: str) -> Order:
    """An order for all clusters by DDM's protocol: an expert's steps and learning rate, K times its batch.

    So large a batch takes a higher rate, and where an expert's is too low this one's is further off: compare at several
    rates (docs/science.md).
    """
    clusters, training = int(partition.config["clusters"]), config.training
    update = {key: getattr(training, key) * clusters for key in ("images", "batch", "warmup_images", "ema_images")}
    update["seed"] = seed_from(training.seed, "order", name)
    like = make_order(data, partition, 0, objective, config)
    changed = {"training": training.model_copy(update=update), "shards": shard_refs(partition, "clusters/")}
    order = like.model_copy(update={"name": name, "cluster": None, **changed})
    return Order.model_validate(order.model_dump())


def write_orders(
    out: str | Path | Store,
    orders: Sequence[Order],
    settings: dict[str, Any],
    parents: dict[str, str],
    license: str | None,
) -> Artifact:
    with ArtifactWriter(out, KIND) as writer:
        for order in orders:
            (writer.folder / f"{order.name}.json").write_bytes(order.to_bytes())
        return writer.commit(config=settings, parents=parents, license=license)


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


def plan_islands(
    data: Artifact,
    partition: Artifact,
    config: PlanConfig,
    islands: Sequence[Island],
    recipes: Callable[[str], PlanConfig] | None,
    explicit: Collection[str],
) -> Planned:
    """By cluster its island, its job, and what it trains there."""
    counts = train_counts(partition)
    matched = match(islands, counts)
    shared = Counter(island.name for island in matched.values())
    planned: Planned = {}
    for k, island in matched.items():
        if island.size is not None:
            options = [option_of_size(island, config)]
        elif recipes is None:
            options = [Option(f"{config.network.width}x{config.network.depth}", config)]
        else:
            options = [Option(name, recipes(name)) for name in suitable_recipes(counts[k])]
        job, fitted = plan_job(
            island,
            shared[island.name],
            k,
            options,
            build=partial(architecture, data.config),
            explicit=explicit,
        )
        planned[k] = island, job, fitted
    return planned


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


def begin_from(init: Artifact, named: Reference | None, orders: Sequence[Order]) -> list[Order]:
    """The orders, those that can begin from the expert `init` naming it; at least one must be able to."""
    card = read_expert_card(init)
    reasons = [mismatch(order, card) for order in orders]
    if all(reasons):
        raise UserError(f"--init {init.store}: {reasons[0]}")
    return [o if reason else o.model_copy(update={"init": named}) for o, reason in zip(orders, reasons, strict=True)]


def train_counts(partition: Artifact) -> list[int]:
    """Training images of every cluster."""
    return [size["train"] for size in read_clusters(partition)["clusters"]]


def shard_refs(partition: Artifact, under: str) -> tuple[ShardRef, ...]:
    """The train and validation shards below a folder of the partition, by path relative to the run."""
    return tuple(
        ShardRef(
            path=f"{partition.store.name}/{name}",
            sha256=partition.manifest.files[name].sha256,
            split="train" if Path(name).name.startswith("train-") else "validation",
        )
        for name in partition.names(under)
        if name.endswith(".safetensors")
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
