"""A folder of images that grows: every call adds its own, and a grid shows them all.

    calls/0001/     the samples of the first call, an artifact: samples.json has every setting
    00000.png ...   all images, in the order of the calls
    sheet.png       all of them, one row per prompt, framed in the colors of the experts
    images.json     which file is of which prompt, seed, expert and call

Only what is in `calls` is kept for good; the rest is made from it and may be made again.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..artifacts import Artifact, UserError, file_lock, find, write_atomic
from ..model import Model, to_pil
from .samples import KIND, Progress, SampleSettings, read_samples, resolve, write_samples
from .sheet import rows_by_prompt, sample_grid

CALLS = "calls"
PER_ROW = 16
SMALLEST_TILE, LARGEST_TILE = 48, 128  # pixels a side on the grid


def add_samples(
    model: Model, settings: SampleSettings, out: Path, *, progress: Progress | None = None
) -> tuple[int, bool]:
    """Sample what the settings ask for and add it to the folder; how many images there are now, and whether any came.

    A call that is there already, of this very model, is found and not sampled again.
    """
    if find(out) is not None:
        raise UserError(f"--out {out}: holds an artifact of its own; choose another folder")
    if out.is_file():
        raise UserError(f"--out {out}: is a file; give a folder")
    request = resolve(model, settings)
    wanted = request.settings
    model.condition(wanted.prompts, wanted.negative_prompt)  # refused before it is begun
    calls = out / CALLS
    with file_lock(calls):
        there = [Artifact.open(calls / name, KIND) for name in sorted(p.name for p in calls.glob("[0-9]*"))]
        identity = wanted.model_dump(mode="json"), model.digest
        is_new = identity not in [(call.config["settings"], call.manifest.parents.get("model")) for call in there]
        if is_new:
            there.append(write_samples(model, request, calls / f"{len(there) + 1:04d}", progress=progress))
        return write_pictures(out, there), is_new


def write_pictures(out: Path, calls: list[Artifact]) -> int:
    """The part of the folder that is for people, made from its calls; how many images there are."""
    images: list[torch.Tensor] = []
    rows: list[dict[str, Any]] = []
    for call in calls:
        found, record = read_samples(call)
        images += list(found)
        experts = record.get("expert_of_image") or [None] * len(found)
        for prompt, seed, expert in zip(record["prompts"], record["seeds"], experts, strict=True):
            file = f"{len(rows):05d}.png"
            rows.append({"file": file, "prompt": prompt, "seed": seed, "expert": expert, "call": call.store.name})
    for row, image in zip(rows, images, strict=True):
        if not (out / row["file"]).exists():
            write_picture(out / row["file"], to_pil(image[None])[0])
    tile = min(LARGEST_TILE, max(SMALLEST_TILE, *(image.shape[-1] for image in images)))
    places, labels = rows_by_prompt([row["prompt"] for row in rows], PER_ROW)
    grid = sample_grid(images, places, [row["expert"] for row in rows], tile=tile, labels=labels, legend=True)
    write_picture(out / "sheet.png", grid)
    write_atomic(out / "images.json", json.dumps(rows, indent=1).encode() + b"\n")
    return len(rows)


def write_picture(path: Path, picture: Image.Image) -> None:
    with io.BytesIO() as stream:
        picture.save(stream, format="PNG")
        write_atomic(path, stream.getvalue())
