"""Admit a contribution: check it as a stranger's, measure it on data no island has seen, then let it in."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..artifacts import Artifact, Draft, Store, UserError, find
from ..data.index import Index
from ..data.shards import ShardSet
from ..ensemble.changes import begun, change_ensemble
from ..ensemble.checks import Checks, check_spaces, objective_of
from ..ensemble.versions import Member, Version, Yardsticks, is_whole, open_ensemble, open_reference, place_of
from ..islands.expert import KIND, Expert, load_expert
from ..islands.order import Order
from ..partition.assignment import clusters_of
from ..process import Condition, Denoiser, Kind, LinearFlow, Prediction, fixed_times, per_sample, velocity_error
from ..training.seeds import generator

FILES = {"expert.json", "metrics.jsonl", "model.safetensors", "conversion.json"}  # all an expert may consist of


@dataclass(frozen=True)
class Admission:
    """What `admit` did: the member as it stands in the model, whether it was there before, and who serves instead."""

    member: Member
    already: bool
    incumbent: str | None = None


def admit(run: Store, contribution: str | Path) -> Admission:
    """Check and measure one expert folder; copy it into the run and name it in a new version of its model.

    Nothing is written unless every check passes. It is measured on the newest data, whichever of the run's orders it
    was trained for. An expert admitted for a cluster that has one already serves in its place, unless it is of an older
    order and worse; all stay on disk and in the model, and `atoll ensemble --use` chooses another.
    """
    run.check_creates()
    artifact = Artifact.open(contribution, KIND)
    if unknown := sorted(set(artifact.names()) - FILES):
        raise UserError(f"{contribution}: lists files no expert has, such as {unknown[0]}; ask for a clean folder")
    for name in artifact.names():
        artifact.file(name)  # every digest and size, before anything else is believed
    expert = load_expert(contribution)
    version = open_ensemble(run)
    order = order_of(run, version, expert, contribution)
    if {expert.card.partition} != {order.partition} or order.partition not in version.partitions:
        raise UserError(f"{contribution}: was trained for another partition of the data; take an order of this run")
    check_spaces(version, expert.card, str(contribution))
    for member in version.experts:
        if member.digest == expert.digest and is_whole(run, member):
            return Admission(member, already=True)

    data = open_reference(run, version.data, "data")
    partition = open_reference(run, version.partition, "partition")
    yardsticks = measure(expert, order, data, partition)
    worst = order.acceptance.gaussians * yardsticks.gaussian
    if not yardsticks.inside <= worst:
        raise UserError(
            f"{contribution}: refused, its holdout error {yardsticks.inside:.4f} on cluster {order.cluster} is above "
            f"{worst:.4f}, {order.acceptance.gaussians:g} times a Gaussian's; train it longer"
        )
    assert order.cluster is not None
    member = Member(
        path=f"contributions/{order.name}-{expert.digest[:12]}",
        digest=expert.digest,
        cluster=order.cluster,
        order=order.digest(),
        objective=objective_of(expert.card),
        yardsticks=yardsticks,
        licence=expert.card.licence,
    )
    copy_expert(artifact, place_of(run, member))

    def seat(now: Version | None) -> Version:
        before = begun(run, now)
        if before.data != version.data:
            raise UserError(f"{run}: has grown onto {before.data.path} meanwhile; run the same command again")
        return before.with_expert(member.model_copy(update={"serving": outranked_by(run, before, member) is None}))

    after = change_ensemble(run, seat, f"admitted {member.name} for cluster {member.cluster}")
    member = next(m for m in after.experts if m.digest == member.digest)
    incumbent = None if member.serving else outranked_by(run, after, member)
    return Admission(member, already=False, incumbent=incumbent)


def outranked_by(run: Store, version: Version, newcomer: Member) -> str | None:
    """The name of the expert that goes on serving the newcomer's cluster: of a newer order, and no worse; or None."""
    generations = Checks(run).generations(version)
    for member in version.serving:
        if member.cluster != newcomer.cluster or member.digest == newcomer.digest:
            continue
        newer = generations.get(member.order, 0) > generations.get(newcomer.order, 0)
        if newer and not better(newcomer.yardsticks, member.yardsticks):
            return member.name
    return None


