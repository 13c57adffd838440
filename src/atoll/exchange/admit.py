"""Admit a contribution: take it as a stranger's, judge a copy of it, and only then let it in.

In this order, and each step before anything the next one needs: the order it was trained for, a bounded copy in the
quarantine, the card against the order, the header of the weights against the order's architecture, their values, what
it answers on data no island has seen, and what the model paints with it.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..artifacts import Artifact, ArtifactWriter, Manifest, Store, UserError, find, sanitize
from ..ensemble.changes import begun, change_ensemble
from ..ensemble.checks import Checks, check_spaces, objective_of
from ..ensemble.versions import Member, ValidationLoss, Version, is_whole, open_ensemble, open_reference, place_of
from ..islands.expert import KIND, Expert, ExpertCard, load_expert, read_expert_card
from ..islands.order import Order
from ..process import Denoiser, LinearFlow
from ..training.execution import named_or_best
from ..training.result import WEIGHTS
from .canary import Canary, canary
from .held import check_card, check_manifest, check_metrics, read_card
from .inbox import Allowance
from .measure import (
    BRANCHES,
    EDGES,
    NEIGHBOUR_PAIRS,
    Branch,
    Draws,
    Holdout,
    Scores,
    cluster_of,
    difference,
    inside_rows,
    mean_error,
    recorded,
    score,
)
from .quarantine import (
    SHEET,
    Quarantined,
    Refused,
    caps,
    leave,
    quarantined,
    read_manifest,
    read_reasons,
    write_reasons,
)
from .signed import SIGNATURE, contributor, read_signature, read_signers, signer_of

JUDGEMENT = "judgement.json"  # beside an admitted expert
MARGIN = 0.01  # by which a newcomer must be better than whoever serves
BRANCH_SLACK = 0.1  # by which its answers without the condition may be worse then
BAND_SLACK = 3.0  # a band of t may be this much worse than the mean may
OUTSIDE_SLACK = 10.0  # the same outside its cluster, of which it has learned nothing
SAME = 0.02  # of a neighbour's error that answers differ by: photographs, disturbed by 1 %: 0.005; trained apart: 0.11
LEARNED = 0.7  # Gaussians; above, experts are alike because they know little yet
STRANGER = 0.55  # of its own error in Gaussians that an expert of another cluster has there
AS_GOOD = 1.1  # of a neighbour's error in its cluster: less is as good as it there
NO_BETTER = 0.97  # of a neighbour's error in one's own cluster: less is knowing one's own better
CANARY_SLACK = 1.25  # by which images may move away from the data


@dataclass(frozen=True)
class Admission:
    """What `admit` did: the member as it stands in the model, whether it was there before, who serves instead, and who
    is credited beside its contributor for having sent the same.
    """

    member: Member
    already: bool
    incumbent: str | None = None
    copied_by: str | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)


def admit(
    run: Store,
    contribution: str | Path | Store,
    *,
    replace: bool = False,
    again: bool = False,
    device: str | None = None,
    signers: str | Path | None = None,
    unsigned_ok: bool | None = None,
    allowance: Allowance | None = None,
) -> Admission:
    """Judge one expert folder in the run's quarantine; if it passes, name it in a new version of the model.

    It is measured on the newest data, whichever of the run's orders it was trained for. Whoever serves its cluster is
    measured on the same draws, and stays unless the newcomer is better by a margin (of a newer order: not worse by it),
    or `replace`. All stay on disk and in the model, and `atoll ensemble --use` chooses another. What is refused stays
    in the quarantine with the reasons, and is refused at once when it comes `again`, unless that is asked for. With an
    `allowance` nobody gets more judged than that.

    `signers` is the organizer's allowed_signers file, RUN/allowed_signers if none is named. Where there is one, who
    signed with no key of it is refused, unless `unsigned_ok`; where there is none, only if that is False.
    """
    run.check_creates()
    source = Store.at(contribution)
    version = open_ensemble(run)
    manifest = read_manifest(source)
    order = order_of(run, version, check_manifest(manifest, str(source)), source)
    name = f"{order.name}-{manifest.digest()[:12]}"
    known = read_signers(run, signers)
    unsigned_ok = known is None if unsigned_ok is None else unsigned_ok
    for member in version.experts:
        if member.digest == manifest.digest() and is_whole(run, member):
            leave(run, name)
            return credited(run, member, manifest, read_signature(source), known)
    before = read_reasons(run, name)
    if before is not None and before.get("whole") and before.get("contribution") == manifest.digest() and not again:
        why = sanitize(str(before.get("reason", "")), 200)
        raise Refused(f"{source}: was refused before ({why}); --again judges it anew")
    signature = read_signature(source)
    judge = Judge(run, version, order, manifest, str(source), named_or_best(device), replace)
    try:
        # who it is from, and whether they may have more of our time: before a byte of it is copied
        judge.contributor = contributor(manifest, signature, known, unsigned_ok, str(source))
        judge.signature = signature if judge.contributor else None
        if allowance is not None:
            judge.accounts = allowance.spend(judge.contributor, source, manifest)
        with quarantined(run, name, source, manifest, caps(order.architecture)) as held:
            admission = judge.admit(held, name)
    except Refused as refusal:
        if allowance is not None and not judge.whole:
            allowance.refund(judge.contributor)
        write_reasons(run, name, judge.told(refusal))
        raise Refused(sanitize(str(refusal), 600)) from refusal
    leave(run, name)
    return admission


def credited(run: Store, member: Member, manifest: Manifest, signature: bytes | None, known: bytes | None) -> Admission:
    """What is there already stays as it is; another who signed the very same one is credited beside its contributor.

    The same order on the same kind of machine makes the same expert, so two people may honestly have it. Whoever came
    later may also have copied it: they are named as who sent the same, and not as who made it.
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


