"""Plans from what contributors have: memory and time predicted, nothing promised that does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_plan import orders_of

from atoll.artifacts import Artifact, UserError
from atoll.cli import main
from atoll.cli.plan import plan as plan_verb
from atoll.planning import plan, read_islands, recipe
from atoll.planning.assign import match
from atoll.planning.islands import Island
from atoll.planning.recipes import OBJECTIVES
from atoll.training.execution import Execution
from atoll.training.machines import GPUS, MACHINES, Machine, bandwidth_for, machine_named
from atoll.training.memory import USABLE


def islands_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "islands.yaml"
    path.write_text(text)
    return path


FILE = """
islands:
  - {name: anna, gpu: RTX 4090, hours: 72, price: 0.40}
  - {name: lab, gpu: A100-80GB, hours: 48, objective: ddpm, clusters: [0, 3]}
  - {name: shed, memory: 12, tflops: 20, hours: 200, bfloat16: false}
"""


def test_orders_follow_from_the_islands(run: Path, tmp_path: Path) -> None:
    islands = read_islands(islands_file(tmp_path, FILE))
    made = plan(run / "data", run / "partition", run / "orders", recipe("small"), islands=islands)
    orders, jobs = orders_of(run), made.config["islands"]
    assert {job["island"] for job in jobs} == {"anna", "lab", "shed"}
    hours: dict[str, float] = {}
    for order, job in zip(orders, jobs, strict=True):
        machine = next(i for i in islands if i.name == job["island"])
        assert job["memory_gib"] <= USABLE * machine.machine.memory
        assert order.training.batch % job["micro_batch"] == 0
        assert not {*Execution.model_fields} & {*order.training.model_dump()}  # how to compute is no order's business
        assert order.training.images == job["images"] <= recipe("small").training.images
        assert order.training.images % order.training.batch == 0
        assert job["precision"] == ("float32" if job["island"] == "shed" else "bfloat16")
        hours[machine.name] = hours.get(machine.name, 0.0) + job["hours"]
        if job["island"] == "anna":
            assert job["cost"] == pytest.approx(0.40 * job["hours"], abs=0.01)
    for island in islands:
        assert hours[island.name] <= island.hours * 1.001
    assert [jobs[k]["island"] for k in (0, 3)] == ["lab", "lab"]
    assert all(order.objective.kind == "epsilon" for order in (orders[0], orders[3]))
    # a stronger machine gets a larger network
    width = {job["island"]: order.architecture.width for order, job in zip(orders, jobs, strict=True)}
    assert width["lab"] >= width["anna"] >= width["shed"]


def test_a_size_that_does_not_fit_is_refused_with_the_largest_that_does(run: Path) -> None:
    islands = (Island(name="small", memory=12, tflops=50, hours=10, size="3b/2"),)
    with pytest.raises(UserError, match=r"--islands small: 3b/2 does not fit into 12 GiB; the largest that does is \w"):
        plan(run / "data", run / "partition", run / "orders", recipe("small"), islands=islands)
    assert not (run / "orders").exists()


def test_eight_bit_moments_are_an_islands_word(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """XL/2 needs them on 8 GiB; an island has them if it says so, whatever the planner's machine has."""
    text = "islands: [{name: shed, memory: 8, tflops: 40, hours: 900, size: xl/2%s}]"
    digests = []
    for folder, installed in (("orders", None), ("again", object())):
        monkeypatch.setattr("atoll.training.memory.find_spec", lambda name, installed=installed: installed)
        without = read_islands(islands_file(tmp_path, text % ""))
        with pytest.raises(UserError, match=r"largest that does is large; with the extra torchao it would.*eight_bit"):
            plan(run / "data", run / "partition", run / folder, recipe("small"), islands=without)
        path = islands_file(tmp_path, text % ", eight_bit: true")
        main(["plan", str(run / "data"), "--recipe", "small", "--islands", str(path), "--out", str(run / folder)])
        assert "shed: fits with" in capsys.readouterr().out
        made = Artifact.open(run / folder)
        assert {job["moments"] for job in made.config["islands"]} == {"8-bit"}
        digests.append(made.digest)
    assert digests[0] == digests[1]


def test_a_machine_is_what_its_gpu_says_or_its_owner() -> None:
    known = Island(name="a", gpu="RTX 4090", hours=1)
    assert known.machine == GPUS["RTX 4090"]
    assert Island(name="a", gpu="RTX 4090", hours=1, memory=20, bandwidth=900).machine == Machine(20, 165, 900)
    assert Island(name="a", memory=12, tflops=30, hours=1).machine == Machine(12, 30, bandwidth_for(30))
    assert Island(name="a", memory=12, tflops=30, bandwidth=400, hours=1, bfloat16=False).machine == Machine(
        12, 30, 400, bfloat16=False
    )