def better(one: Yardsticks | None, other: Yardsticks | None) -> bool:
    """Whether one has the smaller error in its cluster; whoever was not measured is not better."""
    return one is not None and (other is None or one.inside < other.inside)


def order_of(run: Store, version: Version, expert: Expert, contribution: str | Path) -> Order:
    """The order of this run that the expert was trained for."""
    order = Checks(run).orders_of(version).get(expert.card.order or "")
    if order is None or order.cluster is None:
        raise UserError(f"{contribution}: was trained for no order of {run}; admit it to the run that gave the order")
    return order


def copy_expert(source: Artifact, place: Store) -> None:
    """Copy the listed files, each checked again on the way, manifest last: the copy has the same digest."""
    if (there := find(place)) is not None and there.digest == source.digest:
        return
    with Draft(place, KIND) as draft:
        for name in source.names():
            target = draft.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.file(name), target)
        manifest = source.manifest
        copied = draft.commit(config=manifest.config, parents=manifest.parents, licence=manifest.licence)
    assert copied.digest == source.digest


def measure(expert: Expert, order: Order, data: Artifact, partition: Artifact) -> Yardsticks:
    """The yardstick on the holdout, inside and outside the expert's cluster, beside a Gaussian's."""
    assert order.cluster is not None, "a monolith has no cluster to be measured on"
    index = Index.of(data)
    own = clusters_of(index, partition).eq(order.cluster)  # bool [N]
    samples = ShardSet([data.file(name) for name in data.names("shards/")], order.text)
    holdout = torch.from_numpy(index.rows("holdout"))
    inside, outside = holdout[own[holdout]], holdout[~own[holdout]]
    if len(inside) == 0:
        raise UserError(f"cluster {order.cluster} has no holdout samples to measure on; partition with fewer clusters")
    bridge = expert.denoiser(LinearFlow())
    train_rows = torch.from_numpy(index.rows("train"))
    gaussian = GaussianDenoiser.fitted(samples.latents(train_rows[own[train_rows]]))
    times = order.acceptance.times
    return Yardsticks(
        inside=holdout_error(bridge, samples, inside, times),
        outside=holdout_error(bridge, samples, outside, times) if len(outside) else None,
        gaussian=holdout_error(gaussian, samples, inside, times),
    )


@torch.no_grad()
def holdout_error(denoiser: Denoiser, samples: ShardSet, rows: Tensor, times: int, batch: int = 512) -> float:
    """Mean velocity error over every row at `times` fixed times, with noise fixed by the row."""
    total = 0.0
    pairs = torch.cartesian_prod(rows, torch.arange(times))
    for part in torch.split(pairs, batch):
        x0 = samples.latents(part[:, 0])
        eps = torch.stack([torch.randn(x0.shape[1:], generator=generator("holdout", *p)) for p in part.tolist()])
        condition = samples.condition(part[:, 0], torch.zeros(len(part)))
        total += velocity_error(denoiser, x0, eps, fixed_times(times)[part[:, 1]], condition).sum().item()
    return total / len(pairs)


@dataclass(frozen=True)
class GaussianDenoiser:
    """The best answer of somebody who knows the mean m and variance s^2 of each latent value, and no more:
    x0 = m + alpha s^2 / (alpha^2 s^2 + sigma^2) (x - alpha m)."""

    mean: Tensor
    variance: Tensor
    schedule: LinearFlow = LinearFlow()
    kind: Kind = Kind.X0

    @staticmethod
    def fitted(x0: Tensor) -> GaussianDenoiser:
        return GaussianDenoiser(x0.mean(0), x0.var(0, correction=0))

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        alpha, sigma = (per_sample(c, x).to(x.dtype) for c in (self.schedule.alpha(t), self.schedule.sigma(t)))
        gain = alpha * self.variance / (alpha**2 * self.variance + sigma**2)
        return Prediction(self.kind, self.mean + gain * (x - alpha * self.mean))
