"""Benchmarks that wait for a GPU run here at a size that says nothing, so that they run there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from atoll.models.accounting import flops_forward
from atoll.process import Condition
from atoll.router.recipes import router_network

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import distill  # noqa: E402
import table_plan  # noqa: E402
import tables  # noqa: E402


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_benchmark_can_be_begun(name: str) -> None:
    """Some wait for a card, or take an hour: what they take from each other is there."""
    importlib.import_module(name)


def test_the_sampling_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "sampling.json"
    script = ROOT / "benchmarks" / "sampling.py"
    command = [sys.executable, script, "--smoke", "--out", out, "--work", tmp_path / "work"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_COMMIT": "0000000", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    record = json.loads(out.read_text())
    assert record["machine"]["commit"] == "0000000"
    assert {name: part["error"] for name, part in record["parts"].items() if "error" in part} == {}
    assert len(record["parts"]) == 8
    assert len(record["targets"]) >= 10, "every target is looked for where it is"
    # recorded from the demo's router: calm with a prompt, less so without one (pilot2: 0.62 changes in 50 steps)
    calm, restless = (record["machine"]["traces"][name]["top1_changes"] for name in ("balanced", "unprompted"))
    assert calm < 0.2 < restless < 1.5


# of table S one part of every kind: the others differ in numbers alone
SOME_STUDENTS = (
    "main",
    "best",
    "average",
    "of-x4",
    "more-alone",
    "x8-kinds-of-x4",
    "trust-of-x4",
    "data-control-of-x4",
)
SOME_STUDENTS += ("x8-of-x4", "fifth-of-x4", "starts-of-x4", "samples-of-x4")


def photographs_of_nothing(folder: Path) -> None:
    """A prepared set as benchmarks/photograph_set.py leaves it: two classes of 8x8 images, no autoencoder."""
    numbers = torch.Generator().manual_seed(0)
    labels = torch.arange(560) % 2
    pixels = torch.rand(2, 3, 8, 8, generator=numbers)[labels] + 0.1 * torch.randn(560, 3, 8, 8, generator=numbers)
    latents = 2.0 * pixels - 1.0
    folder.mkdir(parents=True)
    save_file(
        {
            "labels": labels,
            "clusters": torch.arange(480) // 60,
            "clusters-4": torch.arange(480) // 120,
            "clusters-16": torch.arange(480) // 30,
            "clusters-random": torch.randint(8, (480,), generator=numbers),
            "clusters-label": torch.arange(480) % 8,
            "text": torch.randn(8, 6, generator=numbers),
            "first": torch.tensor([0, 2]),
            "count": torch.tensor([2, 2]),
        },
        folder / "set.safetensors",
    )
    kinds = ["train"] * 4 + ["template", "synonym", "paraphrase", "paraphrase"]
    meta = {
        "train": 480,
        "names": ["a", "b"],
        "captions": list("abcdefgh"),
        "kinds": kinds,
        "classes": [0, 0, 1, 1] * 2,
    }
    (folder / "set.json").write_text(json.dumps(meta | {"cluster_sizes": [60] * 8, "text_encoder": "none"}))
    np.save(folder / "latents.npy", latents.half().numpy())
    features = torch.nn.functional.adaptive_avg_pool2d(pixels.clamp(0, 1), 8).flatten(1)
    np.save(folder / "features.npy", features.numpy())
    space = {"autoencoder": "pixels", "extractor": "pixels", "mean": [0.0] * 3, "std": [1.0] * 3}
    (folder / "space.json").write_text(json.dumps(space))


def test_the_tables_run_go_on_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photographs_of_nothing(tmp_path / "set")
    out = tmp_path / "tables.json"
    first = ["run", "--set", tmp_path / "set", "--out", out, "--scale", "toy", "--device", "cpu", "--workers", "0"]
    tables.main([*map(str, first), "--tables", "A", "--seeds", "0", "--sheet", str(tmp_path / "sheet.png")])
    before = json.loads(out.read_text())
    capsys.readouterr()
    asked = [name for name in table_plan.TABLES if name != "S"] + [f"S.{part}" for part in SOME_STUDENTS]
    tables.main([*map(str, first), "--tables", *asked, "--seeds", "0"])
    said, record = capsys.readouterr().out, json.loads(out.read_text())
    assert "all done" in said
    assert "monolith-s0" not in said, "what is there is not made again"
    assert set(before["arms"]) < set(record["arms"])
    assert all(record["arms"][name] == arm for name, arm in before["arms"].items())
    # equal images, whoever sees them
    models = record["models"]
    seen = {name: model["training"]["images"] * model["networks"] for name, model in models.items()}
    assert seen["monolith-s0"] == seen["flow8-s0"] == seen["start-s0"] + seen["branched-s0"]
    for name in ("flow8-large", "flow-random", "flow-label", "flow-4", "flow-16"):
        assert seen[f"{name}-s0"] == seen["monolith-s0"], name
    assert (models["flow-4-s0"]["networks"], models["flow-16-s0"]["networks"]) == (4, 16)
    arms = record["arms"]
    assert len(arms["flow8-top-1-g1-s0"]["resampled"]) == table_plan.RESAMPLES
    costs = {
        name: arms[f"{name}-top-1-g1-s0"]["flops"]["sampling"] for name in ("flow8-small", "4small:4flow", "flow8")
    }
    assert costs["flow8-small"] < costs["4small:4flow"] < costs["flow8"]
    tables.main(["report", str(out), "--to", str(tmp_path / "BENCHMARKS.md")])
    page = (tmp_path / "BENCHMARKS.md").read_text()
    assert all(f"## Table {name}: " in page for name in table_plan.TABLES)
    (compared,) = (line for line in page.splitlines() if line.startswith("| 2edm:6flow |"))
    assert "[" in compared, "a ratio to eight flow experts with its interval"
    assert "| mixed, literal fusion | top-2 | 1 |" in page
    assert "| student | - | 1 |" in page
    rows = [line.split(" | ") for line in page.partition("## Students")[2].partition("\n## ")[0].splitlines()]
    beside = {row[0].removeprefix("| "): row[3:] for row in rows if len(row) == 7 and row[1] == "1"}
    assert all("[" in cell for cell in beside["student-half-x8-v-of-x4"]), "all four"
    assert ["[" in cell for cell in beside["student-of-x4"]] == [True, True, True, False], "its teachers are flow's"
    assert "alone-x8" not in beside
    # a sample costs four forwards with a teacher's, three without: equal operations but for rounding
    steps = {name: models[name]["training"]["images"] // models[name]["training"]["batch"] for name in models}
    assert steps["student-s0"] == steps["alone-s0"] == steps["flow8-s0"]
    scale, each = table_plan.Scale(), table_plan.student_recipe(table_plan.Scale(), 8).batch
    assert 4 * 8 * each == pytest.approx(3 * table_plan.student_recipe(scale, 0).batch, rel=0.01)
    assert 8 * each == scale.batch * 8 // 4, "a quarter of the monolith's batch"
    longer = table_plan.student_recipe(scale, 8, longer=2)
    assert longer.images == table_plan.student_recipe(scale, 8).images
    assert 8 * longer.batch == scale.batch, "an expert's, as of `atoll distill`"
    # a student without data has as many lessons, and pays for the router as well
    assert seen["student-samples-fifth-of-x4-s0"] == seen["student-random-fifth-of-x4-s0"] * 8, "of each teacher"
    expert, router = (record["about"][f"{who}_flops"] for who in ("expert", "router"))
    spent = arms["student-samples-fifth-of-x4-g1-s0"]["flops"]["training"]
    assert spent == seen["student-samples-fifth-of-x4-s0"] * (3 * expert + (expert + router) * 33 / 32)
    assert (tmp_path / "sheet.png").stat().st_size > 1000


def test_a_student_without_data_follows_what_its_teachers_would_paint(tmp_path: Path) -> None:
    """Every target is the ensemble's velocity at its state, by top-1; prompts are captions of the training."""
    photographs_of_nothing(tmp_path / "set")
    world = tables.World(tmp_path / "set", torch.device("cpu"), table_plan.SCALES["toy"])
    store = tables.Store(tmp_path / "set", "toy", tmp_path / "tables.json")
    model = replace(table_plan.MODELS["student-samples-fifth-of-x4"], teachers="flow8")
    for name in ("flow8", "router"):
        tables.trained_model(world, store, name, 0)
    task, pool = tables.walked(world, store, model, 0)
    assert len(pool.latents) == table_plan.recipe_of(model, world.scale).images
    assert {tuple(row) for row in pool.text.tolist()} <= {tuple(row) for row in world.text[:4].tolist()}
    assert 0 < task.dropped.float().mean() < 0.5
    mixture, _ = tables.assembled(world, store, table_plan.Arm("S", "flow8", "top-1"), 0)
    said = mixture(pool.latents.float(), task.t, Condition(pooled=pool.text, dropped=task.dropped)).value
    off = (said - task.target.float()).flatten(1).norm(dim=1) / said.flatten(1).norm(dim=1)
    # kept in half precision, where a state between two clusters may be another's
    assert off.median() < 1e-3
    assert (off < 1e-2).float().mean() > 0.9


