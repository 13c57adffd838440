"""atoll plan: a partition becomes work orders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

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
from ..registry.versions import Version, find_ensemble, place_of
from ..training.machines import APPLE, GPUS
from .options import Settings, existing_file, with_settings
from .progress import console, print_line, progress

SIZES = "; ".join(f"{name} ({one.description})" for name, one in RECIPES.items())
MACHINES = f"{', '.join((*GPUS, *APPLE))}, CPU 8 cores; gigabytes may follow"
Islands = Annotated[
    Path | None, typer.Option(help=f"TOML file of machines: {MACHINES}.", parser=existing_file, metavar="<file>")
]


@with_settings(PlanConfig, "objectives", "training.images", "training.seed")
def plan(
    data: Annotated[str, typer.Argument(help="Data artifact, such as runs/demo/data; with --reissue the run.")],
    *,
    partition: Annotated[str | None, typer.Option(help="The partition (default: the one made from DATA).")] = None,
    out: Annotated[str | None, typer.Option(help="Folder to write (default: orders; later orders-2, ...).")] = None,
    recipe_name: Annotated[str | None, typer.Option("--recipe", help=f"{SIZES} (default: by the data).")] = None,
    settings: Settings,
    islands: Islands = None,
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
    if launch is not None:
        check_launch(launch, url, package)
    else:
        refuse({"--url": url, "--package": package}, "no --launch")
    first_only: dict[str, object] = {
        "--objectives": settings.flags.get("objectives"),
        "--seed": settings.flags.get("training.seed"),
        "--islands": islands,
        "--recipe": recipe_name,
        "--init": init,
        "--monolith": monolith or None,
    }
    where = None if out is None else Store.at(out)
    changes = again.Changes(settings.over, settings.words, from_scratch)

    def report(orders: Artifact, version: Version, there: bool) -> None:
        print_orders(orders, version, there)
        if launch is not None:
            print_line(f"launch files: {write_launch(orders, launch, url, package)}")

    if reissue:
        refuse(first_only | {"--onto": onto, "--grown-by": grown_by, "--partition": partition}, "--reissue")
        store = Store.at(data)
        is_data = (artifact := find(store)) is not None and artifact.manifest.kind == "data"
        run = store.parent if is_data else store
        run.check_creates()
        known = accepted(run)
        orders, version = again.reissue(run, reissue, where, changes)
        report(orders, version, orders.digest in known)
        return
    origin = Artifact.open(data, "data")
    run = origin.store.parent
    cut = Artifact.open(partition, "partition") if partition else partition_of(origin)
    check_plan(run, origin, cut)  # before anything is written
    if onto is not None:
        refuse(first_only, "--onto")
        known, before = accepted(run), Artifact.open(onto, "orders")
        with progress() as display:
            orders, version = again.reissue_grown(
                run, origin, cut, before, where, changes, grown_by=grown_by or 0.0, progress=display
            )
        report(orders, version, orders.digest in known)
        return
    refuse({"--grown-by": grown_by, "--from-scratch": from_scratch or None}, "the first orders")

    def change(base: PlanConfig) -> PlanConfig:
        return rescale_hparams(settings.over(base), base, settings.names)

    shape = origin.config["latent"]["shape"]
    name = recipe_name or name_for(origin.config, cut.config["clusters"])
    config = change(recipe(name, shape))
    title = f"recipe {name}: {RECIPES[name].description if name in RECIPES else 'what the demo trains'}"
    settings.show(config, title)
    if monolith:
        others = {name: first_only[name] for name in ("--islands", "--init", "--objectives")}
        refuse(others | {"--launch": launch}, "--monolith")
        orders = plan_monolith(origin.store, cut.store, where or run.child("orders-monolith"), config)
        print_line(f"planned: {orders.store}/{orders.names()[0]}  one order on all clusters  {orders.digest[:12]}")
        return
    place = where or run.child("orders")
    there = find(place) is not None
    machines = () if islands is None else read_islands(islands)
    fixed = recipe_name or name == DIGITS or any(setting.startswith("network.") for setting in settings.names)
    orders = plan_stage(
        origin.store,
        cut.store,
        place,
        config,
        islands=machines,
        recipes=None if fixed else lambda name: change(recipe(name, shape)),
        explicit=settings.names,
        init=None if init is None else Artifact.open(init, "expert"),
    )
    if not machines:
        print_line(title)
    report(orders, again.accept_orders(run, origin, cut, orders), there)
    if init is not None:
        begun = sum(read_order(f"{orders.store}/{name}")[0].init is not None for name in orders.names())
        print_line(f"{begun} of {len(orders.names())} orders begin from {init}, the others from random weights")
    savings: dict[str, dict[str, None]] = {}  # of a machine, each once
    for job in orders.config["islands"]:
        savings.setdefault(job["island"], {})[", ".join(job["savings"])] = None
    for machine, ways in savings.items():
        if used := [way for way in ways if way]:
            print_line(f"{machine}: fits with {'; or '.join(used)}")
    if idle := [machine.name for machine in machines if machine.name not in savings]:
        print_line(f"no cluster left for: {', '.join(idle)}")


def refuse(options: Mapping[str, object], beside: str) -> None:
    """Refuse options that have no effect beside another one."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UserError(f"{given[0]}: has no meaning with {beside}; leave it out")


def accepted(run: Store) -> set[str]:
    """Digests of the orders whose experts the model accepts."""
    version = find_ensemble(run)
    return set() if version is None else {reference.digest for reference in version.orders}


def partition_of(data: Artifact) -> Artifact:
    """The partition beside a data artifact that was made from it: of several the model's, or the one called that."""
    run = data.store.parent
    version = find_ensemble(run)
    usual = {run.child("partition").url, *(() if version is None else [place_of(run, version.partition).url])}
    found = [artifact for artifact in artifacts_in(run) if artifact.manifest.kind == "partition"]
    made = [artifact for artifact in found if artifact.manifest.parents.get("data") == data.digest]
    chosen = [artifact for artifact in made if artifact.store.url in usual] or made
    if len(chosen) > 1:
        names = ", ".join(artifact.store.name for artifact in made)
        raise UserError(f"{data.store}: several partitions were made from it ({names}); name one with --partition")
    if not chosen:
        raise UserError(f"{data.store}: no partition in {run} was made from it; run `atoll partition {data.store}`")
    return chosen[0]


def print_orders(orders: Artifact, version: Version, there: bool) -> None:
    state = "already there" if there else "planned"
    print_line(f"{state}: {orders.store}  {len(orders.names())} orders  {orders.digest[:12]}")
    print_line(f"version {version.version} of the model accepts experts trained for them")
    console.print(table(orders))


def table(orders: Artifact) -> Table:
    """One row per order; with islands, what each is predicted to need."""
    jobs = orders.config["islands"]
    shown = Table("order", "objective", *(["island", "size"] if jobs else []), header_style="bold", box=None)
    if jobs:  # short headings: a number that is cut off is of no use in 80 columns
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
