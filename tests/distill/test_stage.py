"""From a run to a student: killed and gone on with, started somewhere, painted with, and refused in one line."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, ArtifactWriter, Store, UserError, canonical_json, sha256_bytes
from atoll.cli import main
from atoll.cli.options import Settings
from atoll.data.space import LatentConfig
from atoll.diffusion import EDM, CosineVP, Kind, LinearFlow, Objective
from atoll.distill.plan import MOST_UNPROMPTED, DistillPlan, student_plan, unprompted_share, usual_trajectories
from atoll.distill.stage import Desk, Teachers, data_school, distill, parents_of, settled, told_trust
from atoll.distill.start import CHOSEN
from atoll.islands.expert import ExpertCard, all_licenses, load_expert, write_expert
from atoll.model import load
from atoll.models.accounting import flops_forward
from atoll.models.dit import DiT, DiTConfig
from atoll.registry.changes import remove_expert
from atoll.registry.status import stages
from atoll.registry.versions import place_of
from atoll.training.checkpoint import Checkpoints
from atoll.training.compute import ComputeConfig
from atoll.training.resources import Resources
from killed import finish, start

FLOW = "velocity on linear-flow"
TINY = ["--device", "cpu", "--set", "training.images=512", "--set", "training.batch=32"]


@pytest.fixture(scope="module")
def teachers(tiny_demo: Path) -> Teachers:
    return Teachers.of(Store.at(tiny_demo))


def tiny_plan(teachers: Teachers, **changes: object) -> DistillPlan:
    plan = student_plan(teachers.orders)
    training = plan.training.model_copy(update={"images": 128, "batch": 32})
    return plan.model_copy(update={"training": training, **changes})


@pytest.mark.parametrize("states", ["data", pytest.param("samples", marks=pytest.mark.slow)])
def test_killed_and_gone_on_with_it_is_the_same_student(
    states: str, tiny_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("a handwritten one\na handwritten two\n")
    how = ["--start", "best"]
    if states == "samples":  # in many pools
        how = ["--from-samples", "--prompts", str(tmp_path / "prompts.txt"), "--set", "trajectories=3"]
    command = ["distill", str(tiny_demo), *TINY, *how, "--checkpoint-seconds", "0", "--out"]
    main([*command, str(tmp_path / "unbroken")])
    process = start([*command, "broken"], tmp_path)
    state = tmp_path / "broken" / "state"
    deadline = time.monotonic() + 60
    while not list(state.glob("*.safetensors")):
        assert time.monotonic() < deadline
        assert process.is_alive(), (tmp_path / "printed.txt").read_text()
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode != 0
    assert (state / CHOSEN).exists() == (states == "data")
    assert not (tmp_path / "broken" / "manifest.json").exists()
    finish([*command, "broken"], tmp_path)
    unbroken, broken = Artifact.open(tmp_path / "unbroken", "expert"), Artifact.open(tmp_path / "broken", "expert")
    assert broken.digest == unbroken.digest
    assert not state.exists()
    main([*command, str(tmp_path / "broken")])
    assert "already there" in capsys.readouterr().out.splitlines()[-1]


def test_a_student_is_an_expert_like_any_other(teachers: Teachers, tiny_demo: Path, tmp_path: Path) -> None:
    """Of another depth and objective than its teachers; painted with alone, measured beside them."""
    plan = tiny_plan(teachers)
    told = Settings({"network": {"depth": 1}}).over(student_plan(teachers.orders, objective="ddpm"))
    plan = told.model_copy(update={"training": plan.training})
    artifact = distill(teachers.run, tmp_path / "student", plan, resources=Resources("cpu"))
    assert artifact is not None
    expert = load_expert(artifact.store)
    assert expert.card.kind is Kind.EPSILON
    assert expert.card.cluster is None
    assert expert.card.architecture.depth == 1
    assert [teacher.digest for teacher in expert.card.teachers] == [m.digest for m in teachers.version.serving]
    assert artifact.manifest.parents["teacher-03"] == teachers.experts[3].digest
    model = load(tmp_path / "student")
    assert len(model.generate(["a handwritten one"] * 2, steps=2)) == 2

    painted = ["--route", "top-1", "-n", "20", "--steps", "2", "--threads", "1", "--out", str(tmp_path / "results")]
    main(["evaluate", str(tiny_demo), "--student", str(tmp_path / "student"), *painted])
    rows = json.loads((tmp_path / "results" / "evaluation.json").read_text())["configurations"]
    assert {row["name"]: row["digest"] for row in rows}["student-student-g2"] == model.digest
    assert "student student, guidance 2" in (tmp_path / "results" / "report.html").read_text()


@pytest.mark.slow
def test_a_student_paints_the_same_as_a_diffusers_pipeline(teachers: Teachers, tmp_path: Path) -> None:
    """Exported, and read back by atoll; its card names who taught it."""
    distill(teachers.run, tmp_path / "student", tiny_plan(teachers), resources=Resources("cpu"))
    main(["export", str(tmp_path / "student"), "--to", "diffusers", "--out", str(tmp_path / "folder")])
    here, there = load(tmp_path / "student"), load(tmp_path / "folder")
    images = [model.generate(["a handwritten one"] * 2, steps=2, seed=5) for model in (here, there)]
    assert [image.tobytes() for image in images[0]] == [image.tobytes() for image in images[1]]
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "# One dense diffusion model of 8 experts that never met" in card
    assert all(member.digest in card for member in teachers.version.serving)


def test_a_students_classes_have_names(tmp_path: Path) -> None:
    """A model of its own is asked for a class by name, as the ensemble it comes from."""
    network = DiTConfig(latent=(1, 4, 4), patch=4, width=8, depth=1, heads=1, condition="labels", classes=3)
    card = ExpertCard(
        architecture=network,
        schedule=LinearFlow(),
        kind=Kind.VELOCITY,
        latent=LatentConfig(autoencoder="pixels", shape=(1, 4, 4), mean=(0.0,), scale=(1.0,)),
        images=0,
        class_names=("cat", "dog", "owl"),
    )
    write_expert(tmp_path / "student", DiT(network).state_dict(), card, [], {})
    condition = load(tmp_path / "student", device="cpu").condition(["a photo of an owl", 0])
    assert condition is not None
    assert condition.labels is not None
    assert condition.labels.tolist() == [2, 0]


def test_status_knows_students(teachers: Teachers, tiny_demo: Path, tmp_path: Path) -> None:
    """In a folder of its own, and in the run whose experts taught it, until others serve there."""
    run = tmp_path / "run"
    shutil.copytree(tiny_demo, run, ignore=shutil.ignore_patterns("islands", "samples"))
    distill(Store.at(run), run / "distilled", tiny_plan(teachers), resources=Resources("cpu"))
    (alone,) = stages(Store.at(run / "distilled"))
    assert alone.what.endswith("a student of 8 experts, license not said")
    beside = {stage.name: stage for stage in stages(Store.at(run))}["distilled"]
    assert (beside.digest, beside.next) == (alone.digest, "")
    remove_expert(Store.at(run), 0)
    beside = {stage.name: stage for stage in stages(Store.at(run))}["distilled"]
    assert "others serve now" in beside.what
    assert beside.next.startswith("atoll distill")


def test_operations_are_counted(teachers: Teachers, tmp_path: Path) -> None:
    """By hand: a quarter of the images, three forward passes of the student and one of a teacher for each."""
    plan = student_plan(teachers.orders)
    school = data_school(teachers, settled(plan, teachers), Desk.at(Resources("cpu"), tmp_path))
    forward = flops_forward(plan.network)  # all experts of the demo are alike
    seen = sum(order.training.images for order in teachers.orders)
    assert school.cost.student == 3 * forward * plan.training.images
    assert school.cost.teachers == forward * plan.training.images
    assert school.cost.monolith == 3 * forward * seen
    assert school.cost.share == pytest.approx(1 / 3, rel=0.05)


def test_a_student_trains_as_an_expert_does(teachers: Teachers) -> None:
    """With an expert's batch and rate, for a quarter of what eight of them see: twice as many steps as one takes."""
    plan, expert = student_plan(teachers.orders), teachers.orders[0].training
    assert (plan.training.batch, plan.training.learning_rate) == (expert.batch, expert.learning_rate)
    assert plan.training.images == 2 * expert.images
    assert plan.training.warmup_images == 2 * expert.warmup_images
    assert (expert.condition_dropout, plan.training.condition_dropout) == (0.1, 0.2)


