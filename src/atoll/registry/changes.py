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
from ..islands.expert import KIND as EXPERT
from ..islands.expert import read_expert_card
from ..mixture.routes import parse_route
from ..router.card import read_router_card
from .checks import accepted_orders, check_member, check_router, check_spaces, partition_of
from .signatures import sign_version
from .versions import (
    FOLDER,
    Member,
    Newest,
    UnreadableVersion,
    Version,
    find_ensemble,
    history,
    no_ensemble,
    open_ensemble,
    open_reference,
    read_version,
    reference_to,
)

Change = Callable[[Version | None], Version]
MOST_WAIT = 2.0  # seconds between two attempts


def change_ensemble(run: Store, change: Change, what: str, *, may_lose: bool = False) -> Version:
    """Make `change(the newest version)` the next one; `what` tells people what was done.

    `change` may be called several times, with what others have done meanwhile, so it says what to do with the version
    it is given, and doing it twice must be doing it once. What changes nothing creates nothing. Only with `may_lose`
    the new version may be without an admitted expert or the router of the one before, or of one that is unreadable.
    """
    run.check_creates()
    for attempt in count():
        began, newest = time.monotonic(), Newest.of(run)
        before = newest.version
        if newest.unreadable is not None and not may_lose:
            assert before is not None
            raise UserError(
                f"{newest.unreadable}: a change would lose what it says; restore the file, or give it up with "
                f"`atoll ensemble {run} --rollback {before.version}`"
            )
        after = numbered(change(before), before, newest.next_number, what)
        if before is not None and newest.unreadable is None and same_content(before, after):
            return before
        assert may_lose or before is None or keeps_all(before, after), f"{what}: would lose experts or the router"
        sign_version(run, after)
        if run.child(FOLDER).create(after.name, after.to_bytes()):
            return after
        # one of those who try gets through each time; the more they are, the longer it pays to stay away
        time.sleep(random.uniform(0, min(MOST_WAIT, (time.monotonic() - began) * 2 ** min(attempt, 10))))
    raise AssertionError("unreachable")


def numbered(version: Version, before: Version | None, number: int, what: str) -> Version:
    """The version with its number, predecessor and story, validated: a change may have put anything into it."""
    told = {"version": number, "predecessor": None if before is None else before.digest(), "change": what}
    try:
        return Version.model_validate({**version.model_dump(), **told})
    except ValidationError as error:
        raise UserError(f"{what}: {explain(error)}") from error


def same_content(one: Version, other: Version) -> bool:
    story = {"version", "predecessor", "change"}
    return one.model_dump(exclude=story) == other.model_dump(exclude=story)


def keeps_all(before: Version, after: Version) -> bool:
    kept = {member.digest for member in after.experts} >= {member.digest for member in before.experts}
    return kept and (before.router is None or after.router is not None)


