"""Which experts generated what, at each time and for each image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..sampling import Step


class Record:
    """Weights of experts after the route, added up over images at each time, and over times for each image.

    Of the conditional branch, at every step.
    """

    def __init__(self, images: int, experts: int) -> None:
        self._by_image = torch.zeros(images, experts, dtype=torch.float64)
        self._by_time: dict[float, Tensor] = {}

    def add(self, step: Step) -> None:
        weights = step.chosen.detach().cpu().double()
        self._by_image[step.images] += weights
        self._add_at(round(step.time, 9), weights.sum(0))

    def _add_at(self, time: float, weights: Tensor) -> None:
        before = self._by_time.get(time)
        self._by_time[time] = weights if before is None else before + weights

    def tensors(self) -> dict[str, Tensor]:
        """All it holds, for a file: by_image [N, K], times [T] and by_time [T, K], float64."""
        sums = torch.stack(list(self._by_time.values())) if self._by_time else self._by_image.new_zeros(0, 0)
        times = torch.tensor(list(self._by_time), dtype=torch.float64)
        return {"by_image": self._by_image, "times": times, "by_time": sums}

    @staticmethod
    def joined(parts: Iterable[Mapping[str, Tensor]]) -> Record:
        """One record of images sampled in parts, from the `tensors` of each in their order."""
        whole, by_image = Record(0, 0), []
        for part in parts:
            by_image.append(part["by_image"])
            for time, weights in zip(part["times"].tolist(), part["by_time"], strict=True):
                whole._add_at(time, weights)
        whole._by_image = torch.cat(by_image)
        return whole

    def by_time(self) -> tuple[list[float], list[list[float]]]:
        """The times, from noise to data, and the mean weight of each expert at each of them."""
        times = sorted(self._by_time, reverse=True)
        return times, [(self._by_time[t] / self._by_time[t].sum()).tolist() for t in times]

    def by_image(self) -> Tensor:
        """Mean weight of each expert in each image [N, K]."""
        return self._by_image / self._by_image.sum(1, keepdim=True)
