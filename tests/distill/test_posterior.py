"""The mean of what may lie behind a state, against the textbook's formula and its own theorem."""

from __future__ import annotations

import pytest
import torch
from scipy.special import softmax
from torch import Tensor

from atoll.diffusion import CosineVP, Kind, LinearFlow, Objective
from atoll.distill import posterior as module
from atoll.distill.posterior import BLOCK_SIZE, SURE_DISTANCE, Behind, Blocks, mean_target, shift_to_mean

SHAPE = (2, 3, 1)
FLOW = Objective(schedule=LinearFlow(), kind=Kind.VELOCITY)
NOISE = Objective(schedule=CosineVP(), kind=Kind.EPSILON)


def drawn(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def odds(x: Tensor, alpha: float, sigma: float, samples: Tensor) -> Tensor:
    """p(j | x) of one state x [...]: by the definition, with scipy's softmax."""
    distance = (x - alpha * samples).flatten(1).square().sum(1)
    return torch.from_numpy(softmax(-distance.numpy() / (2 * sigma**2)))


@pytest.mark.parametrize("objective", [FLOW, NOISE], ids=["flow", "noise"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_mean_is_the_textbooks(objective: Objective, dtype: torch.dtype) -> None:
    samples, eps = drawn(40), drawn(40, 1)
    t = torch.linspace(0.01, 0.99, 40, dtype=torch.float64)
    at = objective.at(t)
    others = samples.expand(40, *samples.shape)
    valid = torch.rand(40, 40, generator=torch.Generator().manual_seed(2)) < 0.5
    valid |= torch.eye(40, dtype=torch.bool)
    found = mean_target(at.to(dtype=dtype), samples.to(dtype), eps.to(dtype), others.to(dtype), valid)
    assert found.dtype == dtype
    for row in range(40):
        alpha, sigma = at.alpha[row].item(), at.sigma[row].item()
        x, some = alpha * samples[row] + sigma * eps[row], samples[valid[row]]
        x0 = torch.tensordot(odds(x, alpha, sigma, some), some, 1)
        wanted = objective.at(t[row : row + 1]).target(x0[None], ((x - alpha * x0) / sigma)[None])[0]
        torch.testing.assert_close(found[row].double(), wanted, rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-4)


def test_pure_noise_and_pure_data() -> None:
    """At alpha = 0 it is the mean of all; at a sigma next to nothing the sample itself, to the bit."""
    samples, eps = drawn(30), drawn(30, 1)
    others, valid = samples.expand(30, *samples.shape), torch.ones(30, 30, dtype=torch.bool)
    far = shift_to_mean(samples, eps, torch.zeros(30), others, valid)
    torch.testing.assert_close(samples + far, samples.mean(0).expand_as(samples))
    close = shift_to_mean(samples.float(), eps.float(), torch.full((30,), 1e15), others.float(), valid)
    assert not close.any()


@pytest.mark.parametrize("most", [1, 4, 7, 100])
def test_blocks_bias_nothing(most: int) -> None:
    """Whoever may lie behind x brings the mean of its own block, and by their odds all together the mean of all."""
    samples, rows = drawn(30), torch.arange(30)
    blocks = Blocks.of(rows, torch.zeros(30, dtype=torch.int64), 30, torch.Generator().manual_seed(0), most)
    for t in (0.3, 0.6, 0.9):
        alpha, sigma = 1 - t, t
        x = alpha * samples[3] + sigma * drawn(1, 5)[0]
        p = odds(x, alpha, sigma, samples)
        members = blocks.beside(rows)
        eps = (x - alpha * samples) / sigma  # of each, if it is the one behind x
        ratio = torch.full((30,), alpha / sigma, dtype=torch.float64)
        mean = samples + shift_to_mean(samples, eps, ratio, samples[members.clamp(min=0)], members >= 0)
        torch.testing.assert_close(torch.tensordot(p, mean, 1), torch.tensordot(p, samples, 1))


def test_blocks_hold_everybody_once_beside_their_like() -> None:
    rows = torch.arange(5, 600)
    keys = rows % 7
    keys[keys == 3] = 2  # twice as many of these
    blocks = Blocks.of(rows, keys, 700, torch.Generator().manual_seed(1), most=50)
    there = blocks.members[blocks.members >= 0]
    assert torch.equal(there.sort().values, rows)
    key_of = torch.full((700,), -1)
    key_of[rows] = keys
    sizes = []
    for number, block in enumerate(blocks.members):
        own = block[block >= 0]
        assert len(set(key_of[own].tolist())) == 1
        assert torch.equal(blocks.of_row[own], torch.full_like(own, number))
        sizes.append(len(own))
    assert max(sizes) <= 50
    assert min(sizes) > 40, "dealt evenly, so that nobody is left in a small one"
    assert not torch.equal(there, rows), "at random: data lies by classes"


def test_only_states_are_asked_behind_which_others_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Farther than SURE_DISTANCE it would be the sample itself anyway; of other clusters nobody is known."""
    samples = drawn(64)
    clusters, conditions = torch.arange(64) % 2, torch.arange(64) % 4 // 2
    rows = torch.nonzero(clusters == 1).flatten()
    behind = Behind.of(rows, clusters, conditions, lambda some: samples[some], seed=0)
    apart = torch.cdist(samples[rows].flatten(1), samples[rows].flatten(1))
    assert behind.nearest[1] == pytest.approx(apart.fill_diagonal_(torch.inf).min().item())
    t = torch.linspace(0.001, 0.999, len(rows), dtype=torch.float64)
    at, eps = FLOW.at(t), drawn(len(rows), 1)
    assert not behind.may_be_others(torch.zeros(len(rows), dtype=torch.int64), at).any()
    unsure = behind.may_be_others(torch.ones(len(rows), dtype=torch.int64), at)
    assert torch.equal(unsure, (1 - t) / t * behind.nearest[1] < SURE_DISTANCE)
    assert 0 < int(unsure.sum()) < len(rows)
    dropped = torch.arange(len(rows)) % 3 == 0
    found = behind.targets(at, samples[rows], eps, rows, dropped, lambda some: samples[some])
    monkeypatch.setattr(module, "VALUES_AT_ONCE", 100)
    few = behind.targets(at, samples[rows], eps, rows, dropped, lambda some: samples[some])
    torch.testing.assert_close(few, found, msg="some at a time")
    nobody = behind.targets(at[:0], samples[:0], eps[:0], rows[:0], dropped[:0], lambda some: samples[some])
    assert nobody.shape == (0, *SHAPE)
    with pytest.raises(AssertionError, match="nobody is known"):
        behind.targets(at[:1], samples[:1], eps[:1], torch.tensor([0]), dropped[:1], lambda some: samples[some])
    own = at.target(samples[rows], eps)
    torch.testing.assert_close(found[~unsure], own[~unsure], rtol=0, atol=1e-9)
    assert (found - own)[unsure].abs().max() > 0.1
    for place, row in enumerate(rows.tolist()):
        members = behind.members(rows, dropped)[place]
        wanted = (clusters == 1) & (dropped[place] | (conditions == conditions[row]))
        assert torch.equal(members[members >= 0].sort().values, torch.nonzero(wanted).flatten())


def test_clusters_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample is its own mean, and twins are each other's; of a large cluster a block is read, of large latents a
    smaller one."""
    count = BLOCK_SIZE + 90
    samples = drawn(count)
    samples[2] = samples[1]
    clusters = torch.tensor([0, 1, 1] + [2] * (count - 3))
    rows = torch.arange(count)
    behind = Behind.of(rows, clusters, torch.zeros_like(clusters), lambda some: samples[some], seed=0)
    at = FLOW.at(torch.tensor([1e-4, 1e-4, 0.5], dtype=torch.float64))
    assert behind.may_be_others(torch.arange(3), at).tolist() == [False, True, True]
    found = behind.targets(
        at, samples[:3], drawn(3, 1), rows[:3], torch.zeros(3, dtype=torch.bool), lambda r: samples[r]
    )
    torch.testing.assert_close(found, at.target(samples[:3], drawn(3, 1)))
    assert behind.anyone.width == behind.alike.width == -(-(count - 3) // 2)
    monkeypatch.setattr(module, "VALUES_AT_ONCE", 10 * samples[0].numel())
    few = Behind.of(rows, clusters, torch.zeros_like(clusters), lambda some: samples[some], seed=0)
    assert few.anyone.width == 10
