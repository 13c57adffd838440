"""atoll partition: a data artifact is split into clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..artifacts import Store, find
from ..executor import make_executor
from ..partition.methods import PartitionConfig
from ..partition.report import read_clusters
from ..partition.stage import partition as partition_stage
from .options import Engine, Plugins, RayAddress, Settings, merge, parse_value, with_settings
from .progress import progress
from .tables import print_line

SLACK = 1.05  # the bound holds for the samples that clusters are fitted to, and about as closely for all others


@with_settings(PartitionConfig, "clusters -k", "method", "seed")
def partition(
    data: Annotated[str, typer.Argument(help="Data artifact, such as runs/demo/data.")],
    *,
    out: Annotated[str | None, typer.Option(help="Folder or URL to write (default: `partition` next to DATA).")] = None,
    settings: Settings,
    balance: Annotated[str | None, typer.Option(help="Most of largest / smallest cluster; none: no bound.")] = None,
    plugin: Plugins = [],
    onto: Annotated[str | None, typer.Option(help="Older partition: keep its clusters, assign what is new.")] = None,
    engine: Engine = "local",
    workers: Annotated[int, typer.Option(help="Local processes.")] = 1,
    ray_address: RayAddress = None,
) -> None:
    """Split a data set into clusters, each with shards of its own.

    \b
    Examples:
      atoll partition runs/demo/data -k 8
      atoll partition runs/demo/data-2 --onto runs/demo/partition
      atoll partition runs/demo/data -k 8 --method random --out runs/random/partition
    """
    if balance is not None:
        options = {"balance": parse_value(balance)}
        settings = replace(settings, changes=merge(settings.changes, {"options": options}))
    config = settings.over(PartitionConfig())
    settings.show(config, "partition")
    place = out or (Store.at(data).parent.child("partition") if onto is None else Store.at(onto).successor).url
    there = find(place) is not None
    executor = make_executor(engine, workers, ray_address)
    with progress() as display:
        made = partition_stage(data, place, config, onto=onto, executor=executor, progress=display)
    summary, aim = read_clusters(made), made.config["options"].get("balance")
    sizes = [cluster["train"] for cluster in summary["clusters"]]
    print_line(
        f"{'already there' if there else 'partitioned'}: {made.store}  {len(sizes)} clusters of "
        f"{', '.join(f'{size:,}' for size in sizes)} training samples  {made.digest[:12]}"
    )
    if aim is not None and summary["balance"] > SLACK * aim:
        print_line(f"  balance {summary['balance']} is the best these samples allow; {aim:g} was the aim")
    agreement = "" if summary["nmi"] is None else f", agreement with labels {summary['nmi']}"
    print_line(f"  balance {summary['balance']}{agreement}; see partition.html")
