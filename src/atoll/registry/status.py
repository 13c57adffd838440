"""Where a run stands: every stage of its newest version, what is missing, and the command that makes it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..artifacts import Artifact, Reference, Store, UserError, find
from ..islands.expert import KIND as EXPERT
from ..islands.launch import logged_images
from ..islands.order import Order
from .checks import accepted_orders
from .versions import Version, find_ensemble, is_whole, place_of

RESULTS = ("evaluation.json", "report.html", "samples.png")
SETTINGS, ISLANDS = "run.toml", "islands"  # of a run that `atoll run` makes
FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "data": lambda c: f"{c['count']:,} samples, latents {'x'.join(map(str, c['latent']['shape']))}",
    "partition": lambda c: f"{c['clusters']} clusters by {c['method']}",
    "orders": lambda c: f"{len(c['chosen'])} orders: {', '.join(c['chosen']) or 'none was needed'}",
    "router": lambda c: f"{c['card']['images']:,} images, sees {c['card']['architecture']['trunk']['condition']}",
    EXPERT: lambda c: f"{c['kind']} on {c['schedule']['name']}, {c['images']:,} images{distilled_from(c)}",
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
    if find_ensemble(place) is not None or place.exists(SETTINGS) or any(unfinished(place)):
        return True
    return any(artifact.manifest.kind != EXPERT for artifact in artifacts_in(place))


def goes_on(run: Store) -> bool:
    """Whether `atoll run` was begun here and has not come to its end."""
    return run.exists(SETTINGS) and not all(run.exists(name) for name in RESULTS)


def expert_at(place: Store) -> Artifact | None:
    """The expert in a folder of its own, which is no run: an island's, a monolith, a student."""
    artifact = readable(place)
    return artifact if artifact is not None and artifact.manifest.kind == EXPERT else None


def readable(place: Store) -> Artifact | None:
    try:
        return find(place)
    except UserError:  # no whole one; if the model names it, its own line says so
        return None


def artifacts_in(run: Store) -> Iterator[Artifact]:
    for name in run.children():
        artifact = None if name.startswith(".") else readable(run.child(name))
        if artifact is not None and artifact.manifest.kind in FACTS:
            yield artifact


def there(artifact: Artifact, more: str = "") -> Stage:
    try:
        facts = FACTS[artifact.manifest.kind](artifact.config)
    except (KeyError, TypeError, ValueError):
        facts = "of another atoll, which this one cannot describe"
    return Stage(artifact.store.name, artifact.digest, f"{facts}{more}")


def distilled_from(card: dict[str, Any]) -> str:
    teachers = card.get("teachers") or ()
    return f", distilled from {len(teachers)} experts" if teachers else ""


def first_stages(run: Store, found: list[Artifact]) -> Iterator[Stage]:
    """Of a run that has no model yet."""
    data = next((a.store.name for a in found if a.manifest.kind == "data"), "data")
    makers = {
        "data": f"atoll prepare SOURCE --out {shell(run)}/data",
        "partition": f"atoll partition {shell(run)}/{data} -k 8",
        "orders": f"atoll plan {shell(run)}/{data}",
    }
    for kind, command in makers.items():
        own = [there(artifact) for artifact in found if artifact.manifest.kind == kind]
        yield from own or [Stage(kind, "", "not made yet", command)]
    yield Stage("model", "", "begins with the first orders", makers["orders"])


def model_stages(run: Store, version: Version, found: list[Artifact]) -> Iterator[Stage]:
    yield named(run, version.data)
    yield named(run, version.partition, "".join(f", grown from {older.path}" for older in version.earlier[-1:]))
    for reference in version.orders:
        yield named(run, reference)
    yield from added_later(run, version, found)
    yield from experts(run, version)
    yield router(run, version)
    yield Stage("model", version.digest(), f"version {version.version}: {version.change}")
    yield from students(run, version, found)
    yield from results(run, version)


def named(run: Store, reference: Reference, more: str = "") -> Stage:
    """Something that the version names, if it is there."""
    artifact = readable(place_of(run, reference))
    if artifact is None or artifact.digest != reference.digest:
        return Stage(reference.path, "", f"{reference.digest[:12]} is missing, damaged or another one: put it back")
    return there(artifact, more)


