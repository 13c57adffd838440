"""An island: one order in, one expert out, nothing else seen and nobody talked to."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from ..artifacts import Artifact, Store, UserError, check_relative, cleanup, file_digest, file_lock, find, verify_file
from ..data.dataset import LatentDataset
from ..models.accounting import account
from ..models.dit import DiT
from ..training.checkpoints import saved_execution
from ..training.execution import device_name
from ..training.loop import Progress, Watch, averaged, fit
from ..training.resources import Resources
from ..training.seeds import seed_from
from ..training.team import leads_its_team
from .expert import KIND, Expert, write_expert
from .initialization import card_for, init_of
from .learning import ExpertLearner
from .order import Order, read_order
from .sheets import FOLDER, Sheets
from .validation import Validation

LOG_SECONDS = 1.0, 30.0  # between lines of progress: at first, when whoever started it looks, and in the long run


def train(
    order_place: str | Path,
    out: Path,
    *,
    data: str | Path | None = None,
    init: str | Path | None = None,
    resources: Resources = Resources(),
    checkpoint_seconds: float | None = None,
    sheets: bool = True,
    watch: Watch | None = None,
) -> Artifact | None:
    """Train the expert an order asks for and leave it in `out`.

    Shards lie at their path relative to the run the order belongs to, or below `data`. With `init`, or where the order
    names one, training begins from the weights of that expert instead of random ones. Work in progress is in
    `out/state/`; the same call goes on from there, bit for bit on a CPU, after any kind of death. How it is computed
    follows from `resources`, or is as before. With `sheets`, what it would paint is shown in `out/sheets/` at every
    tenth of the budget. `watch` is called after every step. Of several processes that train together all but the first
    return None.
    """
    resources.check()
    order, run = read_order(order_place)
    root = run if data is None else Store.at(data)
    begun_from = init_of(order, root, init)
    parents = {"order": order.digest()} | ({} if begun_from is None else {"init": begun_from.digest})
    if (done := finished(out, parents)) is not None:
        return done
    shards = {split: shards_of(order, root, split) for split in ("train", "validation")}
    if len(shards["train"]) == 0:
        raise UserError(f"{order_place}: the order's train shards hold no samples; partition again with fewer clusters")

    state_folder = out / "state"
    leads = leads_its_team()
    with file_lock(state_folder) if leads else nullcontext():
        if (done := finished(out, parents)) is not None:  # by a process that held the lock until now
            return done
        cost, training = account(order.architecture), order.training
        saved = saved_execution(state_folder)
        choice = resources.choose(cost, training, shards["train"].nbytes(), saved)
        log = Log(out / "log.jsonl", watch) if leads else Silence()
        if choice.said is not None:
            log(Progress(0, training.images, note=f"computing: {choice.said}"))
        if begun_from is not None and saved_execution(state_folder) is None:
            note = f"begins from the weights of expert {begun_from.digest[:12]}; optimizer and average begin anew"
            log(Progress(0, training.images, note=note))
        device = choice.open_device()
        learner = expert_learner(order, shards, begun_from, str(device))
        if choice.execution.samples == "device":
            learner.samples = shards["train"].to(device)
        painted = Sheets(out / FOLDER, learner, shards["train"]) if sheets else None
        if leads:
            log.write(event="start", device=str(device))
            if saved is None and painted is not None:
                painted.clear()
        fitted = fit(
            learner,
            training,
            choice.execution,
            state_folder,
            identity=order.model_dump(mode="json") | {"parents": parents},
            whose="order",
            checkpoint_seconds=checkpoint_seconds,
            watch=log,
            show=None if painted is None else painted.show,
        )
        if not fitted.leads:
            return None
        with averaged(fitted.state):
            card = learner.finished_card(fitted.execution)
        provenance = {"execution": fitted.execution.model_dump(), "device": device_name(device)}
        weights = fitted.state.averaged_weights()
        artifact = write_expert(out, weights, card, fitted.rows, parents, provenance=provenance)
        log.write(event="finished", images=training.images)
        shutil.rmtree(state_folder, ignore_errors=True)
    return artifact


def expert_learner(order: Order, shards: dict[str, LatentDataset], init: Expert | None, device: str) -> ExpertLearner:
    """A network, random or begun from `init`, with the samples of its cluster.

    Captions kept as text are embedded on `device`.
    """
    for samples in shards.values():
        samples.text_device = device
    torch.manual_seed(seed_from(order.training.seed, "weights"))
    network = DiT(order.architecture)
    if init is not None:
        network.load_state_dict(init.network.state_dict())
    validation = Validation.fixed(shards["validation"], order.training.seed)
    return ExpertLearner(order, card_for(order, init), network, shards["train"], validation)


def finished(out: Path, parents: dict[str, str], made_by: str = "order or initial expert") -> Artifact | None:
    """The expert already in `out`, if it has these parents: for example this order and initial expert."""
    artifact = find(out)
    if artifact is None:
        return None
    if artifact.manifest.kind != KIND or artifact.manifest.parents != parents:
        raise UserError(f"{out}: already holds an artifact of another {made_by}; choose another --out")
    cleanup(out)
    return artifact


def shards_of(order: Order, root: Store, split: str) -> LatentDataset:
    """The order's shards of one split, each checked against the digest the order gives it."""
    paths = [fetch(root, ref.path, ref.sha256) for ref in order.shards if ref.split == split]
    return LatentDataset.open(paths, order.latent, order.text)


def fetch(root: Store, path: str, sha256: str) -> Path:
    """A shard on this machine: below `root` at its path in the run, or lying in `root` itself."""
    if not root.is_local:
        return root.download(path, sha256)
    check_relative(path)
    at_path, loose = root.path / path, root.path / Path(path).name
    if not at_path.is_file() and not loose.is_file():
        raise UserError(
            f"{root}: holds neither {path} nor {loose.name}, which the order trains on; "
            f"get {Path(path).parent} of the run, and say with --data where it lies"
        )
    if at_path.is_file():
        verify_file(at_path, sha256)
        return at_path
    if file_digest(loose) != sha256:  # in a folder that somebody named: most likely it is the wrong one
        raise UserError(
            f"--data {root}: its {loose.name} is not the order's (or is damaged): this order trains on {path}, "
            f"so give the folder {Path(path).parent} of the run"
        )
    return loose


class Silence:
    """The log of a process that is not the first of its team."""

    def write(self, **fields: str | int | float | None) -> None:
        pass

    def __call__(self, progress: Progress) -> None:
        pass


class Log:
    """log.jsonl: what happened when, and how fast. Never listed in a manifest, so it may hold times."""

    def __init__(self, path: Path, watch: Watch | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._watch = watch
        self._began = time.monotonic()
        self._due = 0.0

    def write(self, **fields: str | int | float | None) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps({"time": round(time.time(), 3), **fields}) + "\n")

    def __call__(self, progress: Progress) -> None:
        """Called after every step: written down now and then, and passed on to whoever watches."""
        now = time.monotonic()
        if progress.note is not None:
            self.write(event="note", note=progress.note)
        elif now >= self._due or progress.images == progress.total:
            shortest, longest = LOG_SECONDS
            self._due = now + min(longest, max(shortest, (now - self._began) / 20))
            rate = None if progress.rate is None else round(progress.rate, 1)
            self.write(
                event="progress",
                images=progress.images,
                total=progress.total,
                loss=progress.loss,
                val_loss=progress.val_loss,
                images_per_s=rate,
                skipped=progress.skipped,
            )
        if self._watch is not None:
            self._watch(progress)