def test_a_tables_rows_fit_a_terminal(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["plan", str(run / "data"), "--recipe", "small", "--islands", str(islands_file(tmp_path, FILE))])
    told = capsys.readouterr().out
    jobs = Artifact.open(run / "orders").config["islands"]
    rows = [line.split() for line in told.splitlines() if line.strip()[:2].isdecimal()]
    assert [row[2] for row in rows] == [job["island"] for job in jobs]
    assert [row[4:6] for row in rows] == [[str(job["micro_batch"]), f"{job['memory_gib']:.1f}"] for job in jobs]


def test_work_is_shared_by_strength() -> None:
    islands = [
        Island(name="big", memory=80, tflops=300, hours=10),
        Island(name="little", memory=24, tflops=100, hours=10),
    ]
    taken = [island.name for island in match(islands, [100] * 8).values()]
    assert taken.count("big") == 6
    assert taken.count("little") == 2


STRONG_DDPM = "islands: [{name: lab, gpu: H100, hours: 900, objective: ddpm}, {name: anna, gpu: T4, hours: 90%s}]"


@pytest.mark.parametrize(("mix", "ddpm"), [("1ddpm:7flow", 1), ("3ddpm:5flow", 3), ("8flow", 0)])
def test_the_mix_holds_whatever_islands_insist_on(mix: str, ddpm: int, run: Path, tmp_path: Path) -> None:
    islands = read_islands(islands_file(tmp_path, STRONG_DDPM % ""))
    config = recipe("small").model_copy(update={"mix": mix})
    made = plan(run / "data", run / "partition", run / "orders", config, islands=islands)
    chosen, jobs = made.config["chosen"], made.config["islands"]
    assert chosen.count("ddpm") == ddpm
    assert [order.objective.kind for order in orders_of(run)] == [OBJECTIVES[name].kind for name in chosen]
    lab = [chosen[job["cluster"]] for job in jobs if job["island"] == "lab"]
    assert lab == ["ddpm"] * ddpm


def test_a_mix_that_cannot_hold_is_one_line(run: Path, tmp_path: Path) -> None:
    islands = read_islands(islands_file(tmp_path, STRONG_DDPM % ", objective: ddpm"))
    for mix in ("1ddpm:7flow", "flow,flow,flow,flow,flow,flow,flow,ddpm"):
        config = recipe("small").model_copy(update={"mix": mix})
        with pytest.raises(UserError, match=rf"--mix {mix}: leaves nobody for cluster \d, .*lab on ddpm, anna on ddpm"):
            plan(run / "data", run / "partition", run / "orders", config, islands=islands)
    assert not (run / "orders").exists()
    # nobody asked for a mix: all islands get their way
    made = plan(run / "data", run / "partition", run / "orders", recipe("small"), islands=islands)
    assert made.config["chosen"] == ["ddpm"] * 8


def test_an_island_may_not_insist_on_what_nobody_knows(run: Path) -> None:
    islands = (Island(name="a", gpu="T4", hours=9), Island(name="b", gpu="T4", hours=1e-9, objective="edm"))
    with pytest.raises(UserError, match="--islands b: unknown objective 'edm'"):
        plan(run / "data", run / "partition", run / "orders", recipe("small"), islands=islands)


def test_an_island_on_which_nothing_fits_is_left_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "islands: [{name: toy, memory: 0.5, tflops: 5000, hours: 90}, {name: lab, gpu: H100, hours: 9}]"
    main(["plan", str(run / "data"), "--recipe", "small", "--islands", str(islands_file(tmp_path, text))])
    told = capsys.readouterr().out
    assert "left out: toy, no size fits into 0.5 GiB" in told
    assert "no cluster left for" not in told
    made = Artifact.open(run / "orders")
    assert {job["island"] for job in made.config["islands"]} == {"lab"}


def test_only_islands_on_which_nothing_fits_is_one_line(run: Path) -> None:
    toy = Island(name="toy", memory=0.5, tflops=5000, hours=90)
    with pytest.raises(UserError, match=r"--islands toy: 384x12 does not fit into 0\.5 GiB, and nothing smaller does"):
        plan(run / "data", run / "partition", run / "orders", recipe("small"), islands=(toy,))
    picky = Island(name="lab", gpu="H100", hours=9, clusters=(0, 1))
    with pytest.raises(UserError, match="nobody takes cluster 2, nothing fits on toy; add a larger island"):
        match((toy, picky), [10, 10, 10], too_small={"toy"})


