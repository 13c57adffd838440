"""Conditions: indexing, dropping, joining."""

from __future__ import annotations

import pytest
import torch

from atoll.diffusion import Condition


def full(count: int) -> Condition:
    return Condition(
        labels=torch.arange(count),
        pooled=torch.arange(count * 3.0).reshape(count, 3),
        tokens=torch.arange(count * 8.0).reshape(count, 4, 2),
        mask=torch.ones(count, 4, dtype=torch.bool),
    )


@pytest.mark.parametrize(
    "rows",
    [slice(1, 3), torch.tensor([1, 2]), torch.tensor([False, True, True, False])],
    ids=["slice", "index", "mask"],
)
def test_rows_of_every_field_are_taken_alike(rows: slice | torch.Tensor) -> None:
    part = full(4)[rows]
    assert len(part) == 2
    assert part.labels.tolist() == [1, 2]
    assert torch.equal(part.pooled, full(4).pooled[1:3])
    assert torch.equal(part.tokens, full(4).tokens[1:3])
    assert part.dropped is None


def test_null_drops_every_row_and_keeps_the_rest() -> None:
    null = full(3).null()
    assert null.dropped.tolist() == [True, True, True]
    assert torch.equal(null.labels, full(3).labels)


def test_dropping_adds_to_what_is_dropped_already() -> None:
    first = full(3).drop(torch.tensor([True, False, False]))
    assert first.drop(torch.tensor([False, False, True])).dropped.tolist() == [True, False, True]
    assert full(3).dropped is None


def test_joining_a_batch_with_its_null() -> None:
    both = Condition.cat([full(2), full(2).null()])
    assert both.dropped.tolist() == [False, False, True, True]
    assert both.labels.tolist() == [0, 1, 0, 1]
    assert len(Condition.cat([full(2), full(3)])) == 5


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="at least one field"):
        Condition()
    with pytest.raises(ValueError, match="'labels': 2, 'pooled': 3"):
        Condition(labels=torch.zeros(2), pooled=torch.zeros(3, 1))
    with pytest.raises(ValueError, match="pooled is missing in some"):
        Condition.cat([full(2), Condition(labels=torch.zeros(2), tokens=full(2).tokens, mask=full(2).mask)])
