"""Who painted what: a route that remembers which experts it chose, when, and for which image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .routes import PerImageRoute, Route


@dataclass(frozen=True, eq=False)
class RecordedRoute:
    """Passes on another route's answers and adds them up, over images at each time and over times for each image."""

    route: Route
    images: int
    experts: int
    rows: slice = slice(None)
    _by_time: dict[float, Tensor] = field(default_factory=dict)
    _by_image: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        if not len(self._by_image):
            self._by_image.resize_(self.images, self.experts).zero_()

    def bind(self, rows: slice, seeds: Sequence[int]) -> RecordedRoute:
        inner = self.route.bind(rows, seeds) if isinstance(self.route, PerImageRoute) else self.route
        return RecordedRoute(inner, self.images, self.experts, rows, self._by_time, self._by_image)

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        chosen = self.route(weights, t)
        counts = chosen.detach().double().cpu()
        self._by_image[self.rows] += counts
        time = round(float(t[0]), 9)
        self._by_time[time] = self._by_time.get(time, torch.zeros(self.experts)) + counts.sum(0)
        return chosen

    def by_time(self) -> dict[float, list[float]]:
        """Share of each expert at each time asked, from noise to data."""
        return {t: (self._by_time[t] / self._by_time[t].sum()).tolist() for t in sorted(self._by_time, reverse=True)}

    def by_image(self) -> Tensor:
        """Share of each expert in each image [N, K]."""
        return self._by_image / self._by_image.sum(1, keepdim=True)
