"""Samples as an artifact: the images, and every setting that made them.

Images are sampled in parts, by this process or by an executor's workers. A part that is there stays when the command is
killed, and the images are the same however they were sampled, bit for bit.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ..artifacts import STATE, Artifact, ArtifactWriter, UserError, canonical_json, load_if_same, write_atomic
from ..executor import Executor, fixed_threads
from ..mixture.record import Record
from ..model import Model, load
from ..runtime.load import Ensemble
from ..sampling import Sampling, Step, image_seeds

KIND = "samples"
IMAGES = "images/"  # a file for each part: images uint8 [n, C, H, W], and which experts made them
BATCHES_IN_TURNS = 8  # of a part, where experts take turns in memory: each is fetched once for a part
RETRIES = 3  # of a part whose worker died
Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)


class SampleSettings(BaseModel):
    """Everything a set of samples depends on, besides the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompts: tuple[str, ...] = Field(min_length=1, description="one per image")
    negative_prompt: str | None = Field(None, description="what guidance leads away from, of all images")
    seed: int = Field(0, description="image i uses seed + i")
    sampling: Sampling = Sampling()
    batch: int = Field(250, gt=0)
    threads: int = Field(1, gt=0, description="CPU threads; sums depend on them in the last bit")


@dataclass(frozen=True)
class ModelSource:
    """A model by its place, as `load` takes it: what workers are given, which load it themselves."""

    place: str
    router: str | None = None
    device: str | None = None
    memory: str | None = None
    weights: str | None = None
    class_names: tuple[str, ...] | None = None  # the data's: an expert alone may know numbers only


@dataclass(frozen=True)
class Request:
    """Samples that are wanted of a model, with nothing left open, and what their record says of the model."""

    settings: SampleSettings
    model: str  # digest
    device: str
    clusters: int | None  # of an ensemble
    router: str | None
    missing: tuple[int, ...]
    part: int  # images sampled together

    def parts(self, folder: Path) -> list[Part]:
        count = len(self.settings.prompts)
        return [
            Part(self, first, min(first + self.part, count), folder / IMAGES / f"{number:05d}.safetensors")
            for number, first in enumerate(range(0, count, self.part))
        ]


@dataclass(frozen=True)
class Part:
    """Images first .. last - 1 of a request, and the file that keeps them."""

    request: Request
    first: int
    last: int
    path: Path


_opened: dict[ModelSource, Model] = {}  # the one opened last: settings of one model follow each other


def open_source(source: Model | ModelSource) -> Model:
    if isinstance(source, Model):
        return source
    if source not in _opened:
        _opened.clear()  # before the next is loaded: two may be too large for a GPU
        kinds = {"router": source.router, "device": source.device, "memory": source.memory, "weights": source.weights}
        model = load(source.place, **kinds)
        _opened[source] = replace(model, class_names=source.class_names or model.class_names)
    return _opened[source]


@contextmanager
def models_forgotten() -> Iterator[None]:
    """Keep no model before or after: its run may get a newer one, and memory is dear."""
    _opened.clear()
    try:
        yield
    finally:
        _opened.clear()


def resolve(source: Model | ModelSource, settings: SampleSettings) -> Request:
    """What the settings leave open, such as the route, as the model settles it."""
    model = open_source(source)
    settings = settings.model_copy(update={"sampling": model.resolved(settings.sampling)})
    ensemble = model.body if isinstance(model.body, Ensemble) else None
    return Request(
        settings,
        model=model.digest,
        device=model.device.type,
        clusters=None if ensemble is None else ensemble.version.clusters,
        router=None if ensemble is None else ensemble.router.digest,
        missing=tuple(sorted(model.missing)),
        part=settings.batch * (BATCHES_IN_TURNS if model.takes_turns(settings.sampling) else 1),
    )


