"""A newcomer with a folder of photographs: every command of docs/tutorial.md, taken from the page, one by one."""

from __future__ import annotations

import json
import shlex
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import atoll as package
from atoll.artifacts import Artifact
from atoll.cli import main
from pages import DOCS, blocks, commands
from photographs import CLASSES, write_photographs

TUTORIAL = DOCS / "tutorial.md"
WHERE_AND_WHEN = ("provenance.json", "log.jsonl")  # the page says that nothing needs them
PIXELS = ["--features", "pixels", "--workers", "1"]
TINY = "--set network.width=32 --set network.depth=1 --set training.warmup_images=64 --set training.ema_images=64"


def quick(words: list[str]) -> list[str]:
    """The same command with a budget of a moment."""
    more = {
        "prepare": "--features pixels --workers 1 --device cpu --set holdout=0.1",
        "plan": f"--images 320 {TINY} --set acceptance.max_ratio_to_gaussian=1000",
        "train": "--device cpu",
        "router": "--set training.images=320 --set training.warmup_images=64 --device cpu",
        "sample": "-n 2 --steps 2 --device cpu",
        "evaluate": "-n 20 --steps 2 --device cpu",
    }
    return words + shlex.split(more.get(words[0], ""))


def newcomer(folder: Path, *, captions: bool, short: bool) -> Path:
    """Give all commands in a folder with photographs, as somebody who would rather not name a machine; the run."""
    write_photographs(folder / "photos", per_class=60 if short else 100, size=32, captions=captions)
    with chdir(folder):
        for words in commands(TUTORIAL):
            if captions:  # prompts are texts then
                words = [f"a photo of a small {w}" if words[n - 1] == "--prompt" else w for n, w in enumerate(words)]
            if words[0] == "admit":
                for name in WHERE_AND_WHEN:
                    (folder / "experts" / "00" / name).unlink()
            torch.set_num_threads(2 if words[0] == "evaluate" else 1)
            words += ["--until", "plan"] if words[0] == "run" else []  # test_run.py carries one to its end
            main(quick(words) if short else words)
    return folder / "runs" / "photos"


def test_a_newcomer_by_class_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = newcomer(tmp_path, captions=False, short=True)
    told = capsys.readouterr().out
    assert "prompts: 4 classes by name or number: barn, fishing_boat, lemon, rowing_boat" in told
    rows = json.loads((tmp_path / "pictures" / "images.json").read_bytes())
    assert [row["prompt"] for row in rows] == ["lemon"] * 2 + ["barn"] * 2 + ["rowing_boat"] * 2
    assert "tells the cluster of" in told, "how good the router is"
    for cluster in range(4):
        (admitted,) = (run / "contributions").glob(f"{cluster:02d}-*")
        assert Artifact.open(admitted).digest == Artifact.open(tmp_path / "experts" / f"{cluster:02d}").digest
    for page in (run / "partition" / "partition.html", run / "report.html"):
        assert all(name in page.read_text() for name in CLASSES), page
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    assert evaluation["floors"]["chance"] == 0.25
    assert all(arm["recognised"] is not None for arm in evaluation["arms"])
    for arm in evaluation["arms"]:
        record = json.loads((run / "samples" / arm["folder"] / "samples.json").read_bytes())
        assert record["threads"] == 2, "all there are"

    with pytest.raises(SystemExit) as refused:
        main(["sample", str(run), "--prompt", "boat", "--out", str(tmp_path / "boats")])
    assert refused.value.code == 2
    assert "fits 2 classes, fishing_boat (1), rowing_boat (3)" in capsys.readouterr().err
    assert not (tmp_path / "boats").exists()

    model = package.load(run, device="cpu")
    assert "reads 4 classes (barn, fishing_boat, lemon, rowing_boat)" in repr(model)
    by_name, by_number = model.generate(["lemon", "a rowing boat"], steps=2), model.generate([2, 3], steps=2)
    assert [image.tobytes() for image in by_name] == [image.tobytes() for image in by_number]
    (block,) = blocks(TUTORIAL, "python")
    with chdir(tmp_path):
        exec(block.replace("steps=20", "steps=2"), {})
    assert Image.open(tmp_path / "lemon.png").size == (32, 32)


def test_an_unfinished_or_refused_expert_keeps_no_other_out(
    tmp_path: Path, tiny_demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = tmp_path / "unfinished"
    (unfinished / "state").mkdir(parents=True)
    (unfinished / "state" / "000000004096.safetensors").touch()
    expert = tiny_demo / "islands" / "03" / "expert"
    with pytest.raises(SystemExit) as refused:
        main(["admit", str(unfinished), str(tmp_path / "nowhere"), str(expert), "--out", str(tiny_demo)])
    assert refused.value.code == 2
    said = capsys.readouterr()
    assert "already admitted: cluster 3" in said.out
    assert "is not finished, its last checkpoint is after 4,096 images" in said.err
    assert "nowhere: holds no finished expert" in said.err
    assert "2 of 3 were not admitted, for the reasons above; the others are in" in said.err
    with pytest.raises(SystemExit):
        main(["admit", str(unfinished), str(tmp_path / "nowhere"), "--out", str(tiny_demo)])
    assert capsys.readouterr().err.endswith("2 of 2 were not admitted, for the reasons above\n")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("captions", [False, True])
def test_the_page_as_it_stands(captions: bool, tmp_path: Path) -> None:
    """400 photographs and the page's own budgets: pictures that follow the prompt."""
    run = newcomer(tmp_path, captions=captions, short=False)
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    if not captions:
        assert max(arm["recognised"] for arm in evaluation["arms"]) > 0.35, "chance is 0.25; one run gave 0.52"


def test_the_best_balance_there_is_unless_somebody_insists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fifty copies of one picture are one cell, whatever else there is."""
    write_photographs(tmp_path / "photos", ("one",), per_class=12, size=16)
    for number in range(50):
        told = PngInfo()
        told.add_text("number", str(number))  # other files, the same picture
        Image.new("RGB", (16, 16), "red").save(tmp_path / "photos" / f"{number}.png", pnginfo=told)
    main(["prepare", str(tmp_path / "photos"), "--out", str(tmp_path / "data"), "--size", "16", *PIXELS])
    with pytest.raises(SystemExit) as refused:
        main(["partition", str(tmp_path / "data"), "-k", "2", "--balance", "2"])
    assert refused.value.code == 2
    assert "--balance 2: cannot be reached, the best is" in capsys.readouterr().err
    assert not (tmp_path / "partition").exists()
    main(["partition", str(tmp_path / "data"), "-k", "2"])
    assert "is the best these samples allow; 2 was the aim" in capsys.readouterr().out


def test_data_without_captions_and_labels_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_photographs(tmp_path / "photos", ("one",), per_class=30, size=16)
    main(["prepare", str(tmp_path / "photos"), "--out", str(tmp_path / "data"), "--size", "16", *PIXELS])
    assert "prompts: none, no captions or labels found" in capsys.readouterr().out


def test_another_clusters_data_is_called_that(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order, clusters = str(planned / "orders" / "00.json"), planned / "partition" / "clusters"
    for folder, said in ((clusters / "01", "is not the order's (or is damaged)"), (tmp_path, "holds neither")):
        with pytest.raises(SystemExit) as refused:
            main(["train", order, "--data", str(folder), "--out", str(tmp_path / "expert"), "--device", "cpu"])
        assert refused.value.code == 2
        err = capsys.readouterr().err
        assert said in err
        assert "partition/clusters/00" in err
    assert list(tmp_path.iterdir()) == []
