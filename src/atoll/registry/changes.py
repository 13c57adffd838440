"""How a run's model changes: read the newest version, and create the next one; if somebody was faster, again.

Nobody waits for anybody and nothing is overwritten, on a disk or an object store, so nothing is lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import count

from pydantic import ValidationError

from ..artifacts import Artifact, Reference, Store, UserError, explain
from ..data.classes import class_names
from ..data.space import LatentConfig, text_space
from ..mixture.routes import parse_route
from .checks import Checks
from .signatures import sign_version
from .versions import (
    COPY,
    FOLDER,
    History,
    Member,
    Version,
    find_ensemble,
    no_ensemble,
    open_ensemble,
    reference_to,
    warn_if_stale,
)

Change = Callable[[Version | None], Version]
MOST_WAIT = 2.0  # seconds between two attempts


def change_ensemble(run: Store, change: Change, what: str) -> Version:
    """Make `change(the newest version)` the next one; `what` tells people what was done.

    `change` may be called several times, with what others have done meanwhile, so it says what to do with the version
    it is given, and doing it twice must be doing it once. What changes nothing creates nothing.
    """
    run.check_creates()
    history, checks = History.of(run), Checks(run)
    warn_if_stale(history)
    for refusals in count():
        began = time.monotonic()
        before = history.newest
        after = numbered(change(before), before, history.next_number, what)
        if before is not None and same_content(before, after):
            write_copy(history)
            return before
        checks.check(after, before)
        sign_version(run, after)
        created = run.child(FOLDER).create(after.name, after.to_bytes())
        if not created:
            # one of those who try gets through each time; the more they are, the longer it pays to stay away
            time.sleep(random.uniform(0, min(MOST_WAIT, (time.monotonic() - began) * 2 ** min(refusals, 10))))
        history.refresh()
        if created:
            if history.newest == after:  # else whoever was next leaves the copy
                write_copy(history)
            return after
    raise AssertionError("unreachable")


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


def register_orders(run: Store, data: Artifact, partition: Artifact, orders: Artifact | None) -> Version:
    """Accept experts trained for these orders, and work on this data and partition from now on.

    The first orders begin the model. Those of a partition that grew from the model's with late data take it along;
    those of any other are refused once the model has an expert or a router of its own. `orders` may be None where
    late data asks for none.
    """
    new = None if orders is None else reference_to(run, orders)
    what = f"took {partition.store.name} in" if new is None else f"planned {new.path}"
    return change_ensemble(run, lambda now: with_orders(run, now, data, partition, new), what)


def check_plan(run: Store, data: Artifact, partition: Artifact) -> None:
    """Refuse orders that `register_orders` would refuse, before they are written."""
    run.check_creates()
    with_orders(run, find_ensemble(run), data, partition, None)


def with_orders(
    run: Store, now: Version | None, data: Artifact, partition: Artifact, orders: Reference | None
) -> Version:
    """The version that accepts these orders, if any, and works on this data and partition."""
    named, cut = reference_to(run, data), reference_to(run, partition)
    new = () if orders is None else (orders,)
    if now is None or (cut.digest not in now.partitions and is_empty(now) and not grew_from(partition, now)):
        return Version(
            data=named,
            partition=cut,
            orders=new,
            clusters=int(partition.config["clusters"]),
            latent=LatentConfig.model_validate(data.config["latent"]),
            text=text_space(data),
            class_names=class_names(data),
        )
    known = {reference.digest for reference in now.orders}
    update: dict[str, object] = {"orders": (*now.orders, *(r for r in new if r.digest not in known))}
    if now.class_names is None:  # a model that was begun before they had names
        update["class_names"] = class_names(data)
    if grew_from(partition, now):
        update |= {"data": named, "partition": cut, "earlier": (*now.earlier, now.partition)}
    elif cut.digest not in now.partitions:
        raise UserError(
            f"{partition.store}: the model of {run} is of another partition ({now.partition.path}) and has experts "
            "or a router already; make another run for this one, or grow that one with `atoll partition --onto`"
        )
    return now.model_copy(update=update)


def is_empty(version: Version) -> bool:
    return not version.experts and version.router is None


def grew_from(partition: Artifact, version: Version) -> bool:
    return partition.manifest.parents.get("partition") == version.partition.digest


def register_router(run: Store, router: Artifact) -> Version:
    """Make a router the one the ensemble uses."""
    named = reference_to(run, router)
    return change_ensemble(
        run, lambda now: begun(run, now).model_copy(update={"router": named}), f"{named.path} fuses the experts"
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


def use_expert(run: Store, name: str) -> Version:
    """Let an admitted expert serve its cluster instead of whoever does now. `name` is how its folder's name begins."""
    chosen = expert_called(run, open_ensemble(run), name)

    def change(now: Version | None) -> Version:
        (member,) = [m for m in begun(run, now).experts if m.digest == chosen.digest]
        return begun(run, now).with_expert(member.model_copy(update={"serving": True}))

    return change_ensemble(run, change, f"{chosen.name} serves cluster {chosen.cluster}")


