"""The checks of an admission, in the order they run: cheap ones first.

A check is one function and one line in CHECKS. It is given the candidate and raises Refused, or yields what it
measured, each value with its limit; a value beyond its limit is a refusal, too. Its numbers are fields of
AdmissionThresholds. The first line of its docstring is its row in docs/trust.md.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..artifacts import Manifest, Store, UserError, find, sanitize
from ..diffusion import Denoiser, LinearFlow
from ..islands.expert import KIND, Expert, ExpertCard, load_expert, read_expert_card
from ..islands.order import Order
from ..registry.checks import check_spaces
from ..registry.versions import Member, Version, open_reference, place_of
from .card_checks import CARD, METRICS, check_card, check_metrics, largest_files, read_card
from .holdout import BRANCHES, EDGES, FEWER_DRAWS, WEIGHTS, Branch, Draws, Holdout, band_errors, difference
from .inbox import LeftInInbox
from .quarantine import CONTRIBUTION, FOLDER, SHEET, Refused, copy_contribution, quarantined, read_reasons
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
    checked: Counter[str] | None = None  # by sender, of an inbox
    seed: int = field(default_factory=lambda: secrets.randbits(62))  # unknown while the expert was made
    lock: ExitStack = field(default_factory=ExitStack)  # of its quarantine
    folder: Path | None = None  # its quarantine, once all files are copied and are what the manifest says
    contributor: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.order.name}-{self.manifest.digest()[:12]}"

    @property
    def sender(self) -> str:
        """Its folder in the inbox."""
        return sanitize(self.source.parent.name, 40)

    @property
    def cluster(self) -> int:
        assert self.order.cluster is not None, "a monolith is not admitted"
        return self.order.cluster

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
    def weights(self) -> str:
        return weights_digest(self.expert.network)

    @cached_property
    def bridge(self) -> Denoiser:
        return self.expert.denoiser(LinearFlow())

    def bridge_of(self, member: Member) -> Denoiser:
        """An expert of the model, ready to be measured."""
        return load_expert(place_of(self.run, member), self.device).denoiser(LinearFlow())

    @cached_property
    def holdout(self) -> Holdout:
        data = open_reference(self.run, self.version.data, "data")
        return Holdout.of(data, open_reference(self.run, self.version.partition, "partition"))

    @cached_property
    def draws(self) -> Draws:
        return Draws.random(self.holdout.inside(self.cluster), self.seed, "inside")

    def score(self, denoiser: Denoiser, draws: Draws | None = None) -> dict[Branch, Tensor]:
        """Errors of an expert by band of t, at this admission's draws inside the cluster or others."""
        samples, draws = self.holdout.samples, draws or self.draws
        return {branch: band_errors(denoiser, samples, draws, branch, self.device) for branch in BRANCHES}

    @cached_property
    def scores(self) -> dict[Branch, Tensor]:
        return self.score(self.bridge)

    @cached_property
    def unit(self) -> dict[Branch, Tensor]:
        """The Gaussian's errors at the same draws."""
        return self.score(self.holdout.gaussian(self.cluster))


@dataclass(frozen=True)
class Measurement:
    """A value that must not be above its limit."""

    name: str
    value: float
    limit: float

    @property
    def used(self) -> float:
        """The fraction of the limit that is used: more than 1, or NaN, is refused."""
        return self.value / max(self.limit, TINY)


