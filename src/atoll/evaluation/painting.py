"""Paint the samples of an arm, in this process or by an executor's workers: the same images, bit for bit.

A worker opens the model itself, from the same place, and paints whole parts. A part whose worker died is painted
again by another; parts that are there stay when the whole command is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..artifacts import Artifact, UserError
from ..executor import Executor
from ..model import Model, load
from .samples import About, Part, SampleSettings, collect_samples, paint_part, settled

RETRIES = 3  # of a part whose worker died
Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)


@dataclass(frozen=True)
class Opening:
    """A model by its place, as `load` takes it: what a worker is told, for it opens the model itself."""

    place: str
    router: str | None = None
    device: str | None = None
    memory: str | None = None
    weights: str | None = None
    class_names: tuple[str, ...] | None = None  # the data's: an expert alone may know numbers only


KEPT: dict[Opening, Model] = {}  # the model this process has painted with last


def opened(opening: Opening) -> Model:
    """The model of an opening, kept until another is asked for: arms of one model follow each other."""
    if opening not in KEPT:
        KEPT.clear()  # before the next is loaded: two may be too large for a card
        model = load(
            opening.place,
            router=opening.router,
            device=opening.device,
            memory=opening.memory,
            weights=opening.weights,
        )
        KEPT[opening] = replace(model, class_names=opening.class_names or model.class_names)
    return KEPT[opening]


@dataclass(frozen=True)
class Painters:
    """An executor and how many GPUs each of its workers needs. Only in this process every step is reported."""

    executor: Executor
    gpus: float

    def about(self, opening: Opening, settings: SampleSettings) -> tuple[SampleSettings, About]:
        """The settings with nothing left open, and what a record says of the model; from where it is painted."""
        ((_, told),) = self.executor.map(told_of, [(opening, settings)], self.gpus, RETRIES)
        return told

    def paint(
        self, opening: Opening, about: About, settings: SampleSettings, out: Path, progress: Progress | None = None
    ) -> Artifact:
        steps, count = settings.sampling.steps, len(settings.prompts)

        def paint_parts(parts: Sequence[Part]) -> Iterator[int]:
            if self.executor.in_process:
                yield from (paint_part(opened(opening), part, progress) for part in parts)
                return
            done = count - sum(len(part.settings.prompts) for part in parts)
            tasks = [(opening, about.digest, part) for part in parts]
            for _, images in self.executor.map(painted, tasks, self.gpus, RETRIES):
                done += images
                if progress is not None:
                    progress(done * steps, count * steps)
                yield images

        return collect_samples(about, settings, out, paint_parts)


@contextmanager
def painters_of(executor: Executor, gpus: float) -> Iterator[Painters]:
    """The painters of an executor, for the time of a `with` block.

    Models they opened here are forgotten before and after: a run may get a newer one any time, and memory is dear.
    """
    KEPT.clear()
    try:
        with executor:
            yield Painters(executor, gpus)
    finally:
        KEPT.clear()


def told_of(asked: tuple[Opening, SampleSettings]) -> tuple[SampleSettings, About]:
    """What `Painters.about` answers, in a worker."""
    model = opened(asked[0])
    settings = settled(model, asked[1])
    return settings, About.of(model, settings)


def painted(task: tuple[Opening, str, Part]) -> int:
    """Paint one part in a worker, with the model of this very digest; how many images it has."""
    opening, digest, part = task
    model = opened(opening)
    if model.digest != digest:
        raise UserError(
            f"{opening.place}: is model {model.digest[:12]} here, not {digest[:12]}; run the same command again"
        )
    return paint_part(model, part)
