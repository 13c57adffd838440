"""The order for a monolith: one expert on all of the data, for comparison.

DDM's protocol: the same architecture and number of steps as an expert, K times its batch, so that the monolith
sees as many images as all experts together.
"""

from __future__ import annotations

from pathlib import Path

from ..artifacts import Artifact, Draft, Store, reuse
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
    clusters = int(cut.config["clusters"])
    training = config.training.model_copy(
        update={
            "images": config.training.images * clusters,
            "batch": config.training.batch * clusters,
            "warmup_images": config.training.warmup_images * clusters,
            "ema_images": config.training.ema_images * clusters,
            "seed": seed_from(config.training.seed, "order", NAME),
        }
    )
    like = make_order(origin, cut, 0, objective, config)
    update = {"name": NAME, "cluster": None, "shards": shard_refs(cut, "clusters/"), "training": training}
    order = Order.model_validate(like.model_copy(update=update).model_dump())
    settings = order.model_dump(mode="json")
    parents = {"data": origin.digest, "partition": cut.digest}
    if (there := reuse(out, KIND, settings, parents)) is not None:
        return there
    with Draft(out, KIND) as draft:
        (draft.folder / f"{NAME}.json").write_bytes(order.to_bytes())
        return draft.commit(config=settings, parents=parents, licence=origin.manifest.licence)
