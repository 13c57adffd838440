"""The evaluation protocol: sample the same prompts from the same noise in every configuration, and measure them alike.

A configuration is one way to sample one model. Image i of every configuration has the same prompt and the same seed,
so they are compared on equal noise. Real images, one half as if generated, are measured the same way: the baseline.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..artifacts import Artifact, Store, UserError, atomic_file, canonical_json, sha256_bytes
from ..executor import Executor, RayExecutor
from ..models.lpips import LPIPS
from ..registry.versions import Version, open_ensemble, open_reference, place_of
from ..sampling import Sampling
from ..training.compute import best_device
from .prompts import choose_prompts
from .real import RealData
from .samples import (
    RETRIES,
    ModelSource,
    SampleSettings,
    StoredImages,
    models_forgotten,
    read_record,
    resolve,
    write_samples,
)
from .scores import Estimate, as_json
from .scores.estimate import mean_over_seeds

NAME = "evaluation.json"
FEWEST = 8  # images to measure anything by
WRITTEN_AT_ONCE = 500  # images
Progress = Callable[[str, int, int], None]  # (configuration, images done, images in all)


class Configuration(BaseModel):
    """One way to sample: a model of the run, a router, and how to sample."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="what the folder of its samples is called after")
    model: Literal["ensemble", "monolith", "student"] = "ensemble"
    student: str | None = Field(None, description="which of the students that are measured with the run's models")
    router: str | None = Field(None, description="another router folder than the ensemble's own, such as router-blind")
    sampling: Sampling = Sampling()

    @property
    def title(self) -> str:
        """Such as `top-2, guidance 2`, for people."""
        first = f"student {self.student}" if self.student else self.sampling.route or self.model
        return ", ".join(filter(None, (first, f"guidance {self.sampling.guidance:g}", self.router)))


class EvaluationPlan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    configurations: tuple[Configuration, ...] = Field(min_length=1)
    count: int = Field(1000, ge=FEWEST, description="samples per configuration and seed")
    seed: int = 0
    seeds: int = Field(1, ge=1, description="sets of samples, from other noise each: numbers are their means")
    batch: int = Field(500, gt=0)
    threads: int = Field(1, gt=0)
    features: tuple[str, ...] = Field((), description="extractors to measure by, besides the data's own")
    lpips: bool = Field(False, description="LPIPS between images of one prompt, too")


def configurations(
    routes: Sequence[str],
    guidances: Sequence[float],
    *,
    routers: Sequence[str | None] = (None,),
    monolith: bool = False,
    students: Iterable[str] = (),
    sampling: Sampling = Sampling(),
) -> tuple[Configuration, ...]:
    """Every route of every router at every guidance, then the monolith and every student; the rest as in `sampling`."""
    found = []
    for router in routers:
        for guidance in guidances:
            for route in routes:
                name = f"{route}-g{guidance:g}" + ("" if router is None else f"-{router}")
                how = replace(sampling, route=route, guidance=guidance)
                found.append(Configuration(name=name, router=router, sampling=how))
    for guidance in guidances:
        how = replace(sampling, route=None, guidance=guidance)
        if monolith:
            found.append(Configuration(name=f"monolith-g{guidance:g}", model="monolith", sampling=how))
        for student in students:
            name = f"student-{student}-g{guidance:g}"
            found.append(Configuration(name=name, model="student", student=student, sampling=how))
    return tuple(found)


