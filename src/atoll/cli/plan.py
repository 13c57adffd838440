"""atoll plan: a partition becomes work orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..artifacts import Artifact, Store, find
from ..ensemble.changes import check_plan, register_orders
from ..planning.assign import PREDICTED
from ..planning.islands import read_islands
from ..planning.recipes import recipe, recipe_for
from ..planning.stage import plan as plan_stage
from ..training.execution import Execution
from .settings import read_settings


def plan(
    data: Annotated[str, typer.Argument(help="The data artifact, such as runs/demo/data")],
    partition: Annotated[str | None, typer.Option(help="The partition (default: `partition` beside the data)")] = None,
    out: Annotated[str | None, typer.Option(help="Where the orders go (default: `orders` beside the data)")] = None,
    mix: Annotated[str | None, typer.Option(help="Objectives: 2ddpm:6flow, or one per cluster: ddpm,flow,...")] = None,
    islands: Annotated[
        Path | None, typer.Option(help="What contributors have (YAML or TOML): sizes and budgets follow from it")
    ] = None,
    recipe_name: Annotated[str | None, typer.Option("--recipe", help="digits, small or paper")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; every order draws its own from it")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting: --set training.images=32000; repeat it")
    ] = None,
) -> None:
    """Write one work order per cluster.

    Examples:

      atoll plan runs/demo/data --mix 2ddpm:6flow

      atoll plan runs/real/data --islands islands.yaml

      atoll plan runs/demo/data --set training.images=128000 --set network.depth=4
    """
    run = Store.at(data).parent
    artifact = Artifact.open(data, "data")
    defaults = recipe(recipe_name) if recipe_name else recipe_for(artifact.config)
    flags = {"mix": mix, "training.seed": seed}
    settings = read_settings(defaults, file=config, flags=flags, overrides=set_ or ())
    place = out or run.child("orders").url
    there = find(place) is not None
    machines = read_islands(islands) if islands is not None else ()
    cut = Artifact.open(partition or run.child("partition").url, "partition")
    home = Store.at(place).parent
    check_plan(home, artifact, cut)  # before anything is written
    orders = plan_stage(data, cut.store, place, settings, islands=machines)
    version = register_orders(home, artifact, cut, orders)
    state = "already there" if there else "planned"
    typer.echo(f"{state}: {orders.store}  {len(orders.names())} orders  {orders.digest[:12]}")
    typer.echo(f"version {version.version} of the model accepts experts trained for them")
    Console().print(table(orders))
    for island, how in savings(orders.config["islands"]).items():
        typer.echo(f"{island}: fits with {how}")
    busy = {job["island"] for job in orders.config["islands"]}
    too_small = orders.config.get("too_small", {})
    for name, memory in too_small.items():
        typer.echo(f"left out: {name}, no size fits into {memory:g} GiB")
    if idle := [island.name for island in machines if island.name not in busy and island.name not in too_small]:
        typer.echo(f"no cluster left for: {', '.join(idle)}")


def savings(jobs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Islands that are predicted to need more than a small micro-batch to fit, and what."""
    how: dict[str, list[str]] = {}
    for job in jobs:
        words = ", ".join(Execution.model_validate({name: job[name] for name in PREDICTED}).savings)
        if words and words not in how.setdefault(job["island"], []):
            how[job["island"]].append(words)
    return {island: "; or ".join(ways) for island, ways in how.items() if ways}


def table(orders: Artifact) -> Table:
    """One row per order; with islands, what each is predicted to need."""
    jobs = orders.config["islands"]
    shown = Table(show_header=True, header_style="bold", box=None)
    shown.add_column("order")
    shown.add_column("objective")
    if jobs:
        shown.add_column("island")
        shown.add_column("size")
        # short enough for a terminal of 80 columns: a number that is cut off says nothing
        for number in ("micro-\nbatch", "GiB", "images\nper s", "million\nimages", "hours", "cost"):
            shown.add_column(number, justify="right")
    for k, (name, objective) in enumerate(zip(orders.names(), orders.config["chosen"], strict=True)):
        row = [name, objective]
        if jobs:
            job = jobs[k]
            row += [job["island"], job["size"], str(job["micro_batch"]), f"{job['memory_gib']:.1f}"]
            row += [f"{job['images_per_s']:,.0f}", f"{job['images'] / 1e6:.3g}", f"{job['hours']:.1f}"]
            row.append("" if job["cost"] is None else f"{job['cost']:.2f}")
        shown.add_row(*row)
    return shown