def remove_expert(run: Store, cluster: int) -> Version:
    """Let no expert serve a cluster; those admitted for it stay, and `use_expert` brings one back."""

    def change(now: Version | None) -> Version:
        version = begun(run, now)
        if not 0 <= cluster < version.clusters:
            raise UserError(f"--remove {cluster}: no such cluster; they are 0 to {version.clusters - 1}")
        if all(member.cluster != cluster for member in version.experts):
            served = ", ".join(str(member.cluster) for member in version.serving)
            raise UserError(f"--remove {cluster}: no expert was admitted for it; served are {served or 'none'}")
        experts = tuple(m.model_copy(update={"serving": m.serving and m.cluster != cluster}) for m in version.experts)
        return version.model_copy(update={"experts": experts})

    return change_ensemble(run, change, f"no expert serves cluster {cluster}")


def set_route(run: Store, route: str) -> Version:
    """Make a route the one that is taken when none is asked for."""
    parse_route(route)
    return change_ensemble(run, lambda now: begun(run, now).model_copy(update={"route": route}), f"route {route}")


def roll_back(run: Store, number: int | None = None) -> Version:
    """Make the model what it was in an older version: in the one before the newest, if none is named.

    Experts and orders that came since are kept where they belong to its clusters; the experts among them do not serve.
    """
    history, checks = History.of(run), Checks(run)
    newest = history.newest
    if newest is None:
        raise UserError(no_ensemble(run))
    goal = wanted(run, history, newest, number)

    def change(now: Version | None) -> Version:
        if number is None and begun(run, now).version != newest.version:
            raise UserError(f"{run}: somebody changed the model just now; look at it with `atoll ensemble {run}` first")
        return with_later(goal, begun(run, now), checks)

    return change_ensemble(run, change, f"back to version {goal.version}")


def wanted(run: Store, history: History, newest: Version, number: int | None) -> Version:
    """The version to go back to. One whose own content is whole will do, even if its predecessors are lost."""
    if number is None:
        if len(chain := history.chain()) < 2:
            raise UserError(f"--rollback: {run} has no version before its first")
        return chain[1]
    goal = history.versions.get(number) or history.orphans.get(number)
    if goal is None:
        there = sorted({*history.versions, *history.orphans} - {newest.version})
        known = ", ".join(map(str, there[-20:])) or "none"
        why = f" ({history.unused[number]})" if number in history.unused else ""
        raise UserError(f"--rollback {number}: {run} has no such version{why}; there are {known}")
    return goal


def with_later(goal: Version, now: Version, checks: Checks) -> Version:
    """An older version with the orders and experts of a newer one that are of its clusters, the experts at rest."""
    kept = {reference.digest for reference in goal.orders}
    for reference in now.orders:
        artifact = checks.opened(reference, "orders")
        if artifact is not None and artifact.manifest.parents.get("partition") in goal.partitions:
            kept.add(reference.digest)
    orders = tuple(r for r in dict.fromkeys([*goal.orders, *now.orders]) if r.digest in kept)
    version = goal.model_copy(update={"orders": orders})
    accepted = checks.orders_of(version)
    known = {member.digest for member in goal.experts}
    for member in now.experts:
        if member.digest not in known and member.order in accepted:
            version = version.with_expert(member.model_copy(update={"serving": False}))
    return version


def expert_called(run: Store, version: Version, name: str) -> Member:
    """The admitted expert whose folder's name begins like this."""
    matching = [member for member in version.experts if name and member.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(member.name for member in (matching or version.experts)[:20])
    state = "fits several" if matching else "no such expert was admitted"
    raise UserError(f"--use {name}: {state}; {run} has {names or 'none yet'}")
