"""Sample order: a pure function of (seed, images seen)."""

from __future__ import annotations

import pytest
import torch

from atoll.data.stream import sample_order


@pytest.mark.parametrize("size", [1, 7, 100])
def test_every_epoch_is_a_permutation(size: int) -> None:
    stream = sample_order(size, seed=0, start=0, count=5 * size).view(5, size)
    for epoch in stream:
        assert sorted(epoch.tolist()) == list(range(size))
    if size > 1:
        assert len({tuple(epoch.tolist()) for epoch in stream}) > 1, "epochs differ"


def test_any_place_is_reached_without_walking_there_in_batches_of_any_size() -> None:
    whole = sample_order(37, seed=1, start=0, count=300)
    for batch in (1, 16, 100):
        parts = [sample_order(37, seed=1, start=at, count=min(batch, 300 - at)) for at in range(0, 300, batch)]
        assert torch.equal(torch.cat(parts), whole)


def test_seeds_differ_and_zero_is_one_of_them() -> None:
    orders = {tuple(sample_order(100, seed=seed, start=0, count=100).tolist()) for seed in range(20)}
    assert len(orders) == 20
    assert torch.equal(sample_order(100, 0, 0, 100), sample_order(100, 0, 0, 100))


def test_first_places_are_uniform() -> None:
    firsts = torch.tensor([int(sample_order(10, seed, 0, 1)) for seed in range(5000)])
    counts = firsts.bincount(minlength=10).double()
    chi_squared = float(((counts - 500) ** 2 / 500).sum())
    assert chi_squared < 27.9  # 99.9 % quantile with 9 degrees of freedom


@pytest.mark.parametrize("bad", [(0, 0, 0, 1), (5, -1, 0, 1), (5, 0, -1, 1), (5, 0, 0, -1)])
def test_nonsense_is_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="need size >= 1"):
        sample_order(*bad)
