"""Paint the samples of an arm, in this process or by an engine's workers: the same images, bit for bit.

A worker opens the model itself, from the same place, and paints whole parts. A part whose worker died is painted
again by another; parts that are there stay when the whole command is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from ..artifacts import Artifact, UserError
from ..data.engine import ThisProcess, Workers
from ..model import Model, load
from .samples import About, Part, SampleSettings, collect_samples, paint_part, settled

Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)


@dataclass(frozen=True)
class Opening:
    """A model by its place, as `load` takes it: what a worker is told, for it opens the model itself."""

    place: str
    router: str | None = None
    device: str | None = None
    memory: str | None = None
    weights: str | None = None


@lru_cache(maxsize=1)  # arms of one model follow each other, and two models may be too large for a card
def opened(opening: Opening) -> Model:
    return load(
        opening.place,
        router=opening.router,
        device=opening.device,
        memory=opening.memory,
        weights=opening.weights,
    )


def forget_models() -> None:
    """Give back what opened models hold. A run may get a newer one any time, so none is kept from call to call."""
    opened.cache_clear()


@dataclass(frozen=True)
class Painters:
    """Whoever paints: an engine's workers, or this process, which alone tells of every step."""

    workers: Workers | None = None

    def about(self, opening: Opening, settings: SampleSettings) -> tuple[SampleSettings, About]:
        """The settings with nothing left open, and what a record says of the model; from where it is painted."""
        (told,) = (self.workers or ThisProcess()).map(partial(told_of, settings=settings), [opening])
        return told

    def paint(
        self, opening: Opening, about: About, settings: SampleSettings, out: Path, progress: Progress | None = None
    ) -> Artifact:
        steps, count = settings.sampling.steps, len(settings.prompts)

        def paint_parts(parts: Sequence[Part]) -> Iterator[int]:
            if self.workers is None:
                yield from (paint_part(opened(opening), part, progress) for part in parts)
                return
            done = count - sum(len(part.rows) for part in parts)
            for images in self.workers.map(partial(painted, opening, about.digest), parts):
                done += images
                if progress is not None:
                    progress(done * steps, count * steps)
                yield images

        return collect_samples(about, settings, out, paint_parts)


def told_of(opening: Opening, settings: SampleSettings) -> tuple[SampleSettings, About]:
    model = opened(opening)
    settings = settled(model, settings)
    return settings, About.of(model, settings)


def painted(opening: Opening, digest: str, part: Part) -> int:
    """Paint one part in a worker; how many images it has."""
    if (found := opened(opening).digest) != digest:
        raise UserError(f"{opening.place}: is model {found[:12]} here, not {digest[:12]}; run the same command again")
    return paint_part(opened(opening), part)
