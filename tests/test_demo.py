"""The demo: every stage through the real command line; killed anywhere it resumes to the same digests."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageColor

import atoll as package
from atoll.artifacts import Artifact
from atoll.cli import main
from atoll.evaluation.samples import read_samples
from atoll.evaluation.sheet import expert_color
from atoll.sampling import Sampling
from runs import ATOLL, atoll, digests


def test_leaves_everything_a_person_looks_at(tiny_demo: Path) -> None:
    evaluation = json.loads((tiny_demo / "evaluation.json").read_bytes())
    assert [arm["route"] for arm in evaluation["arms"]] == ["top-1", "top-2"]
    for arm in evaluation["arms"]:
        assert Sampling(**arm["sampling"]) == Sampling(steps=4, route=arm["route"], precision="float32")
        assert 0 <= arm["recognised"] <= 1
        assert arm["frechet"] > 0
    assert evaluation["floors"]["recogniser_accuracy"] > 0.95
    html = (tiny_demo / "report.html").read_text()
    assert not re.search(r"(src|href)=.?http", html), "one file, nothing fetched"
    assert html.count("<svg") >= 4
    assert Image.open(tiny_demo / "samples.png").size[0] > 300


def test_two_experts_are_ddpm_and_six_flow_and_each_was_handed_its_own_cluster_only(tiny_demo: Path) -> None:
    ensemble = json.loads((tiny_demo / "ensemble.json").read_bytes())
    objectives = [member["objective"] for member in ensemble["experts"]]
    assert sorted(objectives) == ["epsilon on cosine-vp"] * 2 + ["velocity on linear-flow"] * 6
    for k in range(8):
        inbox = tiny_demo / "islands" / f"{k:02d}" / "inbox"
        files = {p.relative_to(inbox).as_posix() for p in inbox.rglob("*") if p.is_file()}
        assert all(f == f"orders/{k:02d}.json" or f.startswith(f"partition/clusters/{k:02d}/") for f in files)


def test_a_second_run_does_nothing_again(tiny_demo: Path) -> None:
    def stamps() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in tiny_demo.rglob("*") if p.suffix in (".safetensors", ".parquet")}

    before, when = digests(tiny_demo), stamps()
    process = atoll("demo", "--size", "tiny", "--out", tiny_demo)
    assert "everything is there" in process.stdout
    assert digests(tiny_demo) == before
    assert stamps() == when, "a stage was done again"


MOMENTS = (
    "data/manifest.json",
    "islands/01/expert/state",
    "islands/05/expert/manifest.json",
    "ensemble/000004.json",
    "router/state",
    "samples",
)


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_stage_it_goes_on_to_the_same_digests(every: int, tiny_demo: Path, tmp_path: Path) -> None:
    """kill -9 the whole demo just when each of these appears, or each second one, and then let it finish."""
    command = [*ATOLL, "demo", "--size", "tiny", "--out", str(tmp_path / "run")]
    for moment in MOMENTS[every - 1 :: every]:
        assert not (tmp_path / "run" / moment).exists(), f"{moment} is there too early to be killed at"
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while process.poll() is None and not (tmp_path / "run" / moment).exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
        time.sleep(0.2)  # its islands notice the closed pipe and end
    atoll("demo", "--size", "tiny", "--out", tmp_path / "run")
    assert digests(tmp_path / "run") == digests(tiny_demo)


def test_another_seed_in_the_same_folder_is_refused(tiny_demo: Path) -> None:
    process = atoll("demo", "--size", "tiny", "--out", tiny_demo, "--seed", "1", check=False)
    assert process.returncode == 2
    assert "seed: 0 -> 1" in process.stderr


def test_a_contributor_needs_the_order_and_the_clusters_folder(tiny_demo: Path, tmp_path: Path) -> None:
    """The README's way: one order file and one folder of shards, anywhere."""
    shutil.copy(tiny_demo / "orders" / "03.json", tmp_path / "03.json")
    shutil.copytree(tiny_demo / "partition" / "clusters" / "03", tmp_path / "clusters" / "03")
    arguments = ["03.json", "--data", "clusters/03", "--out", "my-expert", "--device", "cpu"]
    atoll("train", *arguments, cwd=tmp_path)
    made = Artifact.open(tmp_path / "my-expert", "expert").digest
    assert made == Artifact.open(tiny_demo / "islands" / "03" / "expert").digest


