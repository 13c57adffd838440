"""A newcomer with a folder of photographs: every command of docs/tutorial.md, taken from the page, one by one."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from PIL import Image

import atoll as package
from atoll.artifacts import Artifact
from atoll.cli import main
from pages import DOCS, blocks, commands, quick
from photographs import CLASSES, write_photographs
from runs import scores_in

TUTORIAL = DOCS / "tutorial.md"
WHERE_AND_WHEN = ("provenance.json", "log.jsonl")  # nothing needs them, as the page has it


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
            # test_run.py runs one to its end
            main(quick(words) if short else words + ["--until", "plan"] * (words[0] == "run"))
    return folder / "runs" / "photos"


def test_a_newcomer_by_class_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = newcomer(tmp_path, captions=False, short=True)
    printed = capsys.readouterr().out
    assert "prompts: 4 classes by name or number: barn, fishing_boat, lemon, rowing_boat" in printed
    assert "router accuracy" in printed
    rows = json.loads((tmp_path / "pictures" / "images.json").read_bytes())
    assert [row["prompt"] for row in rows] == ["lemon"] * 2 + ["barn"] * 2 + ["rowing_boat"] * 2
    for cluster in range(4):
        (admitted,) = (run / "contributions").glob(f"{cluster:02d}-*")
        assert Artifact.open(admitted).digest == Artifact.open(tmp_path / "experts" / f"{cluster:02d}").digest
    for page in (run / "partition" / "partition.html", run / "report.html"):
        assert all(name in page.read_text() for name in CLASSES), page
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    assert evaluation["chance"] == 0.25
    for row in evaluation["configurations"]:
        record = json.loads((run / "samples" / row["folders"][0] / "samples.json").read_bytes())
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
    printed = capsys.readouterr()
    assert "already admitted: cluster 3" in printed.out
    assert "is not finished; give its" in printed.err
    assert "nowhere: holds no finished expert" in printed.err
    assert "2 of 3 were not admitted, for the reasons above; the others are in" in printed.err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("captions", [False, True])
def test_the_page_as_it_stands(captions: bool, tmp_path: Path) -> None:
    """400 photographs and the page's own budgets: pictures that follow the prompt."""
    run = newcomer(tmp_path, captions=captions, short=False)
    if not captions:
        assert max(scores_in(run, "class_accuracy")) > 0.35, "chance is 0.25; one run gave 0.52"


def test_the_data_of_another_cluster_is_refused(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order, clusters = str(planned / "orders" / "00.json"), planned / "partition" / "clusters"
    for folder, words in ((clusters / "01", "is not the order's (or is damaged)"), (tmp_path, "holds neither")):
        with pytest.raises(SystemExit) as refused:
            main(["train", order, "--data", str(folder), "--out", str(tmp_path / "expert"), "--device", "cpu"])
        assert refused.value.code == 2
        printed = capsys.readouterr().err
        assert words in printed
        assert "partition/clusters/00" in printed
    assert list(tmp_path.iterdir()) == []
