"""Prepare and partition against the plain way, in one run: images per second, peak memory, growth, agreement.

    python benchmarks/prepare.py images --source train-*.parquet --counts 2000 10000 --autoencoder taef2 --out out.json
    python benchmarks/prepare.py many --counts 10000 100000 1000000 --out many.json
    python benchmarks/prepare.py kmeans --rows 1000000 --width 1024 --out kmeans.json

The plain way is what a script does: open each image with PIL, one torch call per image and network, keep
everything in lists, then scikit-learn's KMeans. Every measurement runs in a process of its own, so that its peak memory
is its own. Where the plain way would take too long it is measured on fewer images, and the record says on how many.
`images` goes on with the record at --out: what it holds is not measured again (a lent GPU comes in ten-minute turns).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 64
CLUSTERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    images = verbs.add_parser("images", help="prepare + partition against the plain way")
    images.add_argument("--source", nargs="+", required=True, help="parquet files with image, caption and label")
    images.add_argument("--counts", type=int, nargs="+", default=[2_000, 10_000])
    images.add_argument("--plain-counts", type=int, nargs="+", default=[500, 1_000])
    images.add_argument(
        "--plain-threads", type=int, default=1, help="two threads on a busy machine wait for each other; one does not"
    )
    images.add_argument("--autoencoder", default="pixels")
    images.add_argument("--features", default="efficientnet-lite0")
    images.add_argument("--device", default="cpu")
    images.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    images.add_argument("--batch", type=int, default=None, help="images per call [default: prepare's own]")
    images.add_argument("--work", type=Path, default=None, help="keep the artifacts here [default: a new folder]")
    images.add_argument("--out", type=Path, required=True)
    many = verbs.add_parser(
        "many", help="prepare + partition on very many small synthetic images: how time and memory grow"
    )
    many.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    many.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    many.add_argument("--out", type=Path, required=True)
    kmeans = verbs.add_parser("kmeans", help="two-level k-means on synthetic features")
    kmeans.add_argument("--rows", type=int, default=1_000_000)
    kmeans.add_argument("--width", type=int, default=1024)
    kmeans.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    kmeans.add_argument("--plain-rows", type=int, default=50_000, help="rows scikit-learn gets; it is far slower")
    kmeans.add_argument("--out", type=Path, required=True)
    child = verbs.add_parser("measure", help="one measurement, in a process of its own")
    child.add_argument("job")
    arguments = parser.parse_args()
    if arguments.verb == "measure":
        measure(json.loads(arguments.job))
    elif arguments.verb == "images":
        compare_images(arguments)
    elif arguments.verb == "many":
        grow(arguments)
    else:
        compare_kmeans(arguments)


def compare_images(arguments: argparse.Namespace) -> None:
    from atoll.models.autoencoders import load_autoencoder

    work = arguments.work or Path(tempfile.mkdtemp(prefix="atoll-prepare-"))
    work.mkdir(parents=True, exist_ok=True)
    shared = {
        name: getattr(arguments, name)
        for name in ("autoencoder", "features", "device", "workers", "batch", "plain_threads")
    }
    # the record names the autoencoder by its id: paths mean nothing elsewhere
    settings = {**shared, "size": SIZE, "autoencoder": load_autoencoder(arguments.autoencoder).id}
    record: dict[str, Any] = {"machine": machine(arguments.device), "settings": settings, "runs": []}
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        if {**before, "runs": []} != record:
            raise SystemExit(f"--out {arguments.out}: holds the record of another machine or other settings")
        record = before
    measured = {(there["job"], there["count"]) for there in record["runs"]}
    jobs = [(job, count) for count in arguments.counts for job in ("ours", "clusters")]
    jobs += [("plain", count) for count in arguments.plain_counts]
    for job, count in jobs:
        if (job, count) in measured:
            continue
        subset, place = cut(arguments.source, count, work / f"source-{count}"), work / f"run-{count}"
        if job == "ours":
            shutil.rmtree(place, ignore_errors=True)
        record["runs"].append(run({"job": job, "source": str(subset), "count": count, "out": str(place), **shared}))
        save(arguments.out, record)
    print(json.dumps(record, indent=2))


def grow(arguments: argparse.Namespace) -> None:
    shared = {"size": 16, "autoencoder": "pixels", "features": "pixels", "device": "cpu", "batch": None}
    record: dict[str, Any] = {
        "machine": machine("cpu"),
        "settings": {**shared, "workers": arguments.workers},
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="atoll-many-") as work:
        for count in arguments.counts:
            job = {"count": count, "source": f"{work}/{count}", "out": f"{work}/run-{count}", **shared}
            job["workers"] = arguments.workers
            write_pictures(Path(job["source"]), count, shared["size"])
            for name in ("ours", "partition"):
                record["runs"].append(run({"job": name, **job}))
                save(arguments.out, record)
            shutil.rmtree(job["source"])
            shutil.rmtree(job["out"])
    print(json.dumps(record, indent=2))


def write_pictures(folder: Path, count: int, size: int) -> None:
    """Four random corners with colors running between them, as PNGs in parquet files of 5,000.

    The label, and the number in the caption, is that of the brightness in ten steps.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    folder.mkdir()
    generator = np.random.Generator(np.random.Philox(0))
    slope = np.stack([np.linspace(1, 0, size), np.linspace(0, 1, size)], axis=1).astype(np.float32)  # [size, 2]
    for start in range(0, count, 5_000):
        corners = generator.integers(0, 256, (min(5_000, count - start), 2, 2, 3)).astype(np.float32)
        pixels = np.einsum("yi,xj,nijc->nyxc", slope, slope, corners)
        labels = corners.mean((1, 2, 3)).astype(np.int32) * 10 // 256
        images = []
        for picture in pixels.astype(np.uint8):
            Image.fromarray(picture).save(content := io.BytesIO(), "PNG", compress_level=0)
            images.append(content.getvalue())
        captions = [f"a picture of number {label}" for label in labels]
        table = pa.table({"image": images, "caption": captions, "label": labels})
        pq.write_table(table, folder / f"{start:09d}.parquet")


