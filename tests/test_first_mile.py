"""A newcomer with a folder of photographs: every command of docs/tutorial.md, taken from the page, one by one."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.main import get_command

import atoll as package
from atoll.cli import VERBS, main
from photographs import CLASSES, write_photographs

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TINY = "--set network.width=32 --set network.depth=1 --set training.warmup_images=64 --set training.ema_images=64"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Every `atoll` command in the blocks of a page, without its comment."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("atoll ")]


def quick(words: list[str]) -> list[str]:
    """The same command with a budget of a moment."""
    more = {
        "prepare": "--features pixels --workers 1 --device cpu --set holdout=0.1",
        "plan": f"--images 320 {TINY} --set acceptance.gaussians=1000",
        "train": "--device cpu",
        "router": "--set training.images=320 --set training.warmup_images=64 --device cpu",
        "sample": "-n 2 --steps 2 --device cpu",
        "evaluate": "-n 20 --steps 2 --device cpu",
    }
    return words + shlex.split(more.get(words[0], ""))


def newcomer(folder: Path, *, captions: bool, short: bool) -> Path:
    """Give all commands in a folder with photographs; the run."""
    write_photographs(folder / "photos", per_class=60 if short else 100, size=32, captions=captions)
    with chdir(folder):
        for words in commands(ROOT / "docs" / "tutorial.md"):
            if captions:  # prompts are texts then
                words = [f"a photo of a small {w}" if words[n - 1] == "--prompt" else w for n, w in enumerate(words)]
            main(quick(words) if short else words)
    return folder / "runs" / "photos"


def test_a_newcomer_by_class_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = newcomer(tmp_path, captions=False, short=True)
    told = capsys.readouterr().out
    assert "prompts: 4 classes by name or number: barn, fishing_boat, lemon, rowing_boat" in told
    rows = json.loads((tmp_path / "pictures" / "images.json").read_bytes())
    assert [row["prompt"] for row in rows] == ["lemon"] * 2 + ["barn"] * 2 + ["rowing_boat"] * 2
    page = (run / "partition" / "partition.html").read_text()
    assert all(name in page for name in CLASSES)
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    assert evaluation["floors"]["chance"] == 0.25
    assert all(arm["recognised"] is not None for arm in evaluation["arms"])

    with pytest.raises(SystemExit) as refused:
        main(["sample", str(run), "--prompt", "boat", "--out", str(tmp_path / "boats")])
    assert refused.value.code == 2
    assert "fits 2 classes, fishing_boat (1), rowing_boat (3)" in capsys.readouterr().err
    assert not (tmp_path / "boats").exists()

    model = package.load(run, device="cpu")
    assert "reads 4 classes (barn, fishing_boat, lemon, rowing_boat)" in repr(model)
    by_name, by_number = model.generate(["lemon", "a rowing boat"], steps=2), model.generate([2, 3], steps=2)
    assert [image.tobytes() for image in by_name] == [image.tobytes() for image in by_number]
    (block,) = blocks(ROOT / "docs" / "tutorial.md", "python")
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
    assert "2 of 3 were not admitted" in said.err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("captions", [False, True])
def test_the_page_as_it_stands(captions: bool, tmp_path: Path) -> None:
    """400 photographs and the page's own budgets: pictures that follow the prompt."""
    run = newcomer(tmp_path, captions=captions, short=False)
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    if not captions:
        assert max(arm["recognised"] for arm in evaluation["arms"]) > 0.35, "chance is 0.25; one run gave 0.52"


def test_data_without_captions_and_labels_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_photographs(tmp_path / "photos", ("one",), per_class=30, size=16)
    place = ["--out", str(tmp_path / "data"), "--size", "16", "--features", "pixels", "--workers", "1"]
    main(["prepare", str(tmp_path / "photos"), *place])
    assert "prompts: none, for there are neither captions nor labels" in capsys.readouterr().out


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_docs_can_be_understood(page: Path) -> None:
    """Verbs and options are there and values of the right type; what they do is tested where it is told."""
    for words in commands(page):
        assert words[0] in VERBS, f"atoll {' '.join(words)}"
        parser: Any = command_of(words[0])
        given = [word for word in words[1:] if word not in ("&&",)]
        parser.make_context(f"atoll {words[0]}", given)


def command_of(verb: str) -> Any:
    import importlib

    app = typer.Typer(add_completion=False)
    app.command()(getattr(importlib.import_module(f"atoll.cli.{verb}"), verb))
    return get_command(app)
