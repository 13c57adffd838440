"""Who painted what: a route that remembers which experts it chose, when, and for which image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .routes import PerImageRoute, Route


class Record:
    """Weights given to experts, added up over images at each time, and over times for each image."""

    def __init__(self, images: int, experts: int) -> None:
        self._by_image = torch.zeros(images, experts, dtype=torch.float64)
        self._by_time: dict[float, Tensor] = {}

    def add(self, rows: slice, t: Tensor, chosen: Tensor) -> None:
        counts = chosen.detach().cpu().double()
        self._by_image[rows] += counts
        time = round(float(t[0]), 9)
        before = self._by_time.get(time)
        self._by_time[time] = counts.sum(0) if before is None else before + counts.sum(0)

    def by_time(self) -> tuple[list[float], list[list[float]]]:
        """The times asked, from noise to data, and the share of each expert at each of them."""
        times = sorted(self._by_time, reverse=True)
        return times, [(self._by_time[t] / self._by_time[t].sum()).tolist() for t in times]

    def by_image(self) -> Tensor:
        """Share of each expert in each image [N, K]."""
        return self._by_image / self._by_image.sum(1, keepdim=True)


class RecordedRoute:
    """Passes on another route's answers and records them."""

    def __init__(self, route: Route, record: Record, rows: slice | None = None) -> None:
        self.route = route
        self.record = record
        self.rows = rows if rows is not None else slice(None)

    def bind(self, rows: slice, seeds: Sequence[int]) -> RecordedRoute:
        route = self.route.bind(rows, seeds) if isinstance(self.route, PerImageRoute) else self.route
        return RecordedRoute(route, self.record, rows)

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        chosen = self.route(weights, t)
        self.record.add(self.rows, t, chosen)
        return chosen
