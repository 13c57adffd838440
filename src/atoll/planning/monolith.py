"""The order for a monolith: one expert on all of the data, for comparison.

DDM's protocol: the same architecture, number of steps and learning rate as an expert, K times its batch, so that the
monolith sees as many images as all experts together. So large a batch takes a higher rate, and where an expert's is too
low the monolith's is further off: compare at several rates (docs/science.md).
"""

from __future__ import annotations

from pathlib import Path

from ..artifacts import Artifact, ArtifactWriter, Store, load_if_same
from ..islands.order import Order
from ..training.seeds import seed_from
from .recipes import PlanConfig
from .stage import KIND, make_order, shard_refs

NAME = "monolith"


def plan_monolith(
    data: str | Path | Store,
    partition: str | Path | Store,
    out: str | Path | Store,
    config: PlanConfig,
    *,
    objective: str = "flow",
) -> Artifact:
    """Write the order `monolith.json` to `out`."""
    origin, cut = Artifact.open(data, "data"), Artifact.open(partition, "partition")
    return write_alone(origin, cut, out, order_on_everything(origin, cut, config, NAME, objective))


def order_on_everything(data: Artifact, partition: Artifact, config: PlanConfig, name: str, objective: str) -> Order:
    """An order for all of the data: K times an expert's batch and images, so it takes an expert's steps."""
    clusters = int(partition.config["clusters"])
    training = config.training.model_copy(
        update={
            "images": config.training.images * clusters,
            "batch": config.training.batch * clusters,
            "warmup_images": config.training.warmup_images * clusters,
            "ema_images": config.training.ema_images * clusters,
            "seed": seed_from(config.training.seed, "order", name),
        }
    )
    like = make_order(data, partition, 0, objective, config)
    update = {"name": name, "cluster": None, "shards": shard_refs(partition, "clusters/"), "training": training}
    return Order.model_validate(like.model_copy(update=update).model_dump())


def write_alone(origin: Artifact, cut: Artifact, out: str | Path | Store, order: Order) -> Artifact:
    """One order as an artifact of its own."""
    settings = order.model_dump(mode="json")
    parents = {"data": origin.digest, "partition": cut.digest}
    if (there := load_if_same(out, KIND, settings, parents)) is not None:
        return there
    with ArtifactWriter(out, KIND) as draft:
        (draft.folder / f"{order.name}.json").write_bytes(order.to_bytes())
        return draft.commit(config=settings, parents=parents, license=origin.manifest.license)
