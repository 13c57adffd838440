"""Stories told at the command line, from images to pictures: the net under every change of the code.

Command lines and file names are in tests/support/surface.py. tests/test_killed_commands.py kills each command.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

import surface as s
from atoll.cli import main
from photographs import CLASSES, write_photographs

COLORS, SHAPES = ("red", "green", "blue", "yellow"), ("circle", "square")


def call(folder: Path, line: str) -> tuple[int, str]:
    """Exit code and everything printed by `atoll LINE`, given in a folder."""
    printed = StringIO()
    with chdir(folder), redirect_stdout(printed), redirect_stderr(printed):
        try:
            main(line.split())
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, printed.getvalue()


def give(folder: Path, *lines: str) -> str:
    """What the last of these commands printed; all must succeed."""
    for line in lines:
        code, printed = call(folder, line)
        assert code == 0, f"atoll {line}\n{printed}"
    return printed


def refused(folder: Path, line: str, *words: str) -> str:
    """The one line in which a command refuses: exit code 2, and all of these words."""
    code, printed = call(folder, line)
    assert code == 2, f"atoll {line}\n{printed}"
    assert "Traceback" not in printed
    assert all(word in printed for word in words), printed
    return printed


def train_all(count: int, first: int = 0, orders: str = s.ORDERS) -> list[str]:
    names = range(first, first + count)
    return [s.TRAIN.format(order=f"{orders}/{k:02d}.json", out=f"experts/{k:02d}", on=s.ON) for k in names]


def pictures(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob(s.PICTURES))]


def sample(folder: Path, out: str, *prompts: str, model: str = "run", count: int = 2) -> list[bytes]:
    asked = " ".join(f"--prompt {prompt}" for prompt in prompts)
    give(folder, s.SAMPLE.format(model=model, prompts=asked, count=count, out=out))
    made = pictures(folder / out)
    assert len(made) >= count * len(prompts)
    return made


def flip(path: Path, at: float = 0.6) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 0x10
    path.unlink()  # a hard link must not reach the original
    path.write_bytes(bytes(content))


@pytest.fixture(scope="module")
def finished(session_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two clusters, their experts admitted, and a router. Read only: see `place`."""
    folder = tmp_path_factory.mktemp("finished")
    plan = s.PLAN.format(mix="1ddpm:1flow", images=640, tiny=s.TINY, lenient=s.LENIENT)
    give(folder, s.PREPARE.format(source="digits[:600]"), s.PARTITION.format(k=2), plan, *train_all(2))
    give(folder, s.ADMIT.format(experts="experts/00 experts/01"), s.ROUTER.format(images=640, on=s.ON))
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to work in."""
    return Path(shutil.copytree(finished, tmp_path / "place"))


def test_from_images_to_an_export_that_needs_no_atoll(place: Path) -> None:
    """One run from its first command to its last; every command again changes nothing."""
    ours = sample(place, "samples", "one", "two")
    assert sample(place, "samples", "one", "two") == ours, "the same command makes the same images"
    give(place, s.EVALUATE, s.EXPORT.format(out="pipeline"))
    measured = json.loads((place / s.EVALUATION).read_bytes())
    assert "top-1" in json.dumps(measured)
    assert "<html" in (place / s.REPORT).read_text()
    assert (place / "pipeline" / s.PIPELINE).exists()
    theirs = (
        "import torch; from diffusers import DiffusionPipeline as P\n"
        "pipe = P.from_pretrained('pipeline', trust_remote_code=True)\n"
        "images = pipe('one', num_inference_steps=2).images; print(images[0].size)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    environment["HF_MODULES_CACHE"] = str(place / "modules")
    done = subprocess.run(
        [sys.executable, "-c", theirs], cwd=place, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "(8, 8)"
    assert "2" in give(place, s.STATUS)


def test_two_hundred_photographs_by_class(tmp_path: Path) -> None:
    write_photographs(tmp_path / "photos", per_class=50, size=32)
    (tmp_path / "photos" / CLASSES[0] / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    printed = give(tmp_path, s.PREPARE_FOLDERS.format(source="photos"))
    assert s.ONE_SKIPPED in printed, printed
    plan = s.PLAN.format(mix="2flow", images=320, tiny=s.TINY, lenient=s.LENIENT)
    give(tmp_path, s.PARTITION.format(k=2), plan, *train_all(2))
    give(tmp_path, s.ADMIT.format(experts="experts/00 experts/01"), s.ROUTER.format(images=320, on=s.ON))
    made = sample(tmp_path, "samples", CLASSES[2], "3")
    assert Image.open(BytesIO(made[0])).mode == "RGB"
    refused(tmp_path, s.SAMPLE.format(model="run", prompts="--prompt lemmon", count=1, out="no"), "lemmon", "lemon")
    assert not (tmp_path / "no").exists()


def captioned_tar(path: Path, count: int) -> None:
    """A WebDataset of drawn shapes with a sentence each."""
    with tarfile.open(path, "w") as tar:
        for i in range(count):
            color, shape = COLORS[i % 4], SHAPES[i // 4 % 2]
            numbers = np.random.default_rng(i)
            picture = Image.new("RGB", (24, 24), tuple(int(v) for v in numbers.integers(0, 60, 3)))
            x, y = (int(v) for v in numbers.integers(2, 10, 2))
            draw = ImageDraw.Draw(picture)
            (draw.ellipse if shape == "circle" else draw.rectangle)((x, y, x + 11, y + 11), fill=color)
            data = BytesIO()
            picture.save(data, "PNG")
            for ending, content in (("png", data.getvalue()), ("txt", f"a {color} {shape} at night".encode())):
                entry = tarfile.TarInfo(f"{i:05d}.{ending}")
                entry.size = len(content)
                tar.addfile(entry, BytesIO(content))


def test_a_webdataset_of_captions_is_sampled_by_a_sentence(tmp_path: Path) -> None:
    captioned_tar(tmp_path / "shapes.tar", 200)
    plan = s.PLAN.format(mix="1ddpm:1flow", images=320, tiny=s.TINY, lenient=s.LENIENT)
    give(tmp_path, s.PREPARE_IMAGES.format(source="shapes.tar"), s.PARTITION.format(k=2), plan, *train_all(2))
    give(tmp_path, s.ADMIT.format(experts="experts/00 experts/01"), s.ROUTER.format(images=320, on=s.ON))
    sentence = ["sample", "run", "--prompt", "a red circle at night", "-n", "2", "--steps", "2", "--out", "samples"]
    with chdir(tmp_path):
        main([*sentence, "--device", "cpu"])
    assert len(pictures(tmp_path / "samples")) >= 2


def test_data_added_later_teaches_the_clusters_it_falls_into(place: Path) -> None:
    before = sample(place, "before", "one")
    give(place, s.PREPARE_MORE.format(source="digits[600:800]"), s.PARTITION_MORE, s.PLAN_MORE.format(images=320))
    orders = sorted((place / s.ORDERS_MORE).glob("*.json"))
    orders = [order for order in orders if order.name[:2].isdigit()]
    assert orders, "200 new digits make orders for the clusters that grew"
    out = "experts/late"
    give(place, s.TRAIN.format(order=orders[0].relative_to(place), out=out, on=s.ON), s.ADMIT.format(experts=out))
    give(place, s.ROUTER.format(images=640, on=s.ON))
    assert sample(place, "after", "one") != before


def test_an_expert_trains_further_by_a_new_order(place: Path) -> None:
    give(place, s.PLAN_AGAIN.format(cluster=1, images=320))
    order = f"{s.ORDERS_MORE}/01.json"
    give(place, s.TRAIN.format(order=order, out="experts/more", on=s.ON), s.ADMIT.format(experts="experts/more"))
    assert json.loads((place / "experts/more" / s.CARD).read_bytes())


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen: JOINING NOT TESTED HERE")
    (tmp_path / "keys").mkdir()
    for name in ("organizer", "alice", "mallory"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(tmp_path / "keys" / name)]
        subprocess.run(make, check=True)
    return tmp_path / "keys"


def test_publish_join_admit(place: Path, keys: Path) -> None:
    """A contributor sees the published folder only; the organizer admits what a listed key signed, and only that."""
    shutil.rmtree(place / s.VERSIONS)
    shutil.rmtree(place / "run" / "contributions")
    plan = s.PLAN.format(mix="1ddpm:1flow", images=640, tiny=s.TINY, lenient=s.LENIENT)
    shutil.rmtree(place / s.ORDERS)
    give(place, plan, s.PUBLISH.format(url="public", key=keys / "organizer"))
    public = {p.name for p in (place / "public").rglob("*")}
    assert "index.parquet" not in public, "index and holdout stay with the organizer"
    give(place, s.JOIN.format(url="public", out="alice", key=keys / "alice"))
    give(place, s.JOIN.format(url="public", out="mallory", key=keys / "mallory"))
    public_key = (keys / "alice.pub").read_text()
    (place / s.SIGNERS).write_text(f'alice namespaces="atoll" {public_key}')
    code, printed = call(place, s.ADMIT_INBOX.format(url="public", signers=s.SIGNERS))
    assert code == 2, "mallory's key is not on the list"
    assert "admitted" in printed
    version = json.loads(sorted((place / s.VERSIONS).glob("*.json"))[-1].read_bytes())
    assert json.dumps(version).count("contributions/") == 1


def test_a_damaged_contribution_is_refused_and_changes_nothing(place: Path) -> None:
    give(place, s.PLAN_AGAIN.format(cluster=1, images=320))
    give(place, s.TRAIN.format(order=f"{s.ORDERS_MORE}/01.json", out="experts/more", on=s.ON))
    versions = sorted((place / s.VERSIONS).glob("*.json"))
    for name in (s.WEIGHTS, s.CARD, s.MANIFEST):
        bad = Path(shutil.copytree(place / "experts/more", place / f"bad-{name}"))
        flip(bad / name)
        refused(place, s.ADMIT.format(experts=bad.name))
    (place / "empty").mkdir()
    refused(place, s.ADMIT.format(experts="empty"))
    assert sorted((place / s.VERSIONS).glob("*.json")) == versions


def test_a_hostile_contribution_is_refused_and_runs_nothing(place: Path) -> None:
    """Weights that are no numbers, that are huge, and a pickle that would write a file."""
    for name, change in (("nan", float("nan")), ("huge", 1e6)):
        bad = Path(shutil.copytree(place / "experts/01", place / name))
        weights = {key: value * change for key, value in load_file(bad / s.WEIGHTS).items()}
        (bad / s.WEIGHTS).unlink()
        save_file(weights, bad / s.WEIGHTS)
        (bad / s.MANIFEST).unlink()
        seal(bad, place / "experts/01")
        refused(place, s.ADMIT.format(experts=name))
    trap = Path(shutil.copytree(place / "experts/01", place / "trap"))
    (trap / s.WEIGHTS).unlink()
    (trap / s.WEIGHTS).write_bytes(pickle.dumps(Trap(str(place / "owned"))))
    (trap / s.MANIFEST).unlink()
    seal(trap, place / "experts/01")
    refused(place, s.ADMIT.format(experts="trap"))
    assert not (place / "owned").exists()


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def seal(folder: Path, original: Path) -> None:
    """Write a manifest that fits the files, as an attacker would."""
    from atoll.artifacts import finalize

    old = json.loads((original / s.MANIFEST).read_bytes())
    files = [s.CARD, s.METRICS, s.WEIGHTS]
    finalize(folder, files, "expert", config=old["config"], parents=old["parents"], license=old.get("license"))


def test_versions_go_back_to_the_same_images(place: Path) -> None:
    before = sample(place, "before", "one", "two")
    newest = len(list((place / s.VERSIONS).glob("*.json")))
    give(place, s.REMOVE.format(cluster=0), s.ROUTE.format(route="full"))
    assert sample(place, "changed", "one", "two") != before
    give(place, s.ROLLBACK.format(version=newest))
    assert sample(place, "after", "one", "two") == before
    assert len(list((place / s.VERSIONS).glob("*.json"))) == newest + 3, "going back is a new version"
    assert str(newest + 3) in give(place, s.HISTORY)


def test_a_damaged_run_still_shows_samples_and_goes_back(place: Path) -> None:
    """Weights of one expert and an order are damaged: the others sample, and the fault is named."""
    sample(place, "before", "one")
    card = json.loads(next((place / "run/contributions").glob("00-*")).joinpath(s.CARD).read_bytes())
    assert card
    weights = next((place / "run/contributions").glob("00-*")) / s.WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-3] ^= 0x10
    weights.unlink()
    weights.write_bytes(bytes(content))
    line = s.SAMPLE.format(model="run", prompts="--prompt one", count=2, out="after")
    assert "cluster 0" in give(place, line)
    assert pictures(place / "after")
    assert "0" in give(place, s.STATUS)
    give(place, s.ROLLBACK.format(version=""))


def test_a_student_of_two_teachers(place: Path) -> None:
    give(place, s.DISTILL.format(out="student", images=640))
    sample(place, "by-student", "one", model="student")


def test_killed_in_training_it_resumes_to_the_same_bits(place: Path, finished: Path) -> None:
    """A real process, really killed, as soon as there is a checkpoint."""
    shutil.rmtree(place / "experts")
    line = [sys.executable, "-m", "atoll", *train_all(1)[0].split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, cwd=place, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(place.glob("experts/00/state/*.safetensors")):
        pass
    process.kill()
    process.wait()
    give(place, train_all(1)[0])
    assert (place / "experts/00" / s.WEIGHTS).read_bytes() == (finished / "experts/00" / s.WEIGHTS).read_bytes()


MISTAKES: Sequence[tuple[str, str]] = [
    ("prepare nowhere --out new", "nowhere"),
    ("partition run/data -k 0 --out new", "0"),
    ("partition run/orders --out new", "run/orders"),
    ("plan run/data --images some --out new", "some"),
    ("plan run/data --set training.bach=3 --out new", "bach"),
    ("train run/orders/07.json --out new", "07.json"),
    ("admit nowhere --out run", "nowhere"),
    ("router nowhere", "nowhere"),
    ("ensemble run --rollback 99", "99"),
    ("ensemble run --route top-x", "top-x"),
    ("sample run --prompt eleventy --out new", "eleventy"),
    ("sample run --prompt one --solver eulr --out new", "eulr"),
    ("evaluate run --route nearest", "nearest"),
    ("export nowhere --out new", "nowhere"),
    ("status nowhere", "nowhere"),
]


def test_mistakes_are_one_line_and_leave_nothing(place: Path) -> None:
    for line, word in MISTAKES:
        refused(place, line, word)
        assert not (place / "new").exists(), line
