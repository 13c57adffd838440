"""atoll plan: a partition becomes work orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..artifacts import Artifact, Store, UserError, find
from ..ensemble.changes import check_plan
from ..ensemble.versions import Version, clean_run, find_ensemble, place_of
from ..islands.order import Order, read_order
from ..planning import reissue as again
from ..planning.islands import read_islands
from ..planning.launch import check_launch, write_launch
from ..planning.recipes import DIGITS, RECIPES, PlanConfig, name_for, recipe, rescale_hparams
from ..planning.stage import plan as plan_stage
from ..planning.stage import plan_monolith
from ..training.machines import APPLE, GPUS
from .progress import progress
from .settings import names_in, parse_count, read_settings, settings_table, told_changes


def plan(
    data: Annotated[str, typer.Argument(help="The data artifact, such as runs/demo/data; with --reissue the run")],
    partition: Annotated[str | None, typer.Option(help="The partition (default: the one made from the data)")] = None,
    out: Annotated[
        str | None, typer.Option(help="Where the orders go (default: `orders` beside the data; later orders-2, ...)")
    ] = None,
    objectives: Annotated[
        str | None, typer.Option(help="How many of each: 2ddpm:6flow; or one per cluster: v,flow,... (default: flow)")
    ] = None,
    islands: Annotated[
        Path | None, typer.Option(help="TOML file of contributors' machines: sizes and budgets follow from it")
    ] = None,
    recipe_name: Annotated[
        str | None,
        typer.Option("--recipe", help="laptop, tiny, small, base, large or xl (default: what suits the data)"),
    ] = None,
    images: Annotated[str | None, typer.Option(help="Images each order trains for: 96000, 500k, 2M")] = None,
    init: Annotated[
        str | None, typer.Option(help="An expert of the run to begin from: a converted or monolith's one")
    ] = None,
    monolith: Annotated[
        bool, typer.Option("--monolith", help="Instead one order on all clusters, for K times an expert's images")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; every order draws its own from it")] = None,
    onto: Annotated[
        str | None, typer.Option(help="The newest orders, after late data: write new ones for clusters that grew")
    ] = None,
    grown_by: Annotated[
        float | None,
        typer.Option(help="With --onto: only clusters that grew by this share or more, such as 0.2", min=0),
    ] = None,
    reissue: Annotated[
        list[int] | None,
        typer.Option(help="A new order for this cluster, to train its expert further; repeat it"),
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="With --onto or --reissue: from random weights, not the expert's")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings")] = None,
    launch: Annotated[
        str | None, typer.Option(help="Also write a launch file per order: skypilot, slurm or shell")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="With --launch: where `atoll publish` puts the orders; islands join there")
    ] = None,
    package: Annotated[
        str | None, typer.Option(help="With --launch skypilot: a clone or URL that pip installs atoll from")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting: --set training.batch=64; repeat it")
    ] = None,
    settings_only: Annotated[
        bool, typer.Option("--settings", help="Show every setting, its value and its meaning; write nothing")
    ] = False,
) -> None:
    """Write one work order per cluster; later, orders for clusters that grew or for experts that should learn more.

    Examples:

      atoll plan runs/demo/data --objectives 2ddpm:6flow

      atoll plan runs/real/data --islands islands.toml

      atoll plan runs/demo/data --images 128k --set network.depth=4

      atoll plan runs/demo/data --monolith --images 24k

      atoll plan runs/demo/data --init runs/demo/start

      atoll plan runs/photos/data --recipe laptop --settings

      atoll plan runs/demo/data-2 --onto runs/demo/orders --grown-by 0.2

      atoll plan runs/demo --reissue 3 --images 2M

      atoll plan runs/demo/data --launch slurm --url s3://bucket/demo
    """
    if launch is not None:
        check_launch(launch, url, package)
    elif url is not None or package is not None:
        raise UserError(f"--{'url' if url else 'package'}: has no meaning without --launch; leave it out")
    flags = {"training.images": None if images is None else parse_count("--images", images), "training.seed": seed}
    first_only: dict[str, object] = {"--objectives": objectives, "--islands": islands}
    first_only |= {"--recipe": recipe_name, "--init": init}
    first_only |= {"--config": config, "--seed": seed, "--monolith": monolith or None}
    words = [*(f"{k}={v}" for k, v in flags.items() if v is not None), *(set_ or ())]

    def change(order: Order) -> Order:
        return read_settings(order, flags=flags, overrides=set_ or ())

    changes = again.Changes(change, words, from_scratch)

    if reissue:
        refuse(first_only | {"--onto": onto, "--grown-by": grown_by, "--partition": partition}, "--reissue")
        run = clean_run(run_of(data))
        run.check_creates()
        known = accepted_orders(run)
        where = None if out is None else Store.at(out)
        orders, version = again.reissue(run, reissue, where, changes)
        tell(orders, version, orders.digest in known)
        tell_launch(orders, launch, url, package)
        return

    origin = Artifact.open(data, "data")
    run = clean_run(origin.store.parent)
    cut = Artifact.open(partition, "partition") if partition else partition_of(origin)
    check_plan(run, origin, cut)  # before anything is written
    if onto is not None:
        refuse(first_only, "--onto")
        before = Artifact.open(onto, "orders")
        where = None if out is None else Store.at(out)
        known = accepted_orders(run)
        with progress() as display:
            orders, version = again.reissue_grown(
                run, origin, cut, before, where, changes, grown_by=grown_by or 0.0, progress=display
            )
        tell(orders, version, orders.digest in known)
        tell_launch(orders, launch, url, package)
        return

    refuse({"--grown-by": grown_by, "--from-scratch": from_scratch or None}, "the first orders")
    told = {"objectives": objectives, **flags}
    explicit = {name for table in told_changes(config, told, set_ or ()) for name, _ in names_in(table)}

    def changed(base: PlanConfig) -> PlanConfig:
        return rescale_hparams(read_settings(base, file=config, flags=told, overrides=set_ or ()), base, explicit)

    named = recipe_name or name_for(origin.config, cut.config["clusters"])
    usual = changed(recipe(named, origin.config["latent"]["shape"]))
    if settings_only:
        Console().print(settings_table(usual, f"recipe {named}: {about(named)}"))
        return
    if monolith:
        refuse({"--islands": islands, "--init": init, "--objectives": objectives, "--launch": launch}, "--monolith")
        orders = plan_monolith(origin.store, cut.store, out or run.child("orders-monolith"), usual)
        typer.echo(f"planned: {orders.store}/{orders.names()[0]}  one order on all clusters  {orders.digest[:12]}")
        return
    place = run.child("orders") if out is None else Store.at(out)
    there = find(place) is not None
    machines = read_islands(islands) if islands is not None else ()
    fixed = recipe_name or named == DIGITS or any(name.startswith("network.") for name in explicit)
    orders = plan_stage(
        origin.store,
        cut.store,
        place,
        usual,
        islands=machines,
        recipes=None if fixed else lambda name: changed(recipe(name, origin.config["latent"]["shape"])),
        explicit=explicit,
        init=None if init is None else Artifact.open(init, "expert"),
    )
    if not machines:
        typer.echo(f"recipe {named}: {about(named)}")
    tell(orders, again.accept_orders(run, origin, cut, orders), there)
    if init is not None:
        begun = sum(read_order(f"{orders.store}/{name}")[0].init is not None for name in orders.names())
        typer.echo(f"{begun} of {len(orders.names())} orders begin from {init}, the others from random weights")
    tell_launch(orders, launch, url, package)
    for island, fits in savings(orders.config["islands"]).items():
        typer.echo(f"{island}: fits with {fits}")
    busy = {job["island"] for job in orders.config["islands"]}
    if idle := [island.name for island in machines if island.name not in busy]:
        typer.echo(f"no cluster left for: {', '.join(idle)}")


assert plan.__doc__ is not None
plan.__doc__ += f"""
    Recipes, from small to large: {"; ".join(f"{name} ({one.description})" for name, one in RECIPES.items())}.
    Without --recipe, the largest that a cluster has enough images for.

    Machines that --islands knows by name: {", ".join((*GPUS, *APPLE))}, CPU 8 cores; gigabytes may follow.
    """


def about(name: str) -> str:
    """A recipe in a few words."""
    return RECIPES[name].description if name in RECIPES else "what the demo trains"


def refuse(options: Mapping[str, object], beside: str) -> None:
    """Options that say nothing beside another one would be ignored in silence."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UserError(f"{given[0]}: has no meaning with {beside}; leave it out")