@pytest.mark.parametrize(("experts", "student"), [(0.0, 0.0), (0.05, 0.1), (0.3, 1 / 3), (0.5, 0.5)])
def test_lessons_without_a_prompt(experts: float, student: float) -> None:
    """Twice the experts' share, up to what is best for guidance 2; never fewer, and none if they know of none."""
    assert unprompted_share(experts) == pytest.approx(student)
    guidance, shares = 2.0, torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    error = guidance**2 / (1 - shares) + (guidance - 1) ** 2 / shares
    assert float(shares[error.argmin()]) == pytest.approx(MOST_UNPROMPTED, abs=0.001)


def test_students_from_before_truth_and_trust_are_found_again(teachers: Teachers) -> None:
    """A plan without a share of the truth has the digest that it had when plans could not say so; so has one that
    believes its teachers as a whole."""
    plan = student_plan(teachers.orders)
    later = ("truth", "trust", "trajectories")
    before = {key: value for key, value in plan.model_dump(mode="json").items() if key not in later}
    assert plan.digest() == sha256_bytes(canonical_json(before))
    assert plan.model_copy(update={"trajectories": 64}).digest() != plan.digest()
    assert plan.model_copy(update={"trust": "whole"}).digest() == plan.digest()
    assert len({plan.model_copy(update={"trust": rule}).digest() for rule in ("whole", "kind", "data")}) == 3
    assert plan.model_copy(update={"truth": 0.5}).digest() != plan.digest()


