"""atoll prepare: images become a data artifact."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import Artifact, Store, UserError, find
from ..data.classes import class_names
from ..data.config import PrepareConfig
from ..data.prepare import prepare as prepare_stage
from ..data.sources import is_built_in
from ..executor import default_workers, make_executor
from ..training.compute import best_device
from .options import Device, Engine, Plugins, RayAddress, Settings, with_settings
from .progress import progress
from .tables import print_line

NAMES_SHOWN = 12
OPTIONS = "size autoencoder features text_encoder text license source.labels source.image_column source.format"


@with_settings(PrepareConfig, *OPTIONS.split())
def prepare(
    source: Annotated[str, typer.Argument(help="digits, an image folder, tars, parquet, or a URL of these.")],
    *,
    out: Annotated[str | None, typer.Option(help="Folder or URL to write (default with --onto data: data-2).")] = None,
    settings: Settings,
    plugin: Plugins = [],
    onto: Annotated[str | None, typer.Option(help="Data artifact to add these samples to.")] = None,
    engine: Engine = "local",
    workers: Annotated[int | None, typer.Option(help="Local processes (default: one per core, 8 per GPU).")] = None,
    ray_address: RayAddress = None,
    device: Device = None,
) -> None:
    """Decode, encode and index every image of a source.

    The same command resumes after a crash.

    \b
    Examples:
      atoll prepare digits --out runs/demo/data
      atoll prepare photos/ --out runs/photos/data --size 256 --autoencoder stabilityai/sd-vae-ft-mse
      atoll prepare s3://bucket/laion/ --out /shared/run/data --engine ray --ray-address auto --device cuda
      atoll prepare more-photos/ --onto runs/photos/data
    """
    if out is None and onto is None:
        raise UserError("--out: missing; name a folder for the data, for example --out runs/photos/data")
    place = Store.at(out) if out is not None else Store.at(str(onto)).successor
    config = settings.over(PrepareConfig())
    settings.show(config, "prepare")
    there, on = find(place) is not None, best_device(device)
    if workers is None:
        workers = 1 if is_built_in(source) else default_workers(on)  # starting one takes longer than all digits
    executor = make_executor(engine, workers, ray_address)
    with progress() as display:
        data = prepare_stage(source, place, config, onto=onto, executor=executor, device=on, progress=display)
    print_line(
        f"{'already there' if there else 'prepared'}: {data.store}  {data.config['count']:,} samples, "
        f"{data.config['repeats']:,} repeats, {sum(data.config['skipped'].values()):,} skipped  {data.digest[:12]}"
    )
    print_line(f"latents {data.config['latent']['autoencoder']}, features {data.config['features']['extractor']}")
    print_summary(data)


def print_summary(data: Artifact) -> None:
    """What to know about the images before anything is trained on them."""
    if data.config["labels"] is not None and data.config["unlabelled"]:
        print_line(f"without a label: {data.config['unlabelled']:,}")
    print_line(f"prompts: {prompts_of(data)}")
    for reason, count in data.config["skipped"].items():
        print_line(f"skipped {count:,}: {reason} (named in skipped.jsonl)")


def prompts_of(data: Artifact) -> str:
    """The prompts that a model of this data can be given."""
    if data.config["text"] is not None:
        return "texts like its captions"
    if data.config["labels"] is None:
        return "none, no captions or labels found; add captions (docs/data.md), or classes with --labels folder"
    names = class_names(data)
    if names is None:
        return f"class numbers from 0 to {data.config['labels'] - 1}"
    shown = ", ".join(name[:40] for name in names[:NAMES_SHOWN])
    return f"{len(names)} classes by name or number: {shown}{', ...' if len(names) > NAMES_SHOWN else ''}"
