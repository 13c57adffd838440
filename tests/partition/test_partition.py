"""A partition deals every sample out exactly once, and an island gets its own cluster and nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from atoll.artifacts import Artifact, ArtifactWriter, UserError
from atoll.cli import main
from atoll.data.dataset import LatentDataset
from atoll.data.index import Index
from atoll.data.prepare import PrepareConfig, prepare
from atoll.data.space import LatentConfig
from atoll.partition.config import PartitionConfig
from atoll.partition.quality import lines_about, main_classes, telling_words
from atoll.partition.stage import partition, random_cluster
from image_forms import CONFIG, Item, folder, pictures


def cluster_shards(cut: Artifact, data: Artifact, k: int, split: str) -> LatentDataset:
    paths = [cut.file(name) for name in cut.names(f"clusters/{k:02d}/{split}-")]
    return LatentDataset.open(paths, LatentConfig.model_validate(data.config["latent"]))


def cluster_index(cut: Artifact, k: int) -> list[dict[str, object]]:
    return pq.read_table(cut.file(f"clusters/{k:02d}/index.parquet")).to_pylist()


@pytest.mark.parametrize("by", ["features", "label", "random"])
def test_every_sample_is_dealt_out_once(by: str, digits: Artifact, tmp_path: Path) -> None:
    config = PartitionConfig(clusters=8, by=by, shard_rows=100)  # type: ignore[arg-type]
    cut = partition(digits.store, tmp_path / "cut", config)
    index = Index.of(digits)
    assignment = {row["id"]: row["cluster"] for row in pq.read_table(cut.file("assignment.parquet")).to_pylist()}
    assert list(assignment) == index.ids
    everything = LatentDataset.of(digits)
    place = {identity: row for row, identity in enumerate(index.ids)}
    seen: list[str] = []
    for k in range(8):
        rows = cluster_index(cut, k)
        for split in ("train", "validation"):
            mine = [row for row in rows if row["split"] == split]
            shards = cluster_shards(cut, digits, k, split)
            assert len(shards) == len(mine)
            here = torch.arange(len(mine))
            there = torch.tensor([place[str(row["id"])] for row in mine])
            assert torch.equal(shards.latents(here), everything.latents(there))
            assert torch.equal(shards.labels(here), everything.labels(there))
            a, b = (s.condition(r, torch.zeros(len(mine))) for s, r in ((shards, here), (everything, there)))
            assert torch.equal(a.tokens, b.tokens)
            assert index.captions_of(there.numpy()) == [row["captions"] for row in mine]
        assert all(assignment[row["id"]] == k for row in rows)
        seen += [str(row["id"]) for row in rows]
    # the holdout never leaves data/
    assert sorted(seen) == sorted(i for i, s in zip(index.ids, index.splits, strict=True) if s != "holdout")
    sizes = json.loads(cut.read("sizes.json"))["clusters"]
    assert sum(sum(size.values()) for size in sizes) == len(index)
    assert not any("features" in name for name in cut.names("clusters/"))


def test_equal_work_has_equal_digests(digits: Artifact, tmp_path: Path) -> None:
    a, b = (partition(digits.store, tmp_path / name) for name in "ab")
    assert a.digest == b.digest
    other = partition(digits.store, tmp_path / "c", PartitionConfig(seed=1))
    assert other.digest != a.digest
    assert partition(digits.store, tmp_path / "a").digest == a.digest
    with pytest.raises(UserError, match=r"seed: 0 -> 1"):
        partition(digits.store, tmp_path / "a", PartitionConfig(seed=1))


def test_clusters_of_digits_are_digits(digits: Artifact, tmp_path: Path) -> None:
    cut = partition(digits.store, tmp_path / "cut")
    quality = json.loads(cut.read("quality.json"))
    assert quality["nmi"]["clusters"] > 0.6
    assert quality["nmi"]["random"] < 0.05
    assert quality["balance"] <= 2.0
    page = (tmp_path / "cut" / "partition.html").read_text()
    assert page.count("data:image/png;base64,") == 8
    assert "http" not in page.replace("http-equiv", ""), "the page must not need a network"
    with Image.open(cut.file("sheets/00.png")) as sheet:
        assert len(np.unique(np.asarray(sheet))) > 10


@pytest.mark.parametrize(("k", "by", "words"), [(5000, "features", "larger than the"), (11, "label", "only 10 labels")])
def test_too_many_clusters_is_one_line(k: int, by: str, words: str, digits: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        partition(digits.store, tmp_path / "cut", PartitionConfig(clusters=k, by=by))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_late_samples_join_a_cut_that_recorded_a_bound(tmp_path: Path) -> None:
    """Cuts by label once recorded the default bound, and had no rule for samples without a label."""
    source = folder(tmp_path / "first", pictures(60))
    first = prepare(source, tmp_path / "data", CONFIG)
    old = partition(tmp_path / "data", tmp_path / "cut", PartitionConfig(clusters=2, by="label"))
    rule = load_file(old.file("centroids.safetensors"))
    with ArtifactWriter(tmp_path / "older", "partition") as draft:
        shutil.copytree(tmp_path / "cut", draft.folder, dirs_exist_ok=True)
        save_file({"labels": rule["labels"]}, draft.folder / "centroids.safetensors")
        draft.commit(config={**old.config, "balance": 2.0}, parents={"data": first.digest})
    late = [Item(item.name, item.content, item.caption, None) for item in pictures(20, first=500)]
    prepare(folder(tmp_path / "late", late), tmp_path / "data-2", onto=tmp_path / "data")
    made = partition(tmp_path / "data-2", tmp_path / "newer", onto=tmp_path / "older")
    assert sum(sum(size.values()) for size in json.loads(made.read("sizes.json"))["clusters"]) == 80


def test_late_samples_join_the_clusters_there_are(tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(folder(tmp_path / "a", pictures(90)), run / "data", CONFIG)
    prepare(folder(tmp_path / "b", pictures(60, first=90)), run / "data-2", PrepareConfig(), onto=run / "data")
    old = partition(run / "data", run / "partition", PartitionConfig(clusters=3, shard_rows=20))
    new = partition(run / "data-2", run / "partition-2", onto=run / "partition")
    assert new.manifest.parents == {"data": Artifact.open(run / "data-2").digest, "partition": old.digest}
    # orders and experts stay valid: same rule, and every old shard is there under its old name and digest
    assert new.read("centroids.safetensors") == old.read("centroids.safetensors")
    for name in old.names("clusters/"):
        if name.endswith(".safetensors"):
            assert new.manifest.files[name] == old.manifest.files[name]
    before, after = (
        {row["id"]: row["cluster"] for row in pq.read_table(cut.file("assignment.parquet")).to_pylist()}
        for cut in (old, new)
    )
    assert len(after) == 150
    assert before.items() <= after.items()
    for k in range(3):
        rows = cluster_index(new, k)
        for split in ("train", "validation"):
            shards = cluster_shards(new, Artifact.open(run / "data-2"), k, split)
            assert len(shards) == sum(row["split"] == split for row in rows)
    data = Artifact.open(run / "data-2")
    everything = LatentDataset.of(data)
    place = {identity: row for row, identity in enumerate(Index.of(data).ids)}
    for k in range(3):
        mine = [row for row in cluster_index(new, k) if row["split"] == "train"]
        mine.sort(key=lambda row: (str(row["shard"]), int(str(row["row"]))))
        there = torch.tensor([place[str(row["id"])] for row in mine])
        assert torch.equal(
            cluster_shards(new, data, k, "train").latents(torch.arange(len(mine))), everything.latents(there)
        )
    with pytest.raises(UserError, match="was not prepared on top of its data"):
        partition(run / "data", run / "no", onto=run / "partition")


def labelled(count: int, first: int = 0, every: int = 7) -> list[Item]:
    """Pictures of three classes without captions; one in `every` has no label."""
    return [
        replace(item, caption=None, label=None if number % every == 0 else item.label)
        for number, item in enumerate(pictures(count, first))
    ]


def test_samples_without_a_label_are_dealt_out_by_their_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole classes, and the rest by hash; the same rule for those that come late."""
    run = tmp_path / "run"
    prepare(folder(tmp_path / "a", labelled(90)), run / "data", CONFIG)
    prepare(folder(tmp_path / "b", labelled(30, first=90)), run / "data-2", PrepareConfig(), onto=run / "data")
    main(["partition", str(run / "data"), "-k", "3", "--by", "label", "--seed", "5"])
    assert "without a label: 13, assigned by a hash of their id" in capsys.readouterr().out
    main(f"partition {run}/data-2 --onto {run}/partition --out {run}/partition-2".split())
    assert "without a label: 18" in capsys.readouterr().out
    for name in ("", "-2"):
        index, cut = Index.of(Artifact.open(run / f"data{name}")), Artifact.open(run / f"partition{name}")
        found = pq.read_table(cut.file("assignment.parquet"))["cluster"].to_numpy()
        classes = {(label, k) for label, k in zip(index.labels.tolist(), found.tolist(), strict=True) if label >= 0}
        assert len(classes) == 3
        for row in np.flatnonzero(index.labels < 0):
            assert found[row] == random_cluster(index.ids[row], 5, 3)
        assert "by a hash of their id" in (run / f"partition{name}" / "partition.html").read_text()


