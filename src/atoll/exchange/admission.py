"""Admit contributions: check a copy of the expert in quarantine, and add it to the model if all checks pass.

The checks and their order are CHECKS in checks.py. What passes is admitted; whether it also becomes the active expert
of its cluster is decided by `should_replace`.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..artifacts import Artifact, ArtifactWriter, AtollWarning, Store, UserError, find, sanitize
from ..islands.expert import KIND
from ..islands.order import Order
from ..registry.changes import begun, change_ensemble
from ..registry.checks import accepted_orders, objective_of
from ..registry.versions import Member, Version, is_whole, open_ensemble, place_of
from ..training.compute import best_device
from .card_checks import check_manifest
from .checks import Candidate, run_checks
from .holdout import BRANCHES, WEIGHTS, validation_loss
from .quarantine import SHEET, Refused, leave, read_manifest, write_reasons
from .signed import SIGNATURE, read_signers, signer_of
from .thresholds import AdmissionThresholds

JUDGEMENT = "judgement.json"  # next to an admitted expert: what was measured; unlisted, since draws are not repeated


@dataclass(frozen=True)
class Admission:
    """What `admit` did: the member of the model, whether it was there before, which expert is active instead, and who
    is credited for having sent the same.
    """

    member: Member
    already: bool
    incumbent: str | None = None
    copied_by: str | None = None


def admit(
    run: Store,
    contribution: str | Path | Store,
    *,
    replace: bool = False,
    recheck: bool = False,
    device: str | None = None,
    signers: str | Path | None = None,
    unsigned_ok: bool | None = None,
    checked: Counter[str] | None = None,
    thresholds: AdmissionThresholds = AdmissionThresholds(),
) -> Admission:
    """Check one expert folder; if it passes, name it in a new version of the model.

    It may be of any order the run ever gave, and is measured on the newest data. The active expert of its cluster is
    measured on the same draws, and stays active unless the newcomer is better by a margin (of a newer order: not worse
    by it), or `replace`. Both stay in the model, and `atoll ensemble --use` chooses another. What is refused leaves its
    reasons in quarantine, and is refused at once when it is sent again, unless `recheck`.

    `signers` is an allowed_signers file, by default RUN/allowed_signers. Where there is one, an expert that no key in
    it has signed is refused unless `unsigned_ok`; where there is none, only if that is False. `checked` counts what was
    checked of each sender of an inbox.
    """
    run.check_creates()
    source, version, known = Store.at(contribution), open_ensemble(run), read_signers(run, signers)
    try:
        manifest = read_manifest(source)
        order = order_of(run, version, check_manifest(manifest, str(source)))
    except Refused as refusal:
        raise Refused(sanitize(f"{source}: {refusal}", 600)) from refusal
    candidate = Candidate(
        run,
        version,
        order,
        manifest,
        source,
        thresholds,
        best_device(device),
        signers=known,
        unsigned_ok=known is None if unsigned_ok is None else unsigned_ok,
        recheck=recheck,
        replace=replace,
        checked=checked,
    )
    for member in version.experts:
        if member.digest == manifest.digest() and is_whole(run, member):
            leave(run, candidate.name)
            return credited(candidate, member)
    with candidate.lock:
        try:
            run_checks(candidate)
            admission = add(candidate)
        except Refused as refusal:
            reason = sanitize(f"{source}: {refusal}", 600)
            write_reasons(run, candidate.name, reasons(candidate, reason))
            raise Refused(reason) from refusal
    leave(run, candidate.name)
    return admission


def order_of(run: Store, version: Version, digest: str) -> Order:
    """The order of this run that an expert names."""
    accepted = accepted_orders(run, version).get(digest)
    order = None if accepted is None else accepted.order
    if order is None or order.cluster is None:
        raise Refused(f"was trained for no order of {run}; admit it to the run that gave the order")
    return order


def reasons(c: Candidate, reason: str) -> dict[str, object]:
    """What stays in quarantine of a refused contribution, and counts for its sender."""
    return {
        "reason": reason,
        "contribution": c.manifest.digest(),
        "order": c.order.digest(),
        "cluster": c.cluster,
        "whole": c.folder is not None,
        "sender": None if c.checked is None else c.sender,
        "measured": c.measured,
    }


def credited(c: Candidate, member: Member) -> Admission:
    """An expert that is there already stays as it is; another person who signed the same one is credited, too.

    The same order on the same kind of machine makes the same expert, so two people may honestly have it. The later one
    may also have copied it, and is named as who sent the same.
    """
    who = signer_of(c.manifest, c.signature, c.signers)
    if who in (None, member.contributor, *member.copies):
        return Admission(member, already=True)

    def credit(now: Version | None) -> Version:
        version = begun(c.run, now)
        (there,) = [m for m in version.experts if m.digest == member.digest]
        copies = tuple(dict.fromkeys((*there.copies, str(who))))
        return version.with_expert(there.model_copy(update={"copies": copies}))

    after = change_ensemble(c.run, credit, f"credited {who} for sending {member.name}, too")
    return Admission(next(m for m in after.experts if m.digest == member.digest), already=True, copied_by=who)


def add(c: Candidate) -> Admission:
    """Copy a checked expert into the run and name it in a new version. Its files come first: a version lacks none."""
    member = Member(
        path=f"contributions/{c.name}",
        digest=c.manifest.digest(),
        weights=c.weights,
        cluster=c.cluster,
        order=c.order.digest(),
        objective=objective_of(c.card),
        val_loss=validation_loss(c.expert, c.order, c.holdout, c.device),
        license=c.card.license,
        contributor=c.contributor,
    )
    known: dict[str, list[float] | None] = {}
    should_replace(c, c.version, known)  # measured now, so that the judgement has it
    place = place_of(c.run, member)
    copy_expert(Artifact(Store.at(c.files), c.manifest), place)
    place.write(JUDGEMENT, json.dumps(c.measured, indent=2).encode() + b"\n")
    if c.signature is not None and c.contributor is not None:
        place.write(SIGNATURE, c.signature)
    place.write(SHEET, (c.files.parent / SHEET).read_bytes())

    def seat(now: Version | None) -> Version:
        before = begun(c.run, now)
        if before.data != c.version.data:
            raise UserError(f"{c.run}: has grown onto {before.data.path} meanwhile; run the same command again")
        return before.with_expert(member.model_copy(update={"serving": should_replace(c, before, known)}))

    after = change_ensemble(c.run, seat, f"admitted {member.name} for cluster {member.cluster}")
    (admitted,) = [m for m in after.experts if m.digest == member.digest]
    incumbent = next((m.name for m in after.serving if m.cluster == c.cluster and m.digest != member.digest), None)
    return Admission(admitted, already=False, incumbent=incumbent)


def should_replace(c: Candidate, before: Version, known: dict[str, list[float] | None]) -> bool:
    """Whether the candidate becomes the active expert of its cluster; both are measured at the same draws.

    It is called again if another expert has become active meanwhile; `known` keeps the errors of active experts, None
    for one that cannot be read: it keeps its place, since damage must not let a worse expert in.
    """
    incumbent = next((m for m in before.serving if m.cluster == c.cluster and m.digest != c.manifest.digest()), None)
    if incumbent is None or c.replace:
        return True
    if incumbent.digest not in known:
        known[incumbent.digest] = errors_of(c, incumbent)
    theirs = known[incumbent.digest]
    if theirs is None:
        return False
    generations = {digest: each.generation for digest, each in accepted_orders(c.run, before).items()}
    newer = generations.get(c.order.digest(), 0) > generations.get(incumbent.order, 0)
    ours = [float(c.scores[branch] @ WEIGHTS) for branch in BRANCHES]
    c.measured["active"] = {"name": incumbent.name, "error": theirs[0], "the newcomer's": ours[0]}
    better = (1 + c.limits.margin) if newer else (1 - c.limits.margin)
    return ours[0] <= better * theirs[0] and ours[1] <= (1 + c.limits.margin_without) * theirs[1]


def errors_of(c: Candidate, incumbent: Member) -> list[float] | None:
    """Errors of the active expert with the condition and without it; a warning and None if it cannot be read."""
    try:
        return [float(bands @ WEIGHTS) for bands in c.score(c.bridge_of(incumbent)).values()]
    except UserError as error:
        kept = f"the active expert of cluster {c.cluster} cannot be read and keeps its place"
        warnings.warn(AtollWarning(f"{kept} ({error}); restore it, or activate another with --replace"), stacklevel=2)
        return None


def copy_expert(source: Artifact, place: Store) -> None:
    """Copy the listed files of our own copy into the run, manifest last: it has the same digest."""
    if (there := find(place)) is not None and there.digest == source.digest:
        return
    with ArtifactWriter(place, KIND) as draft:
        for name in source.names():
            shutil.copyfile(source.file(name), draft.folder / name)
        manifest = source.manifest
        copied = draft.commit(config=manifest.config, parents=manifest.parents, license=manifest.license)
    assert copied.digest == source.digest