@pytest.mark.parametrize(
    ("latent", "text", "images", "expected"),
    [
        ((1, 8, 8), {}, 192_000, 3000),  # 6,000 are walked, in two pools
        ((1, 8, 8), {}, 1_000, 32),  # all that are walked
        ((4, 64, 64), {}, 4_096_000, 128),  # of 4 MiB
        (
            (1, 8, 8),
            {"condition": "tokens", "text_width": 4096, "text_length": 256},
            32_000,
            125,
        ),  # of 4 MiB and 16 KiB
        ((16, 1024, 1024), {}, 32_000, 1),  # of 4 GiB
    ],
)
def test_as_many_trajectories_are_shuffled_as_memory_takes(
    latent: tuple[int, int, int], text: dict[str, object], images: int, expected: int, teachers: Teachers
) -> None:
    plan = tiny_plan(teachers, states="samples", prompts=("a handwritten one",))
    network = replace(plan.network, latent=latent, condition="none", vocabulary=None, text_length=None, text_width=None)
    network, training = replace(network, **text), plan.training.over(images)
    plan = plan.model_copy(update={"network": network, "training": training})
    assert usual_trajectories(plan) == expected
    assert settled(plan.model_copy(update={"trajectories": 5}), teachers).trajectories == 5
    assert settled(plan.model_copy(update={"trajectories": 10**9}), teachers).trajectories == -(-images // 32)
    assert settled(plan.model_copy(update={"states": "data"}), teachers).trajectories is None


@pytest.mark.parametrize("record", [b"[]", b"null", b"{", b"\xff", b'{"plan": {"truth": NaN}}', b"[" * 100_000, b"{}"])
def test_whatever_lies_in_the_place_of_a_student_is_refused_in_a_line(
    record: bytes, teachers: Teachers, tmp_path: Path
) -> None:
    with ArtifactWriter(tmp_path / "student", "expert") as draft:
        (draft.folder / "distillation.json").write_bytes(record)
        draft.commit(config={}, parents={"plan": "0" * 64})
    with pytest.raises(UserError, match="already holds an artifact of another plan"):
        distill(teachers.run, tmp_path / "student", tiny_plan(teachers), resources=Resources("cpu"))


def test_trajectories_are_of_students_without_data(teachers: Teachers, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--set trajectories=7: has a meaning with --from-samples only"):
        distill(teachers.run, tmp_path / "student", tiny_plan(teachers, trajectories=7))
    assert not (tmp_path / "student").exists()


@pytest.mark.parametrize(
    ("changes", "settles"),
    [
        ({}, "data"),
        ({"trust": "kind"}, "kind"),
        ({"trust": "whole"}, "whole"),
        ({"states": "samples", "prompts": ("a handwritten one",)}, "whole"),
        ({"objective": Objective(schedule=CosineVP(), kind=Kind.EPSILON)}, "whole"),
        ({"objective": Objective(schedule=CosineVP(), kind=Kind.EPSILON), "trust": "kind"}, "whole"),
    ],
)
def test_whom_a_student_believes(changes: dict[str, object], settles: str, teachers: Teachers) -> None:
    """The data, where some of its teachers predict what it does not learn as well from them, and it is there."""
    plan = settled(tiny_plan(teachers, **changes), teachers)
    assert plan.trust == settles
    assert ("2 of 8 teachers predict what makes" in told_trust(plan, teachers)) == (settles != "whole")


@pytest.mark.parametrize("rule", ["whole", "kind"])
@pytest.mark.parametrize("finished", [True, False])
def test_students_of_earlier_rules_are_gone_on_with(
    finished: bool, rule: str, teachers: Teachers, tmp_path: Path
) -> None:
    """Where nobody says whom to believe, one that was begun or made by an earlier rule stays that; asked for another by
    name, it is refused as any other plan is."""
    plan, out = tiny_plan(teachers), tmp_path / "student"
    before = settled(plan.model_copy(update={"trust": rule}), teachers)
    if finished:
        made = distill(teachers.run, out, before, resources=Resources("cpu"))
        assert made is not None
    else:
        Checkpoints(out / "state").begin(before.identity() | {"parents": parents_of(before, teachers)}, "student")
    again = distill(teachers.run, out, plan, resources=Resources("cpu"))
    assert again is not None
    assert again.manifest.parents["plan"] == before.digest()
    with pytest.raises(UserError, match=rf'student of another plan \(trust: "{rule}" -> "data"\)'):
        distill(teachers.run, out, plan.model_copy(update={"trust": "data"}), resources=Resources("cpu"))
    fewer = plan.training.model_copy(update={"condition_dropout": 0.05})
    with pytest.raises(UserError, match=r"training.condition_dropout: 0\.\d+ -> 0\.05"):
        distill(teachers.run, out, plan.model_copy(update={"training": fewer}), resources=Resources("cpu"))


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, "best"),
        ({"start": "average"}, "average"),
        ({"start": "random"}, "random"),
        ({"objective": Objective(schedule=EDM(), kind=Kind.X0)}, "random"),
        ({"states": "samples", "prompts": ("a handwritten one",)}, "average"),
        ({"states": "samples", "objective": Objective(schedule=EDM(), kind=Kind.X0)}, "random"),
    ],
)
def test_it_begins_at_the_best_teacher_where_it_can(
    changes: dict[str, object], begins: str, teachers: Teachers
) -> None:
    assert settled(tiny_plan(teachers, **changes), teachers).start == begins


