"""The distillation stage: the experts of a run's model become one dense network, an expert without a cluster.

DDM's way: for each training image the expert of its own cluster predicts, and no router is asked. Experts may have any
schedule and kind, since each is evaluated through its bridge. Without data, on images that the model generates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..artifacts import Artifact, Store, UserError, canonical_json, write_atomic
from ..data.text import text_encoder
from ..diffusion import Condition, squared_error
from ..islands.expert import KIND, Expert, ExpertCard, Teacher, all_licenses, expert_result, load_expert
from ..islands.order import Order
from ..islands.task import as_learned, process_of
from ..islands.validation import Validation
from ..model import Model, load
from ..models.accounting import account
from ..models.dit import DiT
from ..registry.checks import accepted_orders
from ..registry.signatures import check_signed
from ..registry.versions import Member, Version, open_ensemble, open_reference, place_of
from ..router.task import ClusteredSamples
from ..runtime.load import open_member
from ..runtime.placing import OpenedExpert, Placed, Placement, answering_bytes
from ..sampling import Sampling, image_seeds
from ..training.artifact import seeded, train_artifact
from ..training.checkpoint import saved_compute
from ..training.compute import ComputeConfig, best_device
from ..training.distributed import is_main, local_device
from ..training.loop import Batch, Watch
from ..training.memory import GIB, reachable
from ..training.resources import Resources
from ..training.result import Result
from ..training.seeds import generator, seed_from
from .batches import TeacherBatches, data_batches, generated_batches
from .plan import DistillPlan

WHAT = "plan or other teachers"
RECORD = "distillation.json"  # in a student's folder: its plan, and where it began
READ = ("condition", "classes", "vocabulary", "text_width", "text_length")  # of an architecture: its condition
TEACHERS_SHARE = 0.5  # of a GPU's memory that experts may take; the student trains in the rest
GENERATED = "samples.safetensors"  # in the state's folder
AT_ONCE = 256  # images generated together


@dataclass(frozen=True)
class Teachers:
    """The experts that are active in a run's model, by cluster, and the orders they were trained for."""

    run: Store
    version: Version
    experts: Mapping[int, OpenedExpert]
    orders: tuple[Order, ...]

    @staticmethod
    def of(run: Store) -> Teachers:
        """Every one of them, verified as for sampling; every cluster must have one."""
        version = open_ensemble(run)
        check_signed(run, version)
        if empty := version.empty_clusters():
            raise UserError(f"{run}: cluster {empty[0]} has no expert to learn from; admit one first")
        experts = {}
        for member in version.serving:
            experts[member.cluster] = open_member(run, version, member)
        ordered = {digest: each.order for digest, each in accepted_orders(run, version).items()}
        orders = tuple(ordered[member.order] for member in version.serving if member.order in ordered)
        return Teachers(run, version, experts, orders)

    def card(self, plan: DistillPlan, start: Member | None) -> ExpertCard:
        """Of a student."""
        named = tuple(Teacher(cluster=k, digest=e.digest, license=e.card.license) for k, e in self.experts.items())
        data = None if plan.samples else open_reference(self.run, self.version.data, "data").manifest.license
        return ExpertCard(
            architecture=plan.network,
            schedule=plan.objective.schedule,
            kind=plan.objective.kind,
            latent=self.version.latent,
            text=self.version.text,
            images=plan.training.images,
            partition=self.version.partition.digest,
            license=all_licenses([data, *(teacher.license for teacher in named)]),
            teachers=named,
            class_names=self.version.class_names,
            origin=None if start is None else f"expert {start.digest[:12]}, the best teacher",
        )

    def best(self, plan: DistillPlan) -> Member | None:
        """The teacher to begin from, unless at random: of the student's network and objective, with the lowest
        validation loss outside its cluster, as measured when it was admitted. None if there is none."""
        if plan.start == "random":
            return None
        cards = {k: expert.card for k, expert in self.experts.items()}
        alike = [
            member
            for member in self.version.serving
            if cards[member.cluster].architecture == plan.network
            and (cards[member.cluster].schedule, cards[member.cluster].kind) == process_of(plan.objective)
            and member.val_loss is not None
        ]
        if plan.start == "best" and not alike:
            raise UserError(
                "--start best: no measured expert has the student's network and objective; change what was set of "
                "them, or leave it out"
            )
        return min(alike, key=outside_loss, default=None)

    def check(self, plan: DistillPlan) -> None:
        """Refuse what cannot be, before anything is written."""
        if tuple(plan.network.latent) != tuple(self.version.latent.shape):
            shape = self.version.latent.shape
            raise UserError(f"network.latent {plan.network.latent}: the experts' latents are {shape}; leave it out")
        for name in READ:
            asked = getattr(plan.network, name)
            theirs = {getattr(expert.card.architecture, name) for expert in self.experts.values()}
            if asked not in theirs:
                known = " or ".join(map(str, theirs))
                raise UserError(f"network.{name} {asked}: a student reads what its teachers read, which is {known}")
        if plan.samples is None:
            try:
                open_reference(self.run, self.version.data, "data")
                open_reference(self.run, self.version.partition, "partition")
            except UserError as error:
                raise UserError(f"{error}; --from-samples needs no data") from error
            return
        if self.version.router is None:
            raise UserError(f"--from-samples: {self.run} has no router yet; train one with `atoll router`")
        if self.version.text is not None and not plan.prompts:
            raise UserError("--from-samples: these experts read text; give --prompts FILE with a prompt in each line")
        if self.version.text is None and plan.prompts:
            raise UserError("--prompts: these experts read no text; leave it out")
        if self.version.text is not None and self.version.text.kind == "words":
            text_encoder(self.version.text).encode(plan.prompts)  # every word must be one that they know

    def parents(self, plan: DistillPlan) -> dict[str, str]:
        """Digests of all that a student is made of."""
        parents = {"plan": plan.digest(), "partition": self.version.partition.digest}
        parents |= {f"teacher-{k:02d}": expert.digest for k, expert in self.experts.items()}
        if plan.samples is None:
            return parents | {"data": self.version.data.digest}
        assert self.version.router is not None, "checked"
        return parents | {"router": self.version.router.digest}


