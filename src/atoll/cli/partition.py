"""atoll partition: a data artifact is cut into clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import Store, UserError, find
from ..executor import make_executor
from ..partition.config import PartitionConfig
from ..partition.stage import partition as partition_stage
from .plugin import Plugins
from .progress import progress
from .settings import read_settings

SLACK = 1.05  # a bound is kept on the samples clusters are fitted to; all others follow them about as closely


def partition(
    data: Annotated[str, typer.Argument(help="The data artifact, such as runs/demo/data")],
    clusters: Annotated[int | None, typer.Option("--clusters", "-k", help="How many clusters (default: 8)")] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Where it goes (default: `partition` beside the data; with --onto partition: partition-2)"),
    ] = None,
    by: Annotated[str | None, typer.Option(help="features, or the baselines label and random")] = None,
    balance: Annotated[
        float | None, typer.Option(help="Largest over smallest cluster, at most (default: 2 if it can be); 0: no bound")
    ] = None,
    onto: Annotated[str | None, typer.Option(help="An older partition: keep its clusters, assign what is new")] = None,
    plugin: Plugins = None,
    seed: Annotated[int | None, typer.Option(help="Seed of k-means (default: 0)")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of k-means (default: 1)")] = None,
    engine: Annotated[str, typer.Option(help="Who assigns samples: local, or ray")] = "local",
    workers: Annotated[int, typer.Option(help="Processes of the local engine")] = 1,
    ray_address: Annotated[str | None, typer.Option(help="A running Ray cluster (default: this machine)")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set cells=256; repeat it")] = None,
) -> None:
    """Cut a data set into clusters, each with shards of its own.

    Examples:

      atoll partition runs/demo/data -k 8

      atoll partition runs/demo/data-2 --onto runs/demo/partition

      atoll partition runs/demo/data -k 8 --by random --out runs/random/partition
    """
    unbound = ["balance=none"] if balance == 0 else []
    flags = {"clusters": clusters, "by": by, "balance": balance or None, "seed": seed, "threads": threads}
    settings = read_settings(PartitionConfig(), file=config, flags=flags, overrides=[*unbound, *(set_ or ())])
    place = out or (Store.at(data).parent.child("partition") if onto is None else Store.at(onto).successor).url
    there = find(place) is not None
    executor = make_executor(engine, workers, ray_address)
    with progress() as display:
        made = partition_stage(data, place, settings, onto=onto, executor=executor, progress=display)
    sizes = [cluster["train"] for cluster in json.loads(made.read("sizes.json"))["clusters"]]
    quality = json.loads(made.read("quality.json"))
    typer.echo(
        f"{'already there' if there else 'partitioned'}: {made.store}  {len(sizes)} clusters of "
        f"{', '.join(f'{size:,}' for size in sizes)} training samples  {made.digest[:12]}"
    )
    if made.config["by"] == "label" and quality["unlabelled"]:
        typer.echo(f"  without a label: {quality['unlabelled']:,}, dealt out by a hash of their id")
    agreement = "" if quality["nmi"] is None else f", agreement with labels {quality['nmi']['clusters']}"
    aim = made.config["balance"]
    if balance and there and quality["balance"] > SLACK * balance:
        raise UserError(f"--balance {balance:g}: {made.store} has {quality['balance']}; choose another --out or bound")
    if aim is not None and quality["balance"] > SLACK * aim:
        typer.echo(f"  balance {quality['balance']} is the best these samples allow; {aim:g} was the aim")
    typer.echo(f"  balance {quality['balance']}, silhouette {quality['silhouette']}{agreement}; look at partition.html")