def test_sample_writes_pngs_and_every_setting(tiny_demo: Path, tmp_path: Path) -> None:
    arguments = ["--prompt", "a handwritten three", "-n", "4", "--route", "top-2", "--steps", "3", "--guidance", "2"]
    atoll("sample", tiny_demo, *arguments, "--seed", "5", "--out", tmp_path / "s")
    record = json.loads((tmp_path / "s" / "calls" / "0001" / "samples.json").read_bytes())
    assert record["seeds"] == [5, 6, 7, 8]
    assert Sampling(**record["sampling"]) == Sampling(route="top-2", steps=3, guidance=2.0, precision="float32")
    assert sorted(p.name for p in (tmp_path / "s").glob("0*.png")) == [f"{i:05d}.png" for i in range(4)]
    again = atoll("sample", tiny_demo, *arguments, "--seed", "5", "--out", tmp_path / "s")
    assert "already there" in again.stdout
    atoll("sample", tiny_demo, *arguments, "--seed", "5", "--out", tmp_path / "t")
    assert Artifact.open(tmp_path / "s/calls/0001").digest == Artifact.open(tmp_path / "t/calls/0001").digest


def test_a_folder_of_samples_grows(tiny_demo: Path, tmp_path: Path) -> None:
    """Other prompts and other settings are added; the first images stay as they are."""
    out = tmp_path / "s"
    settings = ["--steps", "2", "--out", str(out)]
    main(["sample", str(tiny_demo), "--prompt", "a handwritten three", "-n", "3", *settings])
    first = {p.name: p.read_bytes() for p in out.glob("0*.png")}
    small = Image.open(out / "sheet.png").size
    more = ["--prompt", "a handwritten four", "--negative-prompt", "a handwritten three", "-n", "2", *settings]
    main(["sample", str(tiny_demo), *more])
    main(["sample", str(tiny_demo), *more])  # the same again adds nothing
    rows = json.loads((out / "images.json").read_bytes())
    assert [(row["file"], row["prompt"], row["seed"], row["call"]) for row in rows] == [
        *((f"0000{i}.png", "a handwritten three", i, "0001") for i in range(3)),
        *((f"0000{3 + i}.png", "a handwritten four", i, "0002") for i in range(2)),
    ]
    assert {p.name: p.read_bytes() for p in out.glob("0*.png") if p.name in first} == first
    sheet = Image.open(out / "sheet.png")
    assert sheet.height > small[1], "a row more"
    colors = {ImageColor.getrgb(expert_color(row["expert"])) for row in rows}
    seen = {color for _, color in sheet.getcolors(100_000)}
    assert colors <= seen, "frames have the colors of the experts"
    record = json.loads((out / "calls" / "0002" / "samples.json").read_bytes())
    assert record["negative_prompt"] == "a handwritten three"


def test_an_image_depends_on_its_seed_and_not_on_its_batch(tiny_demo: Path, tmp_path: Path) -> None:
    common = ["--prompt", "a handwritten one", "--steps", "3"]
    atoll("sample", tiny_demo, *common, "-n", "8", "--batch", "8", "--out", tmp_path / "all")
    atoll("sample", tiny_demo, *common, "-n", "3", "--seed", "4", "--batch", "2", "--out", tmp_path / "some")
    whole, _ = read_samples(Artifact.open(tmp_path / "all/calls/0001"))
    part, _ = read_samples(Artifact.open(tmp_path / "some/calls/0001"))
    assert int((whole[4:7].int() - part.int()).abs().max()) <= 1


def test_the_python_front_door(tiny_demo: Path) -> None:
    model = package.load(str(tiny_demo))
    images = model.generate(["a handwritten seven", "a handwritten two"], steps=2, guidance=2.0, route="top-2", seed=0)
    assert [image.size for image in images] == [(8, 8), (8, 8)]
    full = model.generate(["a handwritten seven"], steps=2, route="full", seed=0)
    assert isinstance(full[0], Image.Image)