def test_no_labels_at_all_cannot_be_dealt_out(tmp_path: Path) -> None:
    prepare(folder(tmp_path / "a", labelled(30, every=1)), tmp_path / "data", CONFIG)
    with pytest.raises(UserError, match="--by label: no sample of the data has a label; use --by features"):
        partition(tmp_path / "data", tmp_path / "cut", PartitionConfig(by="label", clusters=2))


@pytest.mark.parametrize("by", ["features", "label", "random"])
def test_many_shards_are_assigned_each_by_its_own_rows(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, config = folder(tmp_path / "a", labelled(90)), PartitionConfig(by=by, clusters=3)  # type: ignore[arg-type]
    prepare(source, tmp_path / "one", CONFIG.model_copy(update={"shard_rows": 1000}))
    prepare(source, tmp_path / "many", CONFIG.model_copy(update={"shard_rows": 4}))

    def all_of_them(_: Index) -> list[str]:
        raise AssertionError("a list of every id, where a few are needed")

    monkeypatch.setattr(Index, "ids", property(all_of_them))
    cuts = [partition(tmp_path / name, tmp_path / f"{name}-cut", config) for name in ("one", "many")]
    assert cuts[0].read("assignment.parquet") == cuts[1].read("assignment.parquet")


def test_fewer_labels_than_clusters_still_give_a_report(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"validation": 0.0, "holdout": 0.0})
    prepare(folder(tmp_path / "a", labelled(8, every=3)), tmp_path / "data", config)
    cut = partition(tmp_path / "data", tmp_path / "cut", PartitionConfig(clusters=7, balance=None))
    quality = json.loads(cut.read("quality.json"))
    assert quality["unlabelled"] == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--by label --balance 1.5", "balance: only a cut by features can keep a bound; leave it out with --by label"),
        ("--by random --balance 1.01", "leave it out with --by random (got 1.01)"),
        ("--set by=random --set balance=2.0", "leave it out with --by random (got 2.0)"),
        ("--seed 99999999999", "seed: input should be less than or equal to 2147483647 (got 99999999999)"),
        ("--balance inf", "balance: input should be a finite number (got inf)"),
        ("--balance nan", "balance: input should be"),
    ],
)
def test_settings_that_cannot_be_kept_are_one_line(
    options: str, words: str, digits: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["partition", str(digits.store), "--out", str(tmp_path / "cut"), *options.split()])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", ["--by label", "--set by=random", "--by random --balance none"])
