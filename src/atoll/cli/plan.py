"""atoll plan: a partition becomes work orders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifacts import Artifact, Store, UserError, find
from ..islands.order import read_order
from ..planning import reissue as again
from ..planning.islands import read_islands
from ..planning.launch import check_launch, write_launch
from ..planning.recipes import DIGITS, RECIPES, PlanConfig, name_for, recipe, rescale_hparams
from ..planning.stage import plan as plan_stage
from ..planning.stage import plan_monolith
from ..registry.changes import check_plan
from ..registry.status import artifacts_in
from ..registry.versions import Version, find_ensemble
from ..training.memory import MACHINES
from .options import Settings, file_option, refuse, with_settings
from .progress import progress
from .tables import print_line, print_table

SIZES = "; ".join(f"{name} ({one.description})" for name, one in RECIPES.items())
ISLANDS = file_option(f"TOML file of machines: {', '.join(MACHINES)}, CPU 8 cores.")


@with_settings(PlanConfig, "objectives", "training.images", "training.seed")
def plan(
    data: Annotated[str, typer.Argument(help="Data artifact, such as runs/demo/data; with --reissue the run.")],
    *,
    partition: Annotated[str | None, typer.Option(help="The partition (default: the one made from DATA).")] = None,
    out: Annotated[str | None, typer.Option(help="Folder to write (default: orders; later orders-2, ...).")] = None,
    recipe_name: Annotated[str | None, typer.Option("--recipe", help=f"{SIZES} (default: by the data).")] = None,
    settings: Settings,
    islands: Annotated[Path | None, ISLANDS] = None,
    init: Annotated[str | None, typer.Option(help="Expert of the run whose weights all orders begin from.")] = None,
    monolith: Annotated[bool, typer.Option("--monolith", help="Instead one order on all clusters.")] = False,
    onto: Annotated[str | None, typer.Option(help="Newest orders: write new ones for clusters that grew.")] = None,
    grown_by: Annotated[float | None, typer.Option(help="With --onto: least growth, such as 0.2.", min=0)] = None,
    reissue: Annotated[list[int], typer.Option(help="Cluster whose expert is to train further. Repeatable.")] = [],
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="New orders begin from random weights.")] = False,
    launch: Annotated[str | None, typer.Option(help="Write launch files too: skypilot, slurm or shell.")] = None,
    url: Annotated[str | None, typer.Option(help="With --launch: where the orders are published.")] = None,
    package: Annotated[str | None, typer.Option(help="With --launch skypilot: what pip installs atoll from.")] = None,
) -> None:
    """Write one work order per cluster; later new orders for clusters that grew or whose experts train further.

    With --islands, sizes and budgets follow from the machines that contributors have.

    \b
    Examples:
      atoll plan runs/demo/data --objectives 2ddpm:6flow
      atoll plan runs/real/data --islands islands.toml
      atoll plan runs/demo/data --images 128k --set network.depth=4
      atoll plan runs/demo/data --monolith --images 24k
      atoll plan runs/demo/data --init runs/demo/start
      atoll plan runs/photos/data --recipe laptop --print-config
      atoll plan runs/demo/data-2 --onto runs/demo/orders --grown-by 0.2
      atoll plan runs/demo --reissue 3 --images 2M
      atoll plan runs/demo/data --launch slurm --url s3://bucket/demo
    """
    if launch is None:
        refuse({"--url": url, "--package": package}, "no --launch")
    else:
        check_launch(launch, url, package)
    flags = {"--objectives": "objectives", "--seed": "training.seed"}
    first_only: dict[str, object] = {option: settings.flags.get(name) for option, name in flags.items()}
    first_only |= {"--islands": islands, "--recipe": recipe_name, "--init": init, "--monolith": monolith}
    place, where = Store.at(data), None if out is None else Store.at(out)
    changes = again.Changes(settings.over, settings.words, from_scratch)
    if reissue:
        refuse(first_only | {"--onto": onto, "--grown-by": grown_by, "--partition": partition}, "--reissue")
        artifact = find(place)
        run = place if artifact is None or artifact.manifest.kind != "data" else place.parent
        run.check_creates()
        before = find_ensemble(run)
        orders, version = again.reissue(run, reissue, where, changes)
        return print_orders(orders, version, before, launch, url, package)
    origin, run = Artifact.open(place, "data"), place.parent
    cut = Artifact.open(partition, "partition") if partition else partition_of(origin)
    check_plan(run, origin, cut)  # before anything is written
    before = find_ensemble(run)
    if onto is not None:
        refuse(first_only, "--onto")
        newest, least = Artifact.open(onto, "orders"), grown_by or 0.0
        with progress() as display:
            orders, version = again.reissue_grown(
                run, origin, cut, newest, where, changes, grown_by=least, progress=display
            )
        return print_orders(orders, version, before, launch, url, package)
    refuse({"--grown-by": grown_by, "--from-scratch": from_scratch}, "the first orders")

    def changed(name: str) -> PlanConfig:
        base = recipe(name, origin.config["latent"]["shape"])
        return rescale_hparams(settings.over(base), base, settings.names)

    name = recipe_name or name_for(origin.config, cut.config["clusters"])
    title = f"recipe {name}: {RECIPES[name].description if name in RECIPES else 'what the demo trains'}"
    config = changed(name)
    settings.show(config, title)
    if monolith:
        refuse({"--islands": islands, "--init": init, "--launch": launch}, "--monolith")
        refuse({"--objectives": first_only["--objectives"]}, "--monolith")
        orders = plan_monolith(origin.store, cut.store, where or run.child("orders-monolith"), config)
        return print_line(f"planned: {orders.store}/{orders.names()[0]}  one order on all clusters")
    machines = () if islands is None else read_islands(islands)
    fixed = recipe_name or name == DIGITS or any(setting.startswith("network.") for setting in settings.names)
    orders = plan_stage(
        origin.store,
        cut.store,
        where or run.child("orders"),
        config,
        islands=machines,
        recipes=None if fixed else changed,
        explicit=settings.names,
        init=None if init is None else Artifact.open(init, "expert"),
    )
    if not machines:
        print_line(title)
    print_orders(orders, again.accept_orders(run, origin, cut, orders), before, launch, url, package)
    if init is not None:
        begun = sum(read_order(f"{orders.store}/{name}")[0].init is not None for name in orders.names())
        print_line(f"{begun} of {len(orders.names())} orders begin from {init}, the others from random weights")


def partition_of(data: Artifact) -> Artifact:
    """The partition in the run that was made from this data: of several the one called that."""
    run = data.store.parent
    found = [artifact for artifact in artifacts_in(run) if artifact.manifest.kind == "partition"]
    made = [artifact for artifact in found if artifact.manifest.parents.get("data") == data.digest]
    named = [artifact for artifact in made if artifact.store.name == "partition"] or made
    if len(named) > 1:
        names = ", ".join(artifact.store.name for artifact in made)
        raise UserError(f"{data.store}: several partitions were made from it ({names}); name one with --partition")
    if not named:
        raise UserError(f"{data.store}: no partition in {run} was made from it; run `atoll partition {data.store}`")
    return named[0]


def print_orders(
    orders: Artifact, version: Version, before: Version | None, launch: str | None, url: str | None, package: str | None
) -> None:
    """One row per order; with islands, what each is predicted to need. With `launch`, write launch files, too."""
    there = before is not None and orders.digest in {reference.digest for reference in before.orders}
    state = "already there" if there else "planned"
    print_line(f"{state}: {orders.store}  {len(orders.names())} orders  {orders.digest[:12]}")
    print_line(f"version {version.version} of the model accepts experts trained for them")
    jobs, headings = orders.config["islands"], "order objective"
    rows = list(zip(orders.names(), orders.config["chosen"], strict=True))
    if jobs:
        headings += " island size >micro >GiB >images/s >million >hours"
        rows = [(*row, *numbers_of(job)) for row, job in zip(rows, jobs, strict=True)]
    print_table(headings, rows)
    if jobs:
        print_line("micro: images per forward pass; million: training images")
    if launch is not None:
        print_line(f"launch files: {write_launch(orders, launch, url, package)}")


def numbers_of(job: Mapping[str, Any]) -> tuple[str, ...]:
    """What one order is predicted to need on its island."""
    speed, millions = f"{job['images_per_s']:,.0f}", f"{job['images'] / 1e6:.3g}"
    row = (str(job["island"]), str(job["size"]), str(job["micro_batch"]), f"{job['memory_gib']:.1f}", speed)
    return (*row, millions, f"{job['hours']:.1f}")