def test_one_expert_alone_is_a_model_too(tiny_demo: Path) -> None:
    member = json.loads((tiny_demo / "ensemble.json").read_bytes())["experts"][3]
    image = package.load(str(tiny_demo / member["path"])).generate(["a handwritten nine"], steps=2)[0]
    assert image.size == (8, 8)


def test_status_shows_what_is_there_and_what_is_missing(tiny_demo: Path, tmp_path: Path) -> None:
    everything = atoll("status", tiny_demo).stdout
    assert "missing" not in everything
    assert everything.count("there") >= 12
    run = Path(shutil.copytree(tiny_demo / "data", tmp_path / "run" / "data")).parent
    some = atoll("status", run).stdout
    assert "atoll partition" in some
    assert "missing" in some


USER_MISTAKES = {
    "missing run": (["sample", "{tmp}/nowhere", "--prompt", "x"], "no such run"),
    "unknown route": (
        ["sample", "{run}", "--prompt", "a handwritten one", "--route", "best"],
        "unknown route 'best'",
    ),
    "unknown word": (["sample", "{run}", "--prompt", "a painted one"], "unknown word 'painted'"),
    "no prompt": (["sample", "{run}"], "--prompt: missing"),
    "unknown solver": (["sample", "{run}", "--prompt", "a handwritten one", "--solver", "rk9"], "--solver rk9"),
    "unknown device": (["train", "{run}/orders/00.json", "--out", "{tmp}/e", "--device", "tpu9"], "--device tpu9"),
    "unknown card": (["sample", "{run}", "--prompt", "a handwritten one", "--device", "cuda:99"], "--device cuda:99"),
    "expert onto a store": (["train", "{run}/orders/00.json", "--out", "s3://bucket/e"], "give a local folder"),
    "unknown verb": (["sampel"], "did you mean sample?"),
    "unknown option": (["sample", "{run}", "--frobnicate"], "--frobnicate"),
    "not a number": (["sample", "{run}", "--steps", "many"], "--steps"),
    "K larger than the data": (["partition", "{run}/data", "-k", "5000", "--out", "{tmp}/p"], "-k 5000"),
    "missing order": (["train", "{tmp}/00.json", "--out", "{tmp}/e"], "no such order"),
    "folder for an order": (["train", "{run}/orders", "--out", "{tmp}/e"], "not a file"),
    "not an expert": (["admit", "{run}/data", "--out", "{run}"], "is a data artifact, expected expert"),
    "unknown source": (["prepare", "no-such-source", "--out", "{tmp}/d"], "no-such-source"),
    "other settings": (["prepare", "digits", "--out", "{run}/data", "--set", "holdout=0.3"], "holdout"),
    "unknown setting": (["prepare", "digits", "--out", "{tmp}/d", "--set", "color=red"], "color"),
    "empty run": (["evaluate", "{tmp}"], "holds no model yet"),
    "missing router": (["sample", "{run}", "--prompt", "a handwritten one", "--router", "other"], "other"),
}


@pytest.mark.parametrize("mistake", USER_MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    mistake: str, tiny_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = USER_MISTAKES[mistake]
    with chdir(tmp_path), pytest.raises(SystemExit) as exit_:
        main([argument.format(run=tiny_demo, tmp=tmp_path) for argument in arguments])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    command = f"mount -t tmpfs -o size=300k none small && {' '.join(ATOLL)} prepare digits --out small/run/data"
    process = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"NOT TESTED HERE, no mount namespaces: {process.stderr}")
    assert process.returncode == 2, process.stderr
    assert "disk full" in process.stderr
    assert process.stderr.count("\n") == 1


def test_the_record_says_who_painted_what(tiny_demo: Path) -> None:
    evaluation = json.loads((tiny_demo / "evaluation.json").read_bytes())
    for arm in evaluation["arms"]:
        images, record = read_samples(Artifact.open(tiny_demo / "samples" / arm["folder"]))
        shares = torch.tensor(record["experts_at_time"])
        torch.testing.assert_close(shares.sum(1), torch.ones(len(shares)), rtol=0, atol=1e-6)
        assert len(record["expert_of_image"]) == len(images) == len(record["seeds"])
        assert record["times"] == sorted(record["times"], reverse=True)
