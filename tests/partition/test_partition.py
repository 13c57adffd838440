"""A partition assigns every sample once, and an island gets its own cluster and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torch import Tensor

from atoll.artifacts import Artifact, UserError
from atoll.cli import main
from atoll.data.config import PrepareConfig
from atoll.data.index import Index
from atoll.data.prepare import prepare
from atoll.data.shards import data_shards, read_shard, unpack_captions
from atoll.executor import Executor
from atoll.partition.methods import PartitionConfig
from atoll.partition.report import description, main_classes, read_clusters, top_words
from atoll.partition.stage import partition
from image_forms import CONFIG, Item, folder, pictures

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "brightness_clustering.py"
Sample = tuple[bytes, int, tuple[str, ...]]  # latent, label, texts


def samples_of(shards: Iterable[dict[str, Tensor]]) -> list[Sample]:
    """Every sample of some shards, by content."""
    found = []
    for shard in shards:
        for row in range(len(shard["labels"])):
            texts: tuple[str, ...] = ()
            if "captions" in shard:
                rows = range(*shard["captions"][row : row + 2].tolist())
                texts = tuple(
                    str(shard["tokens"][i].tolist()) if "tokens" in shard else unpack_captions(shard, [i])[0]
                    for i in rows
                )
            found.append((shard["latents"][row].numpy().tobytes(), int(shard["labels"][row]), texts))
    return found


def check_shards(data: Artifact, cut: Artifact) -> np.ndarray:
    """Shards of clusters hold just the samples assigned to them, none of the holdout. Returns the assignment [N]."""
    index, shards = Index.of(data), [samples_of([read_shard(*paths)]) for paths in data_shards(data)]
    content = [
        shards[s][r] for s, r in zip(index.table["shard"].to_pylist(), index.table["row"].to_pylist(), strict=True)
    ]
    table = pq.read_table(cut.file("assignment.parquet"))
    assert sorted(table["id"].to_pylist()) == sorted(index.ids)
    cluster = dict(zip(table["id"].to_pylist(), table["cluster"].to_pylist(), strict=True))
    for k, size in enumerate(read_clusters(cut)["clusters"]):
        members = [n for n, identity in enumerate(index.ids) if cluster[identity] == k]
        for split in ("train", "validation", "holdout"):
            expected = sorted(content[n] for n in members if index.splits[n] == split)
            assert size[split] == len(expected)
            shards_of = [read_shard(cut.file(name)) for name in cut.names(f"clusters/{k:02d}/{split}-")]
            assert not any("features" in shard for shard in shards_of), "an island needs no features"
            found = samples_of(shards_of)
            assert sorted(found) == ([] if split == "holdout" else expected)
    return np.array([cluster[identity] for identity in index.ids])


@pytest.mark.parametrize("method", ["kmeans", "label", "random"])
def test_every_sample_is_assigned_once(method: str, digits: Artifact, tmp_path: Path) -> None:
    config = PartitionConfig(clusters=8, method=method, shard_rows=100)
    cut = partition(digits.store, tmp_path / "cut", config)
    check_shards(digits, cut)
    first = samples_of([read_shard(cut.file("clusters/00/train-00000.safetensors"))])
    assert len(first) == 100
    order = [sample[0] for sample in samples_of(read_shard(*paths) for paths in data_shards(digits))]
    places = [order.index(sample[0]) for sample in first]
    assert np.corrcoef(places, range(100))[0, 1] < 0.5, "rows are in random order"


def test_equal_work_has_equal_digests_with_any_number_of_workers(digits: Artifact, tmp_path: Path) -> None:
    first = partition(digits.store, tmp_path / "a")
    assert partition(digits.store, tmp_path / "b", executor=Executor(2)).digest == first.digest
    assert partition(digits.store, tmp_path / "c", PartitionConfig(seed=1)).digest != first.digest
    assert partition(digits.store, tmp_path / "a").digest == first.digest
    with pytest.raises(UserError, match=r"seed: 0 -> 1"):
        partition(digits.store, tmp_path / "a", PartitionConfig(seed=1))


def test_clusters_of_digits_are_digits(digits: Artifact, tmp_path: Path) -> None:
    cut = partition(digits.store, tmp_path / "cut")
    summary = read_clusters(cut)
    assert summary["nmi"] > 0.6
    assert summary["balance"] <= 2.0
    page = (tmp_path / "cut" / "partition.html").read_text()
    assert page.count("data:image/png;base64,") == 8
    assert "http" not in page, "the page must not need a network"
    with Image.open(cut.file("sheets/00.png")) as sheet:
        assert len(np.unique(np.asarray(sheet))) > 10


def grow(run: Path, first: list[Item], later: list[Item]) -> None:
    prepare(folder(run.parent / "a", first), run / "data", CONFIG)
    prepare(folder(run.parent / "b", later), run / "data-2", PrepareConfig(), onto=run / "data")


def test_samples_added_later_join_the_clusters_there_are(tmp_path: Path) -> None:
    run = tmp_path / "run"
    grow(run, pictures(90), pictures(60, first=90))
    old = partition(run / "data", run / "partition", PartitionConfig(clusters=3, shard_rows=20))
    new = partition(run / "data-2", run / "partition-2", onto=run / "partition")
    data = Artifact.open(run / "data-2")
    assert new.manifest.parents == {"data": data.digest, "partition": old.digest}
    # orders and experts stay valid: same centroids, and every old shard is there under its old name and digest
    assert new.read("centroids.safetensors") == old.read("centroids.safetensors")
    for name in old.names("clusters/"):
        assert new.manifest.files[name] == old.manifest.files[name]
    after = dict(zip(Index.of(data).ids, check_shards(data, new).tolist(), strict=True))
    before = check_shards(Artifact.open(run / "data"), old).tolist()
    assert len(after) == 150
    assert dict(zip(Index.of(Artifact.open(run / "data")).ids, before, strict=True)).items() <= after.items()
    with pytest.raises(UserError, match="was not prepared on top of its data"):
        partition(run / "data", run / "no", onto=run / "partition")
    with pytest.raises(UserError, match="its own settings hold"):
        partition(run / "data-2", run / "no", PartitionConfig(clusters=2), onto=run / "partition")


def test_samples_without_a_label_have_no_class_to_be_clustered_by(tmp_path: Path) -> None:
    items = [replace(item, caption=None, label=None if n == 7 else item.label) for n, item in enumerate(pictures(90))]
    prepare(folder(tmp_path / "a", items), tmp_path / "data", CONFIG)
    with pytest.raises(UserError, match="1 samples have no label, or one that no training sample had"):
        partition(tmp_path / "data", tmp_path / "cut", PartitionConfig(clusters=3, method="label"))
    assert not (tmp_path / "cut").exists()


def test_a_method_of_ones_own_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of docs/extend.md by the real command, in worker processes, and again for data added later."""
    run = tmp_path / "run"
    grow(run, pictures(90), pictures(60, first=90))
    words = ["--plugin", str(EXAMPLE), "--method", "brightness", "--set", "options.gamma=2", "--workers", "2"]
    main(["partition", str(run / "data"), "-k", "3", *words])
    main(["partition", str(run / "data-2"), "--onto", str(run / "partition"), "--plugin", str(EXAMPLE)])
    data, cut = Artifact.open(run / "data-2"), Artifact.open(run / "partition-2")
    assert cut.config["options"] == {"gamma": 2.0}
    found = check_shards(data, cut)
    brightness = np.concatenate([read_shard(*p)["features"].numpy().mean(1) for p in data_shards(data)])
    order = np.argsort(brightness[: len(found)])
    assert (np.diff(found[order]) >= 0).mean() > 0.99, "clusters are ranges of brightness"
    first = read_clusters(Artifact.open(run / "partition"))["clusters"]
    assert max(size["train"] for size in first) - min(size["train"] for size in first) <= 1
    assert str(EXAMPLE) in (run / "partition" / "provenance.json").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-k 5000", "-k 5000: larger than the 1619 training samples"),
        ("-k 11 --method label", "-k 11: there are only 10 labels"),
        ("--method labels", "--method labels: not known; did you mean label"),
        (
            "--method label --balance 1.5",
            "options.balance: extra inputs are not permitted (got 1.5); options",
        ),
        ("--set options.cels=3", "options of --method kmeans: cells, balance, threads"),
        ("--seed 99999999999", "seed: input should be less than or equal to 2147483647 (got 99999999999)"),
        ("--balance inf", "options.balance: input should be a finite number (got inf)"),
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


def test_words_that_set_a_cluster_apart() -> None:
    captions = [["a photo of a cat"]] * 30 + [["a photo of a dog"]] * 30 + [["a photo of a rare okapi"]]
    assert top_words(captions, np.array([0] * 30 + [1] * 31), 2) == [["cat"], ["dog"]]
    # however long captions are, words of every one set none apart
    captions = [["a photo of a cat"]] * 300 + [["a photo of a very fluffy dog on a lawn"]] * 100
    found = top_words(captions, np.array([0] * 300 + [1] * 100), 2)
    assert found[0] == ["cat"]
    assert {"dog", "fluffy", "lawn"} <= set(found[1])
    assert not {"a", "photo", "of"} & set(found[1])
    assert top_words([[], []], np.array([0, 1]), 2) == [[], []]


def test_a_cluster_is_described_by_its_classes() -> None:
    classes = main_classes(np.array([0, 0, 1, -1]), ("cat", "dog", "eel"))
    assert classes == [("cat", 0.6667), ("dog", 0.3333)]
    assert description({"classes": classes, "words": ["small"]}) == ["cat 67%, dog 33%", "small"]
