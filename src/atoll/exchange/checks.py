"""The checks of an admission, in the order they run: cheap ones first.

A check is one function of at most 40 lines and one line in CHECKS. It is given the candidate and raises Refused, or
yields what it measured, each value with its limit; a value beyond its limit is a refusal, too. Its numbers are fields
of AdmissionThresholds. The first line of its docstring is its row in docs/trust.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..artifacts import Manifest, Store, UserError, find, sanitize
from ..diffusion import Denoiser, LinearFlow
from ..islands.expert import KIND, Expert, ExpertCard, load_expert, read_expert_card
from ..islands.order import Order
from ..registry.checks import check_spaces
from ..registry.versions import Member, Version, open_reference, place_of
from .card_checks import CARD, METRICS, WEIGHTS, check_card, check_metrics, largest_files, read_card
from .holdout import BRANCHES, EDGES, NEIGHBOR_PAIRS, Branch, Draws, Holdout, Scores, cluster_of, compare, errors, score
from .inbox import Quota
from .quarantine import CONTRIBUTION, SHEET, Refused, copy_contribution, quarantined, read_reasons
from .sample_check import sample_both
from .signed import read_signature, signer_of
from .thresholds import AdmissionThresholds

TINY = 1e-30  # a Gaussian fitted to one sample has no error
CONDITIONAL = BRANCHES[0]


@dataclass
class Candidate:
    """One contribution during its checks, and what they have found. What they need is read or measured once."""

    run: Store
    version: Version
    order: Order
    manifest: Manifest
    source: Store
    limits: AdmissionThresholds = AdmissionThresholds()
    device: str = "cpu"
    signers: bytes | None = None
    unsigned_ok: bool = True
    recheck: bool = False
    replace: bool = False
    quota: Quota | None = None
    seed: int = field(default_factory=lambda: secrets.randbits(62))  # unknown while the expert was made
    lock: ExitStack = field(default_factory=ExitStack)  # of its quarantine
    folder: Path | None = None  # its quarantine, once all files are copied and are what the manifest says
    contributor: str | None = None
    accounts: tuple[str, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.order.name}-{self.manifest.digest()[:12]}"

    @property
    def cluster(self) -> int:
        return cluster_of(self.order)

    @cached_property
    def signature(self) -> bytes | None:
        return read_signature(self.source)

    @cached_property
    def active(self) -> dict[int, Member]:
        """The active expert of each cluster that has one."""
        return {member.cluster: member for member in self.version.serving}

    @property
    def files(self) -> Path:
        assert self.folder is not None, "the files check comes first"
        return self.folder / CONTRIBUTION

    @cached_property
    def card(self) -> ExpertCard:
        return read_card((self.files / CARD).read_bytes())

    @cached_property
    def expert(self) -> Expert:
        return load_expert(self.files, self.device)

    @cached_property
    def bridge(self) -> Denoiser:
        return self.expert.denoiser(LinearFlow())

    def bridge_of(self, member: Member) -> Denoiser | None:
        """An expert of the model, ready to be measured; None if it cannot be read."""
        try:
            return load_expert(place_of(self.run, member), self.device).denoiser(LinearFlow())
        except UserError:
            return None

    @cached_property
    def holdout(self) -> Holdout:
        data = open_reference(self.run, self.version.data, "data")
        partition = open_reference(self.run, self.version.partition, "partition")
        return Holdout.of(data, partition)

    @cached_property
    def draws(self) -> Draws:
        return Draws.random(self.holdout.inside(self.cluster), self.seed, "inside")

    def score(self, denoiser: Denoiser) -> dict[Branch, Scores]:
        """Errors of an expert inside the cluster, at this admission's draws."""
        return score(denoiser, self.holdout.samples, self.draws, self.device)

    @cached_property
    def scores(self) -> dict[Branch, Scores]:
        return self.score(self.bridge)

    @cached_property
    def unit(self) -> dict[Branch, Scores]:
        """The Gaussian's errors at the same draws."""
        return self.score(self.holdout.gaussian(self.cluster))


@dataclass(frozen=True)
class Measurement:
    """A value that must not be above its limit or, where that is a `minimum`, not below it."""

    name: str
    value: float
    limit: float
    minimum: bool = False

    @property
    def used(self) -> float:
        """The fraction of what is allowed that is used: more than 1, or NaN, is refused."""
        over, under = (self.limit, self.value) if self.minimum else (self.value, self.limit)
        return over / max(under, TINY)

    def to_json(self) -> dict[str, float]:
        """Rounded, and without infinity and NaN, which JSON does not have."""
        row = {"value": self.value, "limit": self.limit, "used": self.used}
        return {name: round(value, 5) if abs(value) < 1 / TINY else 1 / TINY for name, value in row.items()}


