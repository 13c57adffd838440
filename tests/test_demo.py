"""The demo: every stage through the real command line; killed anywhere it resumes to the same digests."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageColor

from atoll.artifacts import Artifact
from atoll.cli import explain_failure, main
from atoll.evaluation.samples import read_samples
from atoll.evaluation.sheet import expert_color
from atoll.sampling import Sampling
from runs import ATOLL, atoll, digests

MOMENTS = (
    "data/manifest.json",
    "islands/01/expert/state",
    "islands/05/expert/manifest.json",
    "ensemble/000004.json",
    "router/state",
    "samples",
)


def test_leaves_everything_to_look_at(tiny_demo: Path) -> None:
    evaluation = json.loads((tiny_demo / "evaluation.json").read_bytes())
    for row, route in zip(evaluation["configurations"], ["top-1", "top-2"], strict=True):
        assert Sampling(**row["sampling"]) == Sampling(steps=4, route=route, precision="float32")
        images, record = read_samples(Artifact.open(tiny_demo / "samples" / row["folders"][0]))
        weights = torch.tensor(record["experts_at_time"])
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)), rtol=0, atol=1e-6)
        assert len(record["expert_of_image"]) == len(images) == len(record["seeds"])
    html = (tiny_demo / "report.html").read_text()
    assert not re.search(r"(src|href)=.?http", html), "one file, nothing fetched"
    assert Image.open(tiny_demo / "samples.png").size[0] > 300


def test_two_experts_are_ddpm_and_six_flow_and_each_has_its_own_cluster_only(tiny_demo: Path) -> None:
    ensemble = json.loads((tiny_demo / "ensemble" / "000010.json").read_bytes())
    objectives = [member["objective"] for member in ensemble["experts"]]
    assert sorted(objectives) == ["epsilon on cosine-vp"] * 2 + ["velocity on linear-flow"] * 6
    for k in range(8):
        inbox = tiny_demo / "islands" / f"{k:02d}" / "inbox"
        files = {p.relative_to(inbox).as_posix() for p in inbox.rglob("*") if p.is_file()}
        assert all(f == f"orders/{k:02d}.json" or f.startswith(f"partition/clusters/{k:02d}/") for f in files)


def test_a_second_run_does_nothing_again_and_another_seed_is_refused(
    tiny_demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stamps() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in tiny_demo.rglob("*") if p.suffix in (".safetensors", ".parquet")}

    before, when = digests(tiny_demo), stamps()
    main(["demo", "--size", "tiny", "--out", str(tiny_demo)])
    assert "everything is there" in capsys.readouterr().out
    assert digests(tiny_demo) == before
    assert stamps() == when, "a stage was done again"
    with pytest.raises(SystemExit) as refused:
        main(["demo", "--size", "tiny", "--out", str(tiny_demo), "--seed", "1"])
    assert refused.value.code == 2
    assert "seed: 0 -> 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "moments", [MOMENTS[1:2], pytest.param(MOMENTS, marks=pytest.mark.slow)], ids=["once", "often"]
)
def test_killed_it_resumes_to_the_same_digests(moments: tuple[str, ...], tiny_demo: Path, tmp_path: Path) -> None:
    """kill -9 the whole demo just when each of these appears, and then let it finish."""
    command = [*ATOLL, "demo", "--size", "tiny", "--out", str(tmp_path / "run")]
    for moment in moments:
        assert not (tmp_path / "run" / moment).exists(), f"{moment} is there too early to be killed at"
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while process.poll() is None and not (tmp_path / "run" / moment).exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
        time.sleep(0.2)  # its islands notice the closed pipe and end
    atoll("demo", "--size", "tiny", "--out", tmp_path / "run")
    assert digests(tmp_path / "run") == digests(tiny_demo)


def test_another_prompt_adds_to_the_images(tiny_demo: Path, tmp_path: Path) -> None:
    """One PNG each with every setting recorded; the same command again adds nothing."""
    out = tmp_path / "pictures"
    settings = ["--steps", "2", "--seed", "5", "--route", "top-2", "--out", str(out)]
    main(["sample", str(tiny_demo), "--prompt", "a handwritten three", "-n", "3", *settings])
    first = {p.name: p.read_bytes() for p in out.glob("0*.png")}
    small = Image.open(out / "sheet.png").size
    more = ["--prompt", "a handwritten four", "--negative-prompt", "a handwritten three", "-n", "2", *settings]
    main(["sample", str(tiny_demo), *more])
    main(["sample", str(tiny_demo), *more])
    rows = json.loads((out / "images.json").read_bytes())
    assert [(row["file"], row["prompt"], row["seed"], row["call"]) for row in rows] == [
        *((f"0000{i}.png", "a handwritten three", 5 + i, "0001") for i in range(3)),
        *((f"0000{3 + i}.png", "a handwritten four", 5 + i, "0002") for i in range(2)),
    ]
    assert {p.name: p.read_bytes() for p in out.glob("0*.png") if p.name in first} == first
    sheet = Image.open(out / "sheet.png")
    assert sheet.height > small[1], "a row more"
    colors = {ImageColor.getrgb(expert_color(row["expert"])) for row in rows}
    assert colors <= {color for _, color in sheet.getcolors(100_000)}, "frames have the colors of the experts"
    record = json.loads((out / "calls" / "0002" / "samples.json").read_bytes())
    assert record["negative_prompt"] == "a handwritten three"
    assert Sampling(**record["sampling"]) == Sampling(route="top-2", steps=2, precision="float32")


ONE = '--prompt "a handwritten one"'
USER_MISTAKES = {
    "sample {tmp}/nowhere --prompt x": "no such run",
    f"sample {{run}} {ONE} --route best": "unknown route 'best'",
    'sample {run} --prompt "a painted one"': "unknown word 'painted'",
    "sample {run}": "--prompt: missing",
    f"sample {{run}} {ONE} --solver rk9": "--solver rk9",
    "train {run}/orders/00.json --out {tmp}/e --device tpu9": "--device tpu9",
    f"sample {{run}} {ONE} --device cuda:99": "--device cuda:99",
    "train {run}/orders/00.json --out s3://bucket/e": "give a local folder",
    "sampel": "did you mean sample?",
    "sample {run} --frobnicate": "--frobnicate",
    "sample {run} --steps many": "--steps",
    "partition {run}/data -k 5000 --out {tmp}/p": "-k 5000",
    "train {tmp}/00.json --out {tmp}/e": "no such order",
    "train {run}/orders --out {tmp}/e": "not a file",
    "admit {run}/data --out {run}": "is a data artifact, expected expert",
    "admit --out {run}": "name expert folders, or an --inbox",
    "prepare no-such-source --out {tmp}/d": "no-such-source",
    "prepare digits --out {run}/data --set holdout=0.3": "holdout",
    "prepare digits --out {tmp}/d --set color=red": "color",
    "evaluate {tmp}": "holds no model yet",
    f"sample {{run}} {ONE} --router other": "other",
    "plan {run}/data --islands {tmp}/islands.toml": "not a TOML file",
    "export {run} --to onnx --out {tmp}/x": "'onnx' is not one of",
    "train {run}/orders/00.json {run}/orders/01.json --out {tmp}/e --init x": "--init: has no meaning with several",
}


@pytest.mark.parametrize("mistake", USER_MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    mistake: str, tiny_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(tmp_path), pytest.raises(SystemExit) as exit_:
        main(shlex.split(mistake.format(run=tiny_demo, tmp=tmp_path)))
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert USER_MISTAKES[mistake] in printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_signers_that_are_not_there_are_one_line(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["publish", str(planned), str(tmp_path / "public")])
    with pytest.raises(SystemExit) as refused:
        main(["status", str(tmp_path / "public"), "--signers", str(tmp_path / "missing")])
    assert refused.value.code == 2
    assert f"--signers {tmp_path}/missing: cannot be read" in capsys.readouterr().err


def test_failures_of_the_machine_are_one_line_and_bugs_are_not() -> None:
    lines = {
        "/x: permission denied; fix it and run the same command again": PermissionError(13, "Permission denied", "/x"),
        "/x: disk full while writing": OSError(28, "No space left on device", "/x"),
        "plan: needs faiss: pip install 'atoll-diffusion[organizer]'": ModuleNotFoundError(name="faiss"),
    }
    assert all((explain_failure(error, "plan", []) or "").startswith(line) for line, error in lines.items())
    assert explain_failure(ModuleNotFoundError(name="another"), "plan", []) is None
    assert explain_failure(ValueError("a bug"), "plan", []) is None
