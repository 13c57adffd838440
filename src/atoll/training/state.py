"""Everything a loop carries from one step to the next, on the device, and its counters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..diffusion import wide_dtype
from .ema import EMA
from .execution import Execution
from .optimizer import adamw
from .recipe import Training


@dataclass(frozen=True)
class Counts:
    """What the meters say, read by the host."""

    loss_sum: float
    steps: int  # since the last report
    skipped: int  # steps that were not finite and changed nothing, in all
    longest_row: int  # of them, the most that came one after another

    @property
    def loss(self) -> float | None:
        """Mean loss since the last report."""
        return self.loss_sum / self.steps if self.steps else None


class Meters:
    """Counters on the device: a step adds to them without the host looking on."""

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(5, dtype=wide_dtype(device), device=device)
        self._landing = torch.empty_like(self.values, device="cpu", pin_memory=device.type == "cuda")
        self._landed: torch.cuda.Event | None = None

    def add(self, loss: Tensor, finite: Tensor) -> None:
        """Count one step: `loss` scalar, `finite` 1 or 0 as a float scalar."""
        good = finite.to(self.values.dtype)
        loss = torch.where(finite > 0, loss.to(self.values.dtype), 0.0)
        self.values[:2] += torch.stack([loss, good])
        self.values[2] += 1.0 - good
        self.values[3] = (self.values[3] + 1.0) * (1.0 - good)  # bad ones since the last good one
        self.values[4] = torch.maximum(self.values[4], self.values[3])

    def begin_row(self) -> None:
        self.values[:2] = 0.0

    def read(self) -> Counts:
        """Their values now; the host waits for the device."""
        return counts(self.values)

    def glance(self) -> Counts | None:
        """Their values of some moments ago, without waiting; None if no copy has arrived since the last glance."""
        if self.values.device.type != "cuda":
            return self.read()
        if self._landed is None:
            self._landing.copy_(self.values, non_blocking=True)
            self._landed = torch.cuda.current_stream().record_event()
            return None
        if not self._landed.query():
            return None
        self._landed = None
        return counts(self._landing)


def counts(values: Tensor) -> Counts:
    loss_sum, steps, skipped, _, longest_row = values.tolist()
    return Counts(loss_sum, int(steps), int(skipped), int(longest_row))


class TrainingState:
    """Weights, their average, the optimizer's moments and the meters, with room taken for all of it at once."""

    def __init__(self, network: nn.Module, training: Training, execution: Execution) -> None:
        self.network = network
        self.ema = EMA(network, training.ema_images)
        self.optimizer = adamw(network, training, execution)
        device = next(network.parameters()).device
        self.meters = Meters(device)
        self.rates = torch.zeros(2, device=device)  # of the next step: learning rate, EMA
        self.images = 0
        self.updating = False  # while True, parts of the state are newer than others
        self.copied: torch.cuda.Event | None = None  # what leaves the state must have left before it changes again

    def set_rates(self, learning_rate: float, ema_rate: float) -> None:
        """For the next step; in memory that a replayed graph reads."""
        pinned = self.rates.device.type == "cuda"
        self.rates.copy_(torch.tensor([learning_rate, ema_rate], pin_memory=pinned), non_blocking=True)

    def before_update(self) -> None:
        """Make the device wait for copies of the state that are under way."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def tensors(self) -> dict[str, Tensor]:
        """All of it as one flat dictionary: weights/, ema/, optimizer/<parameter>/<moment>, meters."""
        flat = {f"weights/{name}": value for name, value in self.network.state_dict().items()}
        flat |= {f"ema/{name}": value for name, value in self.ema.tensors.items()}
        for name, parameter in self.network.named_parameters():
            flat |= {f"optimizer/{name}/{key}": value for key, value in self.optimizer.moments(parameter).items()}
        flat["meters"] = self.meters.values
        return {name: value.detach().contiguous() for name, value in flat.items()}

    def averaged_weights(self) -> dict[str, Tensor]:
        """What is kept at the end: the averaged parameters, and buffers as they are."""
        return {**self.network.state_dict(), **self.ema.tensors}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], images: int) -> None:
        """Take over a saved state, whatever execution saved it; every tensor must be there and fit."""
        self.network.load_state_dict(_under(tensors, "weights/"), strict=True)
        saved = _under(tensors, "ema/")
        mine = self.ema.tensors
        assert saved.keys() == mine.keys(), "the saved average belongs to another network"
        for name, value in mine.items():
            value.copy_(saved[name])
        for name, parameter in self.network.named_parameters():
            self.optimizer.restore_moments(parameter, _under(tensors, f"optimizer/{name}/"))
        self.meters.values.copy_(tensors["meters"])
        self.images = images


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
