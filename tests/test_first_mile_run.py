"""The first mile by one command: photographs in class folders through `atoll run`."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from atoll.artifacts import Artifact, Store, UserError
from atoll.cli import main
from atoll.cli.run import print_forecast
from atoll.data.sources import open_source
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
from atoll.training.machines import Machine
from photographs import CLASSES, MORE_CLASSES, write_photographs
from runs import ATOLL, atoll, digests

TWO_CORES = Machine(8, 0.08, 10, bfloat16=False, kind="cpu", cores=2)
CARD = Machine(24, 165, 1008)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photographs(folder, MORE_CLASSES, per_class=50, size=40)
    return folder


def test_a_run_is_sized_to_data_machine_and_hours(photos: Path) -> None:
    origin = open_source(str(photos))
    half, day = (size_run(origin, Asked(hours=h, size=32), TWO_CORES) for h in (0.5, 24))
    assert half.prepare.source.labels == "folder"
    assert (half.plan.network.width, half.plan.network.depth, half.plan.network.patch) == (128, 4, 1)
    assert half.prepare.autoencoder == "dct-4", "8 x 8 blocks, without a download"
    assert half.partition.clusters == 5, "80 images for each"
    assert half.plan.training.images < day.plan.training.images == 200_000
    told = sum(stage.seconds for stage in forecast(half, origin, TWO_CORES))
    assert 0.6 * 1800 < told < 1800, "the prediction is the time it was given"
    compared = size_run(origin, Asked(hours=0.5, size=32), TWO_CORES, compare=True)
    assert compared.plan.training.images == pytest.approx(half.plan.training.images / 2, rel=0.05)
    assert size_run(origin, Asked(hours=0.5, size=32), CARD).plan.training.images == 200_000
    with pytest.raises(UserError, match=r"--hours 0\.001: is over before 400 images are prepared"):
        size_run(origin, Asked(hours=0.001), TWO_CORES)


@pytest.mark.parametrize(("pace", "hours", "clusters"), [(1, 0.1, 5), (1, 0.05, 2), (5, 0.2, 2), (5, 0.5, 5)])
def test_the_hours_include_admission_and_little_time_makes_fewer_experts(
    photos: Path, pace: float, hours: float, clusters: int
) -> None:
    """Checking an expert takes as long as training it on 3,000 images: of seven it was longer than the nine minutes."""
    origin = open_source(str(photos))
    settings = size_run(origin, Asked(hours=hours, size=32), TWO_CORES, pace=pace)
    predicted = sum(stage.seconds for stage in forecast(settings, origin, TWO_CORES, pace))
    assert 0.6 * 3600 * hours < predicted < 1.1 * 3600 * hours
    assert settings.partition.clusters == clusters
    assert settings.plan.training.images >= FEW_IMAGES


def test_the_pace_is_that_of_training_here(photos: Path) -> None:
    """A batch of the chosen network is timed: the predicted rate over the pace is what one core reaches now."""
    origin = open_source(str(photos))
    settings = size_run(origin, Asked(hours=0.5, size=32), TWO_CORES)
    fast, slow = (measure_pace(settings, origin, replace(TWO_CORES, cores=cores), 0.2) for cores in (1, 6))
    assert 0.05 < fast < 100
    assert slow > fast, "six busy threads share the cores there are"
    assert measure_pace(settings, origin, CARD) == 1.0


def test_workers_sample_on_as_many_cores_as_there_are_batches_and_memory_for() -> None:
    evaluation = EvalConfig(count=130, batch=50)
    assert [sampling_workers(evaluation, cores, 8.0, 0.1) for cores in (1, 2, 16)] == [1, 2, 3]
    assert [sampling_workers(evaluation, 16, memory, 1.4) for memory in (0.5, 4.5, 64.0)] == [1, 2, 3]


def test_run_toml_is_written_once_and_reads_back_the_same(photos: Path, tmp_path: Path) -> None:
    origin = open_source(str(photos))
    settings = size_run(origin, Asked(hours=0.5), TWO_CORES)
    there = write_once(Store.at(tmp_path), settings)
    assert there == settings
    assert there.partition.options == {}, "defaults of the method are left to it"
    assert read_run(Store.at(tmp_path)) == settings
    other = size_run(origin, Asked(hours=0.4), TWO_CORES)
    with pytest.raises(UserError, match=r"run\.toml: was begun with other settings \(asked\.hours: 0\.5 -> 0\.4"):
        write_once(Store.at(tmp_path), other)


def test_a_comparison_is_recorded_and_never_dropped(photos: Path, tmp_path: Path) -> None:
    """`atoll status` proposes the command without --compare: stopped early, the run must still train its monolith."""
    settings = size_run(open_source(str(photos)), Asked(hours=0.5), TWO_CORES, compare=True)
    run = Store.at(tmp_path)
    write_once(run, settings)
    there = read_run(run)
    assert there is not None
    assert there.compare
    assert write_once(run, there.model_copy(update={"compare": False})).compare, "as the resumed command has it"
    plain = Store.at(tmp_path / "plain")
    write_once(plain, settings.model_copy(update={"compare": False}))
    write_once(plain, settings)
    assert read_run(plain) == settings, "added later"


AS_PEOPLE_NAME_THEM = ("Äpfel & Birnen", "old cars", "lemon", "東京 タワー")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 160 photographs and a broken one up to its orders, of the usual recipe; and what was said."""
    place = tmp_path_factory.mktemp("begun")
    write_photographs(place / "some photos", AS_PEOPLE_NAME_THEM, per_class=40, size=40)
    (place / "some photos" / "old cars" / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    run = place / "my runs" / "one"
    options = ["--size", "16", "-k", "2", "--hours", "0.2", "--until", "plan"]
    return run, atoll("run", "some photos", "--out", run, *options, cwd=place).stdout


def test_until_plan_and_the_same_file_gives_the_same_orders(begun: tuple[Path, str], tmp_path: Path) -> None:
    one, told = begun
    two = tmp_path / "two"
    assert "all of it" in told
    assert "prompts: 4 classes by name or number: lemon, old cars, Äpfel & Birnen, 東京 タワー" in told
    assert "skipped 1: " in told
    assert f"atoll admit FOLDER --out '{one}'" in told, "to be copied as it stands"
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
    refused = atoll("run", "--out", one, "--hours", "2", check=False)
    assert refused.returncode == 2
    assert "--hours 2.0" in refused.stderr


@pytest.mark.parametrize("verb", ["run", "prepare"])
@pytest.mark.parametrize("place", [".", "runs/photos"])
def test_nothing_is_written_among_the_pictures(
    verb: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was written there was taken for pictures the next time."""
    write_photographs(tmp_path, CLASSES[:2], per_class=15, size=16)
    before = sorted(tmp_path.rglob("*"))
    with chdir(tmp_path), pytest.raises(SystemExit) as refused:
        main([verb, ".", "--out", place])
    assert refused.value.code == 2
    assert "lies in ., the folder of the images; choose a place outside of it" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_is_told_before_anything_is_made(photos: Path) -> None:
    origin = open_source(str(photos))
    for asked, said in (
        (Asked(hours=0), r"--hours 0: give the time that all of it may take, such as 0\.5"),
        (Asked(hours=math.inf), r"--hours inf: give the time"),
        (Asked(clusters=500), r"-k 500: 400 images are too few; give at most -k 20"),
        (Asked(objectives="30flow"), r"--objectives 30flow: 400 images are too few; give at most -k 20"),
        (Asked(objectives="1flow"), r"--objectives 1flow: names one expert, a run has two or more"),
        (
            Asked(objectives="1000000000flow"),
            r"--objectives 1000000000flow: unknown objective '1000000000flow'; use ddpm, flow",
        ),
        (Asked(size=1000), r"--hours 1: is over before .* give more than 56, or a smaller -k or --size"),
        (
            Asked(recipe="xl"),
            r"--hours 1 for latents of 56x8x8: xl does not fit into 8 GiB; use a smaller size or --recipe",
        ),
        (Asked(recipe=""), r"--recipe : not known; use one of laptop, tiny"),
        (
            Asked(hours=0.03, clusters=20),
            r"--hours 0\.03: is over before .* 20 experts started and admitted; give more than 0\.",
        ),
    ):
        with pytest.raises(UserError, match=said):
            size_run(origin, asked, TWO_CORES)


@pytest.fixture
def one_core() -> Iterator[None]:
    """As if this machine had one: nothing is begun in other processes, which takes seconds."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(before)])
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("is_new", [True, False])
def test_pictures_that_are_none_leave_nothing_behind(
    is_new: bool, tmp_path: Path, one_core: None, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, run = tmp_path / "photos", tmp_path / "run"
    photos.mkdir()
    for number in range(40):
        (photos / f"{number}.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    if not is_new:
        run.mkdir()
    with pytest.raises(SystemExit) as refused:
        main(["run", str(photos), "--out", str(run)])
    assert refused.value.code == 2
    assert "none of its images can be used; the first one, 0.jpg: corrupt (OSError)" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == ([photos] if is_new else [photos, run])
    assert is_new or not list(run.iterdir())


def test_pictures_that_are_too_small_ask_for_a_smaller_size(
    photos: Path, tmp_path: Path, one_core: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", str(photos / "moon"), "--out", str(tmp_path / "run"), "--size", "96"])
    assert "too small (40x40, need 48 a side); choose a smaller --size" in capsys.readouterr().err


def test_a_run_that_was_begun_says_how_it_goes_on(
    begun: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "one run"
    shutil.copytree(begun[0], run)
    log = run / "islands" / "00" / "expert" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"images": 1024}\n')
    main(["status", str(run)])
    told = capsys.readouterr().out
    assert f"next: atoll run --out '{run}' does all that is missing, on this machine\nor: atoll train " in told
    there = read_run(Store.at(run))
    assert there is not None
    assert Path(there.source).is_dir(), "from whichever folder that command is given"
    assert "in training here, 1,024 of" in told
    assert told.count("2 clusters by kmeans") == 1, "nothing is listed twice"
    bare = tmp_path / "bare"  # stopped as soon as it began
    bare.mkdir()
    shutil.copy(run / "run.toml", bare)
    main(["status", str(bare)])
    assert f"next: atoll run --out {bare} does all" in capsys.readouterr().out


def test_a_mix_says_how_many_experts_there_are(photos: Path) -> None:
    origin = open_source(str(photos))
    asked = Asked(hours=0.5, size=32, objectives="2ddpm:6flow")
    assert size_run(origin, asked, TWO_CORES).partition.clusters == 8, "for 400 images it is five"
    for mix, said in (("2ddpm:6folw", "unknown objective 'folw'"), ("8flow", "names 8 experts, the partition has 4")):
        with pytest.raises(UserError, match=said):
            size_run(origin, Asked(hours=0.5, objectives=mix, clusters=4), TWO_CORES)


def test_a_first_try_that_made_nothing_binds_nobody(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Say, of a size that no picture has: the next try may ask for another, and fails by its own mistakes only."""
    origin = open_source(str(photos))
    first = size_run(origin, Asked(hours=0.5, size=256), TWO_CORES)
    write_once(Store.at(tmp_path), first)
    with pytest.raises(SystemExit):
        main(["run", str(photos), "--out", str(tmp_path), "--size", "16", "--objectives", "2dpm:2flow"])
    assert "--objectives 2dpm:2flow: unknown objective 'dpm'; use ddpm, flow" in capsys.readouterr().err
    assert read_run(Store.at(tmp_path)) == first, "and it is not half forgotten either"


def test_too_short_a_run_says_so_before_it_begins(
    photos: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    origin = open_source(str(photos))
    for hours, few in ((0.03, True), (1.0, False)):
        settings = size_run(origin, Asked(hours=hours, size=32), TWO_CORES)
        run = Store.at(tmp_path / str(hours))
        write_once(run, settings)
        print_forecast(run, settings, origin, "cpu", "evaluate")
        assert ("give more --hours or a smaller -k" in capsys.readouterr().out) == few, settings.plan.training.images


def test_a_large_card_trains_no_large_network_on_few_images(begun: tuple[Path, str], tmp_path: Path) -> None:
    """XL/2 was once what an H100 got for 465 images."""
    run = Path(shutil.copytree(begun[0], tmp_path / "run"))
    (tmp_path / "islands.toml").write_text('islands = [{name = "lab", gpu = "H100", hours = 90}]')
    shutil.rmtree(run / "ensemble")
    options = ["--islands", str(tmp_path / "islands.toml"), "--out", str(run / "orders-2")]
    main(["plan", str(run / "data"), *options])
    assert [job["size"] for job in Artifact.open(run / "orders-2").config["islands"]] == ["laptop"] * 2


PEAK = "import resource, sys; from atoll.cli import main; main(sys.argv[1:]); "
PEAK += "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"  # KiB


def test_the_router_of_a_small_run_stays_small_and_says_how_good_it_is(begun: tuple[Path, str]) -> None:
    """As the README has it; it once took 22.9 GB. Only the images are fewer, which changes no memory."""
    command = [sys.executable, "-c", PEAK, "router", str(begun[0]), "--set", "training.images=512", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert int(told[told.index("peak") + 1]) < 1.5 * 2**20
    assert "tells the cluster of" in " ".join(told)
    plan = Artifact.open(begun[0] / "router").config["plan"]
    order, _ = read_order(str(begun[0] / "orders" / "00.json"))
    assert plan["network"]["trunk"]["width"] < order.architecture.width
    assert plan["training"]["batch"] == 2 * order.training.batch


TWO = "train {planned}/orders/00.json {planned}/orders/0%d.json --out {tmp}/e"
MISTAKES = {
    "run --out {tmp}/r": "SOURCE: missing",
    "run {tmp}": "--out: missing",
    "run {tmp} --out {tmp}/r --until lunch": "--until lunch",
    "run {planned}/ensemble --out {tmp}/r": "has 0 images; a run needs some hundreds",
    "run {photos} --out {photos}/moon/0000.jpg": "is a file; name a folder for the run",
    "run {planned}/data --out {photos}/moon": "is no run, it holds 0000.jpg; choose a new or an empty folder",
    "demo --out {photos}/moon": "is no run, it holds 0000.jpg; choose a new or an empty folder",
    "run {photos} --out {tmp}/r --device gpu": "--device gpu: cannot be used here",
    "run {photos} --out {tmp}/r --seed 2147483648": "--seed: input should be less than or equal to 2147483647",
    "run {photos} --out {tmp}/r --size 100000": "should be less than or equal to 4096",
    "demo --out {tmp}/r --seed -1": "should be greater than or equal to 0",
    "run {photos}/\udce9t\udce9 --out {tmp}/r": "the path is not UTF-8; rename it",
    TWO % 0: "a second order 00",
    "train {planned}/orders/manifest.json --out {tmp}/e": "not a valid order",
    f"{TWO % 1} --init x": "--init: is of one order",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_one_line(
    command: str, planned: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(command.format(tmp=tmp_path, planned=planned, photos=photos).split())
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert MISTAKES[command] in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_several_orders_on_one_machine(planned: Path, tmp_path: Path) -> None:
    """Two at a time, interrupted, gone on with: the experts that one after another make."""
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
    told = atoll(*command[len(ATOLL) :]).stdout
    assert "3 experts in" in told
    atoll("train", orders[1], "--out", tmp_path / "alone", "--device", "cpu")
    alone, together = (Artifact.open(p, "expert") for p in (tmp_path / "alone", tmp_path / "all" / "01"))
    assert alone.digest == together.digest
    assert "3 of them before" in atoll(*command[len(ATOLL) :]).stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_400_photographs_become_a_model_that_follows_its_prompts(photos: Path, tmp_path: Path) -> None:
    origin = open_source(str(photos))
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
    told = atoll(*command[len(ATOLL) :]).stdout
    assert "everything is there" in told
    assert "the router tells the cluster of" in told
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    best = max(arm["recognised"] for arm in evaluation["arms"])
    assert best > 2 / len(MORE_CLASSES), f"chance is {1 / len(MORE_CLASSES):.1%}"
    assert open_ensemble(Store.at(run)).router is not None
    before = digests(run)
    atoll(*command[len(ATOLL) :])
    assert digests(run) == before


@pytest.mark.parametrize(
    ("channels", "size", "name"),
    [(3, 32, "dct-4"), (3, 64, "dct-8"), (3, 256, "dct-16"), (3, 36, "dct-4"), (3, 9, "pixels"), (1, 32, "pixels")],
)
def test_the_autoencoder_by_default(channels: int, size: int, name: str) -> None:
    assert default_autoencoder(channels, size) == name
