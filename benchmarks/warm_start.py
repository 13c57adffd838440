"""Warm start against random start on Tiny ImageNet: how many images does a borrowed trunk save?

A small DDPM expert (classic AdaLN, class labels) is trained on one half of the classes. Flow-matching experts
(AdaLN-Single, class labels) are then trained on the *other* half, same data, same budget, from
  random      fresh weights
  hddm        patches, attention and MLPs of the old network, all else fresh [HDDM]
  modulation  modulation fitted as well, time embedder kept as it is, final layer new
  fitted      the same with the time embedder fitted to the noise level it now means: `convert --final new`
  bridge      old schedule, kind and final layer kept, the flow loss taken through the bridge: `convert --final bridge`
  classic     bridge without the change of modulation: its loss starts where the old network's was
The yardstick for all of them is the squared error of the bridged velocity on the linear path at fixed
(image, t, noise), with averaged weights. Recorded: images each arm needs to reach the random start's final value.

All arms train through `fit`, as islands do. benchmarks/results/warm_start.csv and docs/warm_start.png were made before
that, by a loop of this script's own with the same recipe: samples drawn with replacement, times not stratified, the
network compiled whole, and the points of a curve closer together early on.

    # once, beside the data: the files a machine without pyarrow can read
    python benchmarks/warm_start.py pack --source ../shared/datasets/tiny-imagenet --out .gpu/warm-start
    cp ../shared/models/taef2/diffusion_pytorch_model.safetensors .gpu/warm-start/taef2.safetensors
    # on the GPU
    PYTHONPATH=src python3 benchmarks/warm_start.py run --data .gpu/warm-start --out OUT
    # a minute on one core, to see that it works; the numbers mean nothing
    python benchmarks/warm_start.py run --data .gpu/warm-start --out /tmp/warm-start --smoke
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from atoll.convert.imported import ImportedNetwork
from atoll.convert.warm_start import warm_start
from atoll.data.stream import sample_order
from atoll.diffusion import (
    Bridge,
    Condition,
    DDPMBetas,
    Denoiser,
    Kind,
    LinearFlow,
    LogitNormal,
    NetworkDenoiser,
    Objective,
    fixed_times,
    squared_error,
    velocity_error,
)
from atoll.models.dit import DiT, DiTConfig
from atoll.models.tiny_autoencoder import TinyAutoencoder
from atoll.training.compute import ComputeConfig
from atoll.training.config import TrainConfig
from atoll.training.loop import Batch, fit
from atoll.training.seeds import generator
from records import write_record

CLASSES = 200
HALF = CLASSES // 2
DDPM = Objective(schedule=DDPMBetas("linear"), kind=Kind.EPSILON)
FLOW = Objective(schedule=LinearFlow(), kind=Kind.VELOCITY, density=LogitNormal())
ARMS = ("random", "hddm", "modulation", "fitted", "bridge", "classic")


@dataclass(frozen=True)
class Plan:
    """One benchmark run; everything is counted in images."""

    training: TrainConfig = TrainConfig(
        images=1_500_000, batch=512, learning_rate=3e-4, warmup_images=50_000, ema_images=100_000, seed=0
    )  # of every arm; of the old network too, but for its images
    pretrain_images: int = 2_000_000
    width: int = 256
    depth: int = 8
    heads: int = 4
    validation_images: int = 1024
    validation_times: int = 16
    limit: float = 100.0
    seconds: float | None = None


SMOKE = Plan(
    training=TrainConfig(images=1600, batch=32, learning_rate=3e-4, warmup_images=320, ema_images=800, seed=0),
    pretrain_images=3200, width=32, depth=2, heads=2, validation_images=64, validation_times=4,
)  # fmt: skip
CPU = ComputeConfig()
GPU = ComputeConfig(device="cuda", precision="bfloat16", compile="cuda-graph")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="parquet files -> arrays that need numpy and Pillow only")
    packing.add_argument("--source", type=Path, required=True)
    packing.add_argument("--out", type=Path, required=True)
    packing.add_argument("--train-files", type=int, default=4)
    packing.add_argument("--validation", type=int, default=2500)
    running = verbs.add_parser("run")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--seeds", type=int, nargs="+", default=[0])
    running.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    running.add_argument("--seconds", type=float, help="shrink all budgets alike to end within this time")
    running.add_argument("--smoke", action="store_true", help="tiny, on the CPU; proves that it runs, nothing else")
    drawing = verbs.add_parser("draw", help="the curves of a finished run, where it had no matplotlib")
    drawing.add_argument("--out", type=Path, required=True, help="folder with warm_start.json")
    arguments = parser.parse_args()
    if arguments.verb == "pack":
        pack(arguments.source, arguments.out, arguments.train_files, arguments.validation)
    elif arguments.verb == "draw":
        draw(json.loads((arguments.out / "warm_start.json").read_text()), arguments.out / "warm_start.png")
    else:
        plan = replace(SMOKE if arguments.smoke else Plan(), seconds=arguments.seconds)
        run(plan, arguments.data, arguments.out, arguments.seeds, arguments.arms, smoke=arguments.smoke)


# -- data ---------------------------------------------------------------------------------------------------


def pack(source: Path, out: Path, train_files: int, validation: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out.mkdir(parents=True, exist_ok=True)
    train = pa.concat_tables([pq.read_table(source / f"train-{i:05d}.parquet") for i in range(train_files)])
    held_out = pq.read_table(source / "val-00000.parquet")
    chosen = np.random.default_rng(0).permutation(len(held_out))[:validation]
    for name, table in {"train": train, "validation": held_out.take(np.sort(chosen))}.items():
        images = [row["bytes"] for row in table["image"].to_pylist()]
        ends = np.cumsum([0, *map(len, images)])
        joined = np.frombuffer(b"".join(images), dtype=np.uint8)
        np.savez(out / f"{name}.npz", bytes=joined, ends=ends, labels=np.array(table["label"], dtype=np.int64))
        print(f"{out / name}.npz: {len(images):,} images, {len(joined) / 2**20:.1f} MiB")


@dataclass(frozen=True)
class Latents:
    """Normalized latents [N, C, H, W] with labels [N], on the device."""

    values: Tensor
    labels: Tensor

    def of_classes(self, first: int, count: int) -> Latents:
        """Only these classes, numbered from 0."""
        rows = (self.labels >= first) & (self.labels < first + count)
        return Latents(self.values[rows], self.labels[rows] - first)


def encode(data: Path, device: str, most: int | None) -> tuple[Latents, Latents]:
    """Train (with mirror images) and validation latents, normalized per channel by the train statistics."""
    autoencoder = TinyAutoencoder(32, pooled=True)
    weights = load_file(data / "taef2.safetensors")
    autoencoder.load_state_dict({name: value.float() for name, value in weights.items()}, strict=True)
    autoencoder = autoencoder.to(device).eval()
    images, labels = decode_images(data / "train.npz", most)
    train = torch.cat([encode_images(autoencoder, images, device), encode_images(autoencoder, images.flip(3), device)])
    held_images, held_labels = decode_images(data / "validation.npz", most)
    held = encode_images(autoencoder, held_images, device)
    mean, std = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    twice = labels.repeat(2).to(device)
    return Latents((train - mean) / std, twice), Latents((held - mean) / std, held_labels.to(device))


def decode_images(path: Path, most: int | None) -> tuple[Tensor, Tensor]:
    """uint8 images [N, 3, 64, 64] and labels [N]."""
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image

    stored = np.load(path)
    ends, blob = stored["ends"], stored["bytes"].tobytes()
    count = min(len(ends) - 1, most or len(ends))

    def decode(i: int) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(blob[ends[i] : ends[i + 1]])).convert("RGB"))

    with ThreadPoolExecutor(16) as pool:
        images = np.stack(list(pool.map(decode, range(count), chunksize=256)))
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(stored["labels"][:count])


@torch.inference_mode()
def encode_images(autoencoder: TinyAutoencoder, images: Tensor, device: str) -> Tensor:
    parts = [autoencoder.encode(part.to(device).float() / 127.5 - 1.0) for part in images.split(512)]
    return torch.cat(parts).clone()


# -- training -----------------------------------------------------------------------------------------------


def architecture(plan: Plan, variant: str) -> DiTConfig:
    return DiTConfig(
        latent=(32, 8, 8), patch=1, width=plan.width, depth=plan.depth, heads=plan.heads, condition="labels",
        classes=HALF, variant="adaln" if variant == "adaln" else "adaln-single",
    )  # fmt: skip


@dataclass
class ArmLearner:
    """A network trained on for an objective; a `Task` of training/loop.py. Its samples are on the device."""

    plan: Plan
    start: ImportedNetwork
    network: DiT
    objective: Objective
    training: TrainConfig
    data: Latents
    held: Latents | None

    def batch(self, images: int, size: int, part: slice) -> Batch:
        """Rows `part` of the batch that follows `images` seen, as an island draws it: row numbers, eps, t."""
        seed = self.training.seed
        rows = sample_order(len(self.data.labels), seed, images, size)
        numbers = generator(seed, "batch", images)
        strata, dropout = torch.rand(2, size, generator=numbers, dtype=torch.float64)
        t = self.objective.times((torch.randperm(size, generator=numbers) + strata) / size)[part]
        return {
            "row": rows[part],
            "dropped": dropout[part] < self.training.condition_dropout,
            "eps": torch.randn(size, *self.data.values.shape[1:], generator=numbers)[part],
            "t": t,
        }

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The objective's loss per sample [B]; of a network that kept another process, through the bridge."""
        x0, labels = self.data.values[batch["row"]], self.data.labels[batch["row"]]
        condition = Condition(labels=labels, dropped=batch["dropped"])
        x_t, target, weight = self.objective.corrupt(x0, batch["eps"], batch["t"])
        error = squared_error(self._learned(network)(x_t, batch["t"], condition).value, target)
        return weight.to(error.dtype) * error

    def _learned(self, network: nn.Module) -> Denoiser:
        denoiser = self._denoiser(network)
        if (self.objective.schedule, self.objective.kind) == (self.start.schedule, self.start.kind):
            return denoiser
        return Bridge(denoiser, onto=self.objective.schedule, limit=self.plan.limit)

    def _denoiser(self, network: nn.Module) -> NetworkDenoiser:
        return NetworkDenoiser(network, self.start.schedule, self.start.kind, self.start.config.time_scale)

    @torch.no_grad()
    def report(self, images: int, execution: ComputeConfig) -> dict[str, float]:
        """The yardstick, where there are samples to take it on."""
        if self.held is None:
            return {}
        return {"yardstick": yardstick(self._denoiser(self.network), self.plan, self.held, execution)}


