"""An expert's batch and validation loss on a device without float64: drawn in float64, narrowed on the way."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from apple_device import APPLE, AppleDevice, NoFloat64
from atoll.diffusion import EDM, CosineVP, DDPMBetas, Kind, LinearFlow, Objective
from atoll.diffusion.schedule import _ddpm_log_snr_on
from atoll.islands.task import ExpertTask
from atoll.training.compute import ComputeConfig
from atoll.training.loop import on_device
from tiny_orders import tiny_order, tiny_task

OBJECTIVES = [
    Objective(schedule=LinearFlow(), kind=Kind.VELOCITY),
    Objective(schedule=DDPMBetas("linear"), kind=Kind.EPSILON),
    Objective(schedule=CosineVP(), kind=Kind.V),
    Objective(schedule=EDM(), kind=Kind.X0),
]


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), validation=4)


def task_of(order: Path, objective: Objective) -> ExpertTask:
    """As if trained a while, for another objective than its order's."""
    task = tiny_task(order)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in task.network.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=numbers))
    card = task.card.model_copy(update={"schedule": objective.schedule, "kind": objective.kind})
    return replace(task, order=task.order.model_copy(update={"objective": objective}), card=card)


def answers(task: ExpertTask, device: torch.device) -> tuple[Tensor, Tensor, float]:
    """Losses of a batch that came through the feed, a gradient, and the validation loss."""
    there = replace(task, network=deepcopy(task.network).to(device))
    batch = on_device(there.batch(64, 8, slice(0, 8)), device)
    loss = there.loss(there.network, batch)
    loss.sum().backward()
    gradient = there.network.patches.project.weight.grad
    assert gradient is not None
    assert {loss.device, gradient.device} == {device}
    val_loss = there.report(64, ComputeConfig(micro_batch=8))["val_loss"]
    return loss.detach().cpu(), gradient.cpu(), val_loss


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.kind} on {o.schedule.name}")
def test_it_learns_there_what_it_learns_on_a_cpu(
    order: Path, objective: Objective, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "torch._dynamo" in sys.modules:  # loaded by another test, it takes the stand-in's tensors for meta tensors
        alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", request.node.nodeid]
        process = subprocess.run(alone, cwd=request.config.rootpath, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout
        return
    task = task_of(order, objective)
    loss, gradient, val_loss = answers(task, torch.device("cpu"))
    monkeypatch.setattr("atoll.diffusion.schedule.WITHOUT_FLOAT64", ("mps", APPLE.type))
    _ddpm_log_snr_on.cache_clear()
    with AppleDevice():
        apples_loss, apples_gradient, apples_val_loss = answers(task, APPLE)
    _ddpm_log_snr_on.cache_clear()
    torch.testing.assert_close(apples_loss, loss, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(apples_gradient, gradient, rtol=1e-2, atol=1e-3 * gradient.abs().max().item())
    assert apples_val_loss == pytest.approx(val_loss, rel=1e-2)


def test_without_narrowing_it_would_fail(order: Path) -> None:
    """What the test above relies on: the drawn times are float64, and the stand-in has none."""
    task = task_of(order, OBJECTIVES[0])
    with AppleDevice(), pytest.raises(NoFloat64):
        answers(task, APPLE)
