"""Batches on their way to the device. What a GPU's thread and copies do is in test_cuda.py."""

from __future__ import annotations

import pytest
import torch

from apple_device import APPLE, AppleDevice
from atoll.training.feed import Feed, narrowed
from atoll.training.packing import Batch, Layout

CPU = torch.device("cpu")


def test_steps_come_in_order_from_where_training_stands_to_the_end() -> None:
    def draw(number: int) -> Batch | None:
        return None if number == 7 else {"x": torch.full((2,), float(number))}

    found = [(number, batch["x"].tolist()) for number, batch in Feed(draw, CPU).stream(3)]
    assert found == [(number, [float(number)] * 2) for number in range(3, 7)]


def test_on_a_cpu_nothing_is_drawn_ahead() -> None:
    drawn = []

    def draw(number: int) -> Batch | None:
        drawn.append(number)
        return {"x": torch.zeros(1)}

    for number, _ in Feed(draw, CPU).stream(0):
        assert drawn == list(range(number + 1))
        if number == 4:
            break


def test_a_draw_that_fails_raises_in_the_reader() -> None:
    def draw(number: int) -> Batch | None:
        if number == 2:
            raise ValueError("no such shard")
        return {"x": torch.zeros(1)}

    seen = []
    with pytest.raises(ValueError, match="no such shard"):
        for number, _ in Feed(draw, CPU).stream(0):
            seen.append(number)
    assert seen == [0, 1]


def test_float64_is_narrowed_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"t": torch.rand(3, dtype=torch.float64), "row": torch.arange(3), "rate": torch.tensor(0.1)}
    monkeypatch.setattr("atoll.diffusion.schedule.WITHOUT_FLOAT64", ("mps", APPLE.type))
    with AppleDevice():
        _, batch = next(Feed(lambda _: drawn, APPLE).stream(0))
    assert {name: value.dtype for name, value in batch.items()} == {
        "t": torch.float32,
        "row": torch.int64,
        "rate": torch.float32,
    }
    assert {value.device for value in batch.values()} == {APPLE}
    assert narrowed(drawn["t"], CPU).dtype is torch.float64


def test_a_packed_batch_is_the_batch() -> None:
    """Every type, scalars, nothing at all, and each where its type wants to begin."""
    torch.manual_seed(0)
    batch = {
        "flag": torch.tensor([True, False, True]),
        "x": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "wide": torch.randn(7, dtype=torch.float64),
        "ids": torch.randint(10, (3, 2)),
        "half": torch.randn(3, dtype=torch.bfloat16),
    }
    layout = Layout.of(batch)
    buffer = torch.zeros(layout.size, dtype=torch.uint8)
    for name, view in layout.views(buffer).items():
        view.copy_(batch[name])
    found = layout.views(buffer.clone())
    assert found.keys() == batch.keys()
    for name, value in batch.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value), name
    assert Layout.of(batch) == layout
    assert Layout.of({**batch, "x": torch.randn(2, 5)}) != layout
