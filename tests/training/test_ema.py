"""The weight average against closed forms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from atoll.training.ema import EMA, one_buffer


def take(average: EMA, images: int, batch: int) -> None:
    average.update(torch.tensor(average.rate(images, batch)))


def test_it_halves_its_distance_every_half_life() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    average = EMA(module, 80, ramp=1e9)
    nn.init.ones_(module.weight)
    for images in range(8, 88, 8):  # ten steps of eight images: one half-life
        take(average, images, 8)
    torch.testing.assert_close(average.tensors["weight"], torch.tensor([[0.5]]))


def test_it_forgets_its_random_start() -> None:
    """With a half-life of 0.1 n after n images, what is left of the start after N of b is prod 2^(-10 / n) ~ N^-6.9."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1e6)
    average = EMA(module, 10**9)
    nn.init.ones_(module.weight)
    for images in range(10, 2010, 10):
        take(average, images, 10)
    assert float(average.tensors["weight"]) == pytest.approx(1.0, abs=0.01)


def test_a_skipped_step_changes_no_bit() -> None:
    torch.manual_seed(0)
    module = nn.Linear(7, 5)
    average = EMA(module, 80)
    nn.init.normal_(module.weight)
    take(average, 10, 10)
    before = {name: value.clone() for name, value in average.tensors.items()}
    nn.init.constant_(module.weight, 1e30)
    average.update(torch.tensor(0.0))
    assert all(torch.equal(value, before[name]) for name, value in average.tensors.items())


def test_the_average_is_swapped_in_and_the_weights_come_back_bit_for_bit() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2, bias=False))
    average = EMA(module, 80)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    take(average, 100, 10)
    own = {name: value.detach().clone() for name, value in module.named_parameters()}
    expected = {name: value.clone() for name, value in average.tensors.items()}
    x = torch.randn(4, 3)
    answer = module(x)
    with average.swapped():
        assert all(torch.equal(value, expected[name]) for name, value in module.named_parameters())
        assert not torch.equal(module(x), answer)
    assert all(torch.equal(value, own[name]) for name, value in module.named_parameters())
    assert torch.equal(module(x), answer)
    with pytest.raises(ZeroDivisionError), average.swapped():
        raise ZeroDivisionError
    assert all(torch.equal(value, own[name]) for name, value in module.named_parameters()), "also after a failure"
    nn.init.zeros_(module[0].weight)
    take(average, 200, 10)
    kept = 1.0 - average.rate(200, 10)
    torch.testing.assert_close(average.tensors["0.weight"], kept * expected["0.weight"])  # still the module's weights


def test_all_weights_lie_in_one_buffer_and_are_what_they_were() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 200))
    before = copy.deepcopy(module)
    buffer = one_buffer(module)
    for name, value in module.named_parameters():
        assert torch.equal(value, before.get_parameter(name))
        assert value.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert value.data_ptr() % 512 == buffer.data_ptr() % 512, "aligned to 128 values"
    x = torch.randn(4, 3)
    assert torch.equal(module(x), before(x))
    buffer.zero_()
    assert all(not value.any() for value in module.parameters())
