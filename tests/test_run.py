"""`atoll run`: from photographs in class folders to a model by one command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, Store, UserError
from atoll.cli import main
from atoll.cli.run import print_forecast
from atoll.data.sources import Source, SourceConfig, open_source
from atoll.islands.order import read_order
from atoll.pipeline.settings import Asked, EvalConfig, read_run, write_once
from atoll.pipeline.sizing import (
    FEW_IMAGES,
    default_autoencoder,
    forecast,
    measure_pace,
    sampling_workers,
    size_run,
)
from atoll.registry.versions import open_ensemble
from atoll.training.memory import Machine
from photographs import CLASSES, MORE_CLASSES, write_photographs
from runs import ATOLL, atoll, digests, scores_in

TWO_CORES = Machine(8, 0.08, bfloat16=False, kind="cpu", cores=2)
GPU = Machine(24, 165)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photographs(folder, MORE_CLASSES, per_class=50, size=40)
    return folder


@pytest.fixture(scope="module")
def origin(photos: Path) -> Source:
    return open_source(str(photos), SourceConfig(labels="auto"))  # as `atoll run` does


def test_a_run_is_sized_to_data_machine_and_hours(origin: Source) -> None:
    half, day = (size_run(origin, Asked(hours=h, size=32), TWO_CORES) for h in (0.5, 24))
    assert half.prepare.source.labels == "auto"
    assert (half.plan.network.width, half.plan.network.depth, half.plan.network.patch) == (128, 4, 1)
    assert half.prepare.autoencoder == "dct-4", "8 x 8 blocks, without a download"
    assert half.partition.clusters == 5, "80 images for each"
    assert half.plan.training.images < day.plan.training.images == 200_000
    compared = size_run(origin, Asked(hours=0.5, size=32), TWO_CORES, compare=True)
    assert compared.plan.training.images == pytest.approx(half.plan.training.images / 2, rel=0.05)
    assert size_run(origin, Asked(hours=0.5, size=32), GPU).plan.training.images == 200_000
    mixed = size_run(origin, Asked(hours=0.5, size=32, objectives="2ddpm:6flow"), TWO_CORES)
    assert mixed.partition.clusters == 8, "for 400 images it is five"


@pytest.mark.parametrize(
    ("pace", "hours", "clusters"), [(1, 0.1, 5), (1, 0.05, 2), (1, 0.5, 5), (5, 0.2, 2), (5, 0.5, 5)]
)
def test_the_hours_include_admission_and_little_time_makes_fewer_experts(
    origin: Source, pace: float, hours: float, clusters: int
) -> None:
    settings = size_run(origin, Asked(hours=hours, size=32), TWO_CORES, pace=pace)
    predicted = sum(stage.seconds for stage in forecast(settings, origin, TWO_CORES, pace))
    assert 0.6 * 3600 * hours < predicted < 1.1 * 3600 * hours
    assert settings.partition.clusters == clusters
    assert settings.plan.training.images >= FEW_IMAGES


def test_the_pace_is_that_of_training_here(origin: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of the chosen network is timed: the predicted rate over the pace is what one core reaches now."""
    settings = size_run(origin, Asked(hours=0.5, size=32), TWO_CORES)
    before = torch.get_num_threads(), torch.random.get_rng_state()
    fast, slow = (measure_pace(settings, origin, replace(TWO_CORES, cores=cores), 0.2) for cores in (1, 6))
    assert 0.05 < fast < 100
    assert slow > fast, "six busy threads share the cores there are"
    assert measure_pace(settings, origin, GPU) == 1.0
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1]), "random numbers of the caller stay as they were"
    monkeypatch.setattr("atoll.pipeline.sizing.DiT.forward", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # as at Ctrl-C: the other threads end, too
        measure_pace(settings, origin, replace(TWO_CORES, cores=3), 0.2)
    assert torch.get_num_threads() == before[0]


def test_the_autoencoder_and_the_sampling_workers_by_default() -> None:
    shapes = {(3, 32): "dct-4", (3, 64): "dct-8", (3, 256): "dct-16", (3, 36): "dct-4", (3, 9): "pixels"}
    shapes |= {(1, 32): "pixels"}
    assert {shape: default_autoencoder(*shape) for shape in shapes} == shapes
    evaluation = EvalConfig(count=130, batch=50)
    assert [sampling_workers(evaluation, cores, 8.0, 0.1) for cores in (1, 2, 16)] == [1, 2, 3]
    assert [sampling_workers(evaluation, 16, memory, 1.4) for memory in (0.5, 4.5, 64.0)] == [1, 2, 3]


def test_run_toml_is_written_once_and_a_comparison_is_never_dropped(origin: Source, tmp_path: Path) -> None:
    """`atoll status` proposes the command without --compare: stopped early, the run must still train its monolith."""
    settings = size_run(origin, Asked(hours=0.5), TWO_CORES)
    run = Store.at(tmp_path)
    assert write_once(run, settings) == read_run(run) == settings
    assert settings.partition.options == {}, "defaults of the method are left to it"
    with pytest.raises(UserError, match=r"run\.toml: was begun with other settings \(asked\.hours: 0\.5 -> 0\.4"):
        write_once(run, size_run(origin, Asked(hours=0.4), TWO_CORES))
    compared = settings.model_copy(update={"compare": True})
    assert write_once(run, compared) == read_run(run) == compared, "added later"
    assert write_once(run, settings).compare, "as the resumed command has it"


IMPOSSIBLE = [
    (Asked(hours=0.001), r"--hours 0\.001: is over before 400 images are prepared"),
    (Asked(clusters=500), r"-k 500: 400 images are too few; give at most -k 20"),
    (Asked(objectives="30flow"), r"--objectives 30flow: 400 images are too few; give at most -k 20"),
    (Asked(objectives="1flow"), r"--objectives 1flow: names one expert, a run has two or more"),
    (Asked(objectives="1000000000flow"), r"--objectives 1000000000flow: "),
    (Asked(objectives="2ddpm:6folw", clusters=4), r"unknown objective 'folw'"),
    (Asked(objectives="8flow", clusters=4), r"names 8 experts, the partition has 4"),
    (Asked(size=1000), r"--hours 1: is over before .* give more than \d+, or a smaller -k or --size"),
    (Asked(recipe="xl"), r"--hours 1 for latents of 56x8x8: xl does not fit into 8 GiB; use a smaller --recipe"),
    (Asked(recipe=""), r"--recipe : not known; use one of laptop, tiny"),
    (Asked(hours=0.03, clusters=20), r"is over before .* 20 experts started and admitted; give more than 0\."),
]


@pytest.mark.parametrize(("asked", "words"), IMPOSSIBLE, ids=str)
def test_what_cannot_be_is_refused_before_anything_is_made(origin: Source, asked: Asked, words: str) -> None:
    with pytest.raises(UserError, match=words):
        size_run(origin, asked, TWO_CORES)


NAMES = ("Äpfel & Birnen", "old cars", "lemon", "東京 タワー")  # as people name folders


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 160 photographs and a broken one up to its orders, of the usual recipe; and what was printed."""
    place = tmp_path_factory.mktemp("begun")
    write_photographs(place / "some photos", NAMES, per_class=40, size=40)
    (place / "some photos" / "old cars" / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    run = place / "my runs" / "one"
    options = ["--size", "16", "-k", "2", "--hours", "0.2", "--until", "plan"]
    return run, atoll("run", "some photos", "--out", run, *options, cwd=place).stdout


def test_until_plan_and_the_same_file_gives_the_same_orders(begun: tuple[Path, str], tmp_path: Path) -> None:
    one, printed = begun
    two = tmp_path / "two"
    assert "all of it" in printed
    assert "prompts: 4 classes by name or number: lemon, old cars, Äpfel & Birnen, 東京 タワー" in printed
    assert "skipped 1: " in printed
    assert f"atoll admit FOLDER --out '{one}'" in printed, "to be copied as it stands"
    assert not (one / "islands").exists()
    two.mkdir()
    shutil.copy(one / "run.toml", two / "run.toml")
    atoll("run", shutil.copytree(one.parents[1] / "some photos", tmp_path / "moved"), "--out", two, "--until", "plan")
    first, second = (Artifact.open(run / "orders", "orders") for run in (one, two))
    assert first.digest == second.digest
    decided = tomllib.loads((one / "run.toml").read_text())
    assert decided["plan"]["objectives"] == f"{decided['partition']['clusters']}flow", "or another default changes it"
    order, _ = read_order(str(one / "orders" / "00.json"))
    assert order.architecture.classes == 4, "the folders are its classes"


def test_status_proposes_the_command_that_resumes(
    begun: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(begun[0], tmp_path / "one run"))
    log = run / "islands" / "00" / "expert" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"images": 1024}\n')
    main(["status", str(run)])
    printed = capsys.readouterr().out
    assert f"next: atoll run --out '{run}' does all that is missing, on this machine\nor: atoll train " in printed
    there = read_run(Store.at(run))
    assert there is not None
    assert Path(there.source).is_dir(), "from whichever folder that command is given"
    assert "in training here, 1,024 of" in printed
    assert printed.count("2 clusters by kmeans") == 1, "nothing is listed twice"


def test_a_first_try_that_made_nothing_binds_nobody(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken pictures leave nothing behind; settings of which nothing is made yet may change."""
    monkeypatch.setattr("atoll.pipeline.stages.default_workers", lambda device: 1)
    (tmp_path / "broken").mkdir()
    for number in range(40):
        (tmp_path / "broken" / f"{number}.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    (tmp_path / "there").mkdir()
    tries = {
        "run broken --out new": "none of its images can be used; the first one, 0.jpg: corrupt (OSError)",
        "run broken --out there": "none of its images can be used",
        f"run {photos}/moon --out there --size 96": "too small (40x40, need 48 a side); choose a smaller --size",
        f"run {photos} --out there --size 16 --objectives 2dpm:2flow": "unknown objective 'dpm'; use ddpm, flow",
    }
    for command, words in tries.items():
        with chdir(tmp_path), pytest.raises(SystemExit):
            main(command.split())
        assert words in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "there"]
        assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize("command", ["run", "prepare"])
@pytest.mark.parametrize("place", [".", "runs/photos"])
def test_nothing_is_written_among_the_pictures(
    command: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be taken for pictures the next time."""
    write_photographs(tmp_path, CLASSES[:2], per_class=15, size=16)
    before = sorted(tmp_path.rglob("*"))
    with chdir(tmp_path), pytest.raises(SystemExit) as refused:
        main([command, ".", "--out", place])
    assert refused.value.code == 2
    assert "lies in ., the folder of the images; choose a place outside of it" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_too_short_a_run_warns_before_it_begins(
    origin: Source, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for hours, few in ((0.03, True), (1.0, False)):
        settings = size_run(origin, Asked(hours=hours, size=32), TWO_CORES)
        run = Store.at(tmp_path / str(hours))
        write_once(run, settings)
        print_forecast(run, settings, origin, "cpu", "evaluate")
        assert ("give more --hours or a smaller -k" in capsys.readouterr().out) == few, settings.plan.training.images


PEAK = "import resource, sys; from atoll.cli import main; main(sys.argv[1:]); "
PEAK += "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"  # KiB


def test_the_router_of_a_small_run_stays_small_and_its_accuracy_is_printed(begun: tuple[Path, str]) -> None:
    """As the README has it; only the images are fewer, which changes no memory."""
    command = [sys.executable, "-c", PEAK, "router", str(begun[0]), "--set", "training.images=512", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert int(printed.split()[-1]) < 1.5 * 2**20
    assert "router accuracy" in printed
    plan = Artifact.open(begun[0] / "router").config["plan"]
    order, _ = read_order(str(begun[0] / "orders" / "00.json"))
    assert plan["network"]["trunk"]["width"] < order.architecture.width
    assert plan["training"]["batch"] == 2 * order.training.batch


MISTAKES = {
    "run --out {tmp}/r": "SOURCE: missing",
    "run {tmp}": "--out: missing",
    "run {tmp} --out {tmp}/r --until lunch": "--until lunch",
    "run {planned}/ensemble --out {tmp}/r": "has 0 images; a run needs some hundreds",
    "run {photos} --out {photos}/moon/0000.jpg": "is a file; name a folder for the run",
    "run {planned}/data --out {photos}/moon": "is no run, it holds 0000.jpg; choose a new or an empty folder",
    "run {photos} --out {tmp}/r --device gpu": "--device gpu: cannot be used here",
    "run {photos} --out {tmp}/r --seed 2147483648": "--seed: input should be less than or equal to 2147483647",
    "run {photos} --out {tmp}/r --size 100000": "should be less than or equal to 4096",
    "run --out {begun} --hours 2": "--hours 2.0: ",
    "run {photos} --out {tmp}/r --hours 0": "--hours: input should be greater than 0",
    "run {photos} --out {tmp}/r --hours inf": "--hours: input should be a finite number",
    "demo --out {photos}/moon": "is no run, it holds 0000.jpg; choose a new or an empty folder",
    "demo --out {tmp}/r --seed -1": "--seed",
    "run {photos}/\udce9t\udce9 --out {tmp}/r": "the path is not UTF-8; rename it",
    "train {planned}/orders/00.json {planned}/orders/00.json --out {tmp}/e": "a second order 00",
    "train {planned}/orders/manifest.json --out {tmp}/e": "not a valid order",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_one_line(
    command: str, planned: Path, photos: Path, begun: tuple[Path, str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = [word.format(tmp=tmp_path, planned=planned, photos=photos, begun=begun[0]) for word in command.split()]
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert MISTAKES[command] in printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_several_orders_on_one_machine(planned: Path, tmp_path: Path) -> None:
    """Side by side, interrupted, resumed: the experts that one after another make."""
    orders = sorted(map(str, (planned / "orders").glob("*.json")))  # as a shell writes them out, manifest and all
    command = [*ATOLL, "train", *orders, "--out", str(tmp_path / "all"), "--device", "cpu", "--checkpoint-seconds", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # where tests run in the background it is ignored
    process = subprocess.Popen(command, env=environment, preexec_fn=heed)  # noqa: PLW1509
    while not (tmp_path / "all" / "00" / "state").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # the islands save, and it ends
    process.wait(60)
    assert not (tmp_path / "all" / "02" / "manifest.json").exists(), "it was done before it could be stopped"
    assert "3 experts in" in atoll(*command[len(ATOLL) :]).stdout
    atoll("train", orders[1], "--out", tmp_path / "alone", "--device", "cpu")
    alone, together = (Artifact.open(p, "expert") for p in (tmp_path / "alone", tmp_path / "all" / "01"))
    assert alone.digest == together.digest
    assert "3 of them before" in atoll(*command[len(ATOLL) :]).stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_400_photographs_become_a_model_that_follows_its_prompts(photos: Path, origin: Source, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # sized for a machine of its own, so that it is the same work on a busy one
    write_once(Store.at(run), size_run(origin, Asked(hours=0.15, size=32), TWO_CORES))
    command = [*ATOLL, "run", str(photos), "--out", str(run)]
    for moment in ("data/manifest.json", "islands/01/expert/state", "router/state"):
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (run / moment).exists():
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL, f"ended before {moment}"
        time.sleep(0.5)
    printed = atoll(*command[len(ATOLL) :]).stdout
    assert "everything is there" in printed
    assert "router accuracy" in printed
    best = max(scores_in(run, "class_accuracy"))
    assert best > 2 / len(MORE_CLASSES), f"chance is {1 / len(MORE_CLASSES):.1%}"
    assert open_ensemble(Store.at(run)).router is not None
    before = digests(run)
    atoll(*command[len(ATOLL) :])
    assert digests(run) == before
