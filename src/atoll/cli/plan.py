"""atoll plan: a partition becomes work orders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import Artifact, Store, find
from ..planning.recipes import recipe, recipe_for
from ..planning.stage import plan as plan_stage
from .settings import read_settings


def plan(
    data: Annotated[str, typer.Argument(help="The data artifact, such as runs/demo/data")],
    partition: Annotated[str | None, typer.Option(help="The partition [default: `partition` beside the data]")] = None,
    out: Annotated[str | None, typer.Option(help="Where the orders go [default: `orders` beside the data]")] = None,
    mix: Annotated[str | None, typer.Option(help="Objectives: 2ddpm:6flow, or one per cluster: ddpm,flow,...")] = None,
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

      atoll plan runs/demo/data --set training.images=128000 --set network.depth=4
    """
    run = Store.at(data).parent
    artifact = Artifact.open(data, "data")
    defaults = recipe(recipe_name) if recipe_name else recipe_for(artifact.config)
    flags = {"mix": mix, "training.seed": seed}
    settings = read_settings(defaults, file=config, flags=flags, overrides=set_ or ())
    place = out or run.child("orders").url
    there = find(place) is not None
    orders = plan_stage(data, partition or run.child("partition").url, place, settings)
    typer.echo(
        f"{'already there' if there else 'planned'}: {orders.store}  {len(orders.names())} orders  {orders.digest[:12]}"
    )
    for name, objective in zip(orders.names(), orders.config["chosen"], strict=True):
        typer.echo(f"  {name}  {objective}")
