"""atoll ensemble: what the model consists of, how it came about, and how to change it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..artifacts import Store, UserError
from ..registry.changes import remove_expert, roll_back, set_route, use_expert
from ..registry.signatures import begin_signing
from ..registry.versions import FOLDER, History, Version, file_name, is_whole, no_ensemble, warn_if_stale
from .progress import console
from .tables import plain

SHOWN = 20  # versions of the history, unless all are asked for


def ensemble(
    run: Annotated[str, typer.Argument(help="The run.")],
    number: Annotated[int | None, typer.Argument(help="A version of its model (default: the newest).")] = None,
    use: Annotated[str | None, typer.Option(help="Admitted expert to activate, such as 03-1f2e3d.")] = None,
    remove: Annotated[int | None, typer.Option(help="Cluster whose expert is deactivated; it stays admitted.")] = None,
    route: Annotated[str | None, typer.Option(help="Default route, such as top-1.")] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="Go back by one change, or to a version.")] = False,
    key: Annotated[str | None, typer.Option("--sign", help="SSH key to sign with; later ones need ATOLL_KEY.")] = None,
    all_versions: Annotated[bool, typer.Option("--all", help="Show the whole history.")] = False,
) -> None:
    """Show the model of a run and its history, or change it. Each change is a new version, and none is lost.

    Every admitted expert stays; one per cluster is active.

    \b
    Examples:
      atoll ensemble runs/flowers
      atoll ensemble runs/flowers 4
      atoll ensemble runs/flowers --use 03-1f2e3d4c5b6a
      atoll ensemble runs/flowers --remove 3
      atoll ensemble runs/flowers --route top-1
      atoll ensemble runs/flowers --rollback
      atoll ensemble runs/flowers --rollback 4
      atoll ensemble runs/flowers --sign ~/.ssh/id_ed25519
    """
    options = {"--use": use, "--remove": remove, "--route": route, "--rollback": rollback or None, "--sign": key}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: one change at a time; each is a version of its own")
    if number is not None and given and not rollback:
        raise UserError(f"{given[0]}: changes the newest version; leave out {number}")
    place = Store.at(run)
    if given:
        before = History.of(place).newest
        if use is not None:
            after = use_expert(place, use)
        elif remove is not None:
            after = remove_expert(place, remove)
        elif route is not None:
            after = set_route(place, route)
        else:
            after = roll_back(place, number) if key is None else begin_signing(place, key)
        if before == after and key is None:
            console.print(f"nothing to do: version {after.version} is like that already")
            return
    show(place, None if given else number, None if all_versions else SHOWN)


def show(run: Store, number: int | None, most: int | None) -> None:
    """One version, the newest by default, and below it the history."""
    history = History.of(run)
    warn_if_stale(history)
    newest = history.newest
    if newest is None:
        raise UserError(no_ensemble(run))
    version = newest if number is None else history.versions.get(number)
    if version is None:
        there = ", ".join(map(str, sorted(history.versions)[-SHOWN:]))
        why = f" ({history.unused[number]})" if number in history.unused else ""
        raise UserError(f"{number}: {run} has no such version{why}; there are {there}")
    console.print(Text(f"{run}, version {version.version}", style="bold"), soft_wrap=True)
    console.print(experts_table(run, version))
    console.print()
    for name, value in facts(run, version):
        console.print(Text.assemble((f"{name:<10}", "bold"), value), soft_wrap=True)
    console.print()
    console.print(history_table(run, history, version, most))
    for unused, why in sorted(history.unused.items()):
        console.print(f"[yellow]not used:[/yellow] {FOLDER}/{file_name(unused)} {why}", soft_wrap=True)


def experts_table(run: Store, version: Version) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("cluster", justify="right")
    table.add_column("expert", no_wrap=True)  # the name is what --use wants, whole
    table.add_column("objective", overflow="fold")
    for column in ("error", "Gaussian's"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("license", overflow="fold")
    credited = any(member.credits for member in version.experts)
    if credited:
        table.add_column("by", overflow="fold")
    table.add_column("active", no_wrap=True)
    for cluster in range(version.clusters):
        members = [member for member in version.experts if member.cluster == cluster]
        idle = "no" if any(member.serving for member in members) else "[yellow]none is[/yellow]"
        for member in sorted(members, key=lambda m: not m.serving):
            score = member.val_loss
            numbers = ["", ""] if score is None else [f"{score.inside:.4f}", f"{score.gaussian:.4f}"]
            there = is_whole(run, member)
            state = ("[green]yes[/green]" if there else "[red]is missing[/red]") if member.serving else idle
            row = [str(cluster), plain(member.name), plain(member.objective), *numbers, plain(member.license or "")]
            row += [plain(member.credits)] if credited else []
            table.add_row(*row, state, style=None if member.serving else "dim")
        if not members:
            table.add_row(str(cluster), "[yellow]none yet[/yellow]")
    return table


def facts(run: Store, version: Version) -> Sequence[tuple[str, str]]:
    """The other artifacts of the model."""
    router = "none yet" if version.router is None else f"{version.router.path}  {version.router.digest[:12]}"
    orders = [f"{reference.path}  {reference.digest[:12]}" for reference in version.orders]
    grown = "" if not version.earlier else f", grown from {', '.join(plain(old.path) for old in version.earlier)}"
    return [
        ("data", f"{plain(version.data.path)}  {version.data.digest[:12]}"),
        ("partition", f"{plain(version.partition.path)}  {version.partition.digest[:12]}{grown}"),
        ("orders", plain(", ".join(orders) or "none")),
        ("router", plain(router)),
        ("route", f"{version.route} on {version.reference.name}"),
        ("model", version.model_digest()[:12]),
    ]


def history_table(run: Store, history: History, shown: Version, most: int | None) -> Table:
    """The chain of versions, newest first."""
    chain = history.chain()
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("version", justify="right")
    for column in ("when (UTC)", "change", "active", "digest"):
        table.add_column(column, overflow="fold")
    for version in chain[:most]:
        when = run.child(FOLDER).modified(version.name)
        row = [
            str(version.version),
            "" if when is None else f"{when:%Y-%m-%d %H:%M}",
            plain(version.change),
            f"{len(version.serving)} of {version.clusters}",
            version.digest()[:12],
        ]
        table.add_row(*row, style="bold" if version.version == shown.version else None)
    if most is not None and len(chain) > most:
        table.add_row("", "", f"and {len(chain) - most} older ones: --all", "", "", style="dim")
    return table
