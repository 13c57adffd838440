"""Where a run stands: every stage of its newest version, what is missing, and the command that makes it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..artifacts import Artifact, Reference, Store, UserError, find
from ..islands.expert import KIND as EXPERT
from ..islands.launch import logged_images
from ..islands.order import Order
from .checks import Checks
from .versions import COPY, Version, find_ensemble, is_whole, no_ensemble, place_of

RESULTS = ("evaluation.json", "report.html", "samples.png")
SETTINGS, ISLANDS = "run.toml", "islands"  # of a run that `atoll run` makes
FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "data": lambda c: f"{c['count']:,} samples, latents {'x'.join(map(str, c['latent']['shape']))}",
    "partition": lambda c: f"{c['clusters']} clusters by {c['method']}",
    "orders": lambda c: f"{len(c['chosen'])} orders: {', '.join(c['chosen']) or 'none was needed'}",
    "router": lambda c: f"{c['card']['images']:,} images, sees {c['card']['architecture']['trunk']['condition']}",
    EXPERT: lambda c: f"{c['kind']} on {c['schedule']['name']}, {c['images']:,} images{learned_of(c)}",
}


@dataclass(frozen=True)
class Stage:
    """One line of a status. `digest` is empty where it is missing; `next` is a command, where there is one to give."""

    name: str
    digest: str
    what: str
    next: str = ""


def shell(place: Store) -> str:
    """A place in a command that somebody copies: in quotes where a shell needs them."""
    return shlex.quote(str(place))


def stages(run: Store) -> list[Stage]:
    """Every stage of a run, in the order in which they are made. A place that holds none is refused."""
    if (alone := expert_at(run)) is not None:
        return [there(alone, f", license {alone.manifest.license or 'not said'}")]
    if not holds_run(run):
        raise UserError(f"{run}: is no run, it holds nothing of one; check the path, or make one with `atoll demo`")
    version = find_ensemble(run)
    found = list(artifacts_in(run))
    lines = list(first_stages(run, found) if version is None else model_stages(run, version, found))
    return [*lines, *refused(run), *unfinished(run)]


def holds_run(place: Store) -> bool:
    """Whether a folder is a run, if only the beginning of one."""
    if find_ensemble(place) is not None or place.exists(COPY) or place.exists(SETTINGS) or any(unfinished(place)):
        return True
    return any(artifact.manifest.kind != EXPERT for artifact in artifacts_in(place))


def goes_on(run: Store) -> bool:
    """Whether `atoll run` was begun here and has not come to its end."""
    return run.exists(SETTINGS) and not all(run.exists(name) for name in RESULTS)


def expert_at(place: Store) -> Artifact | None:
    """The expert in a folder of its own, which is no run: an island's, a monolith, a student."""
    try:
        artifact = find(place)
    except UserError:
        return None
    return artifact if artifact is not None and artifact.manifest.kind == EXPERT else None


def learned_of(card: dict[str, Any]) -> str:
    """Of a student: how many experts taught it."""
    teachers = card.get("teachers") or ()
    return f", a student of {len(teachers)} experts" if teachers else ""


def artifacts_in(run: Store) -> Iterator[Artifact]:
    for name in run.children():
        try:
            artifact = None if name.startswith(".") else find(run.child(name))
        except UserError:  # no whole one; if the model names it, its own line says so
            continue
        if artifact is not None and artifact.manifest.kind in FACTS:
            yield artifact


def first_stages(run: Store, found: list[Artifact]) -> Iterator[Stage]:
    """Of a run that has no model yet."""
    by_kind = {kind: [a for a in found if a.manifest.kind == kind] for kind in FACTS}
    data = by_kind["data"][0].store.name if by_kind["data"] else "data"
    makers = {
        "data": f"atoll prepare SOURCE --out {shell(run)}/data",
        "partition": f"atoll partition {shell(run)}/{data} -k 8",
        "orders": f"atoll plan {shell(run)}/{data}",
    }
    for kind, command in makers.items():
        yield from (there(artifact) for artifact in by_kind[kind])
        if not by_kind[kind]:
            yield Stage(kind, "", "not made yet", command)
    old = f"{no_ensemble(run).partition(': ')[2]}" if run.exists(COPY) else "begins with the first orders"
    yield Stage("model", "", old, f"atoll plan {shell(run)}/{data}")


def model_stages(run: Store, version: Version, found: list[Artifact]) -> Iterator[Stage]:
    yield named(run, version.data, "data")
    grown = "".join(f", grown from {older.path}" for older in version.earlier[-1:])
    yield named(run, version.partition, "partition", grown)
    for reference in version.orders:
        yield named(run, reference, "orders")
    yield from late(run, version, found)
    yield from experts(run, version)
    yield router(run, version)
    yield Stage("model", version.digest(), f"version {version.version}: {version.change}")
    yield from students(run, version, found)
    yield from results(run, version)


def named(run: Store, reference: Reference, kind: str, more: str = "") -> Stage:
    """Something that the version names, if it is there."""
    if not is_whole(run, reference):
        return Stage(reference.path, "", f"{reference.digest[:12]} is missing, damaged or another one: put it back")
    return there(Artifact.open(place_of(run, reference), kind), more)


def there(artifact: Artifact, more: str = "") -> Stage:
    return Stage(artifact.store.name, artifact.digest, f"{FACTS[artifact.manifest.kind](artifact.config)}{more}")


