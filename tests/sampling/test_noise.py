"""Noise belongs to the image: the same bits in any batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from atoll.sampling.noise import image_seeds, initial_noise, step_noise

SHAPE = (4, 8, 8)


def test_an_images_noise_is_the_same_bits_alone_and_in_any_batch() -> None:
    seeds = [5, 0, 17, 5, 2**40, -3]
    together = initial_noise(seeds, SHAPE)
    assert together.dtype == torch.float32
    for row, seed in enumerate(seeds):
        assert torch.equal(initial_noise([seed], SHAPE)[0], together[row])
        assert torch.equal(step_noise([seed], SHAPE, 3)[0], step_noise(seeds, SHAPE, 3)[row])


def test_seeds_steps_and_the_start_are_all_different_draws() -> None:
    draws = [initial_noise([s], SHAPE)[0] for s in range(20)]
    draws += [step_noise([s], SHAPE, i)[0] for s in range(20) for i in range(20)]
    flat = torch.stack(draws).flatten(1)
    correlation = torch.corrcoef(flat).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(flat.shape[1])


def test_noise_is_standard_normal() -> None:
    for noise in (initial_noise(range(2000), SHAPE), step_noise(range(2000), SHAPE, 7)):
        count = noise.numel()
        assert abs(noise.mean()) < 4.5 / math.sqrt(count)
        assert abs(noise.var() - 1) < 4.5 * math.sqrt(2 / count)


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    initial_noise([1, 2], SHAPE)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_from_a_number_or_a_list() -> None:
    assert image_seeds(7, 3) == [7, 8, 9]
    assert image_seeds(np.int64(7), 3) == image_seeds(np.array([7, 8, 9]), 3) == [7, 8, 9]  # type: ignore[arg-type]
    assert image_seeds([3, 3], 2) == [3, 3]
    with pytest.raises(ValueError, match="3 images need 3 seeds, got 2"):
        image_seeds([1, 2], 3)
    with pytest.raises(ValueError, match="must fit in 64 bits"):
        image_seeds(2**64 - 1, 2)
