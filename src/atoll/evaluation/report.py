"""report.html: one file that shows which expert made what, and how well. report.html here is its template."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from io import BytesIO
from typing import Any

from jinja2 import Environment, StrictUndefined
from PIL import Image

from ..artifacts import Artifact, Store, find
from ..islands.expert import read_expert_card
from ..partition.report import description, read_clusters
from ..registry.versions import Member, Version, open_ensemble, open_reference, place_of
from ..router.card import read_router_card
from .evaluate import Configuration
from .figures import Curve, accuracy_curves, data_uri, heat_map, learning_curves
from .prompts import spaced
from .samples import StoredImages, read_record
from .scores import SCORES, score_table
from .sheet import INK, expert_color, rows_by_prompt, sample_grid

PROMPTS, PER_PROMPT = 10, 12  # rows and columns of a grid
SMALL_TILE, LARGE_TILE, PICTURE_TILE = 24, 64, 48  # pixels a side; the last in samples.png
WIDEST_OF_A_PAIR = 600  # pixels of a grid, beyond which two abreast would be too small to see
HEAT_MAPS = 4  # of configurations, at most


def write_report(run: Store, evaluation: dict[str, Any], out: Store) -> None:
    """Write report.html and samples.png to `out`, where the evaluation's samples are."""
    version = open_ensemble(run)
    sampled = [Sampled.read(row, out) for row in evaluation["configurations"]]
    # stronger guidance first; within it the ensemble with its own router, then other models, then other routers
    order = {"ensemble": 0, "monolith": 1, "student": 1}
    shown = sorted(sampled, key=lambda s: (-s.about.sampling.guidance, 2 if s.about.router else order[s.about.model]))
    missing = sorted({cluster for row in evaluation["configurations"] for cluster in row["missing"]})
    experts = [member for member in version.serving if member.cluster not in missing]
    objectives = [member.objective for member in experts]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("report.html").read_text())
    html = template.render(
        run=run.name,
        experts=[{"color": expert_color(e.cluster), "cluster": e.cluster, "objective": e.objective} for e in experts],
        objectives={objective: objectives.count(objective) for objective in objectives},
        blind=router_is_blind(run, version),
        missing=missing,
        sampled=shown,
        pairs=max(one.grid.width for one in shown) <= WIDEST_OF_A_PAIR,
        clusters=[cluster_card(run, version, member) for member in experts],
        heat_maps=[(one.about.title, one.heat_map(version, experts)) for one in shown if one.has_router][:HEAT_MAPS],
        router=router_chart(run, version, sampled),
        losses=[
            learning_curves(losses(run, version, experts, "val_loss"), "validation loss (velocity error)"),
            learning_curves(losses(run, version, experts, "loss"), "training loss, own objective"),
        ],
        tables=[numbers(evaluation, extractor, shown) for extractor in evaluation["features"]],
        scores=SCORES.values(),
        evaluation=evaluation,
        settings=settings(evaluation, version),
    )
    out.write("report.html", html.encode())
    with BytesIO() as stream:
        sampled[0].draw(PICTURE_TILE).save(stream, format="PNG", optimize=True)
        out.write("samples.png", stream.getvalue())


@dataclass(frozen=True)
class Sampled:
    """The images of a configuration (of its first seed), and how they were made."""

    row: dict[str, Any]
    about: Configuration
    images: StoredImages
    record: dict[str, Any]

    @staticmethod
    def read(row: dict[str, Any], out: Store) -> Sampled:
        artifact = Artifact.open(out.child("samples", row["folders"][0]), "samples")
        about = Configuration(**{name: row[name] for name in Configuration.model_fields})
        return Sampled(row, about, StoredImages(artifact), read_record(artifact))

    @property
    def is_small(self) -> bool:
        """Whether its images show their pixels on the page, as digits do."""
        return self.images.shape[-1] <= SMALL_TILE

    @property
    def has_router(self) -> bool:
        return "times" in self.record and not self.about.router

    @cached_property
    def grid(self) -> Image.Image:
        return self.draw(SMALL_TILE if self.is_small else LARGE_TILE)

    @property
    def picture(self) -> str:
        return data_uri(self.grid)

    def draw(self, tile: int) -> Image.Image:
        """Up to ten prompts, evenly taken from all, one row each."""
        rows, labels = rows_by_prompt(self.record["prompts"], PER_PROMPT)
        starts = [place for place, label in enumerate(labels) if label or place == 0]
        first = spaced(starts, min(PROMPTS, len(starts)))
        rows, labels = [rows[place] for place in first], [labels[place] for place in first]
        return sample_grid(self.images, rows, self.record.get("expert_of_image"), tile=tile, labels=labels)

    def heat_map(self, version: Version, experts: list[Member]) -> str:
        kinds = {member.cluster: member.objective.split(" ")[0] for member in experts}
        names = [f"{k}: {kinds.get(k, 'missing')}" for k in range(version.clusters)]
        return heat_map(self.record["times"], self.record["experts_at_time"], names)


