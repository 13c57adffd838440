"""Samples as an artifact: the images, and every setting that made them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ..artifacts import STATE, Artifact, ArtifactWriter, atomic_file, canonical_json, load_if_same, write_atomic
from ..mixture.record import Record
from ..model import Model
from ..runtime.load import Ensemble
from ..sampling import Sampling, Step, image_seeds

KIND = "samples"
IMAGES = "images.safetensors"
BATCHES_IN_TURNS = 8  # where experts take turns, each is fetched once for all images of a part
ASKED = "asked.json"  # what half-done work was for
T = TypeVar("T")


class SampleSettings(BaseModel):
    """Everything a set of samples depends on, besides the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompts: tuple[str, ...] = Field(min_length=1, description="one per image")
    negative_prompt: str | None = Field(None, description="what guidance leads away from, of all images")
    seed: int = Field(0, description="image i uses seed + i")
    sampling: Sampling = Sampling()
    batch: int = Field(250, gt=0)
    threads: int = Field(1, gt=0, description="CPU threads; sums depend on them in the last bit")

    def some(self, first: int, count: int) -> SampleSettings:
        """Of `count` of the images alone, from the first: image i has the seed that it has among all."""
        return self.model_copy(
            update={"prompts": self.prompts[first : first + count], "seed": self.seed + first},
        )

    @model_serializer(mode="wrap")
    def _without_nothing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """There was no negative prompt once, and samples without one keep their digests."""
        content: dict[str, Any] = write(self)
        if self.negative_prompt is None:
            content.pop("negative_prompt", None)
        return content


@dataclass(frozen=True)
class About:
    """What a record says of the model that painted."""

    digest: str
    device: str
    clusters: int | None  # of an ensemble
    router: str | None
    missing: tuple[int, ...]
    part: int  # images it paints at a time

    @staticmethod
    def of(model: Model, settings: SampleSettings) -> About:
        ensemble = model.body if isinstance(model.body, Ensemble) else None
        return About(
            digest=model.digest,
            device=model.device.type,
            clusters=None if ensemble is None else ensemble.version.clusters,
            router=None if ensemble is None else ensemble.router.digest,
            missing=tuple(sorted(model.missing)),
            part=settings.batch * (BATCHES_IN_TURNS if model.takes_turns(settings.sampling) else 1),
        )


@dataclass(frozen=True)
class Part:
    """Some images of a set, painted together and kept in a file of their own until all are there.

    Parts are the same wherever and however often they are painted, and so are their images, bit for bit.
    """

    settings: SampleSettings  # of these images alone
    first: int  # of them, in the whole set
    of: int  # images in the whole set
    path: Path


Painter = Callable[[Sequence[Part]], Iterable[int]]  # paints all parts in any order; how many images each has


