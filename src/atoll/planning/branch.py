"""Branching: one common start on all of the data, then an expert per cluster from there.

In a pilot, experts that branched off after a quarter of all images were better than experts from random weights that
saw as many images. Islands stay as isolated as ever: the start is one more expert of the run, which every order
names, and whoever trains it is an island like any other.

Matched in images: with share s the start sees s K n, each of K experts (1 - s) n, together K n as without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..artifacts import Artifact, Reference, Store, UserError, find
from ..islands.order import Order
from .monolith import order_on_everything, write_alone
from .recipes import PlanConfig

FOLDER = "branch"  # of the run: where the start's order lies
START = "start"  # of the run: where the trained start is looked for; also the order's name
OBJECTIVE = "flow"  # of the start: a velocity, which any flow expert can go on from


@dataclass(frozen=True)
class Branch:
    """A trained start, and the share of all images it has seen."""

    share: float
    start: Reference
    order: Order  # the start's own

    def shortened(self, order: Order) -> Order:
        """An expert's order for what is left; one with another objective begins at random, for the whole budget."""
        if order.objective != self.order.objective or order.architecture != self.order.architecture:
            return order
        batch = order.training.batch
        rest = 1.0 - self.share
        update = {
            "images": max(batch, round(order.training.images * rest / batch) * batch),
            "warmup_images": round(order.training.warmup_images * rest),
            "ema_images": max(1, round(order.training.ema_images * rest)),
        }
        training = order.training.model_copy(update=update)
        return Order.model_validate(order.model_copy(update={"training": training, "start": self.start}).model_dump())

    def record(self) -> dict[str, object]:
        return {"share": self.share, "start": self.start.model_dump(), "order": self.order.digest()}


def check_share(share: float) -> None:
    if not 0.0 < share < 1.0:
        raise UserError(f"--branch {share:g}: use a share of all images between 0 and 1, such as 0.25")


def plan_start(data: Artifact, partition: Artifact, run: Store, config: PlanConfig, share: float) -> Artifact:
    """Write the start's order, branch/start.json; the same call finds it there."""
    check_share(share)
    order = order_on_everything(data, partition, config, START, OBJECTIVE, share)
    return write_alone(data, partition, run.child(FOLDER), order)


def trained_start(run: Store, planned: Artifact, share: float) -> Branch | None:
    """The start in the run, if somebody has trained it; an expert of another order is refused."""
    order = Order.model_validate(planned.config)
    place = run.child(START)
    expert = find(place)
    if expert is None:
        return None
    if expert.manifest.kind != "expert" or expert.manifest.parents.get("order") != order.digest():
        raise UserError(f"{place}: is not an expert of {planned.store}/{START}.json; move it away, or train that order")
    return Branch(share, Reference(path=START, digest=expert.digest), order)
