"""Plans from what contributors have: memory and time predicted, nothing promised that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_plan import orders_of

from atoll.artifacts import Artifact, UserError
from atoll.cli import command_of, main
from atoll.models.dit import DiTConfig
from atoll.planning.islands import Island, match, read_islands
from atoll.planning.jobs import plan_job
from atoll.planning.recipes import OBJECTIVES, PlanConfig, recipe
from atoll.planning.stage import plan
from atoll.training.compute import ComputeConfig
from atoll.training.memory import GPUS, MACHINES, USABLE, Machine, machine_named


def islands_file(tmp_path: Path, *islands: str) -> Path:
    path = tmp_path / "islands.toml"
    path.write_text(f"islands = [{', '.join(islands)}]")
    return path


def plan_for(run: Path, islands: tuple[Island, ...], config: PlanConfig | None = None) -> Artifact:
    return plan(run / "data", run / "partition", run / "orders", config or recipe("small"), islands=islands)


ANNA = '{name = "anna", gpu = "RTX 4090", hours = 72}'
LAB = '{name = "lab", gpu = "A100-80GB", hours = 48, objective = "ddpm", clusters = [0, 3]}'
SHED = '{name = "shed", memory = 12, tflops = 20, hours = 200, bfloat16 = false}'


def test_orders_follow_from_the_islands(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = islands_file(tmp_path, ANNA, LAB, SHED)
    monkeypatch.setenv("COLUMNS", "80")
    main(["plan", str(run / "data"), "--recipe", "small", "--islands", str(path)])
    orders, jobs = orders_of(run), Artifact.open(run / "orders").config["islands"]
    islands = {island.name: island for island in read_islands(path)}
    hours = dict.fromkeys(islands, 0.0)
    for order, job in zip(orders, jobs, strict=True):
        assert job["memory_gib"] <= USABLE * islands[job["island"]].machine.memory
        assert order.training.batch % job["micro_batch"] == 0
        assert not {*ComputeConfig.model_fields} & {
            *order.training.model_dump()
        }  # how to compute is no order's business
        assert order.training.images == job["images"] <= recipe("small").training.images
        assert order.training.images % order.training.batch == 0
        assert job["precision"] == ("float32" if job["island"] == "shed" else "bfloat16")
        hours[job["island"]] += job["hours"]
    assert all(0 < hours[name] <= island.hours * 1.001 for name, island in islands.items())
    assert [jobs[k]["island"] for k in (0, 3)] == ["lab", "lab"]
    assert all(orders[k].objective.kind == "epsilon" for k in (0, 3))
    # no number of the table is cut off in a terminal of 80 columns
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:2].isdecimal()]
    assert [row[2] for row in rows] == [job["island"] for job in jobs]
    assert [row[4:6] for row in rows] == [[str(job["micro_batch"]), f"{job['memory_gib']:.1f}"] for job in jobs]


def test_the_largest_network_that_fits_and_gets_done() -> None:
    options = {name: recipe(name) for name in ("xl", "base", "laptop")}

    def chosen(hours: float, **machine: object) -> str:
        island = Island.model_validate({"name": "a", "hours": 1, **machine})
        build = lambda network: DiTConfig(latent=(4, 32, 32), **network.model_dump())  # noqa: E731
        job = plan_job(island, hours, options, build=build)
        assert job.hours <= hours
        return job.size

    assert chosen(4000, gpu="H200") == "xl"
    assert chosen(5, gpu="H200") == "base", "five hours are not enough for an XL"
    assert chosen(4000, gpu="H200", memory=4) == "base", "4 GiB do not hold an XL"
    assert chosen(0.01, gpu="T4") == "laptop", "for as many images as there is time"


def test_a_size_that_does_not_fit_is_refused(run: Path) -> None:
    islands = (Island(name="little", memory=12, tflops=50, hours=10, size="3b/2"),)
    with pytest.raises(UserError, match="--islands little: 3b/2 does not fit into 12 GiB; use a smaller size"):
        plan_for(run, islands)
    with pytest.raises(UserError, match=r"--islands toy: 384x12 does not fit into 0\.5 GiB"):
        plan_for(run, (Island(name="toy", memory=0.5, tflops=5000, hours=90), Island(name="lab", gpu="H100", hours=9)))
    assert not (run / "orders").exists()


def test_eight_bit_moments_are_in_the_islands_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XL/2 needs them on 10 GiB; whether the planner's machine has torchao makes no difference."""
    shed = '{name = "shed", memory = 10, tflops = 40, hours = 900, size = "xl/2"%s}'
    digests = []
    for folder, installed in (("orders", None), ("again", object())):
        monkeypatch.setattr("atoll.training.memory.find_spec", lambda name, installed=installed: installed)
        with pytest.raises(UserError, match=r"xl/2 does not fit into 10 GiB; .*eight_bit = true"):
            plan_for(run, read_islands(islands_file(tmp_path, shed % "")))
        path = islands_file(tmp_path, shed % ", eight_bit = true")
        main(["plan", str(run / "data"), "--recipe", "small", "--islands", str(path), "--out", str(run / folder)])
        made = Artifact.open(run / folder)
        assert {job["moments"] for job in made.config["islands"]} == {"8-bit"}
        digests.append(made.digest)
    assert digests[0] == digests[1]


def test_a_machine_is_what_its_gpu_has_or_its_owner_gives() -> None:
    known = Island(name="a", gpu="RTX 4090", hours=1)
    assert known.machine == GPUS["RTX 4090"]
    assert Island(name="a", gpu="RTX 4090", hours=1, memory=20, tflops=150).machine == Machine(20, 150)
    shed = Island(name="a", memory=12, tflops=30, hours=1, bfloat16=False)
    assert shed.machine == Machine(12, 30, bfloat16=False)