def order_of(run: Store, version: Version, digest: str, source: Store) -> Order:
    """The order of this run that an expert names."""
    order = Checks(run).orders_of(version).get(digest)
    if order is None or order.cluster is None:
        raise Refused(f"{source}: was trained for no order of {run}; admit it to the run that gave the order")
    return order


@dataclass
class Judge:
    """One admission from the copy in the quarantine to a version of the model."""

    run: Store
    version: Version
    order: Order
    manifest: Manifest
    where: str
    device: str
    replace: bool
    seed: int = field(default_factory=lambda: secrets.randbits(62))  # nobody knew it when the expert was made
    measured: dict[str, Any] = field(default_factory=dict)
    contributor: str | None = None
    accounts: tuple[str, ...] = ()  # on which it is judged, the folder's and the signer's, where they are kept
    signature: bytes | None = None
    whole: bool = False  # every file was what the manifest says; else somebody else may still bring the real one

    def admit(self, held: Quarantined, name: str) -> Admission:
        self.whole = True
        expert = self.load(held)
        holdout = self.holdout()
        cluster = cluster_of(self.order)
        val_loss = self.measure(expert, holdout)
        self.paint(expert, holdout, held)
        member = Member(
            path=f"contributions/{name}",
            digest=self.manifest.digest(),
            cluster=cluster,
            order=self.order.digest(),
            objective=objective_of(expert.card),
            val_loss=val_loss,
            license=expert.card.license,
            contributor=self.contributor,
        )
        place = place_of(self.run, member)
        copy_expert(held.artifact, place)
        self.keep(held, place)  # before the version: whoever is killed after it finds it done, and nothing missing
        seats = Seats(self, holdout, expert)
        after = change_ensemble(
            self.run, lambda now: self.seat(now, member, seats), f"admitted {member.name} for cluster {member.cluster}"
        )
        place.write(JUDGEMENT, to_json(self.measured))  # now also with who was served instead of
        member = next(m for m in after.experts if m.digest == member.digest)
        incumbent = None if member.serving else next((m.name for m in after.serving if m.cluster == cluster), None)
        return Admission(member, already=False, incumbent=incumbent, measured=self.measured)

    def load(self, held: Quarantined) -> Expert:
        """The expert, once card, metrics, the header of its weights and their values are what they should be."""
        files = held.files
        card = read_card((files / "expert.json").read_bytes(), self.where)
        check_card(card, self.manifest, self.order, self.start_card(), self.where)
        try:
            check_spaces(self.version, card, self.where)
        except UserError as error:
            raise Refused(str(error)) from error
        check_metrics((files / "metrics.jsonl").read_bytes(), self.order, self.where)
        self.refuse_copies()
        try:
            return load_expert(held.files, self.device)
        except UserError as error:
            raise Refused(str(error).replace(str(held.files), self.where)) from error

    def start_card(self) -> ExpertCard | None:
        """Of the expert that the order trains on, if it names one."""
        if self.order.init is None:
            return None
        start = open_reference(self.run, self.order.init, KIND)
        return read_expert_card(start)

    def refuse_copies(self) -> None:
        """The very weights of an expert that is there already, under another card, are somebody else's work."""
        weights = self.manifest.files[WEIGHTS].sha256
        for member in self.version.experts:
            try:
                there = find(place_of(self.run, member))
            except UserError:  # damaged by now: it is nobody's
                continue
            if there is not None and there.manifest.files.get(WEIGHTS) == self.manifest.files[WEIGHTS]:
                raise Refused(f"{self.where}: is a copy, its weights {weights[:12]} are those of {member.name}")

    def holdout(self) -> Holdout:
        data = open_reference(self.run, self.version.data, "data")
        partition = open_reference(self.run, self.version.partition, "partition")
        return Holdout.of(data, partition, self.order)

    def measure(self, expert: Expert, holdout: Holdout) -> ValidationLoss:
        """Refuse what is worse than the order allows; of what is not, the errors that anybody can measure again."""
        self.check_errors(expert.denoiser(LinearFlow()), holdout)
        return recorded(expert, self.order, holdout, self.device)

    def check_errors(self, bridge: Denoiser, holdout: Holdout) -> None:
        """In either branch, in any band of t, inside its cluster and out."""
        cluster, allowed = cluster_of(self.order), self.order.acceptance.max_ratio_to_gaussian
        gaussian, draws = holdout.gaussian(cluster), self.draws(holdout)
        found, unit = score(bridge, holdout, draws, self.device), score(gaussian, holdout, draws)
        self.measured |= {
            "gaussians": {b: ratio(found[b].mean, unit[b].mean) for b in BRANCHES},
            "bands": {b: [ratio(*pair) for pair in zip(found[b].bands, unit[b].bands, strict=True)] for b in BRANCHES},
            "edges": EDGES,
        }
        for branch in BRANCHES:
            self.check_branch(branch, found[branch], unit[branch], allowed)
        outside = holdout.outside(cluster)
        if len(outside):
            elsewhere = Draws.of(outside, self.seed, "outside", NEIGHBOUR_PAIRS, 64)
            far, far_unit = score(bridge, holdout, elsewhere, self.device), score(gaussian, holdout, elsewhere)
            for branch in BRANCHES:
                error, worst = far[branch].mean, OUTSIDE_SLACK * allowed * far_unit[branch].mean
                self.measured[f"outside, {branch}"] = ratio(error, far_unit[branch].mean)
                said = f"outside its cluster its error {branch} is {error:.4g}, above {worst:.4g}"
                self.hold(f"outside, {branch}", error, worst, said)
            self.refuse_neighbours(bridge, holdout, found[BRANCHES[0]].mean / unit[BRANCHES[0]].mean)

    def hold(self, rule: str, value: float, worst: float, said: str) -> None:
        """One rule: how much of what it allows is used up, and a refusal for more than all of it."""
        self.measured.setdefault("used", {})[rule] = ratio(value, worst)
        if not value <= worst:
            raise Refused(f"{self.where}: {said}")

    def draws(self, holdout: Holdout) -> Draws:
        return Draws.of(inside_rows(holdout, cluster_of(self.order)), self.seed, "inside")

    def check_branch(self, branch: Branch, found: Scores, unit: Scores, allowed: float) -> None:
        cluster, worst = self.order.cluster, allowed * unit.mean
        said = (
            f"refused, its holdout error {branch} {found.mean:.4f} on cluster {cluster} is above {worst:.4f}, "
            f"{allowed:g} times a Gaussian's; train it longer"
        )
        self.hold(f"mean, {branch}", found.mean, worst, said)
        # near data a velocity's error is x0's over t, so x0's is held against the Gaussian's of the band above
        units = (unit.bands[1] * EDGES[2] ** 2, *unit.bands[1:])
        for low, high, error, of in zip(EDGES, EDGES[1:], found.bands, units, strict=False):
            said = (
                f"refused, {branch} its error for t from {low:g} to {high:g} is {error:.4g} on cluster {cluster}, "
                f"{error / of:.3g} times a Gaussian's"
            )
            self.hold(f"t {low:g} to {high:g}, {branch}", error, BAND_SLACK * allowed * of, said)

    def refuse_neighbours(self, bridge: Denoiser, holdout: Holdout, own: float) -> None:
        """An expert of another cluster under this one's order: it answers as that one does; or it is by far better
        there, as good as who serves there, and no better than that one here.

        To be good there is no fault by itself: among photographs one cluster is easier than another for everybody, and
        a noise expert may be no better at home than a flow expert next door.
        """
        serving = {member.cluster: member for member in self.version.serving}
        here = Draws.of(inside_rows(holdout, cluster_of(self.order)), self.seed, "own", NEIGHBOUR_PAIRS, 1)
        for cluster in holdout.neighbours(cluster_of(self.order)):
            draws = Draws.of(holdout.inside(cluster), self.seed, "neighbour", NEIGHBOUR_PAIRS, 1)
            unit = mean_error(holdout.gaussian(cluster), holdout, draws)
            there = mean_error(bridge, holdout, draws, self.device)
            self.measured[f"cluster {cluster}"] = ratio(there, unit)
            if cluster not in serving:
                continue
            try:
                theirs = load_expert(place_of(self.run, serving[cluster]), self.device).denoiser(LinearFlow())
            except UserError:  # it is missing: nobody to compare with
                continue
            apart = difference(bridge, theirs, holdout, here, self.device)
            self.measured[f"apart from cluster {cluster}'s"] = tidy(apart)
            said = (
                f"answers as the expert of cluster {cluster} does, they differ by {apart:.3g} of its error; two that "
                f"were trained apart by more than {SAME:g}"
            )
            if own < LEARNED and not self.begun_alike(serving[cluster]):
                self.hold(f"same as cluster {cluster}'s", SAME, apart, said)
            # all three must hold for a refusal, so the one that is furthest from it counts.
            # Worse than a Gaussian it is nobody's expert yet: a short training, no stranger's
            mine, neighbours = (mean_error(one, holdout, here, self.device) for one in (bridge, theirs))
            as_good = there / (AS_GOOD * mean_error(theirs, holdout, draws, self.device))
            spared = max(there / unit / min(1.0, STRANGER * own), as_good, NO_BETTER * neighbours / mine)
            said = (
                f"is an expert of cluster {cluster}, where its error is {there / unit:.2f} times a Gaussian's; on "
                f"cluster {self.order.cluster}, which its order is for, {own:.2f}"
            )
            self.hold(f"of cluster {cluster}", 1.0, spared, said)

    def begun_alike(self, member: Member) -> bool:
        """Whether both were begun from the same weights, and so may have stayed alike."""
        there, start = find(place_of(self.run, member)), self.manifest.parents.get("init")
        return start is not None and there is not None and there.manifest.parents.get("init") == start

    def paint(self, expert: Expert, holdout: Holdout, held: Quarantined) -> None:
        """Refuse what the model cannot paint with."""
        seen = canary(self.run, self.version, expert, cluster_of(self.order), holdout, self.seed, self.device)
        (held.folder / SHEET).write_bytes(seen.sheet(self.order.latent))
        self.check_canary(seen)

    def check_canary(self, seen: Canary) -> None:
        """What is painted may not move away from the data, in its cluster or in others."""
        self.measured["canary"] = {
            "with": [tidy(distance) for distance in seen.after],
            "without": seen.before,
            "gaussian": seen.gaussian,
        }
        served = any(member.cluster == self.order.cluster for member in self.version.serving)
        allowed = {"its cluster": self.order.acceptance.max_ratio_to_gaussian * seen.gaussian}
        if seen.before is not None and not self.replace:
            inside, outside = (CANARY_SLACK * distance for distance in seen.before)
            # a model with nobody for this cluster is no measure there
            allowed = {"its cluster": inside if served else allowed["its cluster"], "other clusters": outside}
        for (where, worst), distance in zip(allowed.items(), seen.after, strict=False):
            said = (
                f"refused by the canary, images of {where} painted with it lie {distance:.4g} from the nearest real "
                f"one, at most {worst:.4g} are allowed"
            )
            self.hold(f"canary, {where}", distance, worst, said)

    def seat(self, now: Version | None, member: Member, seats: Seats) -> Version:
        before = begun(self.run, now)
        if before.data != self.version.data:
            raise UserError(f"{self.run}: has grown onto {before.data.path} meanwhile; run the same command again")
        return before.with_expert(member.model_copy(update={"serving": seats.takes(before, member)}))

    def keep(self, held: Quarantined, place: Store) -> None:
        """What was measured and painted stays beside the expert, unlisted: it holds draws that nobody can repeat."""
        place.write(JUDGEMENT, to_json(self.measured))
        if self.signature is not None:
            place.write(SIGNATURE, self.signature)
        if (held.folder / SHEET).is_file():
            place.write(SHEET, (held.folder / SHEET).read_bytes())

    def told(self, refusal: Refused) -> dict[str, Any]:
        return {
            "reason": sanitize(str(refusal), 600),
            "contribution": self.manifest.digest(),
            "order": self.order.digest(),
            "cluster": self.order.cluster,
            "whole": self.whole,
            "accounts": self.accounts if self.whole else self.accounts[:1],
            "measured": self.measured,
        }


