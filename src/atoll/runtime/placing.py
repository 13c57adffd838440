"""Where the experts of a model go: on which devices, in what precision, all at once or in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..artifacts import Artifact, Store, UserError
from ..diffusion import LinearFlow
from ..islands.expert import KIND, ExpertCard, read_expert_card
from ..mixture.mixture import RouterFunction
from ..models.accounting import account
from ..models.dit import DiTConfig
from ..models.kernel_check import wrong_kernels
from ..router.card import TrainedRouter
from ..training.compute import best_device, usable
from ..training.memory import GIB, reachable
from ..training.resources import parse_memory
from ..training.result import WEIGHTS
from .pool import ExpertPool, PoolExpert
from .residency import Residency, Running, Stored
from .routing import place_router
from .weights import Layout, Precision, WeightsFile, layout_of, open_weights

RESERVE = 1.0  # GiB of a card that is left for router, text encoder, autoencoder and CUDA itself
ROWS = 64  # that an expert computes at once, when memory is reckoned with
SHARE_AT_ONCE = 0.6  # of what a block would keep for a backward pass, that is there at the same time without one


@dataclass(frozen=True)
class Placement:
    """What the user asks for."""

    devices: tuple[torch.device, ...] = (torch.device("cpu"),)  # the first is where images are; experts go to all
    memory: float | None = None  # GiB of each device; None: what is free
    int8: bool = False
    graphs: bool | None = None  # None: on CUDA devices; False beside a training, whose own must not be disturbed

    @property
    def device(self) -> torch.device:
        return self.devices[0]


def placement_of(device: str | torch.device | None, memory: str | float | None, weights: str | None) -> Placement:
    """Where experts go, as the user says it."""
    if weights not in (None, "int8"):
        raise UserError(f"--weights {weights}: use int8, or leave it out for weights of the precision")
    names = best_device(None if device is None else str(device)).split(",")
    for name in names:
        if not usable(name):
            raise UserError(f"--device {name}: this machine has none; use cpu")
    devices = tuple(torch.empty(0, device=name).device for name in names)  # with its number, where it has one
    if len({on.type for on in devices}) > 1:
        raise UserError(f"--device {device}: experts are spread over devices of one kind; leave one out")
    room = parse_memory(memory) if isinstance(memory, str) else memory
    return Placement(devices, room, int8=weights == "int8")


@dataclass(frozen=True)
class OpenedExpert:
    """An expert whose card and header are known to fit each other; its weights are read when they get a place."""

    card: ExpertCard
    digest: str
    file: WeightsFile


def open_expert(place: str | Path | Store) -> OpenedExpert:
    artifact = Artifact.open(place, KIND)
    card = read_expert_card(artifact)
    path, sha256 = artifact.file(WEIGHTS, verify=False), artifact.manifest.files[WEIGHTS].sha256
    return OpenedExpert(card, artifact.digest, open_weights(path, sha256, card.architecture))


class Placed:
    """Experts where they are. Changing the precision reads them again, into the same memory."""

    def __init__(self, experts: Sequence[OpenedExpert], placement: Placement) -> None:
        self.experts, self.placement = experts, placement
        self._residency: tuple[Precision, Residency] | None = None
        self._routers: dict[Precision, tuple[TrainedRouter, RouterFunction]] = {}
        self.summary = ""  # what was chosen and why, for people

    def pool(self, precision: Precision, clusters: int = 1, present: Sequence[int] = (0,)) -> ExpertPool:
        """The experts in a precision, on their devices; expert i is that of cluster present[i]."""
        residency = self.residency(precision)
        return ExpertPool(residency, LinearFlow(), clusters, {k: number for number, k in enumerate(present)})

    def residency(self, precision: Precision) -> Residency:
        if self._residency is None or self._residency[0] != precision:
            self._residency = None  # frees its memory first
            experts = [
                Stored(e.card, e.file, layout_of(e.card.architecture, precision, int8=self.placement.int8))
                for e in self.experts
            ]
            slots, self.summary = choose([stored.layout for stored in experts], self.placement)
            self._residency = precision, Residency(experts, slots, self.placement.devices, self.running)
            if (doubt := self.doubt(precision)) is not None:
                self.summary += f"; {doubt}"
        return self._residency[1]

    def read(self) -> None:
        """Read the weights now, in the device's usual precision; UnreadableExperts names those that are damaged."""
        self.residency("bfloat16" if self.placement.device.type == "cuda" else "float32")

    def router(self, trained: TrainedRouter | RouterFunction, precision: Precision) -> RouterFunction:
        """The router beside them: a trained one in their precision, any other as it is."""
        if not isinstance(trained, TrainedRouter):
            return trained
        kept = self._routers.get(precision)
        if kept is None or kept[0] is not trained:
            kept = trained, place_router(trained, precision, self.placement.device, self.running)
            self._routers[precision] = kept
        return kept[1]

    @property
    def running(self) -> Running:
        return Running(graphs=self.placement.graphs)

    def doubt(self, precision: Precision) -> str | None:
        """A line about kernels that are wrong on this GPU for one of the architectures; None if all is well."""
        if precision != "bfloat16" or self.placement.device.type != "cuda":
            return None
        architectures = [expert.card.architecture for expert in self.experts]
        lines = (wrong_kernels(a, a.image_tokens, self.placement.device) for a in architectures)
        return next((line for line in lines if line is not None), None)


