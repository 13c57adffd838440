"""Admit contributions: check a copy of the expert in quarantine, and add it to the model if all checks pass.

The checks and their order are CHECKS in checks.py. What passes is admitted; whether it also becomes the active expert
of its cluster is decided by `should_replace`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..artifacts import Artifact, ArtifactWriter, Manifest, Store, UserError, find, sanitize
from ..islands.expert import KIND
from ..islands.order import Order
from ..registry.changes import begun, change_ensemble
from ..registry.checks import Checks, objective_of
from ..registry.versions import Member, Version, is_whole, open_ensemble, place_of
from ..training.compute import best_device
from .card_checks import check_manifest
from .checks import Candidate, run_checks
from .holdout import BRANCHES, Branch, Scores, validation_loss
from .inbox import Quota
from .quarantine import SHEET, Refused, leave, read_manifest, write_reasons
from .signed import SIGNATURE, read_signature, read_signers, signer_of
from .thresholds import AdmissionThresholds

JUDGEMENT = "judgement.json"  # next to an admitted expert: what was measured


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
    quota: Quota | None = None,
    thresholds: AdmissionThresholds = AdmissionThresholds(),
) -> Admission:
    """Check one expert folder; if it passes, name it in a new version of the model.

    It may be of any order the run ever gave, and is measured on the newest data. The active expert of its cluster is
    measured on the same draws, and stays active unless the newcomer is better by a margin (of a newer order: not worse
    by it), or `replace`. Both stay in the model, and `atoll ensemble --use` chooses another. What is refused leaves its
    reasons in quarantine, and is refused at once when it is sent again, unless `recheck`.

    `signers` is an allowed_signers file, by default RUN/allowed_signers. Where there is one, an expert that no key in
    it has signed is refused unless `unsigned_ok`; where there is none, only if that is False.
    """
    run.check_creates()
    source, version = Store.at(contribution), open_ensemble(run)
    try:
        manifest = read_manifest(source)
        order = order_of(run, version, check_manifest(manifest, str(source)))
    except Refused as refusal:
        raise Refused(sanitize(f"{source}: {refusal}", 600)) from refusal
    known = read_signers(run, signers)
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
        quota=quota,
    )
    for member in version.experts:
        if member.digest == manifest.digest() and is_whole(run, member):
            leave(run, candidate.name)
            return credited(run, member, manifest, read_signature(source), known)
    with candidate.lock:
        try:
            run_checks(candidate)
            admission = add(candidate)
        except Refused as refusal:
            raise refused(candidate, sanitize(f"{source}: {refusal}", 600)) from refusal
    leave(run, candidate.name)
    return admission


def order_of(run: Store, version: Version, digest: str) -> Order:
    """The order of this run that an expert names."""
    order = Checks(run).orders_of(version).get(digest)
    if order is None or order.cluster is None:
        raise Refused(f"was trained for no order of {run}; admit it to the run that gave the order")
    return order


def refused(c: Candidate, reason: str) -> Refused:
    """Write down why, and take the contribution off the account of a signer whose files these are not."""
    whole = c.folder is not None
    if c.quota is not None and c.contributor is not None and c.accounts and not whole:
        c.quota.refund(c.contributor)
    reasons = {
        "reason": reason,
        "contribution": c.manifest.digest(),
        "order": c.order.digest(),
        "cluster": c.cluster,
        "whole": whole,
        "accounts": c.accounts if whole else c.accounts[:1],
        "measured": c.measured,
    }
    write_reasons(c.run, c.name, reasons)
    return Refused(reason)


def credited(run: Store, member: Member, manifest: Manifest, signature: bytes | None, known: bytes | None) -> Admission:
    """An expert that is there already stays as it is; another person who signed the same one is credited, too.

    The same order on the same kind of machine makes the same expert, so two people may honestly have it. The later one
    may also have copied it, and is named as who sent the same.
    """
    who = None if signature is None or known is None else signer_of(manifest, signature, known)
    if who is None or who == member.contributor or who in member.copies:
        return Admission(member, already=True)

    def credit(now: Version | None) -> Version:
        version = begun(run, now)
        there = next((m for m in version.experts if m.digest == member.digest), None)
        if there is None or who in (there.contributor, *there.copies):
            return version
        return version.with_expert(there.model_copy(update={"copies": (*there.copies, who)}))

    after = change_ensemble(run, credit, f"credited {who} for sending {member.name}, too")
    return Admission(next(m for m in after.experts if m.digest == member.digest), already=True, copied_by=who)


def add(c: Candidate) -> Admission:
    """Copy a checked expert into the run and name it in a new version. Its files come first: a version lacks none."""
    member = Member(
        path=f"contributions/{c.name}",
        digest=c.manifest.digest(),
        cluster=c.cluster,
        order=c.order.digest(),
        objective=objective_of(c.card),
        val_loss=validation_loss(c.expert, c.order, c.holdout, c.device),
        license=c.card.license,
        contributor=c.contributor,
    )
    place = place_of(c.run, member)
    copy_expert(Artifact(Store.at(c.files), c.manifest), place)
    write_judgement(c, place)
    if c.signature is not None and c.contributor is not None:
        place.write(SIGNATURE, c.signature)
    if (sheet := c.files.parent / SHEET).is_file():
        place.write(SHEET, sheet.read_bytes())
    known: dict[str, dict[Branch, Scores] | None] = {}

    def seat(now: Version | None) -> Version:
        before = begun(c.run, now)
        if before.data != c.version.data:
            raise UserError(f"{c.run}: has grown onto {before.data.path} meanwhile; run the same command again")
        return before.with_expert(member.model_copy(update={"serving": should_replace(c, before, known)}))

    after = change_ensemble(c.run, seat, f"admitted {member.name} for cluster {member.cluster}")
    write_judgement(c, place)
    (admitted,) = [m for m in after.experts if m.digest == member.digest]
    incumbent = next((m.name for m in after.serving if m.cluster == c.cluster and m.digest != member.digest), None)
    return Admission(admitted, already=False, incumbent=incumbent)


def should_replace(c: Candidate, before: Version, known: dict[str, dict[Branch, Scores] | None]) -> bool:
    """Whether the candidate becomes the active expert of its cluster; both are measured at the same draws.

    It is called again if another expert has become active meanwhile; `known` keeps the scores of active experts.
    """
    incumbent = next((m for m in before.serving if m.cluster == c.cluster and m.digest != c.manifest.digest()), None)
    if incumbent is None or c.replace:
        return True
    if incumbent.digest not in known:
        bridge = c.bridge_of(incumbent)
        known[incumbent.digest] = None if bridge is None else c.score(bridge)
    theirs = known[incumbent.digest]
    if theirs is None:  # it cannot be read any more
        return True
    generations = Checks(c.run).generations(before)
    newer = generations.get(c.order.digest(), 0) > generations.get(incumbent.order, 0)
    conditional, dropped = BRANCHES
    ours = c.scores
    c.measured["active"] = {
        "name": incumbent.name,
        "error": theirs[conditional].mean,
        "the newcomer's": ours[conditional].mean,
    }
    better = (1 + c.limits.margin) if newer else (1 - c.limits.margin)
    return (
        ours[conditional].mean <= better * theirs[conditional].mean
        and ours[dropped].mean <= (1 + c.limits.margin_without) * theirs[dropped].mean
    )


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


def write_judgement(c: Candidate, place: Store) -> None:
    """What was measured; unlisted, since its draws cannot be repeated."""
    place.write(JUDGEMENT, json.dumps(c.measured, indent=2).encode() + b"\n")