def outside_loss(member: Member) -> float:
    loss = member.val_loss
    assert loss is not None
    return loss.inside if loss.outside is None else loss.outside


@dataclass
class StudentTask:
    """A network that learns to predict what its teachers do: a `Task` of training/loop.py."""

    network: DiT
    card: ExpertCard
    plan: DistillPlan
    batches: TeacherBatches
    validation: Validation | None

    def batch(self, images: int, size: int, rows: slice) -> Batch:
        return self.batches.batch(images, size, rows)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The weighted squared error per sample [B]."""
        student = as_learned(network, self.card, self.plan.objective)
        error = squared_error(student(batch["x"], batch["t"], Condition.of(batch)).value, batch["target"])
        return batch["weight"].to(error.dtype) * error

    def report(self, images: int, compute: ComputeConfig) -> dict[str, float]:
        """The validation loss on unseen data of all clusters, if there is any."""
        return {} if self.validation is None else self.validation.report(self.network, self.card, compute)

    def finish(self, compute: ComputeConfig) -> Result:
        card = self.card
        if self.validation is not None:
            card = self.validation.measured_card(self.network, card, compute)
        record = {"plan": self.plan.model_dump(mode="json"), "start": card.origin}
        return expert_result(card, {RECORD: canonical_json(record)})


def distill(
    run: Store,
    out: Path,
    plan: DistillPlan,
    *,
    resources: Resources = Resources(),
    checkpoint_seconds: float | None = None,
    watch: Watch | None = None,
) -> Artifact | None:
    """Train a student of a run's experts and leave it in `out`; the same call resumes, or finds it done.

    Of several processes that train together all but the main one return None.
    """
    resources.check()
    teachers = Teachers.of(run)
    teachers.check(plan)
    start = teachers.best(plan)
    saved = saved_compute(out / "state")
    device = torch.device(local_device(best_device(resources.wanted_device or (saved.device if saved else None))))
    resources.check_memory_of(str(device))
    room = min(reachable(device), resources.memory or float("inf")) if device.type == "cuda" else 0.0

    def build(compute: ComputeConfig, name: str) -> StudentTask:
        network: DiT = seeded(lambda numbers: DiT(plan.network, numbers), plan.training.seed)
        if start is not None:
            expert: Expert = load_expert(place_of(run, start))
            network.load_state_dict(expert.network.state_dict())
        validation: Validation | None = None
        if plan.samples is None:
            batches, validation = batches_of_data(teachers, plan, device, TEACHERS_SHARE * room)
        else:
            model = load(run.url, device=str(device), memory=TEACHERS_SHARE * room or None)
            batches = batches_of_samples(model, plan, plan.samples, out / "state" / GENERATED)
        return StudentTask(network, teachers.card(plan, start), plan, batches, validation)

    return train_artifact(
        out,
        KIND,
        build,
        architecture=plan.network,
        training=plan.training,
        identity=plan.model_dump(mode="json"),
        parents=teachers.parents(plan),
        what=WHAT,
        resources=replace(resources, taken=taken_by(teachers, plan, room)),
        notes=[f"starts from {'random weights' if start is None else f'the weights of {start.name}'}"],
        checkpoint_seconds=checkpoint_seconds,
        watch=watch,
    )


def taken_by(teachers: Teachers, plan: DistillPlan, room: float) -> float:
    """GiB of a GPU with `room` GiB that the teachers and their activations take."""
    if room == 0.0:
        return 0.0
    weights = sum(2 * account(e.card.architecture).parameters for e in teachers.experts.values()) / GIB  # in bfloat16
    rows = [answering_bytes(e.card.architecture, plan.training.batch, "bfloat16") for e in teachers.experts.values()]
    return min(weights, TEACHERS_SHARE * room) + max(rows) / GIB


def batches_of_data(
    teachers: Teachers, plan: DistillPlan, device: torch.device, memory: float
) -> tuple[TeacherBatches, Validation]:
    """Batches of the training images, with the experts within `memory` GiB of a GPU; and what is validated on."""
    version = teachers.version
    data = open_reference(teachers.run, version.data, "data")
    clustered = ClusteredSamples(data, open_reference(teachers.run, version.partition, "partition"))
    clustered.shards.text_device = str(device)
    validation = Validation.fixed(clustered.shards, plan.training.seed, clustered.rows("validation"))
    placed = Placed(list(teachers.experts.values()), Placement((device,), memory or None, graphs=False))
    precision = "bfloat16" if device.type == "cuda" else "float32"
    experts = placed.pool(precision, version.clusters, list(teachers.experts))  # type: ignore[arg-type]
    kinds = [(e.card.schedule, e.card.kind) for _, e in sorted(teachers.experts.items())]
    return data_batches(clustered, experts, kinds, device, plan), validation


def batches_of_samples(model: Model, plan: DistillPlan, count: int, path: Path) -> TeacherBatches:
    """Batches of `count` images of the model, which are generated once and kept in a file; of prompts at random."""
    if model.missing:
        first = min(model.missing)
        raise UserError(f"cluster {first}: its expert cannot be read ({model.missing[first]}); get it again")
    asked: list[str] = list(plan.prompts) or [str(number) for number in range(model.classes or 0)] or [""]
    numbers = torch.randint(len(asked), (count,), generator=generator(plan.training.seed, "prompts")).tolist()
    prompts, sampling = [asked[n] for n in numbers], Sampling(steps=plan.steps, guidance=1.0, route=plan.route)
    if path.is_file():
        latents = load_file(path)["latents"]
    else:
        seeds = image_seeds(seed_from(plan.training.seed, "generated") % 2**31, count)
        latents = model.latents(prompts, seeds, sampling, batch=AT_ONCE).cpu()
        if is_main():
            write_atomic(path, save({"latents": latents.contiguous()}))
    with torch.no_grad():
        condition = model.condition(prompts) or Condition(dropped=torch.ones(count, dtype=torch.bool))
    mixture: Any = model.denoiser(sampling)
    return generated_batches(latents, condition.to("cpu"), mixture, model.device, plan)