@contextmanager
def as_refusal(place: str) -> Iterator[None]:
    """Turn an error about the copy into a refusal that does not name the place of the copy."""
    try:
        yield
    except Refused:
        raise
    except UserError as error:
        raise Refused(str(error).removeprefix(place).lstrip(": /")) from error


def check_refused_before(c: Candidate) -> None:
    """A contribution that was refused before, unless its files were not those of its manifest."""
    before = read_reasons(c.run, c.name)
    if before.get("whole") and before.get("contribution") == c.manifest.digest() and not c.recheck:
        reason = sanitize(str(before.get("reason", "")), 200)
        raise UserError(f"{c.source}: was refused before ({reason}); --recheck checks it again")


def check_signature(c: Candidate) -> None:
    """An expert that no key in allowed_signers has signed, where a signature is required."""
    if c.signature is not None and c.signers is not None:
        c.contributor = signer_of(c.manifest, c.signature, c.signers)
    if c.contributor is None and not c.unsigned_ok:
        wrong = "it is not signed" if c.signature is None else "no key in allowed_signers has made its signature"
        raise Refused(f"stays in quarantine, {wrong}; --unsigned-ok admits it all the same")


def check_quota(c: Candidate) -> None:
    """A sender of more than their number of contributions or bytes; the rest is left in the inbox."""
    if c.quota is not None:
        c.accounts = c.quota.charge(c.contributor, c.source, c.manifest)


def check_files(c: Candidate) -> None:
    """Files that are missing, too large, links, pipes, or not what the manifest says."""
    folder = c.lock.enter_context(quarantined(c.run, c.name))
    copy_contribution(c.source, c.manifest, folder / CONTRIBUTION, largest_files(c.order.architecture, c.limits))
    c.folder = folder


def check_the_card(c: Candidate) -> None:
    """A card that differs from the one the order makes, or whose latents and texts are not the model's."""
    init = None if c.order.init is None else open_reference(c.run, c.order.init, KIND)
    check_card(c.card, c.manifest, c.order, None if init is None else read_expert_card(init), c.limits)
    with as_refusal("it"):
        check_spaces(c.version, c.card, "it")


def check_the_metrics(c: Candidate) -> None:
    """Metrics that are no rows of finite numbers rising to the order's budget."""
    check_metrics((c.files / METRICS).read_bytes(), c.order, c.limits)


def check_copies(c: Candidate) -> None:
    """The weights of an admitted expert under another card."""
    weights = c.manifest.files[WEIGHTS]
    for member in c.version.experts:
        try:
            there = find(place_of(c.run, member))
        except UserError:  # damaged
            continue
        if there is not None and there.manifest.files.get(WEIGHTS) == weights:
            raise Refused(f"is a copy, its weights {weights.sha256[:12]} are those of {member.name}")


def check_weights(c: Candidate) -> None:
    """Weights whose header does not fit the architecture, that are not float32, or not finite, also in bfloat16."""
    with as_refusal(str(c.files)):
        c.expert  # noqa: B018, loading checks them


def check_holdout_error(c: Candidate) -> Iterator[Measurement]:
    """An error on the holdout, with the condition or without it, that is too large."""
    for branch in BRANCHES:
        ratio = c.scores[branch].mean / max(c.unit[branch].mean, TINY)
        yield Measurement(f"holdout error {branch}", ratio, c.order.acceptance.max_ratio_to_gaussian)


def check_bands(c: Candidate) -> Iterator[Measurement]:
    """Garbage in a part of the time axis, with the condition or without it."""
    limit = c.limits.band * c.order.acceptance.max_ratio_to_gaussian
    for branch in BRANCHES:
        # near data x0's error, t^2 times a velocity's, is compared with the Gaussian's of the band above
        bands = c.unit[branch].bands
        units = (bands[1] * EDGES[2] ** 2, *bands[1:])
        for (low, high), error, unit in zip(pairwise(EDGES), c.scores[branch].bands, units, strict=True):
            yield Measurement(f"error for t from {low:g} to {high:g} {branch}", error / max(unit, TINY), limit)


def check_outside(c: Candidate) -> Iterator[Measurement]:
    """Garbage outside its cluster, of which it has learned nothing."""
    rows = c.holdout.outside(c.cluster)
    if len(rows) == 0:
        return
    limit = c.limits.outside * c.order.acceptance.max_ratio_to_gaussian
    draws = Draws.random(rows, c.seed, "outside", NEIGHBOR_PAIRS, 64)
    denoisers = (c.bridge, c.holdout.gaussian(c.cluster))
    found, unit = (score(denoiser, c.holdout.samples, draws, c.device) for denoiser in denoisers)
    for branch in BRANCHES:
        ratio = found[branch].mean / max(unit[branch].mean, TINY)
        yield Measurement(f"error outside its cluster {branch}", ratio, limit)