def write_samples(
    model: Model,
    settings: SampleSettings,
    out: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Artifact:
    """Paint the images and leave them in `out`: images.safetensors, and samples.json about how they came about.

    What the settings leave open, such as the route, is written down as the model settles it. Killed, the same call goes
    on with the first part that is not there.
    """
    settings = settled(model, settings)

    def paint(parts: Sequence[Part]) -> Iterator[int]:
        return (paint_part(model, part, progress) for part in parts)

    return collect_samples(About.of(model, settings), settings, out, paint)


def collect_samples(about: About, settings: SampleSettings, out: Path, paint: Painter) -> Artifact:
    """Have the parts painted that are not there yet, and make one artifact of all. `settings` leave nothing open."""
    dumped = settings.model_dump(mode="json")
    config, parents = {"settings": dumped, "pictures": False}, {"model": about.digest}
    if (done := load_if_same(out, KIND, config, parents)) is not None:
        return done
    count, size = len(settings.prompts), about.part
    asked = canonical_json([config, parents, size])
    with ArtifactWriter(out, KIND, resumable=True) as draft:
        state = draft.folder / STATE
        if not (state / ASKED).is_file() or (state / ASKED).read_bytes() != asked:
            draft.clear()  # half-done work of another call
            state.mkdir()
            write_atomic(state / ASKED, asked)
        parts = [
            Part(settings.some(first, size), first, count, state / f"{number:05d}.safetensors")
            for number, first in enumerate(range(0, count, size))
        ]
        for _ in paint([part for part in parts if not part.path.exists()]):
            pass
        record: dict[str, Any] = {"model": about.digest, "device": about.device, **dumped}
        record["seeds"] = image_seeds(settings.seed, count)
        if about.clusters is not None:
            who = Record.joined(load_file(part.path) for part in parts)
            record |= {"router": about.router, "missing": list(about.missing)}
            record["times"], record["experts_at_time"] = who.by_time()
            record["expert_of_image"] = who.by_image().argmax(1).tolist()
        write_images(draft.folder / IMAGES, [part.path for part in parts])
        (draft.folder / "samples.json").write_bytes(canonical_json(record) + b"\n")
        return draft.commit(config=config, parents=parents)


def paint_part(model: Model, part: Part, progress: Callable[[int, int], None] | None = None) -> int:
    """Paint one part and leave it in its file: images uint8 [n, C, H, W], and who painted them. How many they are."""
    settings, steps = part.settings, part.settings.sampling.steps
    torch.set_num_threads(settings.threads)
    seeds = image_seeds(settings.seed, len(settings.prompts))
    who = Record(len(seeds), model.body.version.clusters) if isinstance(model.body, Ensemble) else None

    done = 0

    def on_step(step: Step) -> None:
        nonlocal done
        done += len(step.request)
        if who is not None:
            who.add(step)
        if progress is not None:
            progress(part.first * steps + done, part.of * steps)

    latents = model.latents(
        settings.prompts,
        seeds,
        settings.sampling,
        negative=settings.negative_prompt,
        batch=settings.batch,
        on_step=on_step,
    )
    images = model.decode(latents).contiguous()
    write_atomic(part.path, save({"images": images, **({} if who is None else who.tensors())}))
    return len(images)


def write_images(path: Path, parts: Sequence[Path]) -> None:
    """The images of all parts as one tensor in one file, never more than a part in memory.

    A safetensors file is the length of its header, the header, and the tensor's bytes.
    """
    with ExitStack() as opened:
        stored: list[Any] = [opened.enter_context(safe_open(part, framework="pt")) for part in parts]
        counts, *shape = zip(*(part.get_slice("images").get_shape() for part in stored), strict=True)
        shape = [sum(counts), *(sizes[0] for sizes in shape)]
        entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, math.prod(shape)]}
        header = json.dumps({"images": entry}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with atomic_file(path) as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            for part in stored:
                stream.write(part.get_tensor("images").numpy().tobytes())


def settled(model: Model, settings: SampleSettings) -> SampleSettings:
    """The settings with nothing left open."""
    return settings.model_copy(update={"sampling": model.resolved(settings.sampling)})


def read_samples(artifact: Artifact) -> tuple[Tensor, dict[str, Any]]:
    """The images uint8 [N, C, H, W] and the record of how they were made."""
    return load_file(artifact.file(IMAGES))["images"], json.loads(artifact.read("samples.json"))


def spaced(things: Sequence[T], count: int) -> list[T]:
    """So many of the things, evenly apart, from the first."""
    return [things[i * len(things) // count] for i in range(count)]


class StoredImages(Sequence[Tensor]):
    """The images of an artifact where they lie: uint8 [C, H, W] each, or [n, C, H, W] a slice, read when asked for."""

    def __init__(self, artifact: Artifact) -> None:
        file: Any = safe_open(artifact.file(IMAGES), framework="pt")
        self._images = file.get_slice("images")
        self.shape: tuple[int, ...] = tuple(self._images.get_shape())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: Any) -> Any:
        return self._images[place]
