"""Small experts on disk, each of another patch, width, depth and objective, with weights that answer something."""

from __future__ import annotations

from pathlib import Path

import torch

from atoll.artifacts import Artifact
from atoll.data.space import LatentConfig
from atoll.diffusion import VE, Bridge, Condition, CosineVP, DDPMBetas, Kind, LinearFlow, Schedule
from atoll.islands.expert import ExpertCard, load_expert, write_expert
from atoll.models.dit import DiT, DiTConfig
from atoll.runtime.pool import ExpertPool
from atoll.runtime.residency import Residency, Stored
from atoll.runtime.weights import Precision, layout_of, open_weights

LATENT = (4, 8, 8)
OBJECTIVES: list[tuple[Schedule, Kind]] = [
    (LinearFlow(), Kind.VELOCITY),
    (CosineVP(), Kind.EPSILON),
    (VE(), Kind.X0),
    (DDPMBetas("linear"), Kind.V),
]


def architecture(number: int, *, alike: bool = False) -> DiTConfig:
    """Of expert `number`; `alike`: all are as the first."""
    number = 0 if alike else number
    return DiTConfig(
        latent=LATENT,
        patch=(2, 4, 2, 8)[number % 4],
        width=(32, 48, 16, 64)[number % 4],
        depth=1 + number % 3,
        heads=(2, 4, 2, 4)[number % 4],
        variant="adaln" if number % 4 == 3 else "adaln-single",
        qk_norm=number % 2 == 1,
        condition="tokens",
        text_width=12,
        text_length=5,
    )


def write_experts(folder: Path, count: int = 4, *, alike: bool = False) -> list[Path]:
    places = []
    for number in range(count):
        config = architecture(number, alike=alike)
        network = DiT(config, torch.Generator().manual_seed(number))
        noise = torch.Generator().manual_seed(100 + number)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
        schedule, kind = OBJECTIVES[0 if alike else number % 4]
        card = ExpertCard(
            architecture=config,
            schedule=schedule,
            kind=kind,
            latent=LatentConfig(autoencoder="none", shape=LATENT, mean=(0.0,) * 4, scale=(1.0,) * 4),
            images=0,
        )
        places.append(folder / f"expert-{number}")
        write_expert(places[-1], network.state_dict(), card, [], {})
    return places


def plain(places: list[Path]) -> list[Bridge]:
    """Every expert in float32, as `load_expert` reads it: the reference."""
    return [load_expert(place).denoiser(LinearFlow()) for place in places]


def stored(place: Path, precision: Precision = "float32", *, int8: bool = False) -> Stored:
    expert = load_expert(place)
    artifact = Artifact.open(place)
    path, entry = artifact.file("model.safetensors"), artifact.manifest.files["model.safetensors"]
    config = expert.card.architecture
    return Stored(expert.card, open_weights(path, entry.sha256, config), layout_of(config, precision, int8=int8))


def pool(
    places: list[Path],
    slots: int | None = None,
    *,
    precision: Precision = "float32",
    int8: bool = False,
    devices: tuple[str, ...] = ("cpu",),
    graphs: bool = False,
) -> ExpertPool:
    experts = [stored(place, precision, int8=int8) for place in places]
    on = [torch.device(name) for name in devices]
    residency = Residency(experts, slots or len(experts), on, graphs)
    return ExpertPool(residency, LinearFlow(), len(places), {k: k for k in range(len(places))})


def question(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Condition]:
    """States, times and text; some tokens are not there."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *LATENT, generator=numbers)
    t = torch.rand(rows, generator=numbers, dtype=torch.float64)
    tokens = torch.randn(rows, 5, 12, generator=numbers)
    return x, t, Condition(tokens=tokens, mask=torch.rand(rows, 5, generator=numbers) < 0.7)


class Router:
    """Weights from the state and the text by a fixed random map: they change on the way from noise to data."""

    def __init__(self, experts: int = 4, sharpness: float = 3.0) -> None:
        numbers = torch.Generator().manual_seed(7)
        self.of_x = torch.randn(256, experts, generator=numbers) / 16
        self.of_text = torch.randn(60, experts, generator=numbers) / 8
        self.sharpness = sharpness
        self.rows = 0

    def __call__(self, x: torch.Tensor, t: torch.Tensor, condition: Condition | None) -> torch.Tensor:
        self.rows += len(x)
        assert condition is not None
        assert condition.tokens is not None
        text = condition.tokens.flatten(1)
        if condition.dropped is not None:
            text = torch.where(condition.dropped[:, None], 0.0, text)
        return torch.softmax(self.sharpness * (x.flatten(1) @ self.of_x + text @ self.of_text), dim=1)
