"""The training step on a GPU: the real `atoll train` on real shards, against a peer in the same run.

    PYTHONPATH=src python3 benchmarks/train_step.py --out train-step.json            # all jobs, about ten minutes
    PYTHONPATH=src python3 benchmarks/train_step.py --out train-step.json --jobs xl peer
    PYTHONPATH=src python3 benchmarks/train_step.py --out /tmp/x.json --smoke        # tiny, on a CPU: that it runs

Jobs, each in a process of its own, so that memory and start-up are its own:
  peer            diffusers' PixArtTransformer2DModel, compiled whole, same sizes and text masks, fused AdamW, data on
                  the card; no clipping, no average, no logging
  xl              `train` of the 607M AdaLN-Single XL/2 with 77 text tokens, batch 128; it then goes on until a
                  checkpoint is written: by how much the slowest step is slower is what that delays training
  xl-bare         the same network and loss without clipping, average, data and logging; and a profile of it
  xl-plain        xl-bare without our fused kernels: what inductor makes of the plain formulas
  xl-8            xl with --set precision=float8: the long products of 8-bit numbers
  xl-24, xl-16    the same training within --memory 24GB and 16GB
  small-1024-bare as xl-bare, for the small network
  small-128, small-1024   `train` of a 22.5M network (width 384, depth 12, 64 tokens, patch 1) at two batch sizes
`train` is stopped after a fixed number of steps; the clock runs between two synchronised moments after warm-up.
What is in --out already is kept, so that jobs can be added (a lent GPU comes in ten-minute turns). With
--until-there FILE a job compiles at once and waits for that file before it is timed: a peer that takes two minutes to
compile can do so beside other work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.artifacts.digest import sha256_file
from atoll.data.dataset import LatentDataset
from atoll.data.shards import write_shard
from atoll.data.space import LatentConfig, TextConfig
from atoll.diffusion import Kind, LinearFlow, LogitNormal, Objective
from atoll.islands.order import Order, ShardRef, read_order
from atoll.islands.task import ExpertTask
from atoll.islands.train import expert_task, shards_of, train
from atoll.models.accounting import account
from atoll.models.dit import DiTConfig
from atoll.models.kernel_check import fuse
from atoll.models.presets import preset
from atoll.training.compute import ComputeConfig
from atoll.training.config import TrainConfig
from atoll.training.loop import Progress, prepare_blocks
from atoll.training.memory import GIB, footprint, images_per_s, this_machine
from atoll.training.resources import Resources
from records import commit, write_record

JOBS = (
    *("xl", "xl-8", "peer", "xl-bare", "xl-24", "xl-16", "xl-plain"),
    *("small-128", "small-1024", "small-1024-bare"),
)
WARM_UP, STEPS = 12, 40
NOBODY = "0" * 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--work", type=Path, default=Path("/tmp/atoll-train-step"), help="where shards are made")
    parser.add_argument("--seconds", type=float, default=150.0, help="most time for one job")
    parser.add_argument("--smoke", action="store_true", help="tiny networks, on the CPU")
    parser.add_argument("--until-there", type=Path, help="wait for this file between compiling and timing")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.measure, arguments.work, arguments.smoke, arguments.until_there)
        return
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"machine": machine(), "jobs": {}}
    for job in arguments.jobs:
        record["jobs"][job] = run(job, arguments)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print(job, json.dumps({k: v for k, v in record["jobs"][job].items() if k != "kernels"}), flush=True)
    record["ratios"] = ratios(record["jobs"])
    write_record(arguments.out.with_suffix(".csv"), record)
    print(json.dumps(record["ratios"], indent=1))


def run(job: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One job in a process of its own; what it prints last is its result, and a failure is a result too."""
    command = [sys.executable, __file__, "--measure", job, "--out", str(arguments.out), "--work", str(arguments.work)]
    command += ["--smoke"] if arguments.smoke else []
    command += ["--until-there", str(arguments.until_there)] if arguments.until_there else []
    environment = {**os.environ, "ATOLL_STARTED": str(time.time())}
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=arguments.seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = error.stderr or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return {"error": f"took longer than {arguments.seconds:g} s", "output": text[-1500:]}
    if process.returncode != 0:
        return {"error": process.stderr[-3000:], "output": process.stdout[-500:]}
    return json.loads(process.stdout.strip().splitlines()[-1])


