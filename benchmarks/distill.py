"""Students of the demo's ensembles, beside the ensembles, a monolith, and a student that learned from data alone.

    python benchmarks/distill.py run --out benchmarks/results/distill-digits-fifth.json --work FOLDER [--seeds 0 1 2]
    python benchmarks/distill.py sheet --work FOLDER --out docs/distill.png        as seen: the same noise for all
    python benchmarks/distill.py table benchmarks/results/distill-digits-fifth.json --into docs/distill.md
    python benchmarks/distill.py run --seeds 30 31 32 33 --seeds-at-once 4 --guidances 1 1.25 2 ...    on many cores
    python benchmarks/distill.py run --size tiny --seeds 0 --out /tmp/distill.json --work /tmp/distill    does it run?

For every seed: digits in eight clusters, eight flow experts, a monolith of the same architecture, and two ensembles in
which two of the experts are trained by another objective, DDPM or v (the other six are the same). Students, all of an
expert's architecture:

    default     as `atoll distill` does it, taught by the flow experts: from the best expert's weights
    random      the same from random weights
    average     the same from the average of the experts' weights
    samples     without data: on the ensemble's own trajectories, answered by its mixture, from the average; and from
                random weights (samples-random)
    mixed-data, v    as default, taught by the ensemble with two DDPM experts, and by the one with two v experts
    mixed-trust as mixed-data, but the noise experts are heard by their kind, as was usual before
    mixed       as mixed-data, but they are heard as a whole, as DDM's are
    control     as default, but the flow experts of the clusters that have noise experts in mixed-data are heard for as
                little as those: what of mixed-data's ratio to default is the data's own doing
    half        as default, with half of the sample's own target in what is learned
    mixed-data-half, ...  half and random of the other two ensembles: the best expert may be one of the two
                that predict something else, so only students from random weights differ in nothing but their teachers
                (and, with mixed-data and mixed-trust, in what of the data stands in for those)
    tenth       as default, with as few lessons without a prompt as an expert has, as was usual before
    data        no teachers: trained on the data for as many operations as `default` takes with its teachers

With --rate 2 experts and monolith have twice the demo's learning rate, and so have all students, whose rate is an
expert's. Guidance 1 is the model as it is, 2 the demo's, beyond what digits need. Records that say `rate` and not
`learning_rate` are of a demo whose rate was 0.003, some of them with --rate 4, which is today's; their students are all
`tenth`, and those called `fast`, at four times an expert's rate, are left out of tables.

All are painted from the same noise by `atoll evaluate` and measured alike. Operations are counted (matrix products; a
backward pass is two forward). Every command goes on where it was stopped, so this script does, too: give it the same
--work. Two commands run at a time, with a thread each; with --seeds-at-once as many times that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

from scipy.stats import t

from atoll.__main__ import main as run_atoll
from atoll.artifacts import Artifact, Store
from atoll.data.index import Index
from atoll.demo import demo_settings, tiny_settings
from atoll.distill.plan import DistillPlan, unprompted_share
from atoll.distill.stage import Teachers
from atoll.ensemble.versions import open_ensemble, open_reference
from atoll.evaluation.real import RealData
from atoll.evaluation.samples import read_samples
from atoll.evaluation.scores.frechet import FrechetReference
from atoll.islands.order import Order, read_order
from atoll.models.accounting import flops_forward
from atoll.pipeline.settings import RunSettings, write_once
from atoll.pipeline.stages import carry_out
from atoll.planning.stage import order_on_everything, write_orders
from atoll.router.card import read_router_card
from provenance import commit

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"demo": (demo_settings, 4000, 50), "tiny": (tiny_settings, 40, 4)}  # settings, samples per arm, steps
MIXES = {"flow": "8flow", "mixed": "2ddpm:6flow", "v": "2v:6flow"}
TENTH = ["--set", "training.condition_dropout=0.1"]
HALF = ["--truth", "0.5"]
RANDOM = ["--start", "random"]
HOWS: dict[str, tuple[str, list[str]]] = {  # what a student's name ends in: how that is told, and its options
    "-random": ("`--start random`", RANDOM),
    "-average": ("`--start average`", ["--start", "average"]),
    "": ("the default: from the best flow expert there is", []),
    "-tenth": ("one lesson in ten without a prompt, as experts have", TENTH),
    "-half": ("`--truth 0.5`", HALF),
}
OTHERS: dict[str, tuple[str, str, list[str]]] = {  # what a student's name begins with: whose, how told, and options
    "mixed-data": ("mixed", "2 ddpm, 6 flow", []),
    "mixed-trust": ("mixed", "2 ddpm, 6 flow, `trust=kind`", ["--set", "trust=kind"]),
    "mixed": ("mixed", "2 ddpm, 6 flow, `trust=whole`", ["--set", "trust=whole"]),
    "v": ("v", "2 v, 6 flow", []),
    "control": ("flow", "8 flow, with as much of the data", []),
}
STUDENTS: dict[str, tuple[str, list[str]]] = {  # by name: whose, and how
    **{how[1:] or "default": ("flow", options) for how, (_, options) in HOWS.items()},
    "samples": ("flow", ["--from-samples"]),
    "samples-random": ("flow", ["--from-samples", *RANDOM]),
    **{
        f"{other}{how}": (whose, options + more)
        for other, (whose, _, more) in OTHERS.items()
        for how, (_, options) in HOWS.items()
    },
}
ALONE = {"data": "default"}  # without teachers, by name: whose training and operations
GUIDANCES = (1.0, 2.0)  # of records that name no others
RESAMPLES = 100  # sets of samples, for the interval of a ratio
ENOUGH = 5  # seeds, for an interval of their own
LIKE_FOR_LIKE = (
    "mixed-data",
    "control",
)  # they differ in two teachers, and where the start is the best in that
SHEET_STUDENTS = {"default": "student", "half": "student, half truth", "data": "no teachers"}
AT_ONCE = 2  # commands
MARKS = "<!-- benchmarks/distill.py writes from here -->", "<!-- to here -->"  # of a page

ROWS = {  # of the table: arm of the evaluation without its guidance, and what it is
    "monolith": "monolith",
    "top-1": "ensemble of 8 flow experts, top-1",
    "top-2": "the same, top-2",
    "mixed top-1": "2 ddpm and 6 flow experts, top-1",
    "mixed top-2": "the same, top-2",
    "v top-1": "2 v and 6 flow experts, top-1",
    "v top-2": "the same, top-2",
    "student-default": "**student** of the flow experts",
    "student-random": "`--start random`",
    "student-average": "`--start average`",
    "student-samples": "`--from-samples`",
    "student-samples-random": "`--from-samples --start random`",
    "student-half": "`--truth 0.5`",
    "student-tenth": "one lesson in ten without a prompt, as experts have",
    "student-data": "no teachers: data alone, same operations",
}
BESIDE = tuple(f"student-{other}{how}" for other in OTHERS for how in HOWS)  # rows of the second table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run", help="train and measure everything")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--work", type=Path, required=True, help="runs and students lie here, and go on here")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--size", choices=sorted(SIZES), default="demo")
    running.add_argument(
        "--only", nargs="+", choices=sorted(STUDENTS), help="these students, and their like without teachers"
    )
    running.add_argument("--rate", type=float, default=1.0, help="of experts and monolith, times the demo's")
    running.add_argument("--guidances", type=float, nargs="+", default=GUIDANCES)
    running.add_argument("--seeds-at-once", type=int, default=1, help="on machines of more than two cores")
    running.add_argument("--no-monolith", action="store_true", help="leave it for later; it takes a sixth of the time")
    running.add_argument(
        "--students-only", action="store_true", help="beside them only the flow ensemble by top-1; half of the time"
    )
    controlling = verbs.add_parser("control", help="a student whose teachers are heard as those of another run are")
    controlling.add_argument("run", type=Path)
    controlling.add_argument("like", type=Path, help="the other run")
    controlling.add_argument("options", nargs=argparse.REMAINDER, help="of `atoll distill`, --out among them")
    drawing = verbs.add_parser("sheet", help="what seed 0 painted, side by side")
    drawing.add_argument("--work", type=Path, required=True)
    drawing.add_argument("--out", type=Path, required=True)
    writing = verbs.add_parser("table", help="the table in Markdown")
    writing.add_argument("records", type=Path, nargs="+", help="of one rate and different seeds: as one")
    writing.add_argument("--into", type=Path, help="write it here, in the place of the one before")
    arguments = parser.parse_args()
    if arguments.verb == "sheet":
        draw_sheet(arguments.work.resolve() / "seed-0", arguments.out)
    elif arguments.verb == "table":
        write_table(arguments.records, arguments.into)
    elif arguments.verb == "control":
        teach_control(arguments.run, arguments.like, arguments.options)
    else:
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    record: dict[str, Any] = {
        "command": " ".join(["python benchmarks/distill.py", *sys.argv[1:]]),
        "commit": commit(),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "learning_rate": at_rate(demo_settings(0), arguments.rate).plan.training.learning_rate,
        "unprompted": unprompted_share(demo_settings(0).plan.training.condition_dropout),
        "guidances": arguments.guidances,
        "seeds": [],
    }
    # processes, since a stage that can be stopped must run in its process's main thread
    with ProcessPoolExecutor(arguments.seeds_at_once, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(measured, arguments, seed) for seed in arguments.seeds]):
            record["seeds"] = sorted([*record["seeds"], done.result()], key=lambda each: int(each["seed"]))
            arguments.out.write_text(json.dumps(record | {"summary": summary(record)}, indent=1) + "\n")
    print("\n".join(table(json.loads(arguments.out.read_text()))))


def measured(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """All that is asked for of one seed."""
    settings, *painting = SIZES[arguments.size]
    work, made = arguments.work.resolve() / f"seed-{seed}", at_rate(settings(seed), arguments.rate)
    names = arguments.only or list(STUDENTS)
    bare, compare = arguments.students_only, not (arguments.no_monolith or arguments.students_only)
    return measure(work, made, names, arguments.guidances, *painting, compare=compare, bare=bare)


def learning_rate(record: dict[str, Any]) -> float:
    """An expert's. Earlier records say how many times the demo's it is, which was 0.003."""
    return float(record.get("learning_rate", 0.003 * record.get("rate", 1.0)))


def guidances_of(record: dict[str, Any]) -> Sequence[float]:
    return record.get("guidances", GUIDANCES)


def measure(
    work: Path,
    settings: RunSettings,
    names: Sequence[str],
    guidances: Sequence[float],
    count: int,
    steps: int,
    *,
    compare: bool,
    bare: bool,
) -> dict[str, Any]:
    """Ensembles of one seed and students, `count` samples of each; `bare`: of ensembles only what students need."""
    seed = settings.asked.seed
    controls = {name for name in names if name.startswith("control")}
    taught_by = {"flow", *(STUDENTS[name][0] for name in names), *(["mixed"] if controls else [])}
    runs = {name: work / name for name in MIXES if name in taught_by}
    for name in runs:
        make_run(runs[name], with_mix(settings, MIXES[name]), known=runs["flow"], compare=compare and name == "flow")
    prompts = work / "prompts.txt"
    prompts.write_text("\n".join(prompts_of(runs["flow"])) + "\n")
    without = {name: like for name, like in ALONE.items() if like in names and not bare}
    students = {name: work / "students" / name for name in (*names, *without)}

    def taught(name: str) -> None:
        whose, options = STUDENTS[name]
        more = ["--prompts", prompts] if "--from-samples" in options else []
        how = ["--out", students[name], "--seed", seed, "--device", "cpu", *options, *more]
        if name in controls:
            run_python(__file__, "control", runs[whose], runs["mixed"], *how)
        else:
            atoll("distill", runs[whose], *how)

    def painted(name: str, scale: float) -> None:
        beside = [part for place in students.values() for part in ("--student", place)] if name == "flow" else []
        how = ["-n", count, "--steps", steps, "--guidance", f"{scale:g}", *(["--route", "top-1"] if bare else [])]
        atoll("evaluate", runs[name], *how, *beside, "--out", results(work, name, scale))

    at_once([lambda name=name: taught(name) for name in names])  # type: ignore[misc]
    told = {name: json.loads((students[name] / "distillation.json").read_text()) for name in names}
    operations = {name: each["operations"] for name, each in told.items()}

    def alone(name: str, like: str) -> None:
        operations[name] = train_alone(runs["flow"], name, students[name], settings, told[like])

    at_once([lambda each=each: alone(*each) for each in without.items()])  # type: ignore[misc]
    seen = list(product(["flow"] if bare else runs, guidances))
    at_once([lambda each=each: painted(*each) for each in seen])  # type: ignore[misc]
    arms: dict[str, dict[str, Any]] = {}
    for name, scale in seen:
        evaluation = evaluated(work, name, scale)
        arms |= {(arm if name == "flow" else f"{name} {arm}"): kept for arm, kept in arms_of(evaluation).items()}
    pairs = [(f"student-{other}{how}", f"student-{how[1:] or 'default'}") for other, how in product(OTHERS, HOWS)]
    real = RealData(Artifact.open(runs["flow"] / "data", "data"), settings.evaluation.feature_scale)
    reference = FrechetReference.of(real.features)
    return {
        "seed": seed,
        "floors": evaluated(work, "flow", guidances[0])["floors"],
        "operations": operations,
        "started": {name: each["start"] for name, each in told.items()},
        "per_step": per_step(runs["flow"], told[names[0]]),
        "yardstick": {name: error for name, place in students.items() if (error := last_yardstick(place)) is not None},
        "paired": {
            arm_of(own, scale): resampled_ratios(work, real, reference, own, flow, scale)
            for own, flow in pairs
            for scale in guidances
            if {arm_of(own, scale), arm_of(flow, scale)} <= set(arms)
        },
        "arms": {name: arm for name, arm in arms.items() if name.rpartition("-g")[0] in (*ROWS, *BESIDE)},
    }


def arm_of(row: str, scale: float) -> str:
    """As an evaluation calls it."""
    return f"{row}-g{scale:g}"


def last_yardstick(student: Path) -> float | None:
    """Error on unseen data at the end of a training; without data there is none."""
    error: float | None = json.loads((student / "metrics.jsonl").read_text().splitlines()[-1]).get("val_loss")
    return error


def resampled_ratios(
    work: Path, real: RealData, reference: FrechetReference, own: str, flow: str, scale: float
) -> list[float]:
    """Ratios of the distances of two arms, both resampled alike; the noise behind image i is that of every seed's."""
    folders = {arm["name"]: arm["folder"] for arm in evaluated(work, "flow", scale)["arms"]}
    resampled = []
    for arm in (own, flow):
        place = results(work, "flow", scale) / "samples" / folders[arm_of(arm, scale)]
        features = real.features_of(read_samples(Artifact.open(place, "samples"))[0])
        resampled.append(reference.distances(features.numpy(), RESAMPLES, seed=0)[1:])
    return [round(a / b, 5) for a, b in zip(*resampled, strict=True)]


