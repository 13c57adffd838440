"""The plan stage: a partition becomes one work order per cluster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..artifacts import Artifact, Draft, Store, UserError, reuse
from ..data.space import LatentSpace, TextSpace
from ..islands.order import Order, ShardRef
from ..models.dit import DiTConfig
from ..training.seeds import seed_from
from .assign import Job, largest_fit, match, plan_job, refusal
from .islands import Island
from .mix import detail_of, read_mix
from .recipes import Network, PlanConfig, recipe_for

KIND = "orders"


class Branching(Protocol):
    """A common start of all experts (branch.py)."""

    def shortened(self, order: Order) -> Order: ...
    def record(self) -> dict[str, object]: ...


def plan(
    data: str | Path | Store,
    partition: str | Path | Store,
    out: str | Path | Store,
    config: PlanConfig | None = None,
    *,
    islands: Sequence[Island] = (),
    branch: Branching | None = None,
) -> Artifact:
    """Write one order per cluster to `out`; without a config, by the recipe that fits the data.

    With `branch`, experts go on from a common start, for what is left of their budget.

    With `islands`, size and budget of each order follow from the machine that will take it, and how it is predicted to
    train there (execution, memory, hours, cost) is in the manifest. An order names its shards by digest and by
    their path relative to the run, so the partition and the orders must lie side by side.
    """
    origin, cut = Artifact.open(data, "data"), Artifact.open(partition, "partition")
    check_places(origin, cut, Store.at(out))
    config = config or recipe_for(origin.config)
    too_small = islands_too_small(origin, config, islands)
    choices = choose(origin, cut, config, islands, too_small)
    settings = {
        **config.model_dump(mode="json"),
        "chosen": [choice.objective for choice in choices],
        "islands": [choice.job.record() for choice in choices if choice.job is not None],
        **({"too_small": too_small} if too_small else {}),
        **({"branch": branch.record()} if branch is not None else {}),
    }
    digests = {"data": origin.digest, "partition": cut.digest}
    if (there := reuse(out, KIND, settings, digests)) is not None:
        return there

    orders = [make_order(origin, cut, k, choice.objective, choice.config) for k, choice in enumerate(choices)]
    orders = orders if branch is None else [branch.shortened(order) for order in orders]
    with Draft(out, KIND) as draft:
        for order in orders:
            (draft.folder / f"{order.name}.json").write_bytes(order.to_bytes())
        return draft.commit(config=settings, parents=digests, licence=origin.manifest.licence)


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


def islands_too_small(data: Artifact, config: PlanConfig, islands: Sequence[Island]) -> dict[str, float]:
    """The islands on which no size fits, with their memory in GiB; not all of them, or there is nobody to plan for."""

    def build(network: Network) -> DiTConfig:
        return architecture(data.config, network)

    small = [i for i in islands if largest_fit(i, config.network, config.training.batch, build) is None]
    if islands and len(small) == len(islands):
        raise UserError(refusal(small[0], config.network, config.training.batch, build))
    return {island.name: island.machine.memory for island in small}


def choose(
    data: Artifact,
    partition: Artifact,
    config: PlanConfig,
    islands: Sequence[Island],
    too_small: Collection[str],
) -> list[Choice]:
    """One choice per cluster: the recipe's, or what the cluster's island can do."""
    clusters = int(partition.config["clusters"])
    mix = read_mix(config.mix, config.objectives, clusters)
    detail = [detail_of(partition, k) for k in range(clusters)]
    if not islands:
        return [Choice(objective, config) for objective in mix.deal(detail)]
    for island in islands:
        if island.objective is not None and island.objective not in config.objectives:
            known = ", ".join(sorted(config.objectives))
            raise UserError(f"--islands {island.name}: unknown objective {island.objective!r}; use {known}")
    counts = [size["train"] for size in json.loads(partition.read("sizes.json"))["clusters"]]
    matched = match(islands, counts, mix, too_small)
    chosen = mix.deal(detail, {k: i.objective for k, i in matched.items() if i.objective is not None})
    shared = Counter(island.name for island in matched.values())
    choices = []
    for k in range(clusters):
        island = matched[k]
        job, network = plan_job(
            island,
            shared[island.name],
            k,
            network=config.network,
            images=config.training.images,
            batch=config.training.batch,
            samples=train_bytes(partition, k),
            build=lambda choice: architecture(data.config, choice),
        )
        training = config.training.model_copy(update={"images": job.images})
        fitted = config.model_copy(update={"network": network, "training": training})
        choices.append(Choice(chosen[k], fitted, job))
    return choices


def make_order(data: Artifact, partition: Artifact, cluster: int, objective: str, config: PlanConfig) -> Order:
    """The order for one cluster."""
    return Order(
        name=f"{cluster:02d}",
        cluster=cluster,
        clusters=int(partition.config["clusters"]),
        data=data.digest,
        partition=partition.digest,
        latent=LatentSpace.model_validate(data.config["latent"]),
        text=None if data.config["text"] is None else TextSpace.model_validate(data.config["text"]),
        shards=shard_refs(partition, f"clusters/{cluster:02d}/"),
        architecture=architecture(data.config, config.network),
        objective=config.objectives[objective],
        training=config.training.model_copy(update={"seed": seed_from(config.training.seed, "order", cluster)}),
        acceptance=config.acceptance,
        licence=data.manifest.licence,
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
    text = None if data["text"] is None else TextSpace.model_validate(data["text"])
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