def added_later(run: Store, version: Version, found: list[Artifact]) -> Iterator[Stage]:
    """Data that was added and a partition of it, which the model does not use yet."""
    for newer in found:
        if newer.manifest.kind != "data" or newer.manifest.parents.get("data") != version.data.digest:
            continue
        yield there(newer, ", not taken in yet")
        parents = {"data": newer.digest, "partition": version.partition.digest}
        grown = [a for a in found if a.manifest.kind == "partition" and parents.items() <= a.manifest.parents.items()]
        if not grown:
            command = f"atoll partition {shell(newer.store)} --onto {shell(run)}/{version.partition.path}"
            yield Stage("partition", "", f"of {newer.store.name}: not made yet", command)
        for cut in grown:
            command = f"atoll plan {shell(newer.store)} --onto {shell(run)}/{version.orders[-1].path}"
            yield there(cut, ", not taken in yet")
            yield Stage("orders", "", f"for {cut.store.name}: not planned yet", command)


def experts(run: Store, version: Version) -> Iterator[Stage]:
    """One line per cluster: who serves it, or what is to be trained; and an order that waits for an expert."""
    newest = {accepted.order.cluster: accepted for accepted in accepted_orders(run, version).values()}
    serving, admitted = {m.cluster: m for m in version.serving}, {m.order for m in version.experts}
    for cluster in range(version.clusters):
        member, accepted, name = serving.get(cluster), newest.get(cluster), f"expert {cluster}"
        path = "ORDER" if accepted is None else accepted.path
        train = f"atoll train {shell(run)}/{path} --out EXPERT && atoll admit EXPERT --out {shell(run)}"
        inactive = [m for m in version.experts if m.cluster == cluster]
        if member is None and inactive:
            use = f"atoll ensemble {shell(run)} --use {inactive[0].name}"
            yield Stage(name, "", f"none serves, {len(inactive)} admitted", use)
        elif member is None:
            begun = "" if accepted is None else trained_here(run, accepted.order)
            yield Stage(name, "", begun or f"waits for an expert of {path}", train)
        elif not is_whole(run, member):
            yield Stage(name, "", f"{member.path} is missing or damaged: put it back", train)
        else:
            score = "" if member.val_loss is None else f", val loss {member.val_loss.inside:.4f}"
            waits = accepted is not None and accepted.order.digest() not in admitted
            more = f"; {path} waits for an expert" if waits else ""
            yield Stage(name, member.digest, f"{member.objective}{score}{more}", train if waits else "")


def trained_here(run: Store, order: Order) -> str:
    """How far `atoll run` is with an expert that is not admitted yet; nothing where it has not begun."""
    if not run.is_local:
        return ""
    expert = run.path / ISLANDS / order.name / "expert"
    if find(expert) is not None:
        return "trained here, not admitted yet"
    seen = logged_images(expert)
    return f"in training here, {seen:,} of {order.training.images:,} images" if seen else ""


def router(run: Store, version: Version) -> Stage:
    command = f"atoll router {shell(run)}"
    if version.router is None:
        return Stage("router", "", "not trained yet", command)
    stage, artifact = named(run, version.router), readable(place_of(run, version.router))
    if artifact is None or artifact.manifest.parents.get("partition") == version.partition.digest:
        return stage
    return Stage(stage.name, stage.digest, f"{stage.what}; of an older partition, to be refreshed", command)


def students(run: Store, version: Version, found: list[Artifact]) -> Iterator[Stage]:
    """Dense networks in the run's folder that were distilled from its experts, and whether these are still the same."""
    serving = {member.digest for member in version.serving}
    for artifact in found:
        teachers = {teacher["digest"] for teacher in artifact.config.get("teachers") or ()}
        if teachers and teachers == serving:
            yield there(artifact)
        elif teachers:
            stage = there(artifact, "; others serve now")
            yield Stage(stage.name, stage.digest, stage.what, f"atoll distill {shell(run)} --out ANOTHER")


def results(run: Store, version: Version) -> Iterator[Stage]:
    """What `atoll evaluate` leaves, and whether it is of this model and measured on its data."""
    command, old = f"atoll evaluate {shell(run)}", False
    try:
        evaluation = json.loads(run.read(RESULTS[0]))
        models = {row.get("digest") for row in evaluation["configurations"]}
        old = version.model_digest() not in models or evaluation["data"] != version.data.digest
    except FileNotFoundError:
        pass  # its line says so
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
    """Work that was begun and not finished: the same command resumes it."""
    for name in run.children():
        if name.startswith(".") and name.endswith(".partial"):
            yield Stage(name[1:].removesuffix(".partial"), "", "begun: the command that makes it resumes it")