def results(work: Path, name: str, scale: float) -> Path:
    return work / f"{name}-results-g{scale:g}"


def evaluated(work: Path, name: str, scale: float) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results(work, name, scale) / "evaluation.json").read_text())
    return found


def at_once(jobs: Sequence[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def make_run(place: Path, settings: RunSettings, *, known: Path, compare: bool) -> None:
    """The demo with these settings up to its router; `known`'s router and experts of the same orders are taken."""
    place.mkdir(parents=True, exist_ok=True)
    run = Store.at(place)
    print(f"{place.parent.name}: the ensemble {place.name}", file=sys.stderr, flush=True)
    settings = write_once(run, settings)

    def stages(until: str) -> None:
        carry_out(run, settings, device="cpu", show=lambda what, done, total: None, compare=compare, until=until)

    stages("plan")
    orders, copy = sorted(place.glob("orders/0*.json")), place.parent / "copy"
    same = [order.stem for order in orders if read_order(order)[0] == read_order(known / "orders" / order.name)[0]]
    for part in ["router", *(f"islands/{name}/expert" for name in same)]:
        if known != place and not (place / part).exists():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(known / part, copy)
            (place / part).parent.mkdir(parents=True, exist_ok=True)
            copy.rename(place / part)
    stages("router")


def with_mix(settings: RunSettings, mix: str) -> RunSettings:
    """Settings with another mix of objectives, and without a blind router."""
    asked, plan = (
        settings.asked.model_copy(update={"objectives": mix}),
        settings.plan.model_copy(update={"objectives": mix}),
    )
    comparison = settings.comparison.model_copy(update={"blind": False})
    return settings.model_copy(update={"asked": asked, "plan": plan, "comparison": comparison})


def at_rate(settings: RunSettings, times: float) -> RunSettings:
    """Settings with so many times the learning rate of experts and monolith."""
    training = settings.plan.training
    training = training.model_copy(update={"learning_rate": times * training.learning_rate})
    return settings.model_copy(update={"plan": settings.plan.model_copy(update={"training": training})})


def prompts_of(run: Path) -> list[str]:
    """Every caption of the data, once."""
    captions = Index.of(Artifact.open(run / "data", "data")).captions
    return sorted({caption for some in captions for caption in some})


def teach_control(run: Path, like: Path, options: Sequence[str]) -> None:
    """`atoll distill RUN`, but each teacher is heard as if it were the one of its cluster in `like`."""
    heard_alike = Teachers.of(Store.at(like)).trust  # whoever teaches
    words = ["atoll", "distill", str(run), *options]
    with patch.object(Teachers, "trust", staticmethod(heard_alike)), patch.object(sys, "argv", words):
        run_atoll()


def train_alone(run: Path, name: str, out: Path, settings: RunSettings, told: dict[str, Any]) -> dict[str, int]:
    """An expert on all of the data, without teachers, for the operations that a student takes with them."""
    plan = DistillPlan.model_validate(told["plan"])
    spent = told["operations"]
    whole = (spent["student"] + spent["teachers"]) / spent["student"]
    batch = plan.training.batch
    training = plan.training.over(round(plan.training.images * whole / batch) * batch)
    data, partition = Artifact.open(run / "data", "data"), Artifact.open(run / "partition", "partition")
    order = order_on_everything(data, partition, settings.plan, name, "flow")
    change = {"architecture": plan.network, "objective": plan.objective, "training": training}
    order = Order.model_validate(order.model_copy(update=change).model_dump())
    write_orders(run / f"orders-{name}", [order], {}, {"partition": partition.digest}, None)
    atoll("train", run / f"orders-{name}" / f"{name}.json", "--out", out, "--device", "cpu", "--no-sheets")
    own = 3 * flops_forward(plan.network) * training.images
    return {"student": own, "teachers": 0, "monolith": spent["monolith"]}


def per_step(run: Path, told: dict[str, Any]) -> dict[str, int]:
    """Operations for one step of one image without guidance; all experts of the demo are alike."""
    place = Store.at(run)
    router = open_ensemble(place).router
    assert router is not None
    trunk = flops_forward(read_router_card(open_reference(place, router, "router")).architecture.trunk)
    student = flops_forward(DistillPlan.model_validate(told["plan"]).network)
    return {"student": student, "top-1": student + trunk, "top-2": 2 * student + trunk}


def arms_of(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is kept of every arm, by its name."""
    kept = ("frechet", "frechet_interval", "recognised", "nearest_median")
    return {arm["name"]: {key: arm[key] for key in kept} for arm in evaluation["arms"]}


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Ratios of every seed to the flow ensemble's top-1, and what the issue asks for."""
    seeds, guidances = record["seeds"], guidances_of(record)
    rows = {
        row: {scale: [distance(s, row, scale) / distance(s, "top-1", scale) for s in seeds] for scale in guidances}
        for row in ROWS
        if all(arm_of(row, guidances[0]) in seed["arms"] for seed in seeds)
    }
    with_data = [{n: o for n, o in seed["operations"].items() if not n.startswith("samples")} for seed in seeds]
    spent = [next(iter(each.values())) for each in with_data]  # all alike
    return {
        "frechet over the flow ensemble's, top-1, by guidance and seed": rows,
        "means": {row: {scale: mean(ratios) for scale, ratios in each.items()} for row, each in rows.items()},
        "student of two objectives over that of flow": {
            f"{other}{how}": {scale: over_flow(seeds, other, how, scale) for scale in guidances}
            for other, how in product(OTHERS, HOWS)
            if over_flow(seeds, other, how, guidances[0])
        },
        "share of the monolith's operations": mean((o["student"] + o["teachers"]) / o["monolith"] for o in spent),
        "targets": {"student over ensemble": 1.1, "share": 1 / 3, "two objectives over flow": 1.0},
    }


def over_flow(seeds: list[dict[str, Any]], other: str, how: str, scale: float) -> list[float]:
    """By seed: the distance of a student of two objectives over that of the same student of flow teachers.

    Nothing, where one of the two was not measured for all seeds.
    """
    own, flow = f"student-{other}{how}", f"student-{how[1:] or 'default'}"
    if not all(arm_of(row, scale) in seed["arms"] for seed in seeds for row in (own, flow)):
        return []
    return [distance(seed, own, scale) / distance(seed, flow, scale) for seed in seeds]


def distance(seed: dict[str, Any], row: str, scale: float) -> float:
    return float(seed["arms"][arm_of(row, scale)]["frechet"])


def merged(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As if all seeds had been asked for at once, at the guidances that all have."""
    first, *others = records
    seeds = sorted((seed for record in records for seed in record["seeds"]), key=lambda seed: int(seed["seed"]))
    assert len({(learning_rate(record), record.get("unprompted")) for record in records}) == 1, "of different trainings"
    assert len({seed["seed"] for seed in seeds}) == len(seeds), "a seed stands in two records"
    shared = [scale for scale in guidances_of(first) if all(scale in guidances_of(other) for other in others)]
    return {"seeds": seeds, "guidances": shared}


def write_table(places: Sequence[Path], page: Path | None) -> None:
    """The table and what it was made with, for a reader or into a page between its two marks."""
    records = [json.loads(place.read_text()) for place in places]
    record, made = merged(records), ""
    for each in records:
        seeds = ", ".join(str(seed["seed"]) for seed in each["seeds"])
        made += (
            f"`{each['command']}`, seeds {seeds}, commit {each['commit'][:7]}, {each['machine']['cores']} CPU cores; "
            f"experts' rate {learning_rate(each):g}, {each.get('unprompted', 0.1):g} of students' lessons unprompted.\n"
        )
    made = made.rstrip()
    like = [*like_for_like(record), *started_alike(record)]
    text = "\n".join([*table(record), "", *objectives_table(record), "", *like, *([""] if like else []), made])
    if page is None:
        print(text)
        return
    before, _, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    assert end, f"{page} has no place for a table"
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def table(record: dict[str, Any]) -> list[str]:
    """One row per arm: distances by seed with the mean half-width of their intervals, ratios, costs."""
    guidances = guidances_of(record)
    head = " | ".join(f"guidance {scale:g} | ratio" for scale in guidances)
    lines = [
        f"| | Frechet distance, {head} | training: own + teachers' | cost of a step |",
        "|---|" + "---|---|" * len(guidances) + "---|---|",
    ]
    for row, name in ROWS.items():
        seeds, cells = [seed for seed in record["seeds"] if arm_of(row, guidances[0]) in seed["arms"]], []
        if not seeds:
            continue
        for scale in guidances:
            values = [distance(seed, row, scale) for seed in seeds]
            ends = [seed["arms"][arm_of(row, scale)]["frechet_interval"] for seed in seeds]
            half = mean((high - low) / 2 for low, high in ends)
            ratios = [value / distance(seed, "top-1", scale) for value, seed in zip(values, seeds, strict=True)]
            cells.append(f"{' / '.join(f'{value:.1f}' for value in values)} (± {half:.1f})")
            cells.append(f"{mean(ratios):.2f} ({' / '.join(f'{ratio:.2f}' for ratio in ratios)})")
        lines.append(f"| {name} | {' | '.join(cells)} | {training_cost(seeds[0], row)} | {step_cost(seeds[0], row)} |")
    return lines


def like_for_like(record: dict[str, Any]) -> list[str]:
    """A line for every start of which both students were measured: the one's distance over the other's, by seed."""
    lines, (own, control) = [], LIKE_FOR_LIKE
    for how, (told, _) in HOWS.items():
        cells = []
        for scale in guidances_of(record):
            both = [over_flow(record["seeds"], each, how, scale) for each in (own, control)]
            if all(both):
                ratios = [a / b for a, b in zip(*both, strict=True)]
                cells.append(f"{ratios_cell(ratios, [])} at guidance {scale:g}")
        if cells:
            lines.append(f"- {told}: {OTHERS[own][1]}, over {OTHERS[control][1]}: {'; '.join(cells)}")
    return lines


def started_alike(record: dict[str, Any]) -> list[str]:
    """A line for students of two objectives of which some begin elsewhere than that of flow: those that do not."""
    lines = []
    for other, (how, (told, _)) in product(OTHERS, HOWS.items()):
        own, flow = f"{other}{how}", how[1:] or "default"
        both = [seed for seed in record["seeds"] if {own, flow} <= set(seed.get("started", {}))]
        alike = [seed for seed in both if seed["started"][own] == seed["started"][flow]]
        if 0 < len(alike) < len(both) == len(record["seeds"]):
            numbers = ", ".join(str(seed["seed"]) for seed in alike)
            cells = [
                f"{ratios_cell(over_flow(alike, other, how, g), [])} at guidance {g:g}" for g in guidances_of(record)
            ]
            lines.append(
                f"- {told}: {OTHERS[other][1]}, begun at the same expert (seeds {numbers}): {'; '.join(cells)}"
            )
    return lines


def objectives_table(record: dict[str, Any]) -> list[str]:
    """Students of teachers of two objectives over those of flow teachers: the mean and each seed's.

    Distances by guidance, with the half-width of the mean's interval where the record has it, and the yardstick.
    """
    seeds, guidances = record["seeds"], guidances_of(record)
    others = [other for other in OTHERS if any(over_flow(seeds, other, how, guidances[0]) for how in HOWS)]
    measured = [f"guidance {scale:g}" for scale in guidances]
    measured += ["error on unseen data"] if all("yardstick" in seed for seed in seeds) else []
    head = [f"{OTHERS[other][1]}, {what}" for other, what in product(others, measured)]
    lines = [f"| student of two objectives over that of flow | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for how, (name, _) in HOWS.items():
        cells = []
        for other in others:
            own = []
            for scale in guidances:
                name_there = arm_of(f"student-{other}{how}", scale)
                resampled = [seed["paired"][name_there] for seed in seeds if name_there in seed.get("paired", {})]
                own.append(ratios_cell(over_flow(seeds, other, how, scale), resampled))
            own.append(ratios_cell(yardstick_over_flow(seeds, other, how), []))
            cells += own[: len(measured)]
        if set(cells) != {"-"}:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def ratios_cell(ratios: Sequence[float], resampled: Sequence[Sequence[float]]) -> str:
    """The mean over seeds, half of its 95 % interval, and each seed's.

    The interval is the seeds' own (Student's t), where there are enough of them, or that of the draws they share.
    """
    if not ratios:
        return "-"
    half = ""
    if len(ratios) >= ENOUGH:
        half = f" ± {t.ppf(0.975, len(ratios) - 1) * stdev(ratios) / len(ratios) ** 0.5:.3f}"
    elif len(resampled) == len(ratios):
        half = f" ± {1.96 * stdev(map(mean, zip(*resampled, strict=True))):.3f}"
    return f"{mean(ratios):.3f}{half} ({' / '.join(f'{ratio:.3f}' for ratio in ratios)})"


def yardstick_over_flow(seeds: list[dict[str, Any]], other: str, how: str) -> list[float]:
    """By seed: as `over_flow`, of the error on unseen data."""
    own, flow = f"{other}{how}", how[1:] or "default"
    if not all({own, flow} <= set(seed.get("yardstick", {})) for seed in seeds):
        return []
    return [seed["yardstick"][own] / seed["yardstick"][flow] for seed in seeds]


def training_cost(seed: dict[str, Any], row: str) -> str:
    """As shares of the monolith's operations."""
    if not row.startswith("student-"):
        return "1 + 0" if row == "monolith" else "1 + router"
    spent = seed["operations"][row.removeprefix("student-")]
    own, teachers = (spent[key] / spent["monolith"] for key in ("student", "teachers"))
    return f"{own:.2f} + {teachers:.2f}"


def step_cost(seed: dict[str, Any], row: str) -> str:
    """In passes of one expert."""
    costs = seed["per_step"]
    return f"{costs.get(row.rpartition(' ')[2], costs['student']) / costs['student']:.2f}"


def draw_sheet(work: Path, out: Path) -> None:
    """Twenty digits of every arm at guidance 1, each column from the same noise."""
    import torch
    from PIL import Image, ImageDraw

    arms = {arm["name"]: arm["folder"] for arm in evaluated(work, "flow", 1)["arms"]}
    names = {"monolith": "monolith", "top-1": "ensemble, top-1"}
    names |= {f"student-{name}": title for name, title in SHEET_STUDENTS.items()}
    scale, label, columns = 4, 130, 20
    sheet = Image.new("L", (label + columns * 8 * scale + 4, len(names) * (8 * scale + 4) + 4), 255)
    for row, (arm, title) in enumerate(names.items()):
        images, _ = read_samples(Artifact.open(results(work, "flow", 1) / "samples" / arms[f"{arm}-g1"], "samples"))
        strip = torch.cat(list(images[:columns, 0]), dim=1).numpy()
        picture = Image.fromarray(255 - strip).resize((columns * 8 * scale, 8 * scale), Image.Resampling.NEAREST)
        top = 4 + row * (8 * scale + 4)
        sheet.paste(picture, (label, top))
        ImageDraw.Draw(sheet).text((4, top + 10), title, fill=0)
    sheet.save(out, optimize=True)


def atoll(*arguments: object) -> None:
    run_python("-m", "atoll", *arguments)


def run_python(*arguments: object) -> None:
    words = [str(each) for each in arguments]
    print(" ".join(words), file=sys.stderr, flush=True)
    command = [sys.executable, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