@dataclass
class Seats:
    """Who serves a cluster: the newcomer, or whoever does, both asked about the same draws."""

    judge: Judge
    holdout: Holdout
    newcomer: Expert
    known: dict[str, dict[Branch, Scores]] = field(default_factory=dict)

    def takes(self, before: Version, member: Member) -> bool:
        """Whether the newcomer takes the seat; called again if somebody else was seated meanwhile."""
        incumbents = [m for m in before.serving if m.cluster == member.cluster and m.digest != member.digest]
        if not incumbents or self.judge.replace:
            return True
        (incumbent,) = incumbents
        theirs = self.scores(incumbent)
        if theirs is None:  # it cannot be read any more
            return True
        ours = self.scores(member)
        assert ours is not None
        generations = Checks(self.judge.run).generations(before)
        newer = generations.get(member.order, 0) > generations.get(incumbent.order, 0)
        margin = MARGIN if newer else -MARGIN
        conditional, dropped = BRANCHES
        self.judge.measured["serving"] = {
            "name": incumbent.name,
            "error": theirs[conditional].mean,
            "the newcomer's": ours[conditional].mean,
        }
        return (
            ours[conditional].mean <= (1 + margin) * theirs[conditional].mean
            and ours[dropped].mean <= (1 + BRANCH_SLACK) * theirs[dropped].mean
        )

    def scores(self, member: Member) -> dict[Branch, Scores] | None:
        if member.digest not in self.known:
            if member.digest == self.judge.manifest.digest():
                expert = self.newcomer
            else:
                try:
                    expert = load_expert(place_of(self.judge.run, member), self.judge.device)
                except UserError:
                    return None
            draws = self.judge.draws(self.holdout)
            self.known[member.digest] = score(expert.denoiser(LinearFlow()), self.holdout, draws, self.judge.device)
        return self.known[member.digest]


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


def ratio(error: float, unit: float) -> float:
    return tidy(error / unit) if unit > 0 else tidy(error)


def tidy(value: float) -> float:
    """As it goes into a JSON file, where nothing is infinite."""
    return round(value, 5) if value == value and abs(value) < 1e30 else 1e30


def to_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2).encode() + b"\n"