def train(
    plan: Plan,
    execution: ComputeConfig,
    start: ImportedNetwork,
    objective: Objective,
    training: TrainConfig,
    data: Latents,
    held: Latents | None,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train `start` on `data`; the averaged weights, and the curve of the yardstick where `held` is given."""
    network = DiT(start.config).to(execution.device)
    network.load_state_dict({name: value.to(execution.device) for name, value in start.weights.items()}, strict=True)
    learner = ArmLearner(plan, start, network, objective, training, data, held)
    first = {"images": 0, **learner.report(0, execution)}
    with tempfile.TemporaryDirectory() as state:
        fitted = fit(learner, training, execution, Path(state), identity={}, what="arm")
    weights = {name: value.to("cpu", copy=True) for name, value in fitted.state.averaged_weights().items()}
    kept = ("images", "yardstick")
    return weights, [{name: row[name] for name in kept} for row in (first, *fitted.rows) if "yardstick" in row]


def yardstick(denoiser: NetworkDenoiser, plan: Plan, held: Latents, execution: ComputeConfig) -> float:
    """Mean squared error of the bridged velocity at fixed (image, t, noise); each image at one of the times."""
    bridge = Bridge(denoiser, limit=plan.limit)
    device, batch = held.values.device, plan.training.batch
    count = min(plan.validation_images, len(held.labels)) // batch * batch or len(held.labels)
    numbers = torch.Generator("cpu").manual_seed(1234)
    eps = torch.randn(count, *held.values.shape[1:], generator=numbers).to(device)
    times = fixed_times(plan.validation_times).to(device)
    errors = []
    for shift in range(4):  # every image at four of the times
        for rows in torch.arange(count, device=device).split(batch):
            t = times[(rows * 5 + shift * 4 + rows // plan.validation_times) % len(times)]
            with execution.autocast():
                condition = Condition(labels=held.labels[rows], dropped=torch.zeros_like(rows, dtype=torch.bool))
                errors.append(velocity_error(bridge, held.values[rows], eps[rows], t, condition))
    return float(torch.cat(errors).mean())


# -- the comparison -----------------------------------------------------------------------------------------


def starts(plan: Plan, old: ImportedNetwork, seed: int) -> dict[str, ImportedNetwork]:
    """Where every arm starts from; all learn FLOW, those that kept DDPM's schedule and kind through the bridge."""
    single, classic = architecture(plan, "adaln-single"), architecture(plan, "adaln")

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    fresh = DiT(single, seeded()).state_dict()
    trunk = {k: v for k, v in old.weights.items() if k.startswith("patches") or ".attention." in k or ".mlp." in k}
    untimed = warm_start(old, single, FLOW.schedule, FLOW.kind, generator=seeded(), fit_time=False)
    fitted = warm_start(old, single, FLOW.schedule, FLOW.kind, generator=seeded())
    bridge = warm_start(old, single, DDPM.schedule, DDPM.kind, generator=seeded())
    unchanged = warm_start(old, classic, DDPM.schedule, DDPM.kind, generator=seeded())
    residuals = {key: round(fate.residual, 3) for key, fate in fitted.fates.items() if fate.residual is not None}
    print(f"residuals of the fit: {residuals}")
    return {
        "random": ImportedNetwork(single, fresh, FLOW.schedule, FLOW.kind),
        "hddm": ImportedNetwork(single, fresh | trunk, FLOW.schedule, FLOW.kind),
        "modulation": untimed,
        "fitted": fitted,
        "bridge": bridge,
        "classic": unchanged,
    }


def run(plan: Plan, data: Path, out: Path, seeds: list[int], arms: list[str], *, smoke: bool) -> None:
    began = time.monotonic()
    execution = GPU if torch.cuda.is_available() and not smoke else CPU
    if execution == GPU:
        torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    train_set, held = encode(data, execution.device, 200 if smoke else None)
    first, second = train_set.of_classes(0, HALF), train_set.of_classes(HALF, HALF)
    target_held = held.of_classes(HALF, HALF)
    print(
        f"{time.monotonic() - began:.0f} s: {len(first.labels):,} + {len(second.labels):,} latents encoded", flush=True
    )

    results: list[dict] = []
    budget = None
    for seed in seeds:
        config = architecture(plan, "adaln")
        fresh = ImportedNetwork(
            config, DiT(config, torch.Generator().manual_seed(seed)).state_dict(), DDPM.schedule, DDPM.kind
        )
        pretraining = plan.training.model_copy(update={"images": plan.pretrain_images, "seed": seed})
        started = time.monotonic()
        weights, _ = train(plan, execution, fresh, DDPM, pretraining, first, None)
        rate = plan.pretrain_images / (time.monotonic() - started)
        print(f"{time.monotonic() - began:.0f} s: seed {seed}: pre-trained, {rate:,.0f} images/s", flush=True)
        old = replace(fresh, weights=weights)
        if budget is None:
            budget = affordable(plan, rate, time.monotonic() - began, len(arms), len(seeds))
        training = plan.training.model_copy(update={"images": budget, "seed": seed + 1})
        curves = {}
        for name, start in starts(plan, old, seed).items():
            if name not in arms:
                continue
            _, curves[name] = train(plan, execution, start, FLOW, training, second, target_held)
            ends = [curves[name][i]["yardstick"] for i in (0, -1)]
            print(f"{time.monotonic() - began:.0f} s: {name}: {ends[0]:.4f} -> {ends[1]:.4f}", flush=True)
        results.append({"seed": seed, "budget": budget, "curves": curves, "images_needed": needed(curves, budget)})
        write(out, plan, execution, results)  # after every seed: a run cut short keeps what it has
    print(summary(results))


def affordable(plan: Plan, rate: float, spent: float, arms: int, seeds: int) -> int:
    """Images per arm: the plan's, or fewer, alike for all arms and seeds, where the time given would not do."""
    images, batch = plan.training.images, plan.training.batch
    if plan.seconds is None:
        return images
    images_left = (plan.seconds - spent) * rate * 0.9 - (seeds - 1) * plan.pretrain_images
    return max(batch, min(images, int(images_left / (arms * seeds)) // batch * batch))


def needed(curves: dict[str, list[dict[str, float]]], budget: int) -> dict[str, float | None]:
    """Images until an arm's yardstick is the random start's final one, interpolated; None: never."""
    if "random" not in curves:
        return {}
    goal = curves["random"][-1]["yardstick"]
    return {name: crossing(curve, goal) for name, curve in curves.items()}


def crossing(curve: list[dict[str, float]], goal: float) -> float | None:
    for before, after in zip([curve[0], *curve], curve, strict=False):
        if after["yardstick"] <= goal:
            if before["yardstick"] <= goal:
                return after["images"]
            share = (before["yardstick"] - goal) / (before["yardstick"] - after["yardstick"])
            return before["images"] + share * (after["images"] - before["images"])
    return None


def summary(results: list[dict]) -> str:
    lines = ["images needed to reach the random start's final yardstick (speed-up):"]
    for name in ARMS:
        found = [(r["images_needed"].get(name), r["budget"]) for r in results if name in r["images_needed"]]
        shown = ["never" if n is None else f"{n:,.0f} ({b / max(n, 1):.2f}x)" for n, b in found]
        if shown:
            lines.append(f"  {name:10s} {', '.join(shown)}")
    return "\n".join(lines)


def write(out: Path, plan: Plan, execution: ComputeConfig, results: list[dict]) -> None:
    record = {
        "plan": vars(plan) | {"training": plan.training.model_dump()},
        "execution": execution.model_dump(),
        "device": torch.cuda.get_device_name() if execution.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "results": results,
    }
    (out / "warm_start.json").write_text(json.dumps(record, indent=1) + "\n")
    write_record(out / "warm_start.csv", record)
    try:
        draw(record, out / "warm_start.png")
    except ImportError:
        print("no matplotlib here: draw the curves later with `warm_start.py draw --out`")


def draw(record: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    colors = dict(zip(ARMS, ["#444444", "#c0792a", "#c9b037", "#2a78c0", "#2a9d5c", "#8a4fbf"], strict=True))
    for index, result in enumerate(record["results"]):
        for name, curve in result["curves"].items():
            points = [(p["images"], p["yardstick"]) for p in curve if p["images"] > 0]
            axes.plot(*zip(*points, strict=True), color=colors[name], label=name if index == 0 else None, lw=1.4)
    lowest = min(p["yardstick"] for r in record["results"] for c in r["curves"].values() for p in c)
    if "random" in (curves := record["results"][0]["curves"]):
        goal = curves["random"][-1]["yardstick"]
        axes.axhline(goal, color="#444444", lw=0.8, ls=":")
        axes.set_ylim(0.97 * lowest, 1.5 * goal)
    axes.set(
        xscale="log", xlabel="images seen", ylabel="squared error of the velocity", title="Warm start, Tiny ImageNet"
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
