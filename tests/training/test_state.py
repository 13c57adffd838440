"""What a loop carries from step to step: counted on the device, and taken over by any execution."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from toys import TRAINING, fresh

from atoll.training.execution import Execution
from atoll.training.recipe import Training
from atoll.training.state import Meters, TrainingState

EXECUTIONS = [Execution(), Execution(moments="8-bit")]
LARGE = Training(**{**TRAINING.model_dump(), "weight_decay": 0.1})


def trained(execution: Execution, steps: int = 4, start: TrainingState | None = None) -> TrainingState:
    """A state after some steps; its matrix is large enough for eight bits."""
    state = start or TrainingState(fresh(4096), LARGE, execution)
    state.optimizer.param_groups[0]["lr"].fill_(1e-3)
    for step in range(steps):
        numbers = torch.Generator().manual_seed(state.images + step)
        for parameter in state.network.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=numbers)
        state.optimizer.grad_scale, state.optimizer.found_inf = torch.ones(()), torch.zeros(())
        state.optimizer.step()
        state.ema.update(torch.tensor(0.3))
        state.meters.add(torch.tensor(0.5), torch.tensor(1.0))
    state.images += 16 * steps
    return state


@pytest.mark.parametrize(("before", "after"), list(itertools.product(EXECUTIONS, EXECUTIONS)), ids=lambda e: e.moments)
def test_any_execution_takes_over_what_any_other_left(before: Execution, after: Execution) -> None:
    """Weights, average and meters to the bit; moments too, unless they are rounded to eight bits now."""
    old = trained(before)
    saved = {name: value.clone() for name, value in old.tensors().items()}
    new = TrainingState(fresh(4096), LARGE, after)
    new.restore(saved, old.images)
    assert new.images == old.images
    found = new.tensors()
    exact = {name for name in saved if not name.startswith("optimizer/") or before.moments == after.moments}
    for name in exact:
        assert torch.equal(found[name], saved[name]), name
    tolerance = 0.0 if before.moments == after.moments else 2e-4  # steps of 1e-3, moments to a percent
    trained(before, start=old)
    trained(after, start=new)
    for name, value in old.network.named_parameters():
        torch.testing.assert_close(new.network.get_parameter(name), value, rtol=0, atol=tolerance)


def test_what_is_missing_is_noticed() -> None:
    state = trained(Execution())
    saved = state.tensors()
    for name in saved:
        part = {n: v.clone() for n, v in saved.items() if n != name}
        with pytest.raises((KeyError, RuntimeError, AssertionError)):
            TrainingState(fresh(4096), LARGE, Execution()).restore(part, 16)


def test_what_is_kept_is_the_average_and_the_buffers() -> None:
    class WithBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("table", torch.arange(3.0))

    state = TrainingState(WithBuffer(), TRAINING, Execution())
    before = state.network.get_parameter("layer.weight").detach().clone()
    with torch.no_grad():
        state.network.get_parameter("layer.weight").add_(1.0)
    state.ema.update(torch.tensor(0.25))
    kept = state.averaged_weights()
    assert kept.keys() == {"layer.weight", "layer.bias", "table"}
    torch.testing.assert_close(kept["layer.weight"], before + 0.25)
    assert kept["table"].tolist() == [0.0, 1.0, 2.0]


def test_meters_count_good_and_bad_steps() -> None:
    meters = Meters(torch.device("cpu"))
    for loss, finite in ((0.5, 1.0), (float("nan"), 0.0), (float("inf"), 0.0), (1.5, 1.0), (float("nan"), 0.0)):
        meters.add(torch.tensor(loss), torch.tensor(finite))
    counts = meters.read()
    assert (counts.loss, counts.steps, counts.skipped, counts.longest_row) == (1.0, 2, 3, 2)
    meters.begin_row()
    counts = meters.read()
    assert (counts.loss, counts.steps, counts.skipped, counts.longest_row) == (None, 0, 3, 2)
    assert meters.glance() == counts


def test_a_mean_over_a_million_steps_keeps_its_digits() -> None:
    """float32 would stop counting at 2^24, and round the sum long before."""
    meters = Meters(torch.device("cpu"))
    meters.values[0], meters.values[1] = 0.1 * 2**25, 2**25
    meters.add(torch.tensor(0.1), torch.tensor(1.0))
    counts = meters.read()
    assert counts.steps == 2**25 + 1
    assert counts.loss == pytest.approx(0.1, rel=1e-9)
