"""Shards: what is written comes back, rows and captions belong together, damage is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.artifacts import UserError, sha256_file
from atoll.data.dataset import LatentDataset
from atoll.data.shards import join_shards, pack_captions, read_shard, unpack_captions, write_shard
from atoll.data.space import LatentConfig
from atoll.models.dit import DiT, DiTConfig
from atoll.partition.layout import rows_of

LATENT = LatentConfig(autoencoder="none", shape=(2, 3, 3), mean=(0.0, 0.0), scale=(1.0, 1.0))


def shard(count: int, first: int, captions: list[int] | None = None) -> dict[str, Tensor]:
    """Rows whose every value tells which row they are: latents = row, tokens = 100 row + caption."""
    rows = torch.arange(first, first + count)
    tensors = {
        "latents": rows.float().view(-1, 1, 1, 1).expand(-1, 2, 3, 3).contiguous(),
        "features": rows.float().view(-1, 1).expand(-1, 4).contiguous(),
        "labels": rows % 5,
    }
    if captions is not None:
        assert len(captions) == count
        texts = [100 * int(row) + i for row, n in zip(rows, captions, strict=True) for i in range(n)]
        tensors["tokens"] = torch.tensor(texts, dtype=torch.int64).view(-1, 1).expand(-1, 3).contiguous()
        tensors["mask"] = torch.ones(len(texts), 3, dtype=torch.bool)
        tensors["captions"] = torch.tensor([0, *captions]).cumsum(0)
    return tensors


def write_all(folder: Path, shards: list[dict[str, Tensor]]) -> list[Path]:
    paths = [folder / f"{i:05d}.safetensors" for i in range(len(shards))]
    for path, tensors in zip(paths, shards, strict=True):
        write_shard(path, tensors)
    return paths


def dataset(paths: list[Path]) -> LatentDataset:
    return LatentDataset.open(paths, LATENT)


def test_rows_come_back_in_the_order_asked(tmp_path: Path) -> None:
    samples = dataset(write_all(tmp_path, [shard(5, 0), shard(0, 5), shard(7, 5), shard(1, 12)]))
    assert len(samples) == 13
    rows = torch.tensor([12, 0, 4, 5, 11, 0])
    assert samples.latents(rows)[:, 0, 0, 0].tolist() == rows.tolist()
    assert samples.features(rows)[:, 0].tolist() == rows.tolist()
    assert samples.labels(rows).tolist() == (rows % 5).tolist()
    assert samples.latents(torch.arange(0)).shape == (0, 2, 3, 3)
    for bad in (-1, 13):
        with pytest.raises(IndexError):
            samples.latents(torch.tensor([bad]))


def test_each_caption_is_chosen_equally_often(tmp_path: Path) -> None:
    samples = dataset(write_all(tmp_path, [shard(3, 0, [1, 3, 2]), shard(2, 3, [0, 4])]))
    u = (torch.arange(1200) + 0.5) / 1200
    for row, count in enumerate([1, 3, 2, 0, 4]):
        condition = samples.condition(torch.full((1200,), row), u)
        if count == 0:
            assert condition.dropped is not None
            assert bool(condition.dropped.all())
            continue
        assert not condition.dropped.any()
        chosen = (condition.tokens[:, 0] - 100 * row).bincount(minlength=count)
        assert chosen.tolist() == [1200 // count] * count
    almost_one = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    condition = samples.condition(torch.tensor([4]), almost_one.view(1))
    assert int(condition.tokens[0, 0]) == 403


def test_a_sample_without_a_label_is_an_unconditional_one(tmp_path: Path) -> None:
    plain = shard(4, 0)
    condition = dataset(write_all(tmp_path / "a", [plain])).condition(torch.arange(4), torch.zeros(4))
    assert condition.labels.tolist() == [0, 1, 2, 3]
    assert not condition.dropped.any()
    network = DiT(DiTConfig(latent=(2, 4, 4), patch=2, width=8, depth=1, heads=2, condition="labels", classes=5))
    x, t = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(0)), torch.full((4,), 0.5)
    for name, labels in {"some": [0, -1, 2, -1], "none": [-1] * 4}.items():
        changed = {**plain, "labels": torch.tensor(labels)}
        condition = dataset(write_all(tmp_path / name, [changed])).condition(torch.arange(4), torch.zeros(4))
        assert condition.labels.min() >= 0, "an index into a table of labels"
        assert condition.dropped.tolist() == [label < 0 for label in labels]
        vector, null = (network.conditioning(t, c)[0] for c in (condition, condition.null()))
        assert [bool(torch.equal(a, b)) for a, b in zip(vector, null, strict=True)] == [label < 0 for label in labels]
        assert network(x, t, condition).isfinite().all()


def test_a_caption_without_a_label_is_not_lost(tmp_path: Path) -> None:
    """One `dropped` for both: a missing caption sets it, a missing label does not."""
    mixed = {**shard(4, 0, [1, 1, 0, 0]), "labels": torch.tensor([2, -1, 2, -1])}
    condition = dataset(write_all(tmp_path, [mixed])).condition(torch.arange(4), torch.zeros(4))
    assert condition.dropped.tolist() == [False, False, True, True]
    assert condition.tokens[:2, 0].tolist() == [0, 100]
    # a network that reads labels takes its null label where there is none
    network = DiT(DiTConfig(latent=(2, 4, 4), patch=2, width=8, depth=1, heads=2, condition="labels", classes=5))
    vector, null = (network.conditioning(torch.full((4,), 0.5), c)[0] for c in (condition, condition.null()))
    assert [bool(torch.equal(a, b)) for a, b in zip(vector, null, strict=True)] == [False, True, True, True]


def test_picking_and_joining_keep_captions_with_their_samples(tmp_path: Path) -> None:
    whole = shard(6, 0, [1, 0, 3, 2, 0, 1])
    whole |= pack_captions([f"text {int(t)}" for t in whole["tokens"][:, 0]])
    picked = [rows_of(whole, torch.tensor(rows, dtype=torch.int64)) for rows in ([5, 2], [], [1, 0, 3])]
    again = join_shards(picked)
    order = [5, 2, 1, 0, 3]
    assert again["latents"][:, 0, 0, 0].tolist() == order
    counts = again["captions"].diff().tolist()
    assert counts == [1, 3, 0, 1, 2]
    texts = [100 * row + i for row, n in zip(order, counts, strict=True) for i in range(n)]
    assert again["tokens"][:, 0].tolist() == texts
    assert unpack_captions(again, range(len(texts))) == [f"text {t}" for t in texts]


def test_captions_of_any_script_survive(tmp_path: Path) -> None:
    captions = ["", "ein schöner Tag", "日本語 🗻", "x" * 10_000, ""]
    packed = pack_captions(captions)
    write_shard(tmp_path / "s.safetensors", packed)
    assert unpack_captions(read_shard(tmp_path / "s.safetensors"), range(5)) == captions


def test_equal_tensors_are_equal_bytes(tmp_path: Path) -> None:
    tensors = shard(5, 0, [1] * 5)
    write_shard(tmp_path / "a", tensors)
    write_shard(tmp_path / "b", dict(reversed(tensors.items())))
    assert sha256_file(tmp_path / "a") == sha256_file(tmp_path / "b")


def test_damage_is_one_line(tmp_path: Path) -> None:
    (path,) = write_all(tmp_path, [shard(5, 0)])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="not a readable shard"):
        dataset([path])
    with pytest.raises(UserError, match="shard is missing"):
        dataset([tmp_path / "gone.safetensors"])
    save_file({"weights": torch.ones(3)}, path)
    with pytest.raises(UserError, match="a shard needs latents and labels"):
        dataset([path])
    save_file({**shard(5, 0), "labels": torch.zeros(4, dtype=torch.int64)}, path)
    with pytest.raises(UserError, match="differ in length"):
        dataset([path])
    lying = shard(2, 0, [1, 1])
    save_file({**lying, "captions": torch.tensor([0, 9, 2])}, path)
    with pytest.raises(UserError, match="do not rise"):
        dataset([path])


def test_cluster_shards_hold_no_features(tmp_path: Path) -> None:
    tensors = shard(3, 0)
    del tensors["features"]
    samples = dataset(write_all(tmp_path, [tensors]))
    with pytest.raises(UserError, match="hold no features"):
        samples.features(torch.arange(3))