def weights_digest(network: nn.Module) -> str:
    """The digest of an expert's tensors by name, whatever else is in their file: this is the expert's identity."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(f"{name} {list(value.shape)}\n".encode())
        digest.update(value.detach().cpu().float().contiguous().numpy().data)
    return digest.hexdigest()


def ratio(errors: Tensor, unit: Tensor) -> float:
    """The mean over t of errors by band, as a ratio to those of a Gaussian."""
    return float(errors @ WEIGHTS) / max(float(unit @ WEIGHTS), TINY)


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
    c.contributor = signer_of(c.manifest, c.signature, c.signers)
    if c.contributor is None and not c.unsigned_ok:
        wrong = "it is not signed" if c.signature is None else "no key in allowed_signers has made its signature"
        raise Refused(f"stays in quarantine, {wrong}; --unsigned-ok admits it all the same")


def check_number(c: Candidate) -> None:
    """More than so many contributions of one sender; the rest is left in the inbox."""
    if c.checked is None:
        return
    if c.checked[c.sender] >= c.limits.contributions:
        raise LeftInInbox(
            f"{c.source}: left in the inbox, {c.sender} had {c.checked[c.sender]} checked or refused; remove settled "
            f"ones from {c.run}/{FOLDER}, or raise --max-per-contributor"
        )
    c.checked[c.sender] += 1


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


def check_weights(c: Candidate) -> None:
    """Weights whose header does not fit the architecture, that are not float32, or not finite, also in bfloat16."""
    with as_refusal(str(c.files)):
        c.expert  # noqa: B018, loading checks them


def check_copies(c: Candidate) -> None:
    """The tensors of an admitted expert in another file, or under another card."""
    for member in c.version.experts:
        if member.weights == c.weights:
            raise Refused(f"is a copy, its weights {c.weights[:12]} are those of {member.name}")


def check_holdout_error(c: Candidate) -> Iterator[Measurement]:
    """An error on the holdout, with the condition or without it, that is too large."""
    for branch in BRANCHES:
        limit = c.order.acceptance.max_ratio_to_gaussian
        yield Measurement(f"holdout error {branch}, by a Gaussian's,", ratio(c.scores[branch], c.unit[branch]), limit)


def check_bands(c: Candidate) -> Iterator[Measurement]:
    """Garbage in a part of the time axis, with the condition or without it."""
    limit = c.limits.band * c.order.acceptance.max_ratio_to_gaussian
    for branch in BRANCHES:
        units = c.unit[branch].tolist()
        units[0] = units[1]  # near data errors of x0 are compared with those of the band above
        for (low, high), error, unit in zip(pairwise(EDGES), c.scores[branch].tolist(), units, strict=True):
            yield Measurement(f"error for t from {low:g} to {high:g} {branch}", error / max(unit, TINY), limit)


def check_outside(c: Candidate) -> Iterator[Measurement]:
    """Garbage outside its cluster, of which it has learned nothing."""
    rows = c.holdout.outside(c.cluster)
    if len(rows) == 0:
        return
    draws = Draws.random(rows, c.seed, "outside", FEWER_DRAWS)
    found, unit = c.score(c.bridge, draws), c.score(c.holdout.gaussian(c.cluster), draws)
    limit = c.limits.outside * c.order.acceptance.max_ratio_to_gaussian
    for branch in BRANCHES:
        yield Measurement(f"error outside its cluster {branch}", ratio(found[branch], unit[branch]), limit)


def check_neighbors(c: Candidate) -> Iterator[Measurement]:
    """An expert of a neighboring cluster: it predicts as that one does, or fits that cluster better than its own."""
    t, samples = c.limits, c.holdout.samples
    here = Draws.random(c.holdout.inside(c.cluster), c.seed, "own", FEWER_DRAWS)
    own = ratio(c.scores[CONDITIONAL], c.unit[CONDITIONAL])

    def error(denoiser: Denoiser, draws: Draws) -> float:
        return max(float(band_errors(denoiser, samples, draws, device=c.device) @ WEIGHTS), TINY)

    for cluster, member in [(k, c.active[k]) for k in c.holdout.neighbors(c.cluster) if k in c.active]:
        try:
            neighbor = c.bridge_of(member)
        except UserError:  # damaged, so there is nothing to compare with
            continue
        mine, theirs = error(c.bridge, here), error(neighbor, here)
        if own < t.undertrained and not begun_alike(c, member):
            apart = difference(c.bridge, neighbor, samples, here, c.device)
            yield Measurement(
                f"likeness to the expert of cluster {cluster}", theirs / max(apart, TINY), 1 / t.difference
            )
        there = Draws.random(c.holdout.inside(cluster), c.seed, "neighbor", FEWER_DRAWS)
        ours, best, unit = (error(one, there) for one in (c.bridge, neighbor, c.holdout.gaussian(cluster)))
        # Refused if all three hold: much better there than at home, as good there as its expert, and no better at home
        # than that one. Each may happen to an honest expert: a cluster can be easier than another for every expert.
        # Worse than a Gaussian there, it is undertrained.
        better_there = min(1.0, t.neighbor_ratio * own) * unit / ours
        suits = min(better_there, t.neighbor_as_good * best / ours, mine / (t.neighbor_better * theirs))
        yield Measurement(f"suitability for cluster {cluster} instead of its own", suits, 1.0)


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


Check = Callable[[Candidate], Iterable[Measurement] | None]
CHECKS: tuple[tuple[str, Check], ...] = (
    ("refused before", check_refused_before),
    ("signature", check_signature),
    ("number", check_number),
    ("files", check_files),
    ("card", check_the_card),
    ("metrics", check_the_metrics),
    ("weights", check_weights),
    ("copies", check_copies),
    ("holdout error", check_holdout_error),
    ("bands of t", check_bands),
    ("outside", check_outside),
    ("neighbors", check_neighbors),
    ("samples", check_samples),
)


def run_checks(candidate: Candidate, checks: Iterable[tuple[str, Check]] = CHECKS) -> None:
    """Run the checks in order until one refuses the candidate; keeps the fraction of every limit that is used."""
    for name, check in checks:
        for found in check(candidate) or ():
            used = candidate.measured.setdefault(name, {})
            used[found.name] = found.used if found.used <= 1 / TINY else 1 / TINY  # JSON has no NaN
            if not found.used <= 1:
                bound = f"is {found.value:.4g}, at most {found.limit:.4g} is allowed"
                raise Refused(f"refused, its {found.name} {bound}; docs/trust.md explains the checks")