def test_two_share_a_set(tmp_path: Path) -> None:
    """Each with a record of its own: neither takes away what the other is measuring."""
    photographs_of_nothing(tmp_path / "set")
    world = tables.World(tmp_path / "set", torch.device("cpu"), table_plan.SCALES["toy"])
    stores = [tables.Store(tmp_path / "set", "toy", tmp_path / f"{name}.json") for name in ("one", "two")]
    both = [tables.Measuring(world, store, workers=0) for store in stores]
    for measuring in both:
        measuring.collect(wait=True)
    assert stores[0].record["arms"]["floor"] == stores[1].record["arms"]["floor"]


def test_a_mean_over_seeds_has_the_interval_of_draws_that_they_share() -> None:
    """What one draw does to all seeds does not average out; what it does to one of two and undoes in the other does."""
    up, down = [1.01, 0.99] * 50, [0.99, 1.01] * 50
    assert distill.ratios_cell([1.02, 1.0], [up, down]) == "1.010 ± 0.000 (1.020 / 1.000)"
    assert distill.ratios_cell([1.02, 1.0], [up, up]) == "1.010 ± 0.020 (1.020 / 1.000)"
    assert distill.ratios_cell([1.02, 1.0], [up]) == "1.010 (1.020 / 1.000)", "no interval of half of the seeds"
    assert distill.ratios_cell([], []) == "-"
    # of five seeds their own: 2.776 sd / sqrt(5), Student's t with four degrees of freedom
    five = [1.0, 1.0, 1.0, 1.0, 1.1]
    assert distill.ratios_cell(five, [up] * 5).startswith(f"1.020 ± {2.776 * 0.044721 / 5**0.5:.3f} (")


