"""The evaluation protocol: paint the same prompts from the same noise with every arm, and measure them alike.

An arm is one way to sample one model. Image i of every arm has the same prompt and the same seed, so arms are
compared on equal noise. Beside the arms stand the floors: what real data scores against real data.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..artifacts import Artifact, Store, UserError, canonical_json, sha256_bytes, write_atomic
from ..data.classes import class_names, class_title
from ..data.index import Index
from ..data.shards import ShardSet
from ..ensemble.versions import open_ensemble, open_reference, place_of
from ..model import Model, load
from ..models.feature_extractors import load_extractor
from ..sampling import Sampling
from ..training.execution import named_or_best
from .metrics import Features, Recogniser, frechet_distance, nearest_distances
from .samples import SampleSettings, read_samples, write_samples
from .scores import SCORES, Sets
from .scores.frechet import FrechetReference

NAME = "evaluation.json"
FEWEST = 8  # samples to measure anything by
ENOUGH_UNSEEN = 1000  # images kept from training, to stand for the data
EXTRACTED = 500  # images whose features are computed at once
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
    students: Mapping[str, Store] = MappingProxyType({}),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Sample every arm (those already there are kept), measure, and write samples/ and evaluation.json to `out`.

    `device`, `memory` and `weights` are `load`'s: where the experts go; features are computed on the first device. With
    `npz` the images of every arm are also written as samples/ARM.npz, as ADM's evaluation reads them: uint8 NHWC.
    `students` are experts without a cluster, wherever they lie, by the names that arms have for them.
    """
    version = open_ensemble(run)
    data = open_reference(run, version.data, "data")
    where = named_or_best(device).split(",")[0]
    real = RealData(data, plan.feature_scale, device=where, resamples=plan.resamples, count=plan.count)
    prompts, wanted = real.prompts(plan.count)

    kept: dict[tuple[str, str | None], Model] = {}

    def opened(place: str, router: str | None) -> Model:
        if (place, router) not in kept:
            kept.clear()  # arms of one model follow each other, and two models may be too large for a card
            model = load(place, router=router, device=device, memory=memory, weights=weights)
            # prompts are the data's names of classes, and an expert alone may know numbers only
            kept[place, router] = replace(model, class_names=version.class_names)
        return kept[place, router]

    def measured(arm: Arm) -> dict[str, Any]:
        source = run
        if arm.model == "monolith":
            if version.monolith is None:
                raise UserError(f"{arm.name}: the model of {run} names no monolith to compare with; leave this arm out")
            source = place_of(run, version.monolith)
        elif arm.student is not None:
            source = students[arm.student]
        model = opened(source.url, arm.router if arm.model == "ensemble" else None)

        def on_step(done: int, total: int) -> None:
            if progress is not None:
                progress(arm.name, done // arm.sampling.steps, total // arm.sampling.steps)

        arm = arm.model_copy(update={"sampling": model.settled(arm.sampling)})
        settings = plan.settings(arm.sampling, prompts)
        # another model or other settings are other samples: an evaluation never finds its place taken
        key = sha256_bytes(canonical_json([model.digest, settings.model_dump(mode="json")]))[:8]
        folder = f"{arm.name}-{key}"
        place = out.child("samples", folder).path
        artifact = write_samples(model, settings, place, progress=on_step)
        images, _ = read_samples(artifact)
        if npz:
            write_npz(images, place.parent / f"{folder}.npz")
        missing = sorted(model.missing)
        facts = {"folder": folder, "samples": artifact.digest, "digest": model.digest, "missing": missing}
        compared = {"route": arm.sampling.route, "guidance": arm.sampling.guidance}  # by most tables
        return {**arm.model_dump(mode="json"), **compared, **facts, **real.measure(images, wanted, prompts)}

    arms = [measured(arm) for arm in plan.arms]
    result = {
        "schema_version": 2,
        "plan": plan.model_dump(mode="json"),
        "data": data.digest,
        "features": data.config["features"]["extractor"],
        "frechet_directions": real.directions,
        "floors": real.floors(plan.count) | {"chance": chance_of(wanted)},
        "arms": arms,
        "against_monolith": against_monolith(arms),
    }
    out.write(NAME, json.dumps(result, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n")
    return result


def write_npz(images: Tensor, path: Path) -> None:
    """Images uint8 [N, C, H, W] as `arr_0` [N, H, W, 3]: what ADM's evaluation and its relatives read."""
    pictures = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    with io.BytesIO() as buffer:
        np.savez(buffer, pictures)
        write_atomic(path, buffer.getvalue())


class RealData:
    """The real features and labels, and everything that is measured against them."""

    def __init__(
        self, data: Artifact, scale: float, *, device: str = "cpu", resamples: int = 20, count: int | None = None
    ) -> None:
        """`count` is the number of samples that will be measured, if they may be fewer than the features."""
        index = Index.of(data)
        samples = ShardSet([data.file(name) for name in data.names("shards/")])
        self._device, self._resamples = device, resamples
        self._extractor = load_extractor(data.config["features"]["extractor"], device)
        self._scale = scale
        self.features: Features = samples.features(torch.arange(len(samples))).double().numpy() * scale
        self.directions = None if count is None else self.directions_for(count)
        self._axes = None if self.directions is None else principal_axes(self.features, self.directions)
        self.train = self.features[index.rows("train")]
        unseen = np.concatenate([index.rows("validation"), index.rows("holdout")])
        # neighbourhoods and kernels are looked at among images no training has seen, if they are enough
        self._unseen = self.features[unseen] if len(unseen) >= ENOUGH_UNSEEN else self.features
        self.labels = index.labels
        # what a prompt is to networks of this data: a caption, or where they read none, a class
        self._prompts = index.captions
        if data.config["text"] is None and data.config["labels"] is not None:
            names = class_names(data)
            self._prompts = [[] if label < 0 else [class_title(label, names)] for label in self.labels.tolist()]
        labelled = self.labels >= 0  # repeats with conflicting labels have none, and are left out
        self.recogniser = None
        if 2 * labelled.sum() > len(labelled) and len(np.unique(self.labels[labelled])) > 1:
            self.recogniser = Recogniser.fitted(self.features[labelled], self.labels[labelled])

    def prompts(self, count: int) -> tuple[list[str], np.ndarray | None]:
        """`count` prompts of the data, every different one in turn, with the label each stands for.

        That label is -1 where only unlabelled samples have the prompt; None for all if one stands for several labels.
        """
        label_of: dict[str, set[int]] = {}
        for prompts, label in zip(self._prompts, self.labels.tolist(), strict=True):
            for prompt in prompts:
                label_of.setdefault(prompt, set()).update([] if label < 0 else [label])
        distinct = sorted(label_of, key=lambda prompt: (min(label_of[prompt], default=math.inf), prompt))
        if not distinct:
            return [""] * count, None
        chosen = [distinct[i % len(distinct)] for i in range(count)]
        if self.recogniser is None or any(len(labels) > 1 for labels in label_of.values()):
            return chosen, None
        return chosen, np.array([min(label_of[prompt], default=-1) for prompt in chosen])

    def directions_for(self, count: int) -> int | None:
        """How many principal directions of the real features a distance of `count` samples is taken in; None: in all.

        A covariance of fewer samples than features is singular, and a distance would measure that. Four samples for
        each direction tell its width. Pixels are taken whole: they are what the demo is measured by.
        """
        if self._extractor.id == "pixels" or count > self.features.shape[1]:
            return None
        if count < FEWEST:
            raise UserError(f"-n {count}: too few samples to measure by; paint {FEWEST} or more")
        return count // 4

    def in_directions(self, features: Features) -> Features:
        """Features [N, D], or as many of their principal directions [N, d] as there are samples to measure by."""
        return features if self._axes is None else features @ self._axes

    def measure(
        self, images: Tensor, wanted: np.ndarray | None, prompts: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Every score of one set of generated images uint8 [N, C, H, W]; `prompts` say which belong together."""
        parts = [self._extractor.extract(part.to(self._device)).cpu() for part in torch.split(images, EXTRACTED)]
        found = torch.cat(parts).double() * self._scale
        features = found.numpy()
        recognised = None
        if self.recogniser is not None and wanted is not None and (asked := wanted >= 0).any():
            recognised = self.recogniser.share_right(features[asked], wanted[asked])
        distance, *resampled = self._reference.distances(self.in_directions(features), self._resamples, seed=0)
        spread = 1.96 * float(np.std(resampled, ddof=1))
        groups = None
        if prompts is not None:
            groups = torch.from_numpy(np.unique(np.array(prompts), return_inverse=True)[1]).to(self._device)
        seen = torch.from_numpy(self._unseen).float().to(self._device)
        sets = Sets(found.float().to(self._device), seen, asked=groups)
        apart = {name: score(sets) for name, score in SCORES.items() if name != "frechet"}  # which has an interval
        return {
            "recognised": recognised,
            "frechet": distance,
            "frechet_interval": [distance - spread, distance + spread],
            "nearest_median": float(np.median(nearest_distances(features, self.train))),
            "scores": {name: value for scores in apart.values() for name, value in scores.items()},
        }

    @cached_property
    def _reference(self) -> FrechetReference:
        return FrechetReference.of(self.in_directions(self.features))

    def floors(self, count: int) -> dict[str, float | None]:
        """What real data scores: rows are in id order, and ids are hashes, so any slice is a random sample."""
        features, half = self.in_directions(self.features), len(self.features) // 2
        return {
            "frechet_half_against_half": frechet_distance(features[:half], features[half:]),
            "frechet_count_against_all": frechet_distance(features[:count], features),
            "nearest_leave_one_out_median": float(
                np.median(nearest_distances(self.train, self.train, leave_one_out=True))
            ),
            "recogniser_accuracy": None if self.recogniser is None else self.recogniser.accuracy,
        }


def principal_axes(features: Features, count: int) -> Features:
    """The `count` directions in which features [N, D] vary most, as columns [D, count]."""
    _, vectors = np.linalg.eigh(np.atleast_2d(np.cov(features, rowvar=False)))
    return vectors[:, ::-1][:, :count]


def chance_of(wanted: np.ndarray | None) -> float | None:
    """The share that guessing among the labels that were asked for gets right; None where none can be right."""
    asked = set() if wanted is None else set(wanted[wanted >= 0].tolist())
    return 1.0 / len(asked) if asked else None


def against_monolith(arms: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]] | None:
    """At each guidance the monolith was sampled at: its distance, the better of top-1 and top-2, and their ratio."""
    table = {}
    for monolith in (arm for arm in arms if arm["model"] == "monolith"):
        rivals = [
            arm
            for arm in arms
            if arm["model"] == "ensemble"
            and arm["router"] is None
            and arm["route"] in ("top-1", "top-2")
            and arm["guidance"] == monolith["guidance"]
        ]
        if rivals:
            best = min(rivals, key=lambda arm: arm["frechet"])
            table[f"guidance {monolith['guidance']:g}"] = {
                "monolith": monolith["frechet"],
                "ensemble": best["frechet"],
                "route": best["route"],
                "ratio": best["frechet"] / monolith["frechet"],
            }
    return table or None
