"""The evaluation protocol: paint the same prompts from the same noise with every arm, and measure them alike.

An arm is one way to sample one model. Image i of every arm has the same prompt and the same seed, so arms are
compared on equal noise. Beside the arms stand the floors: what real data scores against real data.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..artifacts import Store, UserError, atomic_file, canonical_json, sha256_bytes
from ..executor import Executor, RayExecutor
from ..models.lpips import LPIPS
from ..registry.versions import open_ensemble, open_reference, place_of
from ..sampling import Sampling
from ..training.compute import best_device
from .painting import Opening, painters_of
from .real import RealData
from .samples import SampleSettings, StoredImages

NAME = "evaluation.json"
WRITTEN_AT_ONCE = 500  # images
Progress = Callable[[str, int, int], None]  # (arm, images done, images in all)


class Arm(BaseModel):
    """One way to sample: a model of the run, a router, and how to sample."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="what the folder of its samples is called after")
    model: Literal["ensemble", "monolith", "student"] = "ensemble"
    student: str | None = Field(None, description="which of the students that are measured beside the run's models")
    router: str | None = Field(None, description="another router folder than the ensemble's own, such as router-blind")
    sampling: Sampling = Sampling()


class EvaluationPlan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    arms: tuple[Arm, ...] = Field(min_length=1)
    count: int = Field(1000, gt=1, description="samples per arm")
    seed: int = 0
    batch: int = Field(500, gt=0)
    threads: int = Field(1, gt=0)
    resamples: int = Field(20, ge=2, description="sets drawn with replacement, for the interval of a distance")
    feature_scale: float = Field(1.0, gt=0, description="features are multiplied by it: 16 counts ink as the digits do")
    features: tuple[str, ...] = Field((), description="extractors to measure by beside the data's own")
    lpips: bool = Field(False, description="LPIPS between images of one prompt, too")

    def settings(self, sampling: Sampling, prompts: Sequence[str]) -> SampleSettings:
        return SampleSettings(
            prompts=tuple(prompts), seed=self.seed, sampling=sampling, batch=self.batch, threads=self.threads
        )


def arms_for(
    routes: Sequence[str], guidances: Sequence[float], *, router: str | None = None, sampling: Sampling = Sampling()
) -> tuple[Arm, ...]:
    """Every route at every guidance, for the ensemble with one router; all else is as in `sampling`."""
    label = "" if router is None else f"-{router}"
    return tuple(
        Arm(
            name=f"{route}-g{guidance:g}{label}",
            router=router,
            sampling=replace(sampling, route=route, guidance=guidance),
        )
        for guidance in guidances
        for route in routes
    )


def monolith_arms(guidances: Sequence[float], *, sampling: Sampling = Sampling()) -> tuple[Arm, ...]:
    """The monolith at every guidance, sampled as the ensemble is."""
    return tuple(
        Arm(name=f"monolith-g{guidance:g}", model="monolith", sampling=replace(sampling, route=None, guidance=guidance))
        for guidance in guidances
    )