@dataclass(frozen=True)
class SingleExpert:
    """One expert as a model of its own."""

    expert: OpenedExpert
    placed: Placed

    @property
    def card(self) -> ExpertCard:
        return self.expert.card

    @property
    def digest(self) -> str:
        return self.expert.digest

    def denoiser(self, precision: Precision) -> PoolExpert:
        return self.placed.pool(precision)[0]


def load_single_expert(place: str | Path | Store, placement: Placement = Placement()) -> SingleExpert:
    expert = open_expert(place)
    placed = Placed([expert], placement)
    placed.read()
    return SingleExpert(expert, placed)


def choose(layouts: Sequence[Layout], placement: Placement) -> tuple[int, str]:
    """How many experts are there at a time, and a line that says so and why."""
    largest = max(layout.nbytes + at_work(layout, placement.device) for layout in layouts)
    room, why = room_on(placement)
    everybody = sum(layout.nbytes + at_work(layout, placement.device) for layout in layouts)
    devices = len(placement.devices)
    count = len(layouts) if room is None or everybody <= devices * room * GIB else devices * int(room * GIB // largest)
    count = min(count, len(layouts))
    first = layouts[0]
    kept = f"int8 and {first.precision}" if first.int8 else first.precision
    where = ", ".join(map(str, placement.devices))
    experts = "1 expert" if len(layouts) == 1 else f"{len(layouts)} experts"
    total = size(sum(layout.nbytes for layout in layouts))
    if count < 1:
        narrow = "" if first.int8 else "--weights int8, "
        raise UserError(
            f"{why}: an expert in {kept} takes {size(largest)} with what it computes; use {narrow}more, or --device cpu"
        )
    if count == len(layouts):
        return count, f"{experts} in {kept}, {total}: {'all ' if count > 1 else ''}on {where} ({why})"
    return count, (
        f"{experts} in {kept}, {total}: room for {count} at a time on {where} ({why}); images are grouped by the "
        "expert in memory while the next one is copied"
    )


def room_on(placement: Placement) -> tuple[float | None, str]:
    """GiB for experts on each device, and where that number comes from; None: no need to ask."""
    asked = f"--memory {placement.memory:g}GB" if placement.memory is not None else ""
    if placement.device.type != "cuda":
        return placement.memory, asked or "its memory"
    free = min(reachable(device) for device in placement.devices)
    room = min(free, placement.memory or free) - RESERVE
    return max(0.0, room), asked if placement.memory is not None and placement.memory < free else f"{free:.1f} GiB free"


def at_work(layout: Layout, device: torch.device) -> int:
    """Bytes that an expert on a card computes in."""
    return 0 if device.type != "cuda" else answering_bytes(layout.architecture, ROWS, layout.precision)


def answering_bytes(architecture: DiTConfig, rows: int, precision: Precision) -> int:
    """Bytes in which an expert computes its answer to so many rows at once."""
    return int(SHARE_AT_ONCE * rows * account(architecture).block_values * (4 if precision == "float32" else 2))


def size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / 2**20:.1f} MiB"
