"""No command and no Python of README.md and docs/ fails. Each is given in a test or has a reason why not.

docs/commands is made from `--help`, whose examples name files that do not exist: those are parsed only.
"""

from __future__ import annotations

import glob
import re
import shlex
import subprocess
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from atoll.cli import COMMANDS, command_of, main
from atoll.planning.recipes import DIGITS, RECIPES
from late_story import story as late_story
from pages import DOCS, PAGES, ROOT, blocks, commands, lines, quick
from photographs import MORE_CLASSES, write_photographs

WITH_COMMANDS = ["README.md", *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")))]
# pages that are given as a whole elsewhere: tests/test_tutorial.py, tests/test_docs.py
WHOLE = ("tutorial.md", "ensemble.md")
BUCKET = "needs a bucket and keys: tests/exchange/test_join.py gives it on a server of its own"
CHECKPOINT = "needs a checkpoint of 2.7 GB: tests/convert/test_convert_stage.py gives it with small ones"
NOT_GIVEN = {
    "atoll prepare photos/ --out runs/photos/data --size 256 --autoencoder stabilityai/sd-vae-ft-mse": (
        "fetches an autoencoder: tests/models/test_autoencoders.py has folders like it"
    ),
    "atoll evaluate runs/photos -n 10000 --route top-1 --route top-2 --guidance 1 --guidance 3 --device cuda": (
        "needs a GPU: tests/evaluation do so on a CPU, with fewer images"
    ),
    "atoll prepare photos.sqlite --plugin examples/sqlite_source.py --out runs/photos/data": (
        "needs such a file: tests/test_plugins.py makes one"
    ),
    "atoll partition runs/photos/data --method brightness --plugin examples/brightness_clustering.py -k 4": (
        "needs colors: tests/partition/test_partition.py loads it"
    ),
    "atoll convert DiT-XL-2-256x256.pt --from dit --out imagenet": CHECKPOINT,
    "atoll convert DiT-XL-2-256x256.pt --from dit --order orders/03.json --out start-03": CHECKPOINT,
    "atoll export imagenet --to transformer --out folder": CHECKPOINT,
    "atoll publish runs/flowers s3://bucket/flowers --key ~/.ssh/id_ed25519": BUCKET,
    "atoll join s3://bucket/flowers --dry-run": BUCKET,
    "atoll join s3://bucket/flowers --out mine --key ~/.ssh/id_ed25519": BUCKET,
    "atoll status s3://bucket/flowers": BUCKET,
    "atoll admit --inbox s3://bucket/flowers/inbox --out runs/flowers": BUCKET,
}  # `torchrun ... -m atoll train` is given in tests/islands/test_team.py
ANEW = "rm -rf runs/photos && mkdir runs/photos && cp -r cut/data cut/partition runs/photos"
# the commands of all other pages, in an order in which they can be given, with what people do in between
STORY = [
    # README.md: an organizer, a contributor, the organizer again
    "atoll prepare ~/photos --out runs/photos/data --size 64 --labels folder",
    "atoll partition runs/photos/data -k 8",
    "cp -r runs/photos cut",
    "atoll plan runs/photos/data",
    "mkdir clusters && cp runs/photos/orders/03.json . && cp -r runs/photos/partition/clusters/03 clusters",
    "atoll train 03.json --data clusters/03 --out my-expert",
    "mv my-expert from-alice",
    "atoll admit from-alice/ --out runs/photos",
    "atoll router runs/photos",
    "atoll status runs/photos",
    # docs/sampling.md
    'atoll sample runs/photos --prompt "a red tulip" --memory 12GB --weights int8',
    'atoll sample runs/demo --prompt "a handwritten three" -n 16 --out threes',
    # docs/planning.md, docs/data.md
    "atoll plan runs/photos/data --print-config",
    ANEW,
    "atoll plan runs/photos/data --images 2M --set training.batch=256",
    ANEW,
    "atoll plan runs/photos/data --islands islands.toml",
    "rm -rf runs/photos",
    "atoll run ~/photos --out runs/photos --hours 1",
    # docs/training.md
    ANEW,
    "atoll plan runs/photos/data --monolith --images 500k",
    "atoll train runs/photos/orders-monolith/monolith.json --out runs/photos/start",
    "atoll plan runs/photos/data --init runs/photos/start --images 1.5M",
    "ln -s runs/photos/orders runs/photos/partition runs/photos/start .",
    "atoll train orders/*.json --out experts",
    # docs/distill.md
    "cp -rL runs/demo demo && rm runs/demo && mv demo runs/demo",
    "printf 'a handwritten three\\n' > prompts.txt",
    "atoll distill runs/demo --out student --from-samples --prompts prompts.txt",
    "rm -r student",
    "atoll distill runs/demo --out student",
    'atoll sample student --prompt "a handwritten three"',
    "atoll evaluate runs/demo --student student",
    "atoll export student --to diffusers --out student-diffusers",
    "atoll status student",
    # docs/export.md, docs/models.md
    "atoll export runs/demo --to diffusers --out demo-pipeline",
    'atoll describe xl/2 --text 768 --gpu "RTX 4090"',
]


def test_every_command_is_given_or_has_a_reason_not_to_be() -> None:
    printed = {line: page for page in WITH_COMMANDS for line in lines(ROOT / page)}
    elsewhere = {*late_story(), *(line for page in WHOLE for line in lines(DOCS / page))}
    given = {line for line in STORY if line.startswith("atoll ")}
    assert sorted(set(printed) - elsewhere - given - set(NOT_GIVEN)) == [], "no test gives these"
    assert sorted((given | set(NOT_GIVEN)) - set(printed)) == [], "no page has these any more"
    assert not given & set(NOT_GIVEN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_docs_can_be_understood(page: Path) -> None:
    """Commands, options and recipes are there, and values of the right type."""
    for words in commands(page):
        assert words[0] in COMMANDS, f"atoll {' '.join(words)}"
        command_of(words[0]).make_context(f"atoll {words[0]}", [word for word in words[1:] if word != "&&"])
    for name in re.findall(r"--recipe ([a-z]+)", page.read_text()):
        assert name in (*RECIPES, DIGITS), f"--recipe {name}"


def run_python(page: str, place: Path, **names: object) -> dict[str, Any]:
    """Run all Python of a page, one block after the other, with two steps for fifty; its names."""
    there: dict[str, Any] = dict(names)
    with chdir(place):
        for block in blocks(ROOT / page, "python"):
            exec(re.sub(r"steps=\d+", "steps=2", block), there)
    return there


def test_the_python_of_the_pages_runs(tiny_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Image.Image] = []
    monkeypatch.setattr(Image.Image, "show", lambda image: shown.insert(0, image))
    (tmp_path / "runs").mkdir()
    for name in ("demo", "photos"):
        (tmp_path / "runs" / name).symlink_to(tiny_demo)
    bar = SimpleNamespace(update=shown.append)
    named = run_python("docs/sampling.md", tmp_path, prompts=["a handwritten one"], bar=bar)
    assert len(named["images"]) == 4
    assert len(shown) > 2
    named = run_python("docs/data.md", tmp_path)
    assert len(named["x0"]) == 64


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_other_pages(tiny_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_photographs(tmp_path / "photos", ("red_tulip", *MORE_CLASSES[1:]), per_class=30, size=64)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(tiny_demo)
    (tmp_path / "islands.toml").write_text(blocks(DOCS / "planning.md", "toml")[0])
    with chdir(tmp_path):
        for line in STORY:
            if not line.startswith("atoll "):
                subprocess.run(line, shell=True, check=True)
                continue
            words = [str(Path(word).expanduser()) if word.startswith("~") else word for word in shlex.split(line)[1:]]
            words = [found for word in words for found in (sorted(glob.glob(word)) if "*" in word else [word])]
            main(quick(words))
    assert (tmp_path / "experts" / "07" / "manifest.json").exists()
    run_python("docs/export.md", tmp_path)
    run_python("README.md", tmp_path)
    x, t = torch.randn(2, 4, 32, 32), torch.rand(2)
    (block,) = blocks(DOCS / "models.md", "python")
    named: dict[str, Any] = {"x": x, "t": t, "condition": None}
    exec(block.replace('"xl/2"', '"s/2"').replace('condition="tokens", text_width=768, text_length=77', ""), named)
    assert named["answer"].shape == x.shape
    (tmp_path / "islands.toml").write_text(blocks(DOCS / "data.md", "toml")[0])
    with chdir(tmp_path):
        subprocess.run(ANEW, shell=True, check=True)
        main(["plan", "runs/photos/data", "--islands", "islands.toml"])
