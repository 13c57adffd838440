"""What the data alone says of a noisy state: the mean of all samples that may lie behind it.

Training on data has a sample's own x0 and eps for the truth behind x = alpha x0 + sigma eps. They are one draw of what
may lie there, right in the mean and noisy. With x0_j, the samples of the same cluster with the same condition, the mean
of all such draws is known:

    p(j | x) = softmax_j(-|x - alpha x0_j|^2 / (2 sigma^2)),    E[x0 | x] = sum_j p(j | x) x0_j

It is what a network would learn from the draws in the end, without their noise (Rao and Blackwell's theorem; Xu et al.
2023 train on such means of a batch). Near data the sum is the sample itself, near noise the mean of all.

A large cluster is cut into blocks at random, and a sample's mean is over its own block. Which block that is does not
depend on the noise, so the mean over all samples behind x is still the same: smaller blocks leave more noise, and bias
nothing. That holds for any other way to leave samples out that looks only at what a sample is and at its time. Where a
condition is dropped by chance, it is dropped of all samples alike, and they are those of the whole cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..diffusion import Corruption, per_sample
from ..training.seeds import generator

BLOCK_SIZE = 512  # samples, of which so many are read for one state
SURE_DISTANCE = 12.0  # alpha |x0 - x0_j| / sigma from which nobody mistakes j for the sample: odds of exp(-72 ± 12)
VALUES_AT_ONCE = 2**25  # of samples that are compared with states; larger latents have smaller blocks
BYTES_AT_WORK = 3 * 4 * VALUES_AT_ONCE  # the samples in float32, how far away they are, and what is made of that

Latents = Callable[[Tensor], Tensor]  # of rows int64 [n], somewhere: [n, C, H, W]


def shift_to_mean(x0: Tensor, eps: Tensor, ratio: Tensor, others: Tensor, valid: Tensor) -> Tensor:
    """E[x0 | x] - x0 over `others` [B, M, ...] where `valid` bool [B, M], the sample itself among them: [B, ...].

    The state has `ratio` [B] = alpha / sigma, finite. With d_j = x0_j - x0 the odds of j against the sample itself are
    exp(ratio eps d_j - ratio^2 |d_j|^2 / 2), in which nothing large cancels.
    """
    away = (others - x0[:, None]).flatten(2)
    along = torch.einsum("bmd,bd->bm", away, eps.flatten(1).to(away.dtype))
    scale = ratio.to(away.dtype)[:, None]
    logits = scale * along - (scale * away.norm(dim=2)).square() / 2
    weights = logits.masked_fill(~valid, -torch.inf).softmax(1)
    return torch.einsum("bm,bmd->bd", weights, away).view_as(x0)


def mean_target(at: Corruption, x0: Tensor, eps: Tensor, others: Tensor, valid: Tensor) -> Tensor:
    """The target at states x = alpha x0 + sigma eps, sigma > 0, of the mean of what lies behind them, [B, ...].

    E[eps | x] = (x - alpha E[x0 | x]) / sigma: what x0 is moved by, eps is by -alpha / sigma of it.
    """
    ratio = at.alpha / at.sigma
    shift = shift_to_mean(x0, eps, ratio, others, valid)
    return at.target(x0 + shift, eps - per_sample(ratio, shift).to(shift.dtype) * shift)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Samples in blocks of at most some, all of a block with one key; rows are the data's."""

    of_row: Tensor  # int64 [N]: the block of a row
    members: Tensor  # int64 [blocks, M]: rows of a block, and -1 where it has no more

    @staticmethod
    def of(rows: Tensor, keys: Tensor, count: int, numbers: torch.Generator, most: int) -> Blocks:
        """Of `rows` int64 [n] of `count` in all, dealt at random to as few blocks of their key [n] as may be."""
        shuffled = torch.randperm(len(rows), generator=numbers)
        ordered, order = torch.sort(keys[shuffled], stable=True)
        rows = rows[shuffled[order]]
        _, which, sizes = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
        blocks = -(-sizes // most)
        rank = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[which]
        block, place = (blocks.cumsum(0) - blocks)[which] + rank % blocks[which], rank // blocks[which]
        members = torch.full((int(blocks.sum()), int(place.max()) + 1 if len(rows) else 0), -1)
        members[block, place] = rows
        of_row = torch.full((count,), -1)
        of_row[rows] = block
        return Blocks(of_row, members)

    @property
    def width(self) -> int:
        return self.members.shape[1]

    def widened(self, width: int) -> Blocks:
        return replace(self, members=F.pad(self.members, (0, width - self.width), value=-1))

    def beside(self, rows: Tensor) -> Tensor:
        """The blocks of rows [B]: int64 [B, M], -1 where there are no more."""
        return self.members[self.of_row[rows]]


@dataclass(frozen=True, eq=False)
class Behind:
    """Who may lie behind the states of some clusters' samples, and how far apart they are."""

    alike: Blocks  # of one cluster and condition
    anyone: Blocks  # of one cluster, where the condition is dropped
    nearest: Tensor  # float64 [K]: the smallest distance between samples of a cluster's block, infinite elsewhere

    @staticmethod
    def of(rows: Tensor, clusters: Tensor, conditions: Tensor, latents: Latents, seed: int) -> Behind:
        """Of `rows`; `clusters` and `conditions` [N] number those of all samples."""
        numbers = generator(seed, "behind")
        own, count = clusters[rows], len(clusters)
        most = max(2, min(BLOCK_SIZE, VALUES_AT_ONCE // max(1, latents(rows[:1]).numel())))
        anyone = Blocks.of(rows, own, count, numbers, most)
        alike = Blocks.of(rows, own * (int(conditions.max()) + 1) + conditions[rows], count, numbers, most)
        alike, anyone = (each.widened(max(alike.width, anyone.width)) for each in (alike, anyone))
        nearest = torch.full((int(clusters.max()) + 1,), torch.inf, dtype=torch.float64)
        for k in torch.unique(own).tolist():
            block = anyone.beside(rows[own == k][:1])[0]
            some = latents(block[block >= 0]).flatten(1).double()
            nearest[k] = F.pdist(some).min() if len(some) > 1 else torch.inf
        return Behind(alike, anyone, nearest)

    def may_be_others(self, clusters: Tensor, at: Corruption) -> Tensor:
        """Whether at this noise a sample of these clusters [B] may be taken for another: bool [B]."""
        return at.alpha * self.nearest[clusters] < SURE_DISTANCE * at.sigma

    def members(self, rows: Tensor, dropped: Tensor) -> Tensor:
        """Who may lie behind states of samples `rows` [B], those `dropped` bool [B] without their condition: [B, M]."""
        return torch.where(dropped[:, None], self.anyone.beside(rows), self.alike.beside(rows))

    def targets(
        self, at: Corruption, x0: Tensor, eps: Tensor, rows: Tensor, dropped: Tensor, latents: Latents
    ) -> Tensor:
        """`mean_target` at states of samples `rows` [B], some of them at a time: [B, ...]."""
        assert bool((self.anyone.of_row[rows] >= 0).all()), "of these clusters nobody is known"
        found = torch.empty_like(x0)
        for blocks, whose in ((self.alike, ~dropped), (self.anyone, dropped)):  # apart: their blocks differ in size
            places = torch.nonzero(whose).flatten()
            if len(places) == 0:
                continue
            members = blocks.beside(rows[places])
            members = members[:, : int((members >= 0).sum(1).max())]
            size = max(1, VALUES_AT_ONCE // max(1, members.shape[1] * x0.shape[1:].numel()))
            for some, its in zip(members.split(size), places.to(x0.device).split(size), strict=True):
                others = latents(some.clamp(min=0).flatten()).to(x0).unflatten(0, some.shape)
                found[its] = mean_target(at[its], x0[its], eps[its], others, (some >= 0).to(x0.device))
        return found