def test_nobody_is_the_best_of_another_depth_or_without_unseen_data(teachers: Teachers, tmp_path: Path) -> None:
    network = replace(teachers.orders[0].architecture, depth=1)
    assert settled(tiny_plan(teachers, network=network), teachers).start == "random"
    main(["prepare", "digits", "--out", str(tmp_path / "data"), "--set", "validation=0"])
    data = teachers.version.data.model_copy(update={"digest": Artifact.open(tmp_path / "data").digest})
    version = teachers.version.model_copy(update={"data": data})
    blind = replace(teachers, run=Store.at(tmp_path), version=version)
    assert settled(tiny_plan(teachers), blind).start == "random"


def test_the_best_teacher_is_the_one_with_the_lowest_error(teachers: Teachers, tmp_path: Path) -> None:
    """Found again, by measuring every one of its kind on all validation samples, without the stage."""
    plan = tiny_plan(teachers)
    artifact = distill(teachers.run, tmp_path / "student", plan, resources=Resources("cpu"))
    assert artifact is not None
    school = data_school(teachers, settled(plan, teachers), Desk.at(Resources("cpu"), tmp_path))
    validation = school.validation_of(plan, 10_000)
    assert validation is not None
    errors = {}
    flow = [member for member in teachers.version.serving if member.objective == FLOW]
    for member in flow:
        expert = load_expert(place_of(teachers.run, member))
        errors[member.digest] = validation.measure(expert.network, expert.card, ComputeConfig())
    best = min(errors, key=lambda digest: errors[digest])
    assert 1 < len(flow) < 8
    assert f"expert {best[:12]}" in (load_expert(artifact.store).card.origin or "")


def test_an_average_is_weighed_by_samples(teachers: Teachers, tmp_path: Path) -> None:
    """Two steps of next to no learning rate stay where they began: at the mean of the flow experts."""
    plan = tiny_plan(teachers, start="average")
    still = plan.training.model_copy(update={"learning_rate": 1e-12, "images": 64})
    plan = plan.model_copy(update={"training": still})
    artifact = distill(teachers.run, tmp_path / "student", plan, resources=Resources("cpu"))
    assert artifact is not None
    sizes = json.loads((tmp_path_of(teachers) / "partition" / "sizes.json").read_text())["clusters"]
    flow = [m for m in teachers.version.serving if m.objective == FLOW]
    total = sum(sizes[m.cluster]["train"] for m in flow)
    student = load_expert(artifact.store).network.state_dict()
    experts = {m.cluster: load_expert(place_of(teachers.run, m)).network.state_dict() for m in flow}
    assert 1 < len(flow) < 8
    for name, value in student.items():
        mean = sum(experts[m.cluster][name] * (sizes[m.cluster]["train"] / total) for m in flow)
        assert isinstance(mean, torch.Tensor)
        assert torch.allclose(value, mean, atol=1e-5)


