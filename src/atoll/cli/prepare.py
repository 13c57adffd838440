"""atoll prepare: images become a data artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import find
from ..data.engine import Local
from ..data.prepare import PrepareConfig
from ..data.prepare import prepare as prepare_stage
from .bars import bars
from .settings import read_settings


def prepare(
    source: Annotated[str, typer.Argument(help="`digits`, the built-in set")],
    out: Annotated[
        str, typer.Option(help="Where the data artifact goes: a folder, or a URL such as s3://bucket/run/data")
    ],
    size: Annotated[int | None, typer.Option(help="Side of the square images [default: the source's own]")] = None,
    autoencoder: Annotated[str | None, typer.Option(help="pixels")] = None,
    features: Annotated[str | None, typer.Option(help="What clusters are made by: pixels")] = None,
    text_encoder: Annotated[str | None, typer.Option(help="words, or none")] = None,
    workers: Annotated[int, typer.Option(help="Processes; changes the time, not the result")] = 1,
    device: Annotated[str, typer.Option(help="Where the encoders run, such as cuda")] = "cpu",
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set holdout=0.1; repeat it")] = None,
) -> None:
    """Decode, encode and index every image of a source.

    The same command again goes on after a crash, or says that everything is there.

    Examples:

      atoll prepare digits --out runs/demo/data

      atoll prepare digits --out runs/demo/data --set holdout=0.1
    """
    flags = {"size": size, "autoencoder": autoencoder, "features": features, "text_encoder": text_encoder}
    settings = read_settings(PrepareConfig(), file=config, flags=flags, overrides=set_ or ())
    there = find(out) is not None
    with bars() as progress:
        data = prepare_stage(source, out, settings, engine=Local(workers), device=device, progress=progress)
    rejected = sum(data.config["rejected"].values())
    typer.echo(
        f"{'already there' if there else 'prepared'}: {data.store}  {data.config['count']:,} samples, "
        f"{data.config['repeats']:,} repeats, {rejected:,} rejected  {data.digest[:12]}"
    )
    for reason, count in data.config["rejected"].items():
        typer.echo(f"  rejected {count:,}: {reason} (rejects.jsonl by id, log.jsonl by name)")
