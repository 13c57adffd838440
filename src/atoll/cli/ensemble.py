"""atoll ensemble: what the model consists of, how it came about, and how to change it by hand."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from ..artifacts import Store, UserError
from ..registry.changes import remove_expert, roll_back, set_route, use_expert
from ..registry.signatures import begin_signing
from ..registry.versions import FOLDER, Newest, Version, file_name, history, is_whole, open_ensemble
from .tables import Cell, print_line, print_table

SHOWN = 20  # versions of the history


def ensemble(
    run: Annotated[str, typer.Argument(help="The run.")],
    number: Annotated[int | None, typer.Argument(help="A version of its model (default: the newest).")] = None,
    use: Annotated[str | None, typer.Option(help="Admitted expert to activate, such as 03-1f2e3d.")] = None,
    remove: Annotated[int | None, typer.Option(help="Cluster whose expert is deactivated; it stays admitted.")] = None,
    route: Annotated[str | None, typer.Option(help="Default route, such as top-1.")] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="Go back by one change, or to a version.")] = False,
    key: Annotated[str | None, typer.Option("--sign", help="SSH key to sign with; later ones need ATOLL_KEY.")] = None,
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
        before = Newest.of(place).version
        if use is not None:
            after = use_expert(place, use)
        elif remove is not None:
            after = remove_expert(place, remove)
        elif route is not None:
            after = set_route(place, route)
        else:
            after = roll_back(place, number) if key is None else begin_signing(place, key)
        if before == after and key is None:
            print_line(f"nothing to do: version {after.version} is like that already")
            return
        number = None
    print_model(place, number)


def print_model(run: Store, number: int | None) -> None:
    """One version, the newest by default, and below it the history."""
    newest, found = open_ensemble(run), dict(history(run))
    version = newest if number is None else found.get(number, "is not there")
    if isinstance(version, str):
        there = ", ".join(str(n) for n, each in sorted(found.items())[-SHOWN:] if isinstance(each, Version))
        raise UserError(f"{number}: {run} has no such version (it {version}); there are {there}")
    print_experts(run, version)
    parts = [version.data, *version.earlier, version.partition, *version.orders]
    parts += [] if version.router is None else [version.router]
    print_table("part digest", [(one.path, one.digest[:12]) for one in parts], "")
    if version.router is None:
        print_line("router: none yet")
    print_line(f"route: {version.route} on linear-flow; model {version.model_digest()[:12]}")
    chain = []
    for each in (each for each in found.values() if isinstance(each, Version)):
        when = run.child(FOLDER).modified(each.name)
        active = f"{len(each.serving)} of {each.clusters}"
        date = "" if when is None else f"{when:%Y-%m-%d %H:%M}"
        chain.append((each.version, date, each.change, active, each.digest()[:12]))
    print_table(">version when_(UTC) change active digest", chain[:SHOWN], "")
    if len(chain) > SHOWN:
        print_line(f"and {len(chain) - SHOWN} older ones, in {FOLDER}/")
    for each_number, why in found.items():
        if isinstance(why, str):
            print_line(f"not used: {FOLDER}/{file_name(each_number)} {why}")


def print_experts(run: Store, version: Version) -> None:
    """One row per admitted expert; the active one of a cluster comes first."""
    credited = any(member.credits for member in version.experts)
    rows: list[list[Cell]] = []
    for cluster in range(version.clusters):
        members = [member for member in version.experts if member.cluster == cluster]
        idle = Text("no") if any(member.serving for member in members) else Text("none is", "yellow")
        for member in sorted(members, key=lambda m: not m.serving):
            score = member.val_loss
            numbers = ["", ""] if score is None else [f"{score.inside:.4f}", f"{score.gaussian:.4f}"]
            active = Text("yes", "green") if is_whole(run, member) else Text("is missing", "red")
            row: list[Cell] = [cluster, member.name, member.objective, *numbers, member.license or ""]
            row += [member.credits] if credited else []
            rows.append([*row, active if member.serving else idle])
        if not members:
            rows.append([cluster, Text("none yet", "yellow")])
    headings = f">cluster |expert objective >val_loss >Gaussian license{' by' if credited else ''} active"
    print_table(headings, rows, f"{run}, version {version.version}")