def test_a_cut_that_keeps_no_bound_records_none(options: str, digits: Artifact, tmp_path: Path) -> None:
    main(["partition", str(digits.store), "-k", "3", "--out", str(tmp_path / "cut"), *options.split()])
    assert Artifact.open(tmp_path / "cut").config["balance"] is None
    assert PartitionConfig().balance == 2.0


def test_words_that_set_a_cluster_apart() -> None:
    captions = [["a photo of a cat"]] * 30 + [["a photo of a dog"]] * 30 + [["a photo of a rare okapi"]]
    told = telling_words(captions, np.array([0] * 30 + [1] * 31), 2)
    assert told[0][0] == "cat"
    assert told[1][0] == "dog"
    assert "photo" not in told[0] + told[1]


def test_words_of_every_caption_set_no_cluster_apart_however_long_captions_are() -> None:
    captions = [["a photo of a cat"]] * 300 + [["a photo of a very large and fluffy dog on a green lawn"]] * 100
    told = telling_words(captions, np.array([0] * 300 + [1] * 100), 2)
    assert told[0] == ["cat"]
    assert not {"a", "photo", "of"} & set(told[1])
    assert {"dog", "fluffy", "lawn"} <= set(told[1])


def test_a_cluster_is_told_by_its_classes() -> None:
    labels, assignment = np.array([0, 0, 1, 2, 2, 2, -1]), np.array([0, 0, 0, 1, 1, 1, 1])
    told = main_classes(labels, assignment, 3, ("cat", "dog", "eel"))
    assert told == [[("cat", 0.6667), ("dog", 0.3333)], [("eel", 1.0)], []]
    assert lines_about({"classes": told[0], "words": ["small"]}) == ["cat 67%, dog 33%", "small"]
