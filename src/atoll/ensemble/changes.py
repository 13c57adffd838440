"""How a run's model changes: read the newest version, and create the next one; if somebody was faster, again.

Nobody waits for anybody and nothing is overwritten, on a disk or an object store, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError

from ..artifacts import Artifact, Store, UserError, explain
from ..data.space import LatentSpace, text_space
from .checks import Checks
from .versions import COPY, FOLDER, History, Version, no_ensemble, reference_to, told_newest

Change = Callable[[Version | None], Version]


def change_ensemble(run: Store, change: Change, what: str) -> Version:
    """Make `change(the newest version)` the next one; `what` tells people what was done.

    `change` may be called several times, with what others have done meanwhile, so it says what to do with the version
    it is given, and doing it twice must be doing it once. What changes nothing creates nothing.
    """
    run.check_creates()
    history, checks = History.of(run), Checks(run)
    told_newest(history)
    while True:
        before = history.newest
        after = numbered(change(before), before, history.next_number, what)
        if before is not None and same_content(before, after):
            write_copy(history)
            return before
        checks.check(after)
        if run.child(FOLDER).create(after.name, after.to_bytes()):
            history.refresh()
            write_copy(history)
            return after
        history.refresh()


def numbered(version: Version, before: Version | None, number: int, what: str) -> Version:
    """The version with its number, predecessor and story, validated: a change may have put anything into it."""
    told = {
        "version": number,
        "predecessor": None if before is None else before.digest(),
        "change": what,
    }
    try:
        return Version.model_validate({**version.model_dump(), **told})
    except ValidationError as error:
        raise UserError(f"{what}: {explain(error)}") from error


def same_content(one: Version, other: Version) -> bool:
    story = {"version", "predecessor", "change"}
    return one.model_dump(exclude=story) == other.model_dump(exclude=story)


def write_copy(history: History) -> None:
    """Leave a copy of the newest version for people; of several that do so at once the newest has the last word."""
    while (newest := history.newest) is not None:
        data = newest.to_bytes()
        try:
            if history.run.read(COPY, len(data)) == data:
                return
        except FileNotFoundError:
            pass  # the first one
        history.run.write(COPY, data)
        history.refresh()


def register_orders(run: Store, data: Artifact, partition: Artifact, orders: Artifact) -> Version:
    """Accept experts trained for these orders, and work on this data and partition from now on."""
    return change_ensemble(run, with_orders(run, data, partition, orders), f"planned {orders.store.name}")


def with_orders(run: Store, data: Artifact, partition: Artifact, orders: Artifact) -> Change:
    """The change that accepts these orders.

    The first orders begin the model. Those of a partition that grew from the model's with late data take it along;
    those of any other are refused once the model has an expert or a router of its own.
    """
    named, cut, new = reference_to(run, data), reference_to(run, partition), reference_to(run, orders)

    def change(now: Version | None) -> Version:
        if now is None or (cut.digest not in now.partitions and is_empty(now) and not grew_from(partition, now)):
            return Version(
                data=named,
                partition=cut,
                orders=(new,),
                clusters=int(partition.config["clusters"]),
                latent=LatentSpace.model_validate(data.config["latent"]),
                text=text_space(data),
            )
        known = {reference.digest for reference in now.orders}
        update: dict[str, object] = {} if new.digest in known else {"orders": (*now.orders, new)}
        if grew_from(partition, now):
            update |= {"data": named, "partition": cut, "earlier": (*now.earlier, now.partition)}
        elif cut.digest not in now.partitions:
            raise UserError(
                f"{partition.store}: the model of {run} is of another partition ({now.partition.path}) and has experts "
                "or a router already; make another run for this one, or grow that one with `atoll partition --onto`"
            )
        return now.model_copy(update=update)

    return change


def is_empty(version: Version) -> bool:
    return not version.experts and version.router is None


def grew_from(partition: Artifact, version: Version) -> bool:
    return partition.manifest.parents.get("partition") == version.partition.digest


def register_router(run: Store, router: Artifact) -> Version:
    """Make a router the one the ensemble uses."""
    named = reference_to(run, router)
    return change_ensemble(
        run, lambda now: begun(run, now).model_copy(update={"router": named}), f"router {named.path} fuses the experts"
    )


def register_monolith(run: Store, expert: Artifact) -> Version:
    """Name the expert on all of the data that the ensemble is compared with."""
    named = reference_to(run, expert)
    return change_ensemble(
        run, lambda now: begun(run, now).model_copy(update={"monolith": named}), f"compared with {named.path}"
    )


def begun(run: Store, now: Version | None) -> Version:
    """The version to change, where there must be one."""
    if now is None:
        raise UserError(no_ensemble(run))
    return now
