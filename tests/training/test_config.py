"""What a recipe says: rates over images, seeds, and what is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from atoll.training.config import TrainConfig
from atoll.training.loop import report_due
from atoll.training.seeds import generator, seed_from

RECIPE = TrainConfig(images=1000, batch=10, learning_rate=0.1, ema_images=100, seed=0)


def test_the_learning_rate_rises_and_falls_in_images() -> None:
    recipe = RECIPE.model_copy(update={"warmup_images": 100, "decay": "linear", "learning_rate": 1.0})
    assert recipe.learning_rate_at(0) == pytest.approx(0.1)
    assert recipe.learning_rate_at(90) == pytest.approx(1.0)
    assert recipe.learning_rate_at(550) == pytest.approx(0.5)
    assert recipe.learning_rate_at(990) == pytest.approx(10 / 900)
    twice = recipe.model_copy(update={"batch": 20})
    assert twice.learning_rate_at(550) == recipe.learning_rate_at(550), "decay must not depend on the batch"


@pytest.mark.parametrize(("total", "batch"), [(1000, 10), (96_000, 64), (7, 3), (40, 1)])
def test_reports_are_spread_over_the_budget(total: int, batch: int) -> None:
    images, reports = 0, []
    while images < total:
        size = min(batch, total - images)
        images += size
        if report_due(images, size, total):
            reports.append(images)
    assert reports[-1] == total
    assert len(reports) == min(40, -(-total // batch))


def test_seeds_are_pure_functions_and_zero_is_a_seed() -> None:
    assert seed_from(0, "noise", 64) == seed_from(0, "noise", 64)
    keys = [
        (0, "noise", 64),
        (1, "noise", 64),
        (0, "noise", 65),
        (0, "batch", 64),
        (0, "noise", "64"),
        ("0", "noise", 64),
    ]
    assert len({seed_from(*key) for key in keys}) == len(keys)
    assert torch.equal(torch.rand(3, generator=generator(0, "a")), torch.rand(3, generator=generator(0, "a")))


@pytest.mark.parametrize(
    "change",
    [{"images": 0}, {"batch": -1}, {"learning_rate": 0}, {"condition_dropout": 1.0}, {"typo": 1}, {"micro_batch": 8}],
)
def test_bad_recipes_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrainConfig.model_validate({**RECIPE.model_dump(), **change})
