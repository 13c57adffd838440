"""Paint images that do not go in step: each goes on when its answer is there.

The same questions, rules and noise as in `stream`, for rows that each stand at a question of their own. What comes
out does not depend on the order of the answers, but for the rounding of a network's sums in another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..process import Condition, Schedule, UnhurriedDenoiser, wide_dtype
from .noise import initial_noise, step_noise
from .settings import Sampling
from .solvers import Ask, Path, Stand, parse_solver

Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)


@torch.no_grad()
def paint_out_of_step(
    denoiser: UnhurriedDenoiser,
    shape: Sequence[int],
    seeds: Sequence[int],
    condition: Condition | None,
    sampling: Sampling,
    *,
    batch: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Tensor:
    """Latents [len(seeds), *shape], float32 on `device`: what `stream` ends with."""
    device = torch.device(device)
    walk = _Walk(denoiser.schedule, shape, seeds, sampling, device)
    talk = denoiser.converse(seeds, None if condition is None else condition.to(device), sampling.guidance, batch)

    def ask(images: Sequence[int]) -> None:
        for guided in (True, False):
            part = [i for i in images if walk.is_guided(i) is guided]
            if part:
                talk.ask(part, walk.points(part), walk.times(part), guided)

    ask(range(len(seeds)))
    while walk.unfinished:
        images, velocity = talk.answers()
        ask(walk.advance(images, velocity))
        if progress is not None:
            progress(walk.steps_done, len(seeds) * sampling.steps)
    return walk.x


class _Walk:
    """Where every image of a call stands: tensors for all of them, and for each the number of its next question."""

    def __init__(
        self, schedule: Schedule, shape: Sequence[int], seeds: Sequence[int], sampling: Sampling, device: torch.device
    ) -> None:
        self._seeds, self._shape, self._sampling, self._device = seeds, shape, sampling, device
        self._solver = parse_solver(sampling.solver)
        self._path = Path(schedule, sampling.times(schedule))
        asks = [(index, ask) for index in range(self._path.steps) for ask in self._solver.asks(self._path, index)]
        self._index = [index for index, _ in asks]  # of the step a question belongs to
        self._role = [ask.role for _, ask in asks]
        self._time = torch.tensor([ask.time for _, ask in asks], dtype=torch.float64)
        start = self._path.sigma[0]
        self.x = start * initial_noise(seeds, shape).to(device)
        self._point, self._kept = self.x.clone(), torch.zeros_like(self.x)
        numbers = torch.tensor([ask.numbers for _, ask in asks], dtype=torch.float64)
        self._numbers = numbers.to(device, self.x.dtype)
        self._wide_time = self._time.to(device, wide_dtype(device))
        self._next = [0] * len(seeds)
        self.unfinished = len(seeds)
        self.steps_done = 0

    def points(self, images: Sequence[int]) -> Tensor:
        """Where the next question about each image is asked."""
        return self._point[self._places(images)]

    def times(self, images: Sequence[int]) -> Tensor:
        """And when: float64 on the CPU."""
        return self._time[torch.tensor([self._next[i] for i in images])]

    def is_guided(self, image: int) -> bool:
        if self._sampling.guidance == 1.0:
            return False
        low, high = self._sampling.guidance_interval or (0.0, 1.0)
        return low <= float(self._time[self._next[image]]) <= high

    def advance(self, images: Sequence[int], velocity: Tensor) -> list[int]:
        """Take answers in; gives the images that go on."""
        for role in {self._role[self._next[i]] for i in images}:
            chosen = [n for n, i in enumerate(images) if self._role[self._next[i]] == role]
            whole = len(chosen) == len(images)
            answer = velocity if whole else velocity[torch.tensor(chosen).to(self._device)]
            self._advance([images[n] for n in chosen], role, answer)
        for i in images:
            question = self._next[i] = self._next[i] + 1
            if question == len(self._role) or self._index[question] != self._index[question - 1]:
                self.steps_done += 1
        going_on = [i for i in images if self._next[i] < len(self._role)]
        self.unfinished -= len(images) - len(going_on)
        return going_on

    def _advance(self, images: Sequence[int], role: str, velocity: Tensor) -> None:
        places = self._places(images)
        questions = torch.tensor([self._next[i] for i in images]).to(self._device)
        now = Stand(self.x[places], self._point[places], self._kept[places])
        ones = [1] * (self.x.ndim - 1)
        numbers = tuple(column.reshape(-1, *ones) for column in self._numbers[questions].unbind(1))
        ask = Ask(self._wide_time[questions], role, numbers)
        after = self._solver.advance(self._path, ask, now, velocity.to(self.x.dtype), self._noise(images))
        self.x[places], self._point[places], self._kept[places] = after.x, after.point, after.kept

    def _noise(self, images: Sequence[int]) -> Tensor | None:
        """Fresh noise for images at steps of their own; zero where a step ends in data."""
        if not self._solver.needs_noise:
            return None
        rows = []
        for i in images:
            index = self._index[self._next[i]]
            ends = self._path.sigma[index + 1] == 0.0
            rows.append(torch.zeros(1, *self._shape) if ends else step_noise([self._seeds[i]], self._shape, index))
        return torch.cat(rows).to(self.x)

    def _places(self, images: Sequence[int]) -> Tensor:
        return torch.tensor(list(images)).to(self._device)
