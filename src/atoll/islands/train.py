"""An island: one work order in, one expert out. It sees nothing else and talks to no other process."""

from __future__ import annotations

from pathlib import Path

from ..artifacts import Artifact, Store, UserError, check_relative, file_digest, verify_file
from ..data.dataset import LatentDataset
from ..models.dit import DiT
from ..training.artifact import finished, seeded, train_artifact
from ..training.checkpoint import saved_compute
from ..training.compute import ComputeConfig
from ..training.loop import Watch
from ..training.resources import Resources
from .expert import KIND, Expert
from .initialization import card_for, init_of
from .order import Order, read_order
from .sheets import FOLDER, Sheets
from .task import ExpertTask
from .validation import Validation

WHAT = "order or initial expert"


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
    """Train the expert of an order and leave it in `out`; the same call resumes, bit for bit on a CPU.

    Shards lie at their path relative to the run the order belongs to, or below `data`. With `init`, or where the order
    names one, training begins from the weights of that expert instead of random ones. How it is computed follows from
    `resources`, or is as before. With `sheets`, samples are shown in `out/sheets/` at every tenth of the budget. After
    every step `watch` is called. Of several processes that train together all but the main one return None.
    """
    resources.check()
    order, run = read_order(order_place)
    root = run if data is None else Store.at(data)
    start = init_of(order, root, init)
    parents = {"order": order.digest()} | ({} if start is None else {"init": start.digest})
    if (done := finished(out, KIND, parents, WHAT)) is not None:
        return done
    shards = {split: shards_of(order, root, split) for split in ("train", "validation")}
    if len(shards["train"]) == 0:
        raise UserError(f"{order_place}: the order's train shards hold no samples; partition again with fewer clusters")
    notes = []
    if start is not None and saved_compute(out / "state") is None:
        notes.append(f"begins from the weights of expert {start.digest[:12]}; optimizer and average begin anew")

    def build(compute: ComputeConfig, device: str) -> ExpertTask:
        task = expert_task(order, shards, start, device)
        task.sheets = Sheets.of(out / FOLDER, shards["train"]) if sheets else None
        return task

    return train_artifact(
        out,
        KIND,
        build,
        architecture=order.architecture,
        training=order.training,
        identity=order.model_dump(mode="json"),
        parents=parents,
        what=WHAT,
        resources=resources,
        notes=notes,
        checkpoint_seconds=checkpoint_seconds,
        watch=watch,
    )


def expert_task(order: Order, shards: dict[str, LatentDataset], init: Expert | None, device: str) -> ExpertTask:
    """A network, random or begun from `init`, with the samples of its cluster; texts are embedded on `device`."""
    for samples in shards.values():
        samples.text_device = device
    network: DiT = seeded(lambda numbers: DiT(order.architecture, numbers), order.training.seed)
    card = card_for(order)
    if init is not None:
        card = card_for(order, init.card, init.digest)
        network.load_state_dict(init.network.state_dict())
    validation = Validation.fixed(shards["validation"], order.training.seed)
    return ExpertTask(order, card, network, shards["train"], validation)


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
    if file_digest(loose) != sha256:  # the folder was named by hand: most likely it is the wrong one
        raise UserError(
            f"--data {root}: its {loose.name} is not the order's (or is damaged): this order trains on {path}, "
            f"so give the folder {Path(path).parent} of the run"
        )
    return loose