def check_neighbors(c: Candidate) -> Iterator[Measurement]:
    """An expert of a neighboring cluster: it predicts as that one does, or fits that cluster better than its own."""
    t, samples = c.limits, c.holdout.samples
    own = c.scores[CONDITIONAL].mean / max(c.unit[CONDITIONAL].mean, TINY)
    here = Draws.random(c.holdout.inside(c.cluster), c.seed, "own", NEIGHBOR_PAIRS, 0)
    for cluster in c.holdout.neighbors(c.cluster):
        member = c.active.get(cluster)
        neighbor = None if member is None else c.bridge_of(member)
        if member is None or neighbor is None:
            continue
        difference, mine, theirs = compare(c.bridge, neighbor, samples, here, c.device)
        if own < t.undertrained and not begun_alike(c, member):
            ratio = difference / theirs
            yield Measurement(f"difference from the expert of cluster {cluster}", ratio, t.difference, minimum=True)
        there = Draws.random(c.holdout.inside(cluster), c.seed, "neighbor", NEIGHBOR_PAIRS, 0)
        denoisers = (c.bridge, neighbor, c.holdout.gaussian(cluster))
        ours, best, unit = (errors(one, samples, there, device=c.device).mean().item() for one in denoisers)
        # Refused if all three hold: much better there than at home, as good there as its expert, and no better at home
        # than that one. Each may happen to an honest expert: a cluster can be easier than another for every expert.
        # Worse than a Gaussian there, it is undertrained.
        elsewhere = ours / unit / min(1.0, t.neighbor_ratio * own)
        unlike = max(elsewhere, ours / (t.neighbor_as_good * best), t.neighbor_better * theirs / mine)
        yield Measurement(f"unlikeness to an expert of cluster {cluster}", unlike, 1.0, minimum=True)


def begun_alike(c: Candidate, member: Member) -> bool:
    """Whether both were begun from the same weights, and so may be alike."""
    there, init = find(place_of(c.run, member)), c.manifest.parents.get("init")
    return init is not None and there is not None and there.manifest.parents.get("init") == init


def check_samples(c: Candidate) -> Iterator[Measurement]:
    """Images that lie further from the data than without it, in its cluster or in others."""
    seen = sample_both(c.run, c.expert, c.cluster, c.holdout, c.seed, c.device)
    (c.files.parent / SHEET).write_bytes(seen.sheet(c.order.latent))
    limits = [c.order.acceptance.max_ratio_to_gaussian * seen.gaussian]
    if seen.before is not None and not c.replace:
        inside, outside = (c.limits.sample_distance * distance for distance in seen.before)
        # without an active expert for the cluster the model's images of it are no measure
        limits = [inside if c.cluster in c.active else limits[0], outside]
    for where, limit, distance in zip(("of its cluster", "of other clusters"), limits, seen.after, strict=False):
        yield Measurement(f"distance of samples {where} from the data", distance, limit)


@dataclass(frozen=True)
class Check:
    """One defence: its name, its function, and the fields of AdmissionThresholds, or of the order, that it applies.

    `unit` and `advice` go into the message of a refusal.
    """

    name: str
    run: Callable[[Candidate], Iterable[Measurement] | None]
    limits: tuple[str, ...] = ()
    unit: str = ""
    advice: str = ""

    def refusal(self, found: Measurement) -> str:
        bound = f"at {'least' if found.minimum else 'most'} {found.limit:.4g} is allowed"
        return f"refused, its {found.name} is {found.value:.4g}{self.unit}, {bound}{self.advice}"


GAUSSIANS = " times a Gaussian's"
CHECKS = (
    Check("refused before", check_refused_before),
    Check("signature", check_signature),
    Check("quota", check_quota, ("contributions", "contributed_bytes")),
    Check("files", check_files, ("card_bytes", "metrics_bytes", "header_bytes")),
    Check("card", check_the_card, ("text_length",)),
    Check("metrics", check_the_metrics, ("metrics_lines",)),
    Check("copies", check_copies),
    Check("weights", check_weights),
    Check("holdout error", check_holdout_error, ("max_ratio_to_gaussian",), GAUSSIANS, "; train it longer"),
    Check("bands of t", check_bands, ("band",), GAUSSIANS),
    Check("outside", check_outside, ("outside",), GAUSSIANS),
    Check(
        "neighbors",
        check_neighbors,
        ("difference", "undertrained", "neighbor_ratio", "neighbor_as_good", "neighbor_better"),
    ),
    Check("samples", check_samples, ("sample_distance",)),
)


def run_checks(candidate: Candidate, checks: Iterable[Check] = CHECKS) -> None:
    """Run the checks in order until one refuses the candidate. What was measured is kept either way."""
    for check in checks:
        for found in check.run(candidate) or ():
            candidate.measured.setdefault(check.name, {})[found.name] = found.to_json()
            if not found.used <= 1:
                raise Refused(check.refusal(found))
