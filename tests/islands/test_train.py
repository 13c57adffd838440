"""An island: one order in, one expert out; dies and goes on; sees nothing but its own."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, Store, UserError, file_lock, find
from atoll.data.index import split_of
from atoll.data.prepare import prepare
from atoll.islands.expert import load_expert
from atoll.islands.launch import Island, hand_out, logged_images
from atoll.islands.order import read_order
from atoll.islands.task import ExpertTask
from atoll.islands.train import expert_task, shards_of, train
from atoll.partition.methods import PartitionConfig
from atoll.partition.stage import partition
from atoll.planning.recipes import recipe
from atoll.planning.stage import plan
from atoll.training import StopRequested
from atoll.training.loop import Progress
from atoll.training.resources import Resources
from image_forms import CONFIG, folder, pictures
from runs import ATOLL, atoll

CPU = Resources(device="cpu")


@pytest.fixture(scope="module")
def unbroken(planned: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The expert of order 00, trained without a break."""
    return train(planned / "orders" / "00.json", tmp_path_factory.mktemp("unbroken") / "expert", resources=CPU)


def test_leaves_an_expert_that_can_be_loaded_and_asked(planned: Path, unbroken: Artifact) -> None:
    assert unbroken.names() == ["expert.json", "metrics.jsonl", "model.safetensors"]
    expert = load_expert(unbroken.store)
    order, _ = read_order(planned / "orders" / "00.json")
    assert expert.card.order == order.digest()
    assert expert.card.cluster == 0
    assert expert.card.latent == order.latent
    rows = [json.loads(line) for line in unbroken.read("metrics.jsonl").splitlines()]
    assert rows[-1]["images"] == order.training.images
    assert all(0 < row["loss"] < 10 and "val_loss" in row for row in rows)
    assert not (unbroken.store.path / "state").exists()


def test_it_learns(unbroken: Artifact) -> None:
    rows = [json.loads(line) for line in unbroken.read("metrics.jsonl").splitlines()]
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]


def test_the_same_order_gives_the_same_digest(planned: Path, unbroken: Artifact, tmp_path: Path) -> None:
    again = train(planned / "orders" / "00.json", tmp_path / "expert", resources=CPU)
    assert again.digest == unbroken.digest