def ratios(jobs: dict[str, Any]) -> dict[str, float]:
    """What DESIGN section 8 asks for."""
    rate = {name: job["images_per_s"] for name, job in jobs.items() if "images_per_s" in job}
    pairs = {
        "xl against the peer": ("xl", "peer"),
        "xl in float8 against the peer": ("xl-8", "peer"),
        "xl in float8 against bfloat16": ("xl-8", "xl"),
        "xl against its bare step": ("xl", "xl-bare"),
        "24 GB against unlimited": ("xl-24", "xl"),
        "16 GB against unlimited": ("xl-16", "xl"),
        "fused kernels against plain formulas, bare": ("xl-bare", "xl-plain"),
    }
    return {name: round(rate[a] / rate[b], 3) for name, (a, b) in pairs.items() if a in rate and b in rate}


def machine() -> dict[str, Any]:
    there = torch.cuda.is_available()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if there else None, "torch": torch.__version__}
    found["commit"] = commit()
    if there:
        gpu = this_machine("cuda")
        found |= {"stated_tflops": round(gpu.tflops, 1)}
        found |= {"memory_gib": round(gpu.memory, 1), "commit": found["commit"]}
    return found


# -- what is trained ----------------------------------------------------------------------------------------


def xl(smoke: bool) -> DiTConfig:
    if smoke:
        return DiTConfig(
            latent=(4, 8, 8), patch=2, width=32, depth=2, heads=2, condition="tokens", text_width=16, text_length=77
        )
    return preset("xl/2", latent=(4, 32, 32), condition="tokens", text_width=768, text_length=77)


def small(smoke: bool) -> DiTConfig:
    width, depth = (32, 2) if smoke else (384, 12)
    return DiTConfig(
        latent=(32, 8, 8), patch=1, width=width, depth=depth, heads=2 if smoke else 6, condition="labels", classes=200
    )