def test_clusters_are_shared_by_strength_and_each_island_has_one_first() -> None:
    big, little = (Island(name=n, memory=m, tflops=t, hours=10) for n, m, t in (("big", 80, 300), ("little", 24, 100)))
    taken = [island.name for island in match([big, little], [100] * 8).values()]
    assert (taken.count("big"), taken.count("little")) == (6, 2)
    islands = [Island(name=name, gpu=gpu, hours=10) for name, gpu in (("a", "H200"), ("b", "T4"), ("c", "Apple"))]
    assert {i.name for i in match(islands, [9, 9, 9]).values()} == {"a", "b", "c"}
    names = [i.name for i in match(islands, [9, 9, 9, 9, 9]).values()]
    assert sorted(set(names)) == ["a", "b", "c"]
    assert names.count("a") == 3
    with pytest.raises(UserError, match="no island takes cluster 1; leave out `clusters` of one"):
        match([Island(name="a", gpu="T4", hours=1, clusters=(0,))], [10, 10])
    with pytest.raises(UserError, match="cluster 7 does not exist"):
        match([Island(name="a", gpu="T4", hours=1, clusters=(7,))], [10, 10])


def test_an_objective_of_an_island_holds_or_is_refused(run: Path) -> None:
    lab = Island(name="lab", gpu="H100", hours=9, objective="ddpm", clusters=(2,))
    anna = Island(name="anna", gpu="T4", hours=90)
    made = plan_for(run, (lab, anna))
    assert made.config["chosen"] == ["flow", "flow", "ddpm", *["flow"] * 5]
    assert [order.objective.kind for order in orders_of(run)] == [OBJECTIVES[n].kind for n in made.config["chosen"]]
    with pytest.raises(UserError, match=r"--objectives 8flow: the islands file has others \(cluster 2: ddpm\)"):
        plan_for(run, (lab, anna), recipe("small").model_copy(update={"objectives": "8flow"}))
    with pytest.raises(UserError, match="unknown objective 'edm'"):
        plan_for(run, (lab.model_copy(update={"objective": "edm"}), anna))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("islands = []", "islands"),
        ('islands = [{name = "a", gpu = "RTX 9999", hours = 1}]', "machine 'RTX 9999' is not known"),
        ('islands = [{name = "a", hours = 1}]', "needs a gpu, or memory"),
        ('islands = [{name = "a", gpu = "T4", hours = -1}]', "hours"),
        ('islands = [{name = "a", gpu = "T4", hours = 1, ours = 2}]', "ours"),
        ('islands = [{name = "a", gpu = "T4", hours = 1}, {name = "a", gpu = "T4", hours = 1}]', "the same name: a"),
        ("islands: [{name: a, gpu: T4, hours: 1}]", "not a TOML file"),
        ('islands = [{name = "J\udcf6rg"}]', "not a TOML file"),
        (None, "not a TOML file"),
    ],
)
def test_a_bad_file_is_one_line(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "islands.toml"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=words) as caught:
        read_islands(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "known"),
    [("rtx4090", "RTX 4090"), ("4090", "RTX 4090"), ("a100 40gb", "A100-40GB"), ("t4", "T4"), ("apple", "Apple")],
)
def test_machines_are_known_however_they_are_spaced(written: str, known: str) -> None:
    assert machine_named(written) == MACHINES[known]


def test_every_machine_is_named_in_the_help() -> None:
    """The list was once cut short, in an error, where it was needed."""
    (islands,) = (option for option in command_of("plan").params if option.name == "islands")
    assert all(name in islands.help for name in MACHINES)


def test_a_cpu_trains_as_many_orders_as_it_has_cores(run: Path) -> None:
    assert machine_named("CPU 16 cores").cores == 16
    made = plan_for(run, (Island(name="old", gpu="CPU 4 cores", hours=1),), recipe("digits"))
    jobs = made.config["islands"]
    assert {job["precision"] for job in jobs} == {"float32"}
    assert max(job["hours"] for job in jobs) <= 0.5, "eight orders, four at a time"
    with pytest.raises(ValueError, match="cores count for a CPU only"):
        machine_named("RTX 4090 8 cores")


def test_a_budget_that_is_cut_takes_warm_up_and_average_with_it(run: Path) -> None:
    """A laptop's 13,824 images kept a warm-up of 128,000 and an average over 900,000."""
    usual = recipe("laptop")
    plan_for(run, (Island(name="slow", gpu="CPU 1 core", hours=0.05),), usual)
    for order in orders_of(run):
        learns = order.training
        assert learns.images < usual.training.images
        assert learns.warmup_images / learns.images == pytest.approx(0.02, rel=0.05)
        assert learns.ema_images <= 0.06 * learns.images or learns.ema_images == learns.batch


def test_what_is_set_is_honored_or_refused_with_islands(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = islands_file(tmp_path, ANNA, SHED)
    words = ["plan", str(run / "data"), "--islands", str(path)]
    main([*words, "--set", "network.width=96", "--set", "training.ema_images=77"])
    assert {(order.architecture.width, order.training.ema_images) for order in orders_of(run)} == {(96, 77)}
    with pytest.raises(SystemExit):
        main([*words, "--images", "900B", "--out", str(run / "more")])
    assert "images of 48x3 need" in capsys.readouterr().err
    assert not (run / "more").exists()