def register_orders(run: Store, data: Artifact, partition: Artifact, orders: Artifact | None) -> Version:
    """Accept experts trained for these orders, and work on this data and partition from now on.

    The first orders begin the model. Those of a partition that grew from the model's take it along; those of any other
    are refused once the model has an expert or a router of its own. `orders` may be None where added data asks for
    none.
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
    grew = now is not None and grew_from(partition, now)
    if now is None or (cut.digest not in now.partitions and not (now.experts or now.router or grew)):
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
    if grew:
        update |= {"data": named, "partition": cut, "earlier": (*now.earlier, now.partition)}
    elif cut.digest not in now.partitions:
        raise UserError(
            f"{partition.store}: the model of {run} is of another partition ({now.partition.path}) and has experts "
            "or a router already; make another run for this one, or grow that one with `atoll partition --onto`"
        )
    return now.model_copy(update=update)


def grew_from(partition: Artifact, version: Version) -> bool:
    return partition.manifest.parents.get("partition") == version.partition.digest


def register_router(run: Store, router: Artifact) -> Version:
    """Make a router the one the ensemble uses."""
    named, card = reference_to(run, router), read_router_card(router)

    def change(now: Version | None) -> Version:
        check_router(begun(run, now), card, str(router.store))
        return begun(run, now).model_copy(update={"router": named})

    return change_ensemble(run, change, f"{named.path} fuses the experts")


def register_monolith(run: Store, expert: Artifact) -> Version:
    """Name the expert on all of the data that the ensemble is compared with."""
    named, card = reference_to(run, expert), read_expert_card(expert)
    if card.cluster is not None:
        raise UserError(f"{expert.store}: is an expert of cluster {card.cluster}, no monolith; choose another")

    def change(now: Version | None) -> Version:
        check_spaces(begun(run, now), card, str(expert.store))
        return begun(run, now).model_copy(update={"monolith": named})

    return change_ensemble(run, change, f"compared with {named.path}")


def begun(run: Store, now: Version | None) -> Version:
    """The version to change, where there must be one."""
    if now is None:
        raise UserError(no_ensemble(run))
    return now


def use_expert(run: Store, name: str) -> Version:
    """Let an admitted expert serve its cluster instead of whoever does now. `name` is how its folder's name begins."""
    chosen = expert_called(run, open_ensemble(run), name)
    card = read_expert_card(open_reference(run, chosen, EXPERT))

    def change(now: Version | None) -> Version:
        (member,) = [m for m in begun(run, now).experts if m.digest == chosen.digest]
        check_member(run, begun(run, now), member, card)
        return begun(run, now).with_expert(member.model_copy(update={"serving": True}))

    return change_ensemble(run, change, f"{chosen.name} serves cluster {chosen.cluster}")


def expert_called(run: Store, version: Version, name: str) -> Member:
    """The admitted expert whose folder's name begins like this."""
    matching = [member for member in version.experts if name and member.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(member.name for member in (matching or version.experts)[:20])
    state = "fits several" if matching else "no such expert was admitted"
    raise UserError(f"--use {name}: {state}; {run} has {names or 'none yet'}")


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

    Orders and experts that came since are kept where they belong to its clusters; these experts do not serve.
    """
    newest = Newest.of(run)
    seen = begun(run, newest.version)
    goal = seen if number is None and newest.unreadable is not None else wanted(run, seen, number)

    def change(now: Version | None) -> Version:
        if number is None and begun(run, now).version != seen.version:
            raise UserError(f"{run}: somebody changed the model just now; look at it with `atoll ensemble {run}` first")
        return with_later(run, goal, begun(run, now))

    return change_ensemble(run, change, f"back to version {goal.version}", may_lose=True)


def wanted(run: Store, newest: Version, number: int | None) -> Version:
    """The version to go back to."""
    try:
        if number is not None:
            return read_version(run, number)
    except UnreadableVersion as error:
        there = sorted(n for n, found in history(run) if isinstance(found, Version) and n != newest.version)
        known = ", ".join(map(str, there[-20:])) or "none"
        raise UserError(f"--rollback {number}: {run} has no such version (it {error}); there are {known}") from error
    older = (found for n, found in history(run) if n < newest.version and isinstance(found, Version))
    goal = next(older, None)
    if goal is None:
        raise UserError(f"--rollback: {run} has no version before its first")
    return goal


def with_later(run: Store, goal: Version, now: Version) -> Version:
    """An older version with the orders and experts of a newer one that are of its clusters, the experts inactive."""
    same = goal.partitions == now.partitions  # nothing need be read
    orders = dict.fromkeys([*goal.orders, *(r for r in now.orders if same or partition_of(run, r) in goal.partitions)])
    version = goal.model_copy(update={"orders": tuple(orders)})
    accepted = None if same else accepted_orders(run, version)
    known = {member.digest for member in goal.experts}
    for member in now.experts:
        if member.digest not in known and (accepted is None or member.order in accepted):
            version = version.with_expert(member.model_copy(update={"serving": False}))
    return version
