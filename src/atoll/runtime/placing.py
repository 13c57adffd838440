"""Where the experts of a model go: on which devices, in what precision, all at once or in turn."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..artifacts import Artifact, Store, UserError
from ..data.space import LatentConfig, TextConfig
from ..data.text import text_encoder
from ..diffusion import LinearFlow
from ..islands.expert import KIND, ExpertCard, read_expert_card
from ..mixture.mixture import RouterFunction
from ..models.accounting import account
from ..models.autoencoders import load_autoencoder
from ..models.dit import DiTConfig
from ..models.kernel_check import use_kernels, wrong_kernels
from ..models.router import Router
from ..router.card import TrainedRouter
from ..training.compute import best_device, usable
from ..training.memory import GIB, reachable
from ..training.resources import parse_memory
from ..training.result import WEIGHTS
from .graphs import Runner
from .pool import ExpertPool, PoolExpert
from .residency import Residency, Stored
from .weights import Layout, Precision, WeightsFile, layout_of, open_weights

RESERVE = 2.0  # GiB of a GPU that is left for the router, decoding and CUDA itself
ROWS = 64  # that an expert computes at once, when memory is estimated
KEPT = 0.6  # of what a block would keep for a backward pass, that is there at the same time without one


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

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def with_codecs(self, latent: LatentConfig, text: TextConfig | None) -> Placement:
        """Load text encoder and autoencoder first, on a GPU: what is free afterwards is for the experts."""
        if self.is_cuda:
            if text is not None:
                text_encoder(text, str(self.device))
            load_autoencoder(latent.autoencoder).decode(torch.zeros(1, *latent.shape, device=self.device))
        return self


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
        self.graphs = placement.is_cuda if placement.graphs is None else placement.graphs
        self.summary = ""  # what was chosen and why, for people
        self._residency: tuple[Precision, Residency] | None = None
        self._router: tuple[TrainedRouter, Precision, RouterFunction] | None = None

    def pool(self, precision: Precision, clusters: int = 1, present: Sequence[int] = (0,)) -> ExpertPool:
        """The experts in a precision, on their devices; expert i is that of cluster present[i]."""
        if self._residency is None or self._residency[0] != precision:
            self._residency = None  # frees its memory first
            layouts = [layout_of(e.card.architecture, precision, int8=self.placement.int8) for e in self.experts]
            slots, self.summary = choose(layouts, self.placement)
            experts = [Stored(e.card, e.file, layout) for e, layout in zip(self.experts, layouts, strict=True)]
            self._residency = precision, Residency(experts, slots, self.placement.devices, self.graphs)
            if (doubt := self.doubt(precision)) is not None:
                self.summary += f"; {doubt}"
        numbers = {k: number for number, k in enumerate(present)}
        return ExpertPool(self._residency[1], LinearFlow(), clusters, numbers)

    def read(self) -> None:
        """Read the weights now, in the device's usual precision; UnreadableExperts names those that are damaged."""
        self.pool("bfloat16" if self.placement.is_cuda else "float32")

    def router(self, trained: TrainedRouter | RouterFunction, precision: Precision) -> RouterFunction:
        """The router beside them: a trained one in their precision, any other as it is."""
        if not isinstance(trained, TrainedRouter):
            return trained
        if self._router is None or self._router[:2] != (trained, precision):
            device = self.placement.device
            placed = TrainedRouter(trained.card, network_of(trained, precision, device), trained.digest)
            self._router = trained, precision, Runner(placed, device, self.graphs)
        return self._router[2]

    def doubt(self, precision: Precision) -> str | None:
        """A line about kernels that are wrong on this GPU for one of the architectures; None if all is well."""
        if precision != "bfloat16" or not self.placement.is_cuda:
            return None
        architectures = [expert.card.architecture for expert in self.experts]
        lines = (wrong_kernels(a, a.image_tokens, self.placement.device) for a in architectures)
        return next((line for line in lines if line is not None), None)


def network_of(trained: TrainedRouter, precision: Precision, device: torch.device) -> Router:
    """A router's network on a device. In bfloat16 its head stays float32: rounded logits would flip near ties."""
    network = copy.deepcopy(trained.network).to(device)
    if precision == "bfloat16":
        for name, part in network.named_children():
            if name != "head":
                part.to(torch.bfloat16)
        use_kernels(network)
    return network


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
    placed = Placed([expert], placement.with_codecs(expert.card.latent, expert.card.text))
    placed.read()
    return SingleExpert(expert, placed)


def choose(layouts: Sequence[Layout], placement: Placement) -> tuple[int, str]:
    """How many experts are in memory at a time, and a line that says so and why."""
    needed = [layout.nbytes + (computing_bytes(layout) if placement.is_cuda else 0) for layout in layouts]
    room, why = room_on(placement)
    devices, largest, count = len(placement.devices), max(needed), len(layouts)
    if room is not None and sum(needed) > devices * room * GIB:
        count = min(count, devices * int(room * GIB // largest))
    first = layouts[0]
    kept = f"int8 and {first.precision}" if first.int8 else first.precision
    where = ", ".join(map(str, placement.devices))
    if count < 1:
        narrow = "" if first.int8 else "--weights int8, "
        raise UserError(
            f"{why}: an expert in {kept} takes {size(largest)} with what it computes; use {narrow}more, or --device cpu"
        )
    experts = "1 expert" if len(layouts) == 1 else f"{len(layouts)} experts"
    told = f"{experts} in {kept}, {size(sum(layout.nbytes for layout in layouts))}"
    if count == len(layouts):
        return count, f"{told}: {'all ' if count > 1 else ''}on {where} ({why})"
    turns = "images are grouped by the expert in memory while the next one is copied"
    return count, f"{told}: room for {count} at a time on {where} ({why}); {turns}"


def room_on(placement: Placement) -> tuple[float | None, str]:
    """GiB for experts on each device, and where that number comes from; None: as much as they need."""
    asked = f"--memory {placement.memory:g}GB" if placement.memory is not None else ""
    if not placement.is_cuda:
        return placement.memory, asked or "its memory"
    free = min(reachable(device) for device in placement.devices)
    limited = placement.memory is not None and placement.memory < free
    room = placement.memory if limited and placement.memory is not None else free
    return max(0.0, room - RESERVE), asked if limited else f"{free:.1f} GiB free"


def computing_bytes(layout: Layout) -> int:
    """Bytes in which an expert on a GPU computes."""
    return answering_bytes(layout.architecture, ROWS, layout.precision)


def answering_bytes(architecture: DiTConfig, rows: int, precision: Precision) -> int:
    """Bytes in which an expert computes so many rows at once."""
    return int(KEPT * rows * account(architecture).block_values * (4 if precision == "float32" else 2))


def size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / 2**20:.1f} MiB"