def test_a_second_call_finds_it_done(planned: Path, unbroken: Artifact) -> None:
    before = (unbroken.store.path / "manifest.json").stat().st_mtime_ns
    assert train(planned / "orders" / "00.json", unbroken.store.path).digest == unbroken.digest
    assert (unbroken.store.path / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(
    planned: Path, unbroken: Artifact, tmp_path: Path, number: signal.Signals
) -> None:
    command = [*ATOLL, "train", str(planned / "orders" / "00.json"), "--out", str(tmp_path / "expert"), "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    island = Island("00", planned / "orders" / "00.json", tmp_path / "expert", tmp_path / "errors.txt", images=0)
    while logged_images(island.expert) == 0:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Interrupted, saved after" in errors
    assert errors.count("\n") == 1
    assert list((tmp_path / "expert" / "state").glob("*.safetensors"))
    assert train(planned / "orders" / "00.json", tmp_path / "expert", resources=CPU).digest == unbroken.digest


def test_how_far_an_island_is_comes_from_the_last_line_that_says_so(tmp_path: Path) -> None:
    island = Island("00", tmp_path / "00.json", tmp_path / "expert", tmp_path / "errors.txt", images=100)
    assert logged_images(island.expert) == 0, "no log yet"
    island.expert.mkdir()
    log = island.expert / "log.jsonl"
    for line, images in (
        ('{"event": "start"}\n', 0),
        ('{"event": "progress", "images": 32}\n', 32),
        ('{"event": "note", "note": "out of memory"}\n', 32),
        ('{"event": "progress", "ima', 32),
    ):
        with log.open("a") as stream:
            stream.write(line)
        assert logged_images(island.expert) == images


def changed_order(planned: Path, folder: Path, **training: object) -> Path:
    """Order 00 with other training settings, beside a link to the run's partition."""
    order, _ = read_order(planned / "orders" / "00.json")
    order = order.model_copy(update={"training": order.training.model_copy(update=training)})
    (folder / "orders").mkdir(parents=True)
    (folder / "partition").symlink_to(planned / "partition")
    path = folder / "orders" / "00.json"
    path.write_bytes(order.to_bytes())
    return path


def test_a_changed_order_on_resume_is_refused_naming_the_field(planned: Path, tmp_path: Path) -> None:
    def stop_at_once(now: Progress) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StopRequested):
        train(planned / "orders" / "00.json", tmp_path / "expert", resources=CPU, watch=stop_at_once)
    other = changed_order(planned, tmp_path / "run", learning_rate=0.5)
    process = atoll("train", other, "--out", tmp_path / "expert", check=False)
    assert process.returncode == 2
    before = read_order(planned / "orders" / "00.json")[0].training.learning_rate
    assert f"training.learning_rate: {before} -> 0.5" in process.stderr
    assert process.stderr.count("\n") == 1


def test_another_orders_folder_is_refused(planned: Path, unbroken: Artifact) -> None:
    with pytest.raises(UserError, match="another order"):
        train(planned / "orders" / "01.json", unbroken.store.path)


def test_a_corrupt_shard_is_refused_by_name(planned: Path, tmp_path: Path) -> None:
    island = hand_out(Store.at(planned), "00", tmp_path)
    shard = next((tmp_path / "inbox").rglob("train-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.unlink()  # a second name of the run's own file, which other tests need whole
    shard.write_bytes(bytes(data))
    process = atoll("train", island.order, "--out", tmp_path / "expert", check=False)
    assert process.returncode == 2
    assert f"{shard}: corrupt" in process.stderr
    assert process.stderr.count("\n") == 1
    assert not (tmp_path / "expert").exists()


def test_two_processes_cannot_work_in_one_folder(planned: Path, tmp_path: Path) -> None:
    with file_lock(tmp_path / "expert" / "state"):
        process = atoll("train", planned / "orders" / "00.json", "--out", tmp_path / "expert", check=False)
    assert process.returncode == 2
    assert "another process is working here" in process.stderr


def test_an_island_needs_no_network_and_no_sight_of_other_clusters(
    planned: Path, unbroken: Artifact, tmp_path: Path
) -> None:
    """In a namespace without network, with the run hidden under an empty file system, it still succeeds."""
    island = hand_out(Store.at(planned), "00", tmp_path / "island")
    handed = {
        p.relative_to(tmp_path / "island" / "inbox").as_posix() for p in (tmp_path / "island" / "inbox").rglob("*.*")
    }
    assert all(name == "orders/00.json" or name.startswith("partition/clusters/00/") for name in handed)
    inside = f"""
mount -t tmpfs none {planned} || exit 99
test -z "$(ls -A {planned})" || exit 98
{sys.executable} -c "
import socket
try:
    socket.create_connection(('127.0.0.1', 9), timeout=1)
except OSError as error:
    assert error.errno == 101 or 'unreachable' in str(error), error
else:
    raise SystemExit(97)
" || exit 97
exec {sys.executable} -m atoll train {island.order} --out {island.expert} --quiet
"""
    process = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", inside],
        capture_output=True,
        text=True,
        cwd=tmp_path / "island",
        check=False,
    )
    if process.returncode == 99 or process.stderr.startswith("unshare:"):
        pytest.skip(f"NOT TESTED HERE, no namespaces: {process.stderr}")
    assert process.returncode == 0, process.stderr
    assert Artifact.open(island.expert).digest == unbroken.digest
    assert find(planned / "partition") is not None, "the run was hidden only inside the namespace"


def task_of(planned: Path, order_name: str = "00") -> ExpertTask:
    order, run = read_order(planned / "orders" / f"{order_name}.json")
    shards = {split: shards_of(order, run, split) for split in ("train", "validation")}
    return expert_task(order, shards, None, "cpu")


def test_batches_are_a_pure_function_of_seed_and_images_seen(planned: Path) -> None:
    task = task_of(planned)
    first, again, other = (task.batch(images, 32, slice(0, 32)) for images in (64, 64, 96))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["eps"], other["eps"])
    assert not torch.equal(first["x0"], other["x0"])


def test_parts_of_a_batch_are_the_batch(planned: Path) -> None:
    """Whoever draws a part gets what whoever draws all of it has there: so a team of any size sees the same images."""
    task = task_of(planned)
    whole = task.batch(64, 32, slice(0, 32))
    parts = [task.batch(64, 32, slice(start, end)) for start, end in ((0, 10), (10, 21), (21, 32))]
    for name, value in whole.items():
        assert torch.equal(value, torch.cat([part[name] for part in parts])), name


def test_times_are_stratified(planned: Path) -> None:
    task = task_of(planned)
    t = task.batch(0, 32, slice(0, 32))["t"]
    uniform = task.order.objective.density.name == "uniform"
    counts = (
        torch.histc(t.float(), 32, 0, 1)
        if uniform
        else torch.histc(torch.special.ndtr(torch.logit(t)).float(), 32, 0, 1)
    )
    assert counts.max() <= 2  # one in each part; clamping to the band may move an edge


def test_an_island_learns_labels_where_some_samples_have_none(tmp_path: Path) -> None:
    """The extreme: the training samples are labelled, and of the validation samples none is."""
    config = CONFIG.model_copy(update={"validation": 0.3})
    items = [replace(item, caption=None) for item in pictures(60)]
    split = [split_of(hashlib.sha256(item.content).digest(), config.validation, config.holdout) for item in items]
    items = [replace(item, label=item.label if s == "train" else None) for item, s in zip(items, split, strict=True)]
    prepare(folder(tmp_path / "source", items), tmp_path / "data", config)
    partition(tmp_path / "data", tmp_path / "partition", PartitionConfig(clusters=2))
    settings = recipe("digits")
    short = settings.training.model_copy(update={"images": 64, "batch": 16, "warmup_images": 16, "ema_images": 16})
    plan(
        tmp_path / "data",
        tmp_path / "partition",
        tmp_path / "orders",
        settings.model_copy(update={"training": short}),
    )
    expert = load_expert(train(str(tmp_path / "orders" / "00.json"), tmp_path / "expert").store)
    assert (expert.card.architecture.condition, expert.card.architecture.classes) == ("labels", 3)
    measured = [json.loads(line) for line in (tmp_path / "expert" / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(measured[-1]["val_loss"])


def test_nothing_damaged_is_handed_out(planned: Path, tmp_path: Path) -> None:
    """In the run, or in the inbox of an earlier call: refused by name, and nothing damaged is left in an inbox."""
    shutil.copytree(planned, tmp_path / "run")
    shards = [next((tmp_path / "run").rglob("clusters/01/train-*.safetensors"))]
    hand_out(Store.at(tmp_path / "run"), "01", tmp_path / "first")
    shards.append(next((tmp_path / "first" / "inbox").rglob("train-*.safetensors")))
    damaged = bytearray(shards[0].read_bytes())
    damaged[-1] ^= 1
    for shard, island in zip(shards, ("second", "first"), strict=True):
        shard.unlink()
        shard.write_bytes(bytes(damaged))
        with pytest.raises(UserError, match=f"{shard}: corrupt"):
            hand_out(Store.at(tmp_path / "run"), "01", tmp_path / island)
    assert not list((tmp_path / "second").rglob("train-*"))
