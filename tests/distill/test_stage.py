"""From a run to a student: killed and resumed, started from an expert, sampled, and refused in one line."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, Store, UserError
from atoll.cli import main
from atoll.diffusion import Kind
from atoll.distill.plan import DistillPlan, student_plan
from atoll.distill.stage import Teachers, distill, outside_loss
from atoll.islands.expert import all_licenses, load_expert
from atoll.model import load
from atoll.registry.changes import remove_expert
from atoll.registry.status import stages
from atoll.registry.versions import place_of
from atoll.training.resources import Resources
from killed import finish, start

TINY = ["--device", "cpu", "--set", "training.images=512", "--set", "training.batch=32"]


@pytest.fixture(scope="module")
def teachers(tiny_demo: Path) -> Teachers:
    return Teachers.of(Store.at(tiny_demo))


def tiny_plan(teachers: Teachers, objective: str | None = None, **changes: object) -> DistillPlan:
    plan = student_plan(teachers.orders, objective=objective)
    training = plan.training.model_copy(update={"images": 128, "batch": 32})
    return plan.model_copy(update={"training": training, **changes})


@pytest.mark.parametrize("states", ["data", pytest.param("samples", marks=pytest.mark.slow)])
def test_killed_and_resumed_it_is_the_same_student(
    states: str, tiny_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("a handwritten one\na handwritten two\n")
    how = ["--start", "best"]
    if states == "samples":
        how = ["--from-samples", "--prompts", str(tmp_path / "prompts.txt"), "--set", "samples=40", "--set", "steps=2"]
    command = ["distill", str(tiny_demo), *TINY, *how, "--checkpoint-seconds", "0", "--out"]
    main([*command, str(tmp_path / "unbroken")])
    process = start([*command, "broken"], tmp_path)
    state = tmp_path / "broken" / "state"
    deadline = time.monotonic() + 60
    while not [path for path in state.glob("*.safetensors") if path.name != "samples.safetensors"]:
        assert time.monotonic() < deadline
        assert process.is_alive(), (tmp_path / "printed.txt").read_text()
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode != 0
    assert (state / "samples.safetensors").exists() == (states == "samples")
    assert not (tmp_path / "broken" / "manifest.json").exists()
    finish([*command, "broken"], tmp_path)
    unbroken, broken = Artifact.open(tmp_path / "unbroken", "expert"), Artifact.open(tmp_path / "broken", "expert")
    assert broken.digest == unbroken.digest
    assert ("router" in broken.manifest.parents) == (states == "samples")
    assert not state.exists()
    main([*command, str(tmp_path / "broken")])
    assert "already there" in capsys.readouterr().out.splitlines()[-1]


def test_a_student_is_an_expert_like_any_other(teachers: Teachers, tiny_demo: Path, tmp_path: Path) -> None:
    """Of another depth and objective than its teachers; sampled alone, measured with them, known to `status`."""
    run = tmp_path / "run"
    shutil.copytree(tiny_demo, run, ignore=shutil.ignore_patterns("islands"))
    plan = tiny_plan(teachers, "ddpm")
    plan = plan.model_copy(update={"network": replace(plan.network, depth=1)})
    artifact = distill(Store.at(run), run / "student", plan, resources=Resources("cpu"))
    assert artifact is not None
    card = load_expert(artifact.store).card
    assert (card.kind, card.cluster, card.architecture.depth, card.origin) == (Kind.EPSILON, None, 1, None)
    assert [teacher.digest for teacher in card.teachers] == [m.digest for m in teachers.version.serving]
    assert artifact.manifest.parents["teacher-03"] == teachers.experts[3].digest
    assert json.loads(artifact.read("distillation.json"))["plan"] == plan.model_dump(mode="json")
    model = load(run / "student")
    assert len(model.generate(["a handwritten one"] * 2, steps=2)) == 2

    how = ["--route", "top-1", "-n", "20", "--steps", "2", "--threads", "1", "--out", str(tmp_path / "results")]
    main(["evaluate", str(run), "--student", str(run / "student"), *how])
    rows = json.loads((tmp_path / "results" / "evaluation.json").read_text())["configurations"]
    assert {row["name"]: row["digest"] for row in rows}["student-student-g2"] == model.digest
    assert "student student, guidance 2" in (tmp_path / "results" / "report.html").read_text()

    found = {stage.name: stage for stage in stages(Store.at(run))}["student"]
    assert (found.digest, found.next) == (artifact.digest[: len(found.digest)], "")
    remove_expert(Store.at(run), 0)
    assert {stage.name: stage for stage in stages(Store.at(run))}["student"].next.startswith("atoll distill")


def test_a_plan_follows_the_orders_of_the_teachers(teachers: Teachers) -> None:
    plan, order = student_plan(teachers.orders), teachers.orders[0]
    assert plan.network == order.architecture
    assert plan.training.images == sum(one.training.images for one in teachers.orders) // 4
    assert plan.training.condition_dropout == pytest.approx(2 * order.training.condition_dropout)
    assert plan.objective.kind is Kind.VELOCITY
    generated = plan.from_samples(["a"])
    assert (generated.samples, generated.prompts) == (plan.training.images // 32, ("a",))
    assert generated.digest() != plan.digest()


def test_it_starts_from_the_best_teacher_of_its_kind(teachers: Teachers, tmp_path: Path) -> None:
    """By the validation loss outside its cluster, as admission measured it."""
    flow = [m for m in teachers.version.serving if "velocity" in m.objective]
    best = teachers.best(tiny_plan(teachers))
    assert best == min(flow, key=outside_loss)
    assert teachers.best(tiny_plan(teachers, start="random")) is None
    assert teachers.best(tiny_plan(teachers, "v")) is None
    with pytest.raises(UserError, match="--start best: no measured expert"):
        teachers.best(tiny_plan(teachers, "v", start="best"))
    plan = tiny_plan(teachers)
    still = plan.training.model_copy(update={"learning_rate": 1e-12, "images": 32})
    distill(teachers.run, tmp_path / "s", plan.model_copy(update={"training": still}), resources=Resources("cpu"))
    student, expert = load_expert(tmp_path / "s"), load_expert(place_of(teachers.run, best))
    assert student.card.origin == f"expert {best.digest[:12]}, the best teacher"
    for ours, theirs in zip(student.network.parameters(), expert.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--start", "nowhere"], "--start: input should be 'best' or 'random' (got 'nowhere')"),
        (["--prompts", __file__], "--prompts"),
        (["--from-samples"], "--from-samples: these experts read text; give --prompts"),
        (["--start", "best", "--set", "network.depth=1"], "--start best: no measured expert"),
        (["--objective", "x"], "--objective x: not known; use ddpm, flow, v"),
        (["--data-weight", "2"], "--data-weight: input should be less than or equal to 1 (got 2)"),
        (["--set", "network.dept=1"], "did you mean network.depth"),
        (["--set", "network.latent=[1, 4, 4]"], "the experts' latents are"),
        (["--set", "network.vocabulary=5"], "what its teachers read, which is 12"),
        (["--from-samples", "--prompts", __file__], "unknown word 'from'"),
        (["--memory", "8GB", "--device", "cpu"], "--memory: means a CUDA device's memory, and cpu is none"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str], message: str, tiny_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(["distill", str(tiny_demo), "--out", str(tmp_path / "student"), *arguments], capsys)
    assert not (tmp_path / "student").exists()


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line in which a command says what is wrong."""
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_that_lacks_something(
    teachers: Teachers, tiny_demo: Path, planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No experts yet; the data gone; one expert damaged; one that is not active any more."""
    student = ["--device", "cpu", "--out", str(tmp_path / "student")]
    assert "cluster 0 has no expert to learn from" in refused(["distill", str(planned), *student], capsys)
    run = tmp_path / "run"
    shutil.copytree(tiny_demo, run, ignore=shutil.ignore_patterns("data", "islands", "samples"))
    assert "--from-samples needs no data" in refused(["distill", str(run), *student], capsys)
    third = teachers.version.serving[3]
    weights = run / third.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert third.path in refused(["distill", str(run), *student], capsys)
    remove_expert(Store.at(run), 3)
    assert "cluster 3 has no expert" in refused(["distill", str(run), *student], capsys)
    assert not (tmp_path / "student").exists()


def test_a_card_names_teachers_and_their_licenses(teachers: Teachers) -> None:
    """Experts of two people under two licenses: both are the student's, and are in its card."""
    assert all_licenses(["MIT", None, "CC-BY-4.0", "MIT"]) == "MIT AND CC-BY-4.0"
    assert all_licenses([None, ""]) is None
    licenses = {0: "MIT", 1: "CC-BY-4.0", 2: "MIT"}
    experts = {
        k: replace(expert, card=expert.card.model_copy(update={"license": licenses.get(k)}))
        for k, expert in teachers.experts.items()
    }
    card = replace(teachers, experts=experts).card(tiny_plan(teachers, samples=1), None)
    assert card.license == "MIT AND CC-BY-4.0"
    assert [(teacher.cluster, teacher.license) for teacher in card.teachers[:3]] == list(licenses.items())