def evaluate(
    run: Store,
    plan: EvaluationPlan,
    out: Store,
    *,
    device: str | None = None,
    memory: str | None = None,
    weights: str | None = None,
    npz: bool = False,
    executor: Executor | None = None,
    students: Mapping[str, Store] = MappingProxyType({}),
    progress: Progress = lambda name, done, total: None,
) -> dict[str, Any]:
    """Sample every configuration (samples already there are kept), measure, and write samples/ and evaluation.json.

    `device`, `memory` and `weights` are `load`'s: where the experts go; features are computed on the first device. With
    `npz` the images are also written as samples/NAME.npz, as ADM's evaluation reads them: uint8 NHWC. Workers of an
    `executor` sample, each with a model of its own; the images are the same. `students` are experts without a cluster,
    wherever they are, by the names that configurations have for them.
    """
    version = open_ensemble(run)
    data = open_reference(run, version.data, "data")
    executor = executor or Executor()
    # workers may have devices that this machine has not: what is measured here is measured on the best there is
    where = best_device(None if isinstance(executor, RayExecutor) else device).split(",")[0]
    gpus = 0 if best_device(device) == "cpu" else 1
    perceptual = LPIPS(where, data.config["size"]) if plan.lpips else None
    kept = out.child("features").path
    measures = [RealData(data, where, perceptual=perceptual)]
    measures += [RealData(data, where, extractor=name, kept=kept) for name in plan.features]
    prompts, labels = choose_prompts(data, plan.count)

    def sampled(configuration: Configuration, seed: int) -> Artifact:
        """The samples of a configuration from this seed on, in a folder named after all that they depend on."""
        settings = SampleSettings(
            prompts=tuple(prompts),
            seed=seed,
            sampling=configuration.sampling,
            batch=plan.batch,
            threads=plan.threads,
        )
        model, names = place_to_load(run, version, configuration, students), version.class_names
        source = ModelSource(model, configuration.router, device, memory, weights, names)
        # resolved where the images will be sampled: another machine may have other devices
        ((_, request),) = executor.map(partial(resolve, source), [settings], gpus, RETRIES)
        key = sha256_bytes(canonical_json([request.model, request.settings.model_dump(mode="json")]))[:8]
        place, steps = out.child("samples", f"{configuration.name}-{key}").path, configuration.sampling.steps

        def report(done: int, total: int) -> None:
            progress(configuration.name, done // steps, total // steps)

        return write_samples(source, request, place.absolute(), executor=executor, gpus=gpus, progress=report)

    rows = []
    with executor, models_forgotten():
        for configuration in plan.configurations:
            seeds = range(plan.seed, plan.seed + plan.seeds * plan.count, plan.count)
            samples = [sampled(configuration, seed) for seed in seeds]
            if npz:
                for one in samples:
                    write_npz(StoredImages(one), one.store.path.with_name(f"{one.store.name}.npz"))
            record = read_record(samples[0])
            rows.append(
                {
                    **configuration.model_dump(mode="json"),
                    "sampling": record["sampling"],  # with nothing left open
                    "digest": record["model"],
                    "missing": record.get("missing", []),
                    "folders": [one.store.name for one in samples],
                    "samples": [one.digest for one in samples],
                    "scores": {
                        by.extractor: over_seeds([by.measure(StoredImages(one), prompts, labels) for one in samples])
                        for by in measures
                    },
                }
            )
    asked = set(labels[labels >= 0].tolist())
    result = {
        "schema_version": 2,
        "plan": plan.model_dump(mode="json"),
        "data": data.digest,
        "features": [by.extractor for by in measures],
        "lpips": None if perceptual is None else perceptual.id,
        "chance": 1.0 / len(asked) if asked else None,  # that guessing among the classes asked for is right
        "real": {by.extractor: as_json(by.baseline()) for by in measures},
        "configurations": rows,
        "against_monolith": against_monolith(rows, measures[0].extractor),
    }
    out.write(NAME, json.dumps(result, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n")
    return result


def over_seeds(sets: Sequence[Mapping[str, Estimate]]) -> dict[str, dict[str, float | None]]:
    """The scores of several sets of samples as one: means, with their intervals."""
    return as_json({name: mean_over_seeds([scores[name] for scores in sets]) for name in sets[0]})


def place_to_load(run: Store, version: Version, configuration: Configuration, students: Mapping[str, Store]) -> str:
    """Where the model of a configuration is; absolute, since a worker may have another working folder."""
    place = run
    if configuration.model == "monolith":
        if version.monolith is None:
            raise UserError(f"{configuration.name}: the model of {run} names no monolith; leave this configuration out")
        place = place_of(run, version.monolith)
    elif configuration.student is not None:
        place = students[configuration.student]
    return str(place.path.absolute()) if place.is_local else place.url


def write_npz(images: Tensor | StoredImages, path: Path) -> None:
    """Images uint8 [N, C, H, W] as `arr_0` [N, H, W, 3]: what ADM's evaluation and its relatives read."""
    count, _, height, width = images.shape
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, height, width, 3)}
    with atomic_file(path) as stream, zipfile.ZipFile(stream, "w") as archive:
        entry = zipfile.ZipInfo("arr_0.npy")  # which has no time, so that equal images are equal bytes
        with archive.open(entry, "w", force_zip64=True) as array:
            np.lib.format.write_array_header_1_0(array, header)
            for start in range(0, count, WRITTEN_AT_ONCE):
                part = images[start : start + WRITTEN_AT_ONCE].expand(-1, 3, -1, -1)
                array.write(part.permute(0, 2, 3, 1).contiguous().numpy().tobytes())


def against_monolith(rows: Sequence[Mapping[str, Any]], features: str) -> list[dict[str, Any]]:
    """At each guidance of the monolith: its FD, that of the ensemble by the first route named, and their ratio.

    The route is fixed before anything is measured: the better of several on the same samples would favor the ensemble.
    """
    table = []
    for monolith in (row for row in rows if row["model"] == "monolith"):
        guidance = monolith["sampling"]["guidance"]
        own = (row for row in rows if row["model"] == "ensemble" and row["router"] is None)
        rival = next((row for row in own if row["sampling"]["guidance"] == guidance), None)
        if rival is not None:
            ours, theirs = (row["scores"][features]["fd"]["value"] for row in (rival, monolith))
            found = {"guidance": guidance, "route": rival["sampling"]["route"], "ensemble": ours, "monolith": theirs}
            table.append(found | {"ratio": ours / theirs})
    return table
