"""From seeds to latents: noise, grid, guidance and solver put together, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..process import Condition, Denoiser, PerImageDenoiser
from .grids import parse_grid
from .guidance import Guided
from .noise import initial_noise, step_noise
from .solvers import Step, parse_solver

Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)
Watch = Callable[[slice, Step], None]  # (rows of the call that are in this batch, the step)


@torch.no_grad()
def generate(
    denoiser: Denoiser,
    shape: Sequence[int],
    seeds: Sequence[int],
    condition: Condition | None = None,
    *,
    steps: int = 50,
    solver: str = "heun",
    grid: str = "uniform",
    guidance: float = 1.0,
    guidance_interval: tuple[float, float] | None = None,
    batch: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """Latents [len(seeds), *shape], float32 on `device`: the state at t = 0 of the denoiser's path.

    Image i depends on seeds[i] and row i of `condition` only, up to the rounding of the network's sums in another
    batch; its noise is the same bit for bit. A denoiser with `bind` is told which images each batch holds.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if condition is not None and len(condition) != len(seeds):
        raise ValueError(f"{len(seeds)} seeds need a condition of {len(seeds)} rows, got {len(condition)}")
    solve = parse_solver(solver)
    times = parse_grid(grid)(steps, denoiser.schedule)
    start = float(denoiser.schedule.sigma(times[:1]))

    latents = torch.empty(len(seeds), *shape, device=device)
    for first in range(0, len(seeds), batch):
        rows = slice(first, min(first + batch, len(seeds)))
        own_seeds = seeds[rows]
        bound = denoiser.bind(rows, own_seeds) if isinstance(denoiser, PerImageDenoiser) else denoiser

        def after(step: Step, rows: slice = rows) -> None:
            if watch is not None:
                watch(rows, step)
            if progress is not None:
                progress(rows.start * steps + (step.index + 1) * (rows.stop - rows.start), len(seeds) * steps)

        latents[rows] = solve(
            Guided(bound, guidance, guidance_interval),
            start * initial_noise(own_seeds, shape).to(device),
            times,
            None if condition is None else condition[rows].to(device),
            partial(step_noise, own_seeds, shape),
            after,
        )
    return latents