def test_records_of_students_read_as_one() -> None:
    """Seeds of two records side by side, at the guidances of both; like for like is a ratio of ratios."""
    rows = {"default": (10.0, 12.0, 40.0), "mixed-data": (11.0, 12.0, 42.0), "control": (10.0, 6.0, 40.0)}

    def seed(number: int, guidances: tuple[float, ...]) -> dict[str, object]:
        pairs = [(row, *pair) for row, some in rows.items() for pair in zip(guidances, some, strict=True)]
        arms = {f"student-{row}-g{scale:g}": value for row, scale, value in pairs}
        return {"seed": number, "arms": {name: {"frechet": value} for name, value in arms.items()}}

    one = {"rate": 4.0, "guidances": [1.0, 1.25, 2.0], "seeds": [seed(8, (1.0, 1.25, 2.0))]}
    two = {"rate": 4.0, "guidances": [1.0, 1.25, 3.0], "seeds": [seed(7, (1.0, 1.25, 3.0))]}
    both = distill.merged([one, two])
    assert [each["seed"] for each in both["seeds"]] == [7, 8]
    assert both["guidances"] == [1.0, 1.25], "what one of them lacks is no column"
    (line,) = distill.like_for_like(both)
    assert line.endswith("1.100 (1.100 / 1.100) at guidance 1; 2.000 (2.000 / 2.000) at guidance 1.25")
    assert distill.started_alike(both) == [], "nobody says where they began"
    where = {7: {"default": "03", "mixed-data": "05"}, 8: {"default": "01", "mixed-data": "01"}}
    (line,) = distill.started_alike(both | {"seeds": [{**s, "started": where[s["seed"]]} for s in both["seeds"]]})
    assert line.endswith("(seeds 8): 1.100 (1.100) at guidance 1; 1.000 (1.000) at guidance 1.25")
    assert distill.merged([{**one, "learning_rate": 0.012}, two])["seeds"], "what was four times the demo's rate"
    for change in ({"rate": 1.0}, {"learning_rate": 0.003}, {"unprompted": 0.2}):
        with pytest.raises(AssertionError, match="different trainings"):
            distill.merged([one, {**two, **change}])
    with pytest.raises(AssertionError, match="two records"):
        distill.merged([one, one])


def test_the_tables_keep_the_router_at_the_papers_share() -> None:
    for size in ("", "small", "large"):
        scale = table_plan.Scale().of_size(size)
        expert = table_plan.expert_network(scale, (32, 8, 8), 384)
        router = flops_forward(router_network(expert))
        training = table_plan.router_recipe(scale, expert).images * router
        experts = table_plan.recipe(scale, batch=scale.batch * table_plan.CLUSTERS).images * flops_forward(expert)
        assert router <= 0.08 * flops_forward(expert)
        assert 0.039 < training / experts <= 0.04