def late(run: Store, version: Version, found: list[Artifact]) -> Iterator[Stage]:
    """Data that came late and a partition of it, which the model has not taken in yet."""
    data, partition, orders = version.data, version.partition, version.orders[-1].path
    for newer in (a for a in found if a.manifest.kind == "data" and a.manifest.parents.get("data") == data.digest):
        cuts = [a for a in found if a.manifest.kind == "partition" and a.manifest.parents["data"] == newer.digest]
        grown = [cut for cut in cuts if cut.manifest.parents.get("partition") == partition.digest]
        yield there(newer, ", not taken in yet")
        if not grown:
            command = f"atoll partition {shell(newer.store)} --onto {shell(run)}/{partition.path}"
            yield Stage("partition", "", f"of {newer.store.name}: not made yet", command)
        for cut in grown:
            yield there(cut, ", not taken in yet")
            yield Stage(
                "orders",
                "",
                f"for {cut.store.name}: not planned yet",
                f"atoll plan {shell(newer.store)} --onto {shell(run)}/{orders}",
            )


def experts(run: Store, version: Version) -> Iterator[Stage]:
    """One line per cluster: who serves it, or what is to be trained; and an order that waits for somebody."""
    checks = Checks(run)
    accepted, generations = checks.orders_of(version), checks.generations(version)
    newest: dict[int | None, Order] = {order.cluster: order for order in accepted.values()}
    serving = {member.cluster: member for member in version.serving}
    for cluster in range(version.clusters):
        member, order = serving.get(cluster), newest.get(cluster)
        place = "" if order is None else f"{version.orders[generations[order.digest()]].path}/{order.name}.json"
        train = f"atoll train {shell(run)}/{place} --out EXPERT && atoll admit EXPERT --out {shell(run)}"
        if member is None:
            others = [m for m in version.experts if m.cluster == cluster]
            waiting = trained_here(run, order) or f"waits for an expert of {place}"
            what = f"none serves, {len(others)} admitted" if others else waiting
            use = f"atoll ensemble {shell(run)} --use {others[0].name}" if others else train
            yield Stage(f"expert {cluster}", "", what, use)
        elif not is_whole(run, member):
            yield Stage(f"expert {cluster}", "", f"{member.path} is missing or damaged: put it back", train)
        else:
            score = "" if member.val_loss is None else f", holdout error {member.val_loss.inside:.4f}"
            admitted = {m.order for m in version.experts}
            waits = order is not None and order.digest() != member.order and order.digest() not in admitted
            more = f"; {place} waits for an expert" if waits else ""
            yield Stage(f"expert {cluster}", member.digest, f"{member.objective}{score}{more}", train if waits else "")


def trained_here(run: Store, order: Order | None) -> str:
    """How far `atoll run` is with an expert that is not admitted yet; nothing where it has not begun."""
    if order is None or not run.is_local:
        return ""
    expert = run.path / ISLANDS / order.name / "expert"
    if find(expert) is not None:
        return "trained here, not admitted yet"
    seen = logged_images(expert)
    return f"in training here, {seen:,} of {order.training.images:,} images" if seen else ""


def students(run: Store, version: Version, found: list[Artifact]) -> Iterator[Stage]:
    """Dense networks in the run's folder that were taught by its experts, and whether these are still the same."""
    serving = {member.digest for member in version.serving}
    for artifact in found:
        taught_by = {teacher["digest"] for teacher in artifact.config.get("teachers") or ()}
        if not taught_by:
            continue  # no student; nor does a model without experts have any
        if taught_by == serving:
            yield there(artifact)
        else:
            again = f"atoll distill {run} --out ANOTHER"
            yield replace(there(artifact, "; others serve now"), next=again)


def router(run: Store, version: Version) -> Stage:
    if version.router is None:
        return Stage("router", "", "not trained yet", f"atoll router {shell(run)}")
    stage = named(run, version.router, "router")
    if not stage.digest:
        return stage
    artifact = Artifact.open(place_of(run, version.router), "router")
    if artifact.manifest.parents["partition"] == version.partition.digest:
        return stage
    older = f"{stage.what}; of an older partition, to be refreshed"
    return Stage(stage.name, stage.digest, older, f"atoll router {shell(run)}")


def results(run: Store, version: Version) -> Iterator[Stage]:
    """What `atoll evaluate` leaves, and whether it is of this model and measured on its data."""
    command = f"atoll evaluate {shell(run)}"
    try:
        evaluation = json.loads(run.read(RESULTS[0]))
        models = {row.get("digest") for row in evaluation["configurations"]}
        old = version.model_digest() not in models or evaluation["data"] != version.data.digest
    except FileNotFoundError:
        old = False
    except (ValueError, KeyError, TypeError, AttributeError):
        yield Stage(RESULTS[0], "", "cannot be read", command)
        return
    for name in RESULTS:
        if not run.exists(name):
            yield Stage(name, "", "not made yet", command)
        else:
            yield Stage(name, "file", "of another version" if old else "", command if old else "")


def refused(run: Store) -> Iterator[Stage]:
    """Contributions that stay in quarantine, and why."""
    quarantine = run.child("quarantine")
    for name in quarantine.children():
        try:
            reason = str(json.loads(quarantine.child(name).read("reasons.json", 2**20))["reason"])
        except (OSError, ValueError, KeyError, TypeError, UserError):
            continue  # being judged just now, or nothing of ours
        yield Stage(f"quarantine/{name}", "", f"refused: {reason}")


def unfinished(run: Store) -> Iterator[Stage]:
    """Work that was begun and not finished: the same command goes on with it."""
    for name in run.children():
        if name.startswith(".") and name.endswith(".partial"):
            yield Stage(
                name[1:].removesuffix(".partial"), "", "begun: the command that makes it goes on when run again"
            )