def compare_kmeans(arguments: argparse.Namespace) -> None:
    shared = {"width": arguments.width, "threads": arguments.threads}
    record: dict[str, Any] = {"machine": machine("cpu"), "runs": []}
    record["runs"].append(run({"job": "sklearn-kmeans", "rows": arguments.plain_rows, **shared}))
    for rows in (arguments.rows // 10, arguments.rows):
        record["runs"].append(run({"job": "our-kmeans", "rows": rows, **shared}))
        save(arguments.out, record)
    largest = record["runs"][-1]
    # the fit is on a sample of fixed size, so only assigning grows, and it grows in proportion
    record["extrapolated_seconds"] = {
        f"{millions}M": round(largest["fit_s"] + largest["assign_s"] * millions * 1e6 / arguments.rows, 1)
        for millions in (11, 158)
    }
    save(arguments.out, record)
    print(json.dumps(record, indent=2))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One measurement in a fresh process; what it printed last, as JSON."""
    print(f"... {job['job']} {job.get('count', job.get('rows'))}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, __file__, "measure", json.dumps(job)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(job: dict[str, Any]) -> None:
    jobs = {
        "plain": plain,
        "ours": ours,
        "partition": our_partition,
        "clusters": clusters,
        "our-kmeans": our_kmeans,
        "sklearn-kmeans": sklearn_kmeans,
    }
    result = jobs[job["job"]](job)
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    if "count" in job and "seconds" in result:
        # what a loaded machine does not change: images per second of processor time, start-up included
        result |= {"cpu_s": round(cpu_seconds, 1), "images_per_cpu_s": round(job["count"] / cpu_seconds, 1)}
    shown = {name: job[name] for name in ("job", "count", "rows", "width", "threads") if name in job}
    peak = {"peak_mib": own.ru_maxrss // 1024, "peak_mib_largest_worker": children.ru_maxrss // 1024}
    print(json.dumps({**shown, **result, **peak}))


def plain(job: dict[str, Any]) -> dict[str, Any]:
    """A script as one writes it in an afternoon."""
    import pyarrow.parquet as pq
    import torch
    from PIL import Image

    from atoll.models.autoencoders import load_autoencoder
    from atoll.models.feature_extractors import load_extractor

    autoencoder, extractor = load_autoencoder(job["autoencoder"]), load_extractor(job["features"], job["device"])
    torch.set_num_threads(job["plain_threads"])
    started = time.monotonic()
    latents, features = [], []
    with torch.inference_mode():
        for record in pq.read_table(job["source"], columns=["image"]).to_pylist():
            image = Image.open(io.BytesIO(record["image"]["bytes"])).convert("RGB").resize((SIZE, SIZE))
            tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(job["device"])
            latents.append(autoencoder.encode(tensor).cpu())
            features.append(extractor.extract(tensor).cpu())
    encoded = torch.cat(latents), torch.cat(features)
    seconds = time.monotonic() - started
    assert len(encoded[0]) == job["count"]
    return {"seconds": round(seconds, 2), "images_per_s": round(job["count"] / seconds, 1)}


def ours(job: dict[str, Any]) -> dict[str, Any]:
    from atoll.data.prepare import PrepareConfig, prepare
    from atoll.executor import Executor

    config = PrepareConfig(
        size=job.get("size", SIZE),
        autoencoder=job["autoencoder"],
        features=job["features"],
        batch=job["batch"],
        threads=1,
    )
    started = time.monotonic()
    marks: dict[str, float] = {}

    def progress(task: str, done: int, total: int | None) -> None:
        marks[task] = time.monotonic() - started

    engine = Executor(job["workers"])
    data = prepare(
        job["source"], Path(job["out"]) / "data", config, executor=engine, device=job["device"], progress=progress
    )
    seconds = time.monotonic() - started
    assert data.config["count"] + data.config["repeats"] == job["count"]
    return {
        "seconds": round(seconds, 2),
        "images_per_s": round(job["count"] / seconds, 1),
        "until_s": {task: round(at, 2) for task, at in marks.items()},
        "repeats": data.config["repeats"],
        "digest": data.digest,
    }


def our_partition(job: dict[str, Any]) -> dict[str, Any]:
    from atoll.executor import Executor
    from atoll.partition.config import PartitionConfig
    from atoll.partition.stage import partition

    run_folder = Path(job["out"])
    started = time.monotonic()
    marks: dict[str, float] = {}

    def progress(task: str, done: int, total: int | None) -> None:
        marks[task] = time.monotonic() - started

    config = PartitionConfig(clusters=CLUSTERS, options={"threads": job["workers"]})
    made = partition(
        run_folder / "data", run_folder / "partition", config, executor=Executor(job["workers"]), progress=progress
    )
    seconds = time.monotonic() - started
    return {
        "seconds": round(seconds, 2),
        "until_s": {task: round(at, 2) for task, at in marks.items()},
        "quality": json.loads(made.read("quality.json")),
        "sizes": [size["train"] for size in json.loads(made.read("sizes.json"))["clusters"]],
        "digest": made.digest,
    }


def clusters(job: dict[str, Any]) -> dict[str, Any]:
    """Our partition, and scikit-learn's KMeans on the same features."""
    import torch
    from sklearn.cluster import KMeans
    from sklearn.metrics import normalized_mutual_info_score

    from atoll.artifacts import Artifact
    from atoll.data.dataset import LatentDataset
    from atoll.data.index import Index
    from atoll.partition.kmeans import KMeans as OurKMeans
    from atoll.partition.kmeans import unit_length

    run_folder = Path(job["out"])
    made = our_partition(job)
    data = Artifact.open(run_folder / "data", "data")
    index = Index.of(data)
    samples = LatentDataset.of(data)
    rows = index.rows("train")
    features = unit_length(samples.features(torch.from_numpy(rows)).numpy())
    started = time.monotonic()
    none = np.zeros(0, dtype=np.int64)
    ours = OurKMeans(balance=None, threads=job["workers"]).fitted(features, none, [], CLUSTERS, 0)
    unbounded = ours.assign(features, none, [])
    our_seconds = time.monotonic() - started
    started = time.monotonic()
    found = KMeans(CLUSTERS, n_init=1, random_state=0).fit_predict(features)
    plain_seconds = time.monotonic() - started
    return {
        "partition_s": made["seconds"],
        "partition_until_s": made["until_s"],
        **{name: made[name] for name in ("quality", "sizes", "digest")},
        "our_kmeans_s": round(our_seconds, 2),
        "our_nmi_without_bound": round(float(normalized_mutual_info_score(index.labels[rows], unbounded)), 4),
        "sklearn_kmeans_s": round(plain_seconds, 2),
        "sklearn_nmi": round(float(normalized_mutual_info_score(index.labels[rows], found)), 4),
    }


def synthetic(rows: int, width: int) -> np.ndarray:
    """Features with structure: 4096 centres with noise around them."""
    generator = np.random.Generator(np.random.Philox(0))
    centres = generator.standard_normal((4096, width), dtype=np.float32)
    features = np.empty((rows, width), dtype=np.float32)
    for start in range(0, rows, 65_536):
        part = features[start : start + 65_536]
        part[:] = 0.7 * generator.standard_normal(part.shape, dtype=np.float32)
        part += centres[generator.integers(0, len(centres), len(part))]
    return features


def our_kmeans(job: dict[str, Any]) -> dict[str, Any]:
    from atoll.partition.kmeans import KMeans
    from atoll.partition.stage import FIT_ROWS

    features, none = synthetic(job["rows"], job["width"]), np.zeros(0, dtype=np.int64)
    started = time.monotonic()
    made = KMeans(balance_required=True, threads=job["threads"]).fitted(features[:FIT_ROWS], none, [], CLUSTERS, 0)
    fitted = time.monotonic()
    for start in range(0, len(features), 16_384):
        made.assign(features[start : start + 16_384], none, [])
    return {
        "cells": len(made.state["cells"]),
        "fit_s": round(fitted - started, 2),
        "assign_s": round(time.monotonic() - fitted, 2),
    }


def sklearn_kmeans(job: dict[str, Any]) -> dict[str, Any]:
    from sklearn.cluster import KMeans

    features = synthetic(job["rows"], job["width"])
    started = time.monotonic()
    made = KMeans(1024, n_init=1, max_iter=25, random_state=0).fit(features)
    return {"cells": 1024, "fit_s": round(time.monotonic() - started, 2), "iterations": int(made.n_iter_)}


def cut(source: list[str], count: int, place: Path) -> Path:
    """The first `count` rows of parquet files as one folder of parquet files; made once."""
    import pyarrow.parquet as pq

    if place.exists():
        return place
    place.mkdir(parents=True)
    left = count
    for number, path in enumerate(sorted(source)):
        table = pq.read_table(path).slice(0, left)
        pq.write_table(table, place / f"{number:05d}.parquet", row_group_size=1_000)
        left -= len(table)
        if left == 0:
            return place
    raise SystemExit(f"the source has {count - left} images, {count} were asked for")


def machine(device: str) -> dict[str, Any]:
    import platform

    import torch

    name = torch.cuda.get_device_name(0) if device.startswith("cuda") else platform.processor() or platform.machine()
    return {"cores": os.cpu_count(), "device": name, "torch": torch.__version__, "python": platform.python_version()}


def save(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