def tmp_path_of(teachers: Teachers) -> Path:
    return teachers.run.path


def test_without_the_data(tiny_demo: Path, tmp_path: Path) -> None:
    """A run whose data and partition are gone teaches all the same, on what it paints; and again the same."""
    run = tmp_path / "run"
    shutil.copytree(tiny_demo, run, ignore=shutil.ignore_patterns("data", "partition", "islands", "samples"))
    (tmp_path / "prompts.txt").write_text("a handwritten one\n\na handwritten two\n")
    common = ["distill", str(run), *TINY, "--from-samples", "--prompts", str(tmp_path / "prompts.txt")]
    main([*common, "--out", str(tmp_path / "student")])
    main([*common, "--out", str(tmp_path / "again")])
    assert Artifact.open(tmp_path / "student").digest == Artifact.open(tmp_path / "again").digest
    assert "router" in Artifact.open(tmp_path / "student").manifest.parents
    assert json.loads((tmp_path / "student" / "distillation.json").read_text())["plan"]["route"] == "top-2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--start", "nowhere"], "--start: input should be 'random', 'best' or 'average' (got 'nowhere')"),
        (["--prompts", "prompts.txt"], "prompts.txt: no such file"),
        (["--from-samples"], "--from-samples: these experts read text; give --prompts"),
        (["--start", "average", "--set", "network.depth=1"], "--start average: 0 of the experts"),
        (["--objective", "x"], "--objective x: not known; use ddpm, flow, v"),
        (["--truth", "2"], "--truth: input should be less than or equal to 1 (got 2)"),
        (["--from-samples", "--truth", "0.5", "--prompts", __file__], "--truth 0.5: with --from-samples there is no"),
        (["--from-samples", "--set", "trust=data", "--prompts", __file__], "--set trust=data: with --from-samples"),
        (["--from-samples", "--set", "trust=kind", "--prompts", __file__], "--set trust=kind: with --from-samples"),
        (["--set", "network.dept=1"], "did you mean network.depth"),
        (["--set", "network.latent=[1, 4, 4]"], "the experts' latents are"),
        (["--set", "network.vocabulary=5"], "what its teachers read, and they have 12"),
        (["--from-samples", "--start", "best", "--prompts", __file__], "--start best: is measured on data"),
        (
            ["--from-samples", "--route", "oracle", "--prompts", __file__],
            "route 'oracle' needs the true cluster",
        ),
        (["--from-samples", "--prompts", __file__], "unknown word 'from'"),
        (["--memory", "8GB", "--device", "cpu"], "--memory: means a CUDA device's memory, and cpu is none"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str], said: str, tiny_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(["distill", str(tiny_demo), "--out", str(tmp_path / "student"), *arguments], capsys)
    assert not (tmp_path / "student").exists()


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line in which a verb says what is wrong."""
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_that_lacks_something(
    teachers: Teachers, tiny_demo: Path, planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No experts yet; the data gone; an expert that does not serve any more; one that is damaged."""
    student = ["--device", "cpu", "--out", str(tmp_path / "student")]
    assert "no expert serves cluster 0, so nobody can teach it" in refused(["distill", str(planned), *student], capsys)
    run = tmp_path / "run"
    shutil.copytree(tiny_demo, run, ignore=shutil.ignore_patterns("data", "islands", "samples"))
    assert "--from-samples needs no data" in refused(["distill", str(run), *student], capsys)
    third = teachers.version.serving[3]
    weights = run / third.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert third.path in refused(["distill", str(run), *student], capsys)
    remove_expert(Store.at(run), 3)
    assert "no expert serves cluster 3" in refused(["distill", str(run), *student], capsys)
    assert not (tmp_path / "student").exists()


def test_every_license_is_named_once() -> None:
    assert all_licenses(["MIT", None, "CC-BY-4.0", "MIT"]) == "MIT AND CC-BY-4.0"
    assert all_licenses([None, ""]) is None


def test_a_card_names_teachers_and_their_licenses(teachers: Teachers) -> None:
    """Experts of two people under two licenses: both are the student's, and stand in the card people read."""
    said = {0: "MIT", 1: "CC-BY-4.0", 2: "MIT"}
    experts = {
        k: replace(expert, card=expert.card.model_copy(update={"license": said.get(k)}))
        for k, expert in teachers.experts.items()
    }
    card = replace(teachers, experts=experts).card(tiny_plan(teachers), None)
    assert card.license == "MIT AND CC-BY-4.0"
    assert [(teacher.cluster, teacher.license) for teacher in card.teachers[:3]] == list(said.items())