def write_samples(
    source: Model | ModelSource,
    request: Request,
    out: Path,
    *,
    executor: Executor | None = None,
    gpus: float = 0,
    progress: Progress | None = None,
) -> Artifact:
    """Sample the parts that are not there yet, and make one artifact of all: images/, and samples.json about them."""
    settings, steps, count = request.settings, request.settings.sampling.steps, len(request.settings.prompts)
    config, parents = {"settings": settings.model_dump(mode="json")}, {"model": request.model}
    if (done := load_if_same(out, KIND, config, parents)) is not None:
        return done
    executor = executor or Executor()
    # a worker cannot call back: then whole parts are reported
    sample = partial(sample_part, source, progress if executor.in_process else None)
    with ArtifactWriter(out, KIND, resumable=True) as draft:
        asked = draft.folder / STATE / "asked.json"
        content = canonical_json([config, parents, request.part])
        if not asked.is_file() or asked.read_bytes() != content:
            draft.clear()  # half-done work of another call
            (draft.folder / IMAGES).mkdir()
            asked.parent.mkdir()
            write_atomic(asked, content)
        parts = request.parts(draft.folder)
        wanted = [part for part in parts if not part.path.exists()]
        images = count - sum(part.last - part.first for part in wanted)
        for number, _ in executor.map(sample, wanted, gpus, RETRIES):
            images += wanted[number].last - wanted[number].first
            if progress is not None:
                progress(images * steps, count * steps)
        (draft.folder / "samples.json").write_bytes(canonical_json(record_of(request, parts)) + b"\n")
        return draft.commit(config=config, parents=parents)


def record_of(request: Request, parts: Sequence[Part]) -> dict[str, Any]:
    """What samples.json says: every setting, and of an ensemble which experts made what."""
    settings = request.settings
    record: dict[str, Any] = {
        "model": request.model,
        "device": request.device,
        **settings.model_dump(mode="json"),
        "seeds": image_seeds(settings.seed, len(settings.prompts)),
    }
    if request.clusters is not None:
        experts = Record.joined(load_file(part.path) for part in parts)
        record |= {"router": request.router, "missing": list(request.missing)}
        record["times"], record["experts_at_time"] = experts.by_time()
        record["expert_of_image"] = experts.by_image().argmax(1).tolist()
    return record


def sample_part(source: Model | ModelSource, progress: Progress | None, part: Part) -> None:
    """Sample one part and leave it in its file; the model must be that of the request."""
    model, settings, count = open_source(source), part.request.settings, part.last - part.first
    if model.digest != part.request.model:
        raise UserError(
            f"{source}: is model {model.digest[:12]} here, not {part.request.model[:12]}; run the same command again"
        )
    experts = None if part.request.clusters is None else Record(count, part.request.clusters)
    done, steps = part.first * settings.sampling.steps, len(settings.prompts) * settings.sampling.steps

    def on_step(step: Step) -> None:
        nonlocal done
        done += len(step.request)
        if experts is not None:
            experts.add(step)
        if progress is not None:
            progress(done, steps)

    with fixed_threads(settings.threads):
        latents = model.latents(
            settings.prompts[part.first : part.last],
            image_seeds(settings.seed + part.first, count),
            settings.sampling,
            negative=settings.negative_prompt,
            batch=settings.batch,
            on_step=on_step,
        )
        images = model.decode(latents).contiguous()
    write_atomic(part.path, save({"images": images, **({} if experts is None else experts.tensors())}))


def read_record(artifact: Artifact) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(artifact.read("samples.json"))
    return record


def read_samples(artifact: Artifact) -> tuple[Tensor, dict[str, Any]]:
    """The images uint8 [N, C, H, W] and the record of how they were made."""
    return StoredImages(artifact)[:], read_record(artifact)


class StoredImages(Sequence[Tensor]):
    """The images of an artifact where they lie: uint8 [C, H, W] each, or [n, C, H, W] a slice, read when asked for."""

    def __init__(self, artifact: Artifact) -> None:
        files: list[Any] = [safe_open(artifact.file(name), framework="pt") for name in artifact.names(IMAGES)]
        self._parts = [file.get_slice("images") for file in files]
        shapes = [part.get_shape() for part in self._parts]
        self._starts = [0, *accumulate(shape[0] for shape in shapes)]
        self.shape: tuple[int, ...] = (self._starts[-1], *shapes[0][1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice):
            number = bisect_right(self._starts, range(len(self))[place]) - 1
            return self._parts[number][range(len(self))[place] - self._starts[number]]
        first, last, _ = place.indices(len(self))
        parts = zip(self._parts, self._starts, self._starts[1:], strict=False)
        return torch.cat([part[max(0, first - a) : min(b, last) - a] for part, a, b in parts if a < last and first < b])
