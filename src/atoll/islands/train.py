"""The expert loop: one order in, one expert out, nothing else seen and nobody talked to."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..artifacts import Artifact, Store, UserError, check_relative, find, only_one, verify_file
from ..data.shards import ShardSet
from ..data.stream import sample_order
from ..models.dit import DiT
from ..process import Condition
from ..training.average import WeightAverage
from ..training.checkpoint import Checkpoints, TrainingState
from ..training.device import autocast, open_device
from ..training.optimizer import adamw
from ..training.seeds import generator, seed_from
from ..training.step import micro_batches, report_due, take_step
from ..training.stopping import StopSignal
from .expert import KIND, write_expert
from .order import Order, read_order
from .start import card_for, learner, read_start
from .validation import Validation


def train(
    order_place: str | Path,
    out: Path,
    *,
    data: str | Path | None = None,
    start: str | Path | None = None,
    device: str | None = None,
    checkpoint_seconds: float = 60.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Artifact:
    """Train the expert an order asks for and leave it in `out`.

    Shards lie at their path relative to the run the order belongs to, or below `data`. With `start` the weights of
    that expert are trained on instead of random ones. Work in progress is in `out/state/`; the same call goes on from
    there, bit for bit on a CPU, after any kind of death.
    `on_progress(images, total)` is called after every step.
    """
    order, run = read_order(order_place)
    plan = order.training
    grown_from = None if start is None else read_start(start, order)
    parents = {"order": order.digest()} | ({} if grown_from is None else {"start": grown_from.digest})
    if (done := finished(out, parents)) is not None:
        return done
    where = open_device(device, plan)

    root = run if data is None else Store.at(data)
    shards = {split: shards_of(order, root, split) for split in ("train", "validation")}
    if len(shards["train"]) == 0:
        raise UserError(f"{order_place}: the order's train shards hold no samples; partition again with fewer clusters")
    validation = Validation.fixed(shards["validation"], plan)

    torch.manual_seed(seed_from(plan.seed, "weights"))
    network = DiT(order.architecture).to(where)
    if grown_from is not None:
        network.load_state_dict(grown_from.network.state_dict())
    state = TrainingState(
        module=network,
        optimizer=adamw(network, plan.learning_rate, plan.betas, plan.weight_decay),
        average=WeightAverage(network, plan.ema_images),
    )
    card = card_for(order, grown_from)
    denoiser = learner(network, card, order)
    log = Log(out / "log.jsonl")
    with only_one(out / "state"), StopSignal() as stop:
        if (done := finished(out, parents)) is not None:  # by a process that held the lock until now
            return done
        checkpoints = Checkpoints(out / "state", checkpoint_seconds)
        checkpoints.begin(order.model_dump(mode="json") | {"parents": parents}, "order")
        ledger = checkpoints.restore(state)
        log.write(event="start", images=state.images, device=str(where))

        while state.images < plan.images:
            batch = min(plan.batch, plan.images - state.images)
            x0, condition, eps, t = draw(order, shards["train"], state.images, batch)
            loss = 0.0
            for part in micro_batches(batch, plan.micro_batch):
                x0_, eps_, t_ = (value[part].to(where) for value in (x0, eps, t))
                with autocast(where, plan):
                    answer = denoiser(order.objective.noisy(x0_, eps_, t_), t_, condition[part].to(where))
                share = order.objective.loss(answer, x0_, eps_, t_).sum() / batch
                share.backward()  # type: ignore[no-untyped-call]
                loss += share.item()
            take_step(state, plan, loss, batch)

            ledger.add(loss)
            if report_due(state.images, batch, plan.images):
                measured = {} if validation is None else {"yardstick": validation.measure(state, card)}
                ledger.report(state.images, measured)
                log.write(event="report", images=state.images, total=plan.images)
            if on_progress is not None:
                on_progress(state.images, plan.images)
            checkpoints.keep(state, ledger, stop)

        if validation is not None:
            card = card.model_copy(update={"bridge_limit": validation.best_limit(state, card)})
        artifact = write_expert(out, state.averaged_weights(), card, ledger.rows, parents)
        log.write(event="finished", images=state.images)
        shutil.rmtree(out / "state", ignore_errors=True)
    return artifact


def finished(out: Path, parents: dict[str, str]) -> Artifact | None:
    """The expert already in `out`, if it is of this order and this start."""
    artifact = find(out)
    if artifact is None:
        return None
    if artifact.manifest.kind != KIND or artifact.manifest.parents != parents:
        raise UserError(f"{out}: already holds an artifact of another order or start; choose another --out")
    return artifact


def shards_of(order: Order, root: Store, split: str) -> ShardSet:
    """The order's shards of one split, each checked against the digest the order gives it."""
    paths = [fetch(root, ref.path, ref.sha256) for ref in order.shards if ref.split == split]
    return ShardSet(paths, order.text)


def fetch(root: Store, path: str, sha256: str) -> Path:
    """A shard on this machine: below `root` at its path in the run, or lying in `root` itself."""
    if not root.is_local:
        return root.download(path, sha256)
    check_relative(path)
    at_path, loose = root.path / path, root.path / Path(path).name
    found = loose if loose.is_file() and not at_path.is_file() else at_path
    verify_file(found, sha256)
    return found


def draw(order: Order, samples: ShardSet, images: int, batch: int) -> tuple[Tensor, Condition, Tensor, Tensor]:
    """The batch that follows `images` seen: x0 [B, C, H, W], condition, eps, t [B].

    A pure function of (seed, images seen), so resuming needs no memory of what was drawn before. Times are
    stratified: one in each of B equal parts of the density, which lowers the variance of the loss.
    """
    seed = order.training.seed
    rows = sample_order(len(samples), seed, images, batch)
    numbers = generator(seed, "batch", images)
    which_caption, strata, dropout = torch.rand(3, batch, generator=numbers, dtype=torch.float64)
    t = order.objective.times((torch.randperm(batch, generator=numbers) + strata) / batch)
    x0 = samples.latents(rows)
    eps = torch.randn(x0.shape, generator=numbers)
    condition = samples.condition(rows, which_caption).drop(dropout < order.training.condition_dropout)
    return x0, condition, eps, t


class Log:
    """log.jsonl: what happened when. Never listed in a manifest, so it may hold times."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, **fields: str | int | float) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps({"time": round(time.time(), 3), **fields}) + "\n")