@pytest.mark.parametrize("name", ["islands.yaml", "islands.toml"])
def test_a_file_that_is_not_text_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes("islands: [{name: Jörg}]".encode("latin-1"))
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 18\); save it as UTF-8"):
        read_islands(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_islands(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("islands: []", "islands"),
        ("islands: [{name: a, gpu: RTX 9999, hours: 1}]", "machine 'RTX 9999' is not known"),
        ("islands: [{name: a, hours: 1}]", "needs a gpu, or memory"),
        ("islands: [{name: a, gpu: T4, hours: -1}]", "hours"),
        ("islands: [{name: a, gpu: T4, hours: 1, ours: 2}]", "ours"),
        ("islands: [{name: a, gpu: T4, hours: 1}, {name: a, gpu: T4, hours: 1}]", "the same name"),
        ("islands: {", "not valid YAML"),
        ("!!python/object/apply:os.system [echo]", "not valid YAML"),
    ],
)
def test_a_bad_file_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_islands(islands_file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_clusters_nobody_takes() -> None:
    with pytest.raises(UserError, match="nobody takes cluster 1"):
        match([Island(name="a", gpu="T4", hours=1, clusters=(0,))], [10, 10])
    with pytest.raises(UserError, match="cluster 7 does not exist"):
        match([Island(name="a", gpu="T4", hours=1, clusters=(7,))], [10, 10])


@pytest.mark.parametrize(
    ("written", "known", "memory"),
    [
        ("rtx4090", "RTX 4090", 24),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
        ("4090", "RTX 4090", 24),
        ("A100 40GB", "A100-40GB", 40),
        ("A100-SXM4-80GB", "A100-80GB", 80),
        ("a100", "A100-40GB", 40),
        ("T4 16 GB", "T4", 16),
        ("Tesla T4", "T4", 16),
        ("RTX 3060 8GB", "RTX 3060", 8),
        ("RTX A6000", "A6000", 48),
        ("Apple M2 Max 64GB", "M2 Max", 64),
        ("m1", "M1", 8),
    ],
)
def test_machines_as_people_write_them(written: str, known: str, memory: float) -> None:
    assert machine_named(written) == replace(MACHINES[known], memory=memory)


def test_every_machine_is_named_in_the_help() -> None:
    """The list was once cut short, in an error, where it was needed."""
    assert plan_verb.__doc__ is not None
    assert all(name in plan_verb.__doc__ for name in MACHINES)


def test_a_cpu_is_a_machine_that_trains_as_many_orders_as_it_has_cores(run: Path, tmp_path: Path) -> None:
    assert machine_named("CPU 16 cores").cores == 16
    text = "islands: [{name: old, gpu: CPU 4 cores, hours: 1}]"
    made = plan(run / "data", run / "partition", run / "orders", islands=read_islands(islands_file(tmp_path, text)))
    jobs = made.config["islands"]
    assert {job["precision"] for job in jobs} == {"float32"}
    assert max(job["hours"] for job in jobs) <= 0.5, "eight orders, four at a time"
    with pytest.raises(ValueError, match="cores count for a CPU only"):
        machine_named("RTX 4090 8 cores")


def test_every_island_has_a_cluster_before_any_has_two() -> None:
    islands = [Island(name=name, gpu=gpu, hours=10) for name, gpu in (("a", "H200"), ("b", "T4"), ("c", "M1"))]
    assert {i.name for i in match(islands, [9, 9, 9]).values()} == {"a", "b", "c"}
    names = [i.name for i in match(islands, [9, 9, 9, 9, 9]).values()]
    assert sorted(set(names)) == ["a", "b", "c"]
    assert names.count("a") == 3


def test_a_budget_that_is_cut_takes_warm_up_and_average_with_it(run: Path) -> None:
    """A laptop's 13,824 images kept a warm-up of 128,000 and an average over 900,000."""
    islands = (Island(name="slow", gpu="CPU 1 core", hours=0.05),)
    plan(run / "data", run / "partition", run / "orders", recipe("laptop"), islands=islands)
    usual = recipe("laptop").training
    for order in orders_of(run):
        learns = order.training
        assert learns.images < usual.images
        assert learns.warmup_images / learns.images == pytest.approx(usual.warmup_images / usual.images, rel=0.05)
        assert learns.ema_images <= 0.06 * learns.images or learns.ema_images == learns.batch


def test_what_is_set_is_honoured_or_refused_with_islands(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = islands_file(tmp_path, "islands: [{name: lab, gpu: H100, hours: 9}, {name: shed, gpu: T4, hours: 9}]")
    main(
        [
            "plan",
            str(run / "data"),
            "--islands",
            str(path),
            "--set",
            "network.width=96",
            "--set",
            "training.ema_images=77",
        ]
    )
    for order in orders_of(run):
        assert order.architecture.width == 96
        assert order.training.ema_images == 77
    with pytest.raises(SystemExit):
        main(["plan", str(run / "data"), "--islands", str(path), "--images", "900B", "--out", str(run / "more")])
    assert "images of 48x3 need" in capsys.readouterr().err
    assert not (run / "more").exists()