def router_is_blind(run: Store, version: Version) -> bool:
    """Whether the router does not read the prompt."""
    assert version.router is not None, "an evaluated ensemble has a router"
    card = read_router_card(open_reference(run, version.router, "router"))
    return card.architecture.trunk.condition == "none"


def cluster_card(run: Store, version: Version, member: Member) -> dict[str, Any]:
    """What is shown of a cluster and its expert."""
    partition, expert = open_reference(run, version.partition, "partition"), Artifact.open(place_of(run, member))
    cluster = read_clusters(partition)["clusters"][member.cluster]
    known = {other.digest: other.name for other in version.experts}
    start = expert.manifest.parents.get("init")
    return {
        "number": member.cluster,
        "color": expert_color(member.cluster),
        "sheet": data_uri(Image.open(partition.file(f"sheets/{member.cluster:02d}.png"))),
        "images": cluster["train"],
        "lines": description(cluster),
        "objective": member.objective,
        "val_loss": member.val_loss,
        "start": known.get(start or "", start and start[:12]) or read_expert_card(expert).origin,
    }


def router_chart(run: Store, version: Version, sampled: list[Sampled]) -> str:
    """How often routers are right about the cluster of unseen samples, over time."""
    assert version.router is not None
    own = version.router.path
    curves: list[Curve] = []
    for folder in dict.fromkeys([own, *(one.about.router for one in sampled if one.about.router)]):
        if (artifact := find(run.child(*folder.split("/")))) is not None:
            table, color = json.loads(artifact.read("accuracy.json")), expert_color(len(curves))
            curves.append(Curve(folder, table["t"], table["accuracy"], color))
            if folder == own:
                name = f"{own}, prompt dropped"
                curves.append(Curve(name, table["t"], table["accuracy_unconditional"], color, dashed=True))
    return accuracy_curves(curves, "right cluster, unseen samples")


def losses(run: Store, version: Version, experts: list[Member], key: str) -> list[Curve]:
    """One number of metrics.jsonl, of every expert and the monolith."""
    places = [(f"expert {m.cluster} ({m.objective.split(' ')[0]})", m, expert_color(m.cluster)) for m in experts]
    references: list[tuple[str, Any, str]] = [*places]
    if version.monolith is not None:
        references.append(("monolith", version.monolith, INK))
    curves = []
    for name, reference, color in references:
        if (artifact := find(place_of(run, reference))) is None:
            continue
        rows = [json.loads(line) for line in artifact.read("metrics.jsonl").splitlines()]
        if rows := [row for row in rows if key in row]:
            # images as a share of the budget: the monolith sees K times as many
            done = [row["images"] / rows[-1]["images"] for row in rows]
            curves.append(Curve(name, done, [row[key] for row in rows], color, dashed=name == "monolith"))
    return curves


def numbers(evaluation: dict[str, Any], extractor: str, sampled: list[Sampled]) -> dict[str, Any]:
    """The table of all scores by the features of one extractor; real images are its last row."""
    found = [one.row["scores"][extractor] for one in sampled]
    head, cells = score_table([*found, evaluation["real"][extractor]])
    titles = [*(one.about.title for one in sampled), "real images, halves"]
    return {"features": extractor, "head": head, "rows": list(zip(titles, cells, strict=True))}


def settings(evaluation: dict[str, Any], version: Version) -> dict[str, str]:
    """Everything the numbers depend on; of how images were sampled, every value that some configuration has."""
    plan, samplings = evaluation["plan"], [row["sampling"] for row in evaluation["configurations"]]
    sampling = {name: dict.fromkeys(str(one[name]) for one in samplings) for name in samplings[0]}
    return {
        "command": shlex.join(["atoll", *sys.argv[1:]]),
        "samples per configuration": f"{plan['count']:,} from {plan['seeds']} seed(s), the first {plan['seed']}",
        **{name.replace("_", " "): ", ".join(some).replace("None", "none") for name, some in sampling.items()},
        "features": ", ".join(evaluation["features"]),
        "ensemble": version.digest(),
        "data": evaluation["data"],
    }