def make_order(work: Path, name: str, config: DiTConfig, batch: int, samples: int) -> Path:
    """Shards of random latents (and text with masks of random length) and an order for them, in a run of their own."""
    place = work / name / "orders" / "00.json"
    if place.exists():
        return place
    numbers = torch.Generator().manual_seed(0)
    shard: dict[str, Tensor] = {"latents": torch.randn(samples, *config.latent, generator=numbers)}
    shard["labels"] = torch.randint(config.classes or 1, (samples,), generator=numbers)
    text = None
    if config.condition == "tokens":
        assert config.text_length is not None
        assert config.text_width is not None
        text = TextConfig(encoder="random", kind="tokens", length=config.text_length, width=config.text_width)
        lengths = torch.randint(5, config.text_length + 1, (samples, 1), generator=numbers)
        shard["tokens"] = torch.randn(samples, config.text_length, config.text_width, generator=numbers)
        shard["mask"] = torch.arange(config.text_length)[None] < lengths
        shard["captions"] = torch.arange(samples + 1)
    path = work / name / "partition" / "clusters" / "00" / "train-000.safetensors"
    write_shard(path, shard)
    channels = config.latent[0]
    order = Order(
        name="00",
        cluster=0,
        clusters=1,
        data=NOBODY,
        partition=NOBODY,
        latent=LatentConfig(autoencoder="none", shape=config.latent, mean=(0.0,) * channels, scale=(1.0,) * channels),
        text=text,
        shards=(ShardRef(path=str(path.relative_to(work / name)), sha256=sha256_file(path), split="train"),),
        architecture=config,
        objective=Objective(schedule=LinearFlow(), kind=Kind.VELOCITY, density=LogitNormal()),
        training=TrainConfig(images=100_000_000, batch=batch, learning_rate=1e-4, ema_images=222_000, seed=0),
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(order.to_bytes())
    return place


def order_of(job: str, work: Path, smoke: bool) -> Path:
    if job.startswith("small"):
        batch = 8 if smoke else int(job.split("-")[1])
        return make_order(work, f"small-{batch}", small(smoke), batch, 64 if smoke else 20_000)
    return make_order(work, "xl", xl(smoke), 8 if smoke else 128, 32 if smoke else 1024)


# -- jobs ---------------------------------------------------------------------------------------------------


def measure(job: str, work: Path, smoke: bool, until_there: Path | None) -> None:
    result: dict[str, Any]
    if job == "peer":
        result = measure_peer(smoke, until_there)
    elif job in ("xl-bare", "xl-plain", "small-1024-bare"):
        result = measure_bare(order_of(job, work, smoke), smoke, plain=job == "xl-plain")
    else:
        memory = {"xl-24": 24.0, "xl-16": 16.0}.get(job)
        settings = {"precision": "float8"} if job == "xl-8" and not smoke else {}
        resources = Resources("cpu") if smoke else Resources("cuda", memory, settings)
        result = measure_train(order_of(job, work, smoke), work, smoke, resources, checkpoints=job == "xl")
    print(json.dumps(result))


class Enough(Exception):
    """The training has run for long enough to be measured."""


class Stopwatch:
    """Watches a training: when its first step was done, how fast it is after warm-up, and, if it is to see a checkpoint
    being written, how long each later step took."""

    def __init__(self, warm_up: int, steps: int, checkpoints: Path | None) -> None:
        self.warm_up, self.steps, self.checkpoints = warm_up, steps, checkpoints
        self.notes: list[str] = []
        self.moments: list[float] = []
        self.later: list[float] = []
        self.written_at: int | None = None
        self.first_step: float | None = None
        self.rate = 0.0

    def __call__(self, now: Progress) -> None:
        if now.note is not None:
            self.notes.append(now.note)
            return
        count = len(self.moments) + 1
        if self.rate:
            self._see_a_checkpoint()
            return
        last = count == self.warm_up + self.steps
        if count in (1, self.warm_up) or last:
            synchronise()
        if count == 1:
            self.first_step = time.time() - float(os.environ.get("ATOLL_STARTED", "nan"))
        self.moments.append(time.perf_counter())
        if count == self.warm_up:
            self.images = now.images
        if last:
            self.rate = (now.images - self.images) / (self.moments[-1] - self.moments[self.warm_up - 1])
            if self.checkpoints is None:
                raise Enough

    def _see_a_checkpoint(self) -> None:
        """Go on until one is written, and a few steps more; some steps after the clock was stopped are not counted."""
        self.later.append(time.perf_counter())
        assert self.checkpoints is not None
        written = len(list(self.checkpoints.glob("*.safetensors")))
        if written and self.written_at is None:
            self.written_at = len(self.later)
        if (self.written_at and len(self.later) > self.written_at + 8) or self.later[-1] - self.later[0] > 45:
            raise Enough


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_train(
    order_place: Path, work: Path, smoke: bool, resources: Resources, *, checkpoints: bool
) -> dict[str, Any]:
    """`train`, the real thing."""
    out = work / f"expert-{os.getpid()}"
    steps = (2, 4) if smoke else (WARM_UP, STEPS)
    order, _ = read_order(order_place)
    if order.training.batch >= 1024:
        steps = steps[0], 3 * steps[1]
    elif account(order.architecture).parameters < 100e6 and not smoke:
        steps = 5 * steps[0], 15 * steps[1]
    watch = Stopwatch(*steps, out / "state" if checkpoints else None)
    seconds = (0.1 if smoke else 90.0) if checkpoints else None  # the first falls after the steps that are timed
    with contextlib.suppress(Enough):
        train(order_place, out, resources=resources, checkpoint_seconds=seconds, watch=watch)
    execution = ComputeConfig.model_validate_json((out / "state" / "compute.json").read_bytes())
    gaps = torch.tensor(watch.moments[steps[0] : -1]).diff()  # the last step waits for all that are under way
    result: dict[str, Any] = {
        "images_per_s": round(watch.rate, 1),
        "first_step_s": round(watch.first_step or 0.0, 1),
        "reserved_gib": reserved(),
        "execution": execution.model_dump(),
        "said": watch.notes,
        "step_ms": {"median": round(1e3 * gaps.median().item(), 2), "slowest": round(1e3 * gaps.max().item(), 2)},
    }
    if checkpoints and watch.written_at:
        saved = sorted((out / "state").glob("*.safetensors"))
        later = torch.tensor(watch.later[8:]).diff()  # the pipeline has filled again by then
        result["checkpoint"] = {
            "gib": round(saved[-1].stat().st_size / GIB, 2),
            "step_ms": round(1e3 * later.median().item(), 1),
            "slowest_steps_ms": [round(1e3 * gap, 1) for gap in later.sort(descending=True).values[:4].tolist()],
        }
    if not smoke:
        cost = account(order.architecture)
        batch = order.training.batch
        predicted = images_per_s(cost, this_machine("cuda"), execution, batch)
        result["predicted"] = {
            "memory_gib": round(footprint(cost, execution, batch), 2),
            "images_per_s": round(predicted, 1),
        }
    return result


def samples_of(order_place: Path) -> LatentDataset:
    order, run_folder = read_order(order_place)
    return shards_of(order, run_folder, "train")


def reserved() -> float:
    return round(torch.cuda.max_memory_reserved() / GIB, 2) if torch.cuda.is_available() else 0.0


def measure_bare(order_place: Path, smoke: bool, *, plain: bool) -> dict[str, Any]:
    """Forward, backward and AdamW on one batch that stays on the card; the network, loss and kernels are train's."""
    device = torch.device("cpu" if smoke else "cuda")
    learner, batch = learner_and_batch(order_place, device)
    fuse(learner.network, not plain)
    execution = ComputeConfig(
        device=device.type, precision="float32" if smoke else "bfloat16", compile="none" if smoke else "blocks"
    )
    prepare_blocks(learner.network, execution)
    optimizer = torch.optim.AdamW(learner.network.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    size = learner.order.training.batch

    def step() -> None:
        with execution.autocast():
            loss = learner.loss(learner.network, batch).sum() / size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    result = timed(step, size, smoke)
    if not smoke:
        result["kernels"] = profiled(step)
    return result


def learner_and_batch(order_place: Path, device: torch.device) -> tuple[ExpertTask, dict[str, Tensor]]:
    order, run_folder = read_order(order_place)
    shards = {split: shards_of(order, run_folder, split) for split in ("train", "validation")}
    learner = expert_task(order, shards, None, device.type)
    learner.network.to(device)
    size = order.training.batch
    drawn = learner.batch(0, size, slice(0, size))
    return learner, {name: value.to(device) for name, value in drawn.items()}


def measure_peer(smoke: bool, until_there: Path | None) -> dict[str, Any]:
    from diffusers import PixArtTransformer2DModel

    device = torch.device("cpu" if smoke else "cuda")
    torch.manual_seed(0)
    config = xl(smoke)
    network = PixArtTransformer2DModel(
        num_attention_heads=config.heads,
        attention_head_dim=config.width // config.heads,
        in_channels=config.latent[0],
        out_channels=config.latent[0],
        num_layers=config.depth,
        cross_attention_dim=config.width,
        sample_size=config.latent[1],
        patch_size=config.patch,
        norm_type="ada_norm_single",
        caption_channels=config.text_width,
        use_additional_conditions=False,
    ).to(device)
    size = 8 if smoke else 128
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    x, target = (torch.randn(size, *config.latent, device=device) for _ in range(2))
    t = torch.rand(size, device=device) * 999.0
    text = torch.randn(size, 77, config.text_width or 0, device=device)
    mask = torch.arange(77, device=device)[None] < torch.randint(5, 78, (size, 1), device=device)
    call: Callable[..., Any] = network if smoke else torch.compile(network, dynamic=False)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=not smoke):
            answer = call(
                x,
                encoder_hidden_states=text,
                timestep=t,
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
                encoder_attention_mask=mask,
                return_dict=False,
            )[0]
        (answer.float() - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    weights = sum(p.numel() for p in network.parameters())
    return timed(step, size, smoke, until_there) | {"weights": weights}


def timed(step: Callable[[], None], images: int, smoke: bool, until_there: Path | None = None) -> dict[str, Any]:
    """Images per second after warm-up, and how long the first step took."""
    began = time.perf_counter()
    step()
    synchronise()
    first = time.perf_counter() - began
    while until_there is not None and not until_there.exists():
        time.sleep(0.1)
    warm_up, steps = (1, 2) if smoke else (WARM_UP, STEPS)
    for _ in range(warm_up):
        step()
    synchronise()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise()
    seconds = (time.perf_counter() - began) / steps
    return {
        "images_per_s": round(images / seconds, 1),
        "step_ms": {"median": round(1e3 * seconds, 2)},
        "compile_s": round(first, 1),
        "reserved_gib": reserved(),
    }


def profiled(step: Callable[[], None], steps: int = 3) -> list[list[Any]]:
    """Kernels by time: name, ms per step, launches per step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        synchronise()
    rows = [(e.key, e.self_device_time_total / 1e3 / steps, e.count / steps) for e in profile.key_averages()]
    return [[k[:120], round(ms, 3), round(n, 1)] for k, ms, n in sorted(rows, key=lambda r: -r[1]) if ms > 0.1]


if __name__ == "__main__":
    main()
