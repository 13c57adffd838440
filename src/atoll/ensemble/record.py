"""Who painted what: a route that shows which experts it chose, when, and for which image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .routes import PerImageRoute, Route

# (rows of the call that are in this batch, t [B], the router's weights [B, K], what the route made of them [B, K])
RouteWatch = Callable[[slice | Tensor, Tensor, Tensor, Tensor], None]


class Record:
    """Weights given to experts, added up over images at each time, and over times for each image."""

    def __init__(self, images: int, experts: int) -> None:
        self._by_image = torch.zeros(images, experts, dtype=torch.float64)
        self._by_time: dict[float, Tensor] = {}

    def add(self, rows: slice | Tensor, t: Tensor, weights: Tensor, chosen: Tensor) -> None:
        counts = chosen.detach().cpu().double()
        self._by_image[rows] += counts
        time = round(float(t[0]), 9)
        before = self._by_time.get(time)
        self._by_time[time] = counts.sum(0) if before is None else before + counts.sum(0)

    def tensors(self) -> dict[str, Tensor]:
        """Everything it holds, to be kept in a file: by_image [N, K], times [T] and by_time [T, K], float64."""
        times = list(self._by_time)
        sums = torch.stack([self._by_time[t] for t in times]) if times else self._by_image.new_zeros(0, 0)
        return {
            "by_image": self._by_image,
            "times": torch.tensor(times, dtype=torch.float64),
            "by_time": sums,
        }

    @staticmethod
    def joined(parts: Iterable[Mapping[str, Tensor]]) -> Record:
        """One record of images painted in parts, from the `tensors` of each in their order."""
        whole, by_image = Record(0, 0), []
        for part in parts:
            by_image.append(part["by_image"])
            for time, counts in zip(part["times"].tolist(), part["by_time"], strict=True):
                before = whole._by_time.get(time)
                whole._by_time[time] = counts if before is None else before + counts
        whole._by_image = torch.cat(by_image)
        return whole

    def by_time(self) -> tuple[list[float], list[list[float]]]:
        """The times asked, from noise to data, and the share of each expert at each of them."""
        times = sorted(self._by_time, reverse=True)
        return times, [(self._by_time[t] / self._by_time[t].sum()).tolist() for t in times]

    def by_image(self) -> Tensor:
        """Share of each expert in each image [N, K]."""
        return self._by_image / self._by_image.sum(1, keepdim=True)


class WatchedRoute:
    """Passes on another route's answers and shows them to `watch`."""

    def __init__(self, route: Route, watch: RouteWatch, rows: slice | Tensor | None = None) -> None:
        self.route = route
        self.watch = watch
        self.rows = rows if rows is not None else slice(None)

    def bind(self, rows: slice | Tensor, seeds: Sequence[int]) -> WatchedRoute:
        route = self.route.bind(rows, seeds) if isinstance(self.route, PerImageRoute) else self.route
        return WatchedRoute(route, self.watch, rows)

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        chosen = self.route(weights, t)
        self.watch(self.rows, t, weights, chosen)
        return chosen


class Glimpse:
    """The first routing since one last looked: at a step's own time, of the conditional half."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor] | None = None

    def add(self, rows: slice | Tensor, t: Tensor, weights: Tensor, chosen: Tensor) -> None:
        if self._seen is None:
            self._seen = weights, chosen

    def taken(self) -> tuple[Tensor, Tensor] | None:
        """The router's weights and what the route made of them, each [B, K]; None if nothing was routed."""
        seen, self._seen = self._seen, None
        return seen
