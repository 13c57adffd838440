"""atoll prepare: images become a data artifact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import Artifact, Store, UserError, find, sanitize
from ..data.classes import class_names
from ..data.prepare import PrepareConfig
from ..data.prepare import prepare as prepare_stage
from ..data.sources import is_built_in
from ..executor import default_workers, make_executor
from ..training.execution import named_or_best
from .plugin import Plugins
from .progress import progress
from .settings import read_settings

NAMES_SHOWN = 12


def prepare(
    source: Annotated[
        str, typer.Argument(help="digits, an image folder, tars, parquet, or a URL of these (s3://, hf://datasets/...)")
    ],
    out: Annotated[
        str | None,
        typer.Option(help="Where it goes: a folder, or a URL such as s3://bucket/run/data; with --onto data: data-2"),
    ] = None,
    size: Annotated[int | None, typer.Option(help="Side of the square images (default: 64; digits: 8)")] = None,
    autoencoder: Annotated[str | None, typer.Option(help="pixels, dct-4, taef2, or a diffusers folder or id")] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="What clusters are made by: pixels, efficientnet-lite0, dinov2, dinov2:PLACE "
            "(default: dinov2 on a GPU if it can be had, else efficientnet-lite0)"
        ),
    ] = None,
    text_encoder: Annotated[str | None, typer.Option(help="words, clip:PLACE, t5:PLACE, minilm, or none")] = None,
    text: Annotated[str | None, typer.Option(help="cache embeddings now, or online: while training")] = None,
    labels: Annotated[str | None, typer.Option(help="given, or folder: the first folder is the class")] = None,
    image_column: Annotated[str | None, typer.Option(help="Of a table, where several columns can be it")] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="folder, webdataset, parquet, arrow, digits (default: what most files are)"),
    ] = None,
    plugin: Plugins = None,
    onto: Annotated[str | None, typer.Option(help="An older data artifact to add these samples to")] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: a cluster that shares the folders")] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes of the local engine (default: one per core, on a GPU 8 at most); not in the result"
        ),
    ] = None,
    ray_address: Annotated[str | None, typer.Option(help="A running Ray cluster (default: this machine)")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where the encoders run: cpu, cuda, mps; default: cuda if there is one")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set holdout=0.1; repeat it")] = None,
) -> None:
    """Decode, encode and index every image of a source.

    The same command again goes on after a crash, or says that everything is there.

    Examples:

      atoll prepare digits --out runs/demo/data

      atoll prepare photos/ --out runs/photos/data --size 256 --autoencoder stabilityai/sd-vae-ft-mse

      atoll prepare s3://bucket/laion/ --out /shared/run/data --engine ray --ray-address auto --device cuda

      atoll prepare more-photos/ --onto runs/photos/data
    """
    if out is None:
        if onto is None:
            raise UserError("--out: missing; say where the data goes, for example --out runs/photos/data")
        out = Store.at(onto).successor.url
    flags = {
        "size": size,
        "autoencoder": autoencoder,
        "features": features,
        "text_encoder": text_encoder,
        "text": text,
        "source.labels": labels,
        "source.image_column": image_column,
        "source.format": format_,
    }
    settings = read_settings(PrepareConfig(), file=config, flags=flags, overrides=set_ or ())
    there = find(out) is not None
    on = named_or_best(device)
    if workers is None:
        workers = 1 if is_built_in(source) else default_workers(on)  # starting one takes longer than all digits
    executor = make_executor(engine, workers, ray_address)
    with progress() as display:
        data = prepare_stage(source, out, settings, onto=onto, executor=executor, device=on, progress=display)
    rejected = sum(data.config["rejected"].values())
    typer.echo(
        f"{'already there' if there else 'prepared'}: {data.store}  {data.config['count']:,} samples, "
        f"{data.config['repeats']:,} repeats, {rejected:,} rejected  {data.digest[:12]}"
    )
    typer.echo(f"  latents {data.config['latent']['autoencoder']}, features {data.config['features']['extractor']}")
    for line in lines_about(data):
        typer.echo(f"  {line}")


def lines_about(data: Artifact) -> Iterator[str]:
    """What a user should know of the images before anything is trained on them."""
    unlabelled = data.config.get("unlabelled", 0)  # not counted in older data, where one was enough to lose all labels
    if data.config["labels"] is not None and unlabelled:
        yield f"without a label: {unlabelled:,}"
    yield prompts_line(data)
    for reason, count in data.config["rejected"].items():
        yield f"rejected {count:,}: {reason} (rejects.jsonl by id, log.jsonl by name)"


def prompts_line(data: Artifact) -> str:
    """What a model of this data can be asked for."""
    if data.config["text"] is not None:
        return "prompts: texts like its captions"
    if data.config["labels"] is None:
        return (
            "prompts: none, for there are neither captions nor labels, and the model will paint whatever the images "
            "show; captions go beside images (docs/data.md), or --labels folder takes folders as classes"
        )
    names = class_names(data)
    if names is None:
        return f"prompts: class numbers from 0 to {data.config['labels'] - 1}"
    shown = ", ".join(sanitize(name, 40) for name in names[:NAMES_SHOWN])
    return f"prompts: {len(names)} classes by name or number: {shown}{', ...' if len(names) > NAMES_SHOWN else ''}"