def student_arms(students: Iterable[str], guidances: Sequence[float], *, sampling: Sampling) -> tuple[Arm, ...]:
    """Every student at every guidance, sampled as the ensemble is."""
    return tuple(
        Arm(
            name=f"student-{name}-g{guidance:g}",
            model="student",
            student=name,
            sampling=replace(sampling, route=None, guidance=guidance),
        )
        for name in students
        for guidance in guidances
    )


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
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Sample every arm (those already there are kept), measure, and write samples/ and evaluation.json to `out`.

    `device`, `memory` and `weights` are `load`'s: where the experts go; features are computed on the first device. With
    `npz` the images of every arm are also written as samples/ARM.npz, as ADM's evaluation reads them: uint8 NHWC.
    Workers of an `executor` sample, each with a model of its own; the images are the same.
    `students` are experts without a cluster, wherever they lie, by the names that arms have for them.
    """
    version = open_ensemble(run)
    data = open_reference(run, version.data, "data")
    partition = open_reference(run, version.partition, "partition")
    # workers may have devices that this machine has not: then what is measured here is measured on the best there is
    where = best_device(None if isinstance(executor, RayExecutor) else device).split(",")[0]
    with painters_of(
        executor or Executor(), 0 if (device or best_device(None)) == "cpu" else 1
    ) as painters:  # before anything is measured: there may be none
        how: dict[str, Any] = {
            "device": where,
            "resamples": plan.resamples,
            "count": plan.count,
            "partition": partition,
        }
        perceptual = LPIPS(where, data.config["size"]) if plan.lpips else None
        real = RealData(data, plan.feature_scale, **how, perceptual=perceptual)
        kept = out.child("features").path
        others = [RealData(data, 1.0, **how, extractor=name, kept=kept) for name in plan.features]
        prompts, wanted = real.prompts(plan.count)

        def basis(by: RealData) -> dict[str, Any]:
            """What every number of an arm belongs to."""
            return {
                "count": plan.count,
                "seeds": [plan.seed, plan.seed + plan.count - 1],
                "extractor": by.extractor,
                "scale": plan.feature_scale if by is real else 1.0,
                "directions": by.directions,
                "data": data.digest,
                "partition": partition.digest,
                "against": by.against,
                "lpips": perceptual.id if perceptual is not None and by is real else None,
            }

        def measured(arm: Arm) -> dict[str, Any]:
            source = run
            if arm.model == "monolith":
                if version.monolith is None:
                    raise UserError(
                        f"{arm.name}: the model of {run} names no monolith to compare with; leave this arm out"
                    )
                source = place_of(run, version.monolith)
            elif arm.student is not None:
                source = students[arm.student]
            # a worker may have another working folder
            place = str(source.path.absolute()) if source.is_local else source.url
            router = arm.router if arm.model == "ensemble" else None
            opening = Opening(place, router, device, memory, weights, class_names=version.class_names)
            settings, about = painters.about(opening, plan.settings(arm.sampling, prompts))

            def on_step(done: int, total: int) -> None:
                if progress is not None:
                    progress(arm.name, done // arm.sampling.steps, total // arm.sampling.steps)

            arm = arm.model_copy(update={"sampling": settings.sampling})
            # another model or other settings are other samples: an evaluation never finds its place taken
            key = sha256_bytes(canonical_json([about.digest, settings.model_dump(mode="json")]))[:8]
            folder = f"{arm.name}-{key}"
            samples = out.child("samples", folder).path.absolute()
            artifact = painters.paint(opening, about, settings, samples, on_step)
            images = StoredImages(artifact)
            if npz:
                write_npz(images, samples.parent / f"{folder}.npz")
            missing = list(about.missing)
            facts = {"folder": folder, "samples": artifact.digest, "digest": about.digest, "missing": missing}
            compared = {"route": arm.sampling.route, "guidance": arm.sampling.guidance}  # by most tables
            found, *more = ({"basis": basis(by), **by.measure(images, wanted, prompts)} for by in (real, *others))
            seen = {by.extractor: numbers for by, numbers in zip(others, more, strict=True)}
            return {**arm.model_dump(mode="json"), **compared, **facts, **found, "extractors": seen}

        arms = [measured(arm) for arm in plan.arms]
    result = {
        "schema_version": 2,
        "plan": plan.model_dump(mode="json"),
        "data": data.digest,
        "features": data.config["features"]["extractor"],
        "frechet_directions": real.directions,
        "floors": real.floors(plan.count) | {"chance": chance_of(wanted)},
        "extractors": {by.extractor: {"floors": by.floors(plan.count)} for by in others},
        "arms": arms,
        "against_monolith": against_monolith(arms),
    }
    out.write(NAME, json.dumps(result, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n")
    return result


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


def chance_of(wanted: np.ndarray | None) -> float | None:
    """The share that guessing among the labels that were asked for gets right; None where none can be right."""
    asked = set() if wanted is None else set(wanted[wanted >= 0].tolist())
    return 1.0 / len(asked) if asked else None


def against_monolith(arms: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]] | None:
    """At each guidance of the monolith: its distance, that of the ensemble by the first route named, and their ratio.

    The route is fixed before anything is measured: the better of several on the same samples would favor the ensemble.
    """
    table = {}
    for monolith in (arm for arm in arms if arm["model"] == "monolith"):
        own = (arm for arm in arms if arm["model"] == "ensemble" and arm["router"] is None)
        rival = next((arm for arm in own if arm["guidance"] == monolith["guidance"]), None)
        if rival is not None:
            table[f"guidance {monolith['guidance']:g}"] = {
                "monolith": monolith["frechet"],
                "ensemble": rival["frechet"],
                "route": rival["route"],
                "ratio": rival["frechet"] / monolith["frechet"],
            }
    return table or None
