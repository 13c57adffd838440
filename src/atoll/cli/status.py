"""atoll status: what a run has, and what is missing."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from ..artifacts import Store, UserError, find
from ..ensemble.versions import find_ensemble, place_of
from .bars import console


def status(
    run: Annotated[str, typer.Argument(help="The run")],
    out: Annotated[str | None, typer.Option(help="Also write the table as JSON to this file")] = None,
) -> None:
    """Show every stage of a run: there or missing, its digest, and the command that makes what is missing.

    Example:

      atoll status runs/demo
    """
    place = Store.at(run)
    if not place.exists():
        raise UserError(f"{run}: no such run; check the path, or make one with `atoll demo --out {run}`")
    rows = [*_artifacts(place), *_experts(place), *_files(place)]
    table = Table(title=str(place), title_justify="left", header_style="bold")
    for column in ("stage", "state", "digest", "what"):
        table.add_column(column, overflow="fold")
    for row in rows:
        state = "[green]there[/green]" if row["digest"] else "[yellow]missing[/yellow]"
        table.add_row(row["stage"], state, row["digest"][:12], row["what"])
    console.print(table)
    if out is not None:
        Store.at(out).parent.write(Store.at(out).name, json.dumps(rows, indent=2).encode() + b"\n")


def _row(stage: str, digest: str, what: str) -> dict[str, str]:
    return {"stage": stage, "digest": digest, "what": what}


def _artifacts(run: Store) -> list[dict[str, str]]:
    makers = {
        "data": f"atoll prepare SOURCE --out {run}/data",
        "partition": f"atoll partition {run}/data -k 8",
        "orders": f"atoll plan {run}/data",
        "router": f"atoll router {run}",
    }
    rows = []
    for stage, command in makers.items():
        artifact = find(run.child(stage))
        if artifact is None:
            rows.append(_row(stage, "", f"make it: {command}"))
            continue
        facts = {
            "data": lambda c: f"{c['count']:,} samples, latents {'x'.join(map(str, c['latent']['shape']))}",
            "partition": lambda c: f"{c['clusters']} clusters by {c['by']}",
            "orders": lambda c: f"{len(c['chosen'])} orders: {', '.join(c['chosen'])}",
            "router": lambda c: (
                f"{c['card']['images']:,} images, sees {c['card']['architecture']['trunk']['condition']}"
            ),
        }
        fact = facts[stage](artifact.config)
        ensemble = find_ensemble(run)
        if stage == "router" and (ensemble is None or ensemble.router is None):
            fact += f"; not registered yet: atoll router {run}, once an expert is admitted"
        rows.append(_row(stage, artifact.digest, fact))
    return rows


def _experts(run: Store) -> list[dict[str, str]]:
    ensemble = find_ensemble(run)
    if ensemble is None:
        return [_row("experts", "", f"train the orders, then: atoll admit EXPERT --out {run}")]
    rows = []
    members = {member.cluster: member for member in ensemble.serving}
    for cluster in range(ensemble.clusters):
        member = members.get(cluster)
        if member is not None and find(place_of(run, member)) is not None:
            score = "" if member.yardsticks is None else f", holdout error {member.yardsticks.inside:.4f}"
            rows.append(_row(f"expert {cluster}", member.digest, f"{member.objective}{score}"))
        else:
            rows.append(
                _row(f"expert {cluster}", "", f"train order {cluster:02d}, then: atoll admit EXPERT --out {run}")
            )
    return rows


def _files(run: Store) -> list[dict[str, str]]:
    version = find_ensemble(run)
    digest, what = ("", "plan orders first") if version is None else (version.digest(), f"version {version.version}")
    rows = [_row("ensemble", digest, what)]
    for name in ("evaluation.json", "report.html", "samples.png"):
        there = run.exists(name)
        rows.append(_row(name, "file" if there else "", "" if there else f"make it: atoll evaluate {run}"))
    return rows