def accepted_orders(run: Store) -> set[str]:
    """Digests of the orders that the model knows."""
    version = find_ensemble(run)
    return set() if version is None else {reference.digest for reference in version.orders}


def run_of(place: str) -> Store:
    """The run, whether the user names it or its data."""
    store = Store.at(place)
    there = find(store)
    return store if there is None or there.manifest.kind != "data" else store.parent


def partition_of(data: Artifact) -> Artifact:
    """The partition beside a data artifact that was made from it: of several the model's, or the one called that."""
    run = data.store.parent
    version = find_ensemble(run)
    usual = {run.child("partition").url, *(() if version is None else [place_of(run, version.partition).url])}
    found = [there for name in run.children() if not name.startswith(".") and (there := find(run.child(name)))]
    made = [a for a in found if a.manifest.kind == "partition" and a.manifest.parents.get("data") == data.digest]
    chosen = [artifact for artifact in made if artifact.store.url in usual] or made
    if len(chosen) > 1:
        names = ", ".join(artifact.store.name for artifact in made)
        raise UserError(f"{data.store}: several partitions were made from it ({names}); say which with --partition")
    if not chosen:
        raise UserError(f"{data.store}: no partition in {run} was made from it; run `atoll partition {data.store}`")
    return chosen[0]


def tell(orders: Artifact, version: Version, there: bool) -> None:
    state = "already there" if there else "planned"
    typer.echo(f"{state}: {orders.store}  {len(orders.names())} orders  {orders.digest[:12]}")
    typer.echo(f"version {version.version} of the model accepts experts trained for them")
    Console().print(table(orders))


def tell_launch(orders: Artifact, launch: str | None, url: str | None, package: str | None) -> None:
    if launch is not None:
        typer.echo(f"launch files: {write_launch(orders, launch, url, package)}")


def savings(jobs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Islands that are predicted to need more than a small micro-batch to fit, and what."""
    how: dict[str, dict[str, None]] = {}
    for job in jobs:
        if words := ", ".join(job["savings"]):
            how.setdefault(job["island"], {})[words] = None
    return {island: "; or ".join(ways) for island, ways in how.items()}


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
