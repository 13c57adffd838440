"""Experts of other sizes, patches, conditions, schedules and makers in one ensemble: they share latents only."""

from __future__ import annotations

from pathlib import Path

import torch
from foreign import SIDE, official_dit, randomize
from torch import Tensor

from atoll.convert.expert import convert, own_spaces
from atoll.convert.source import read_source
from atoll.data.space import LatentConfig, TextConfig
from atoll.ensemble.mixture import Mixture
from atoll.islands.expert import ExpertCard, load_expert, write_expert
from atoll.models.dit import DiT, DiTConfig
from atoll.process import EDM, AnySchedule, Condition, CosineVP, Kind, LinearFlow

LATENT = LatentConfig(
    autoencoder="stabilityai/sd-vae-ft-ema", shape=(4, SIDE, SIDE), mean=(0.0,) * 4, scale=(5.49,) * 4
)
WORDS = TextConfig(encoder="words", kind="words", length=3, width=None, vocabulary=("a", "b", "c"))


def native(folder: Path, config: DiTConfig, schedule: AnySchedule, kind: Kind, text: TextConfig | None) -> Path:
    network = DiT(config)
    randomize(network, seed=config.width)
    card = ExpertCard(architecture=config, schedule=schedule, kind=kind, latent=LATENT, text=text, images=0)
    write_expert(folder, network.state_dict(), card, [], {})
    return folder


def foreign(folder: Path, form: str) -> Path:
    torch.save(official_dit(), folder.with_suffix(".pt"))
    source = read_source(folder.with_suffix(".pt"), form, heads=2)  # type: ignore[arg-type]
    latent, text = own_spaces(source, source.network.config, autoencoder=None, latent_scale=None, text_encoder=None)
    convert(source, folder, latent=latent, text=text)
    return folder


@torch.inference_mode()
def test_one_mixture_of_all_kinds_of_experts(tmp_path: Path) -> None:
    size = (4, SIDE, SIDE)
    folders = [
        foreign(tmp_path / "imagenet-ddpm", "dit"),
        foreign(tmp_path / "imagenet-flow", "sit"),
        native(
            tmp_path / "small",
            DiTConfig(latent=size, patch=4, width=16, depth=1, heads=2),
            CosineVP(),
            Kind.V,
            None,
        ),
        native(
            tmp_path / "wide",
            DiTConfig(latent=size, patch=1, width=64, depth=2, heads=4, condition="words", vocabulary=3, qk_norm=True),
            LinearFlow(),
            Kind.VELOCITY,
            WORDS,
        ),
        native(
            tmp_path / "edm",
            DiTConfig(latent=size, patch=8, width=32, depth=2, heads=2, variant="adaln", condition="labels", classes=3),
            EDM(),
            Kind.X0,
            None,
        ),
    ]
    experts = [load_expert(folder).denoiser(LinearFlow()) for folder in folders]
    batch = 6
    x = torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0.02, 0.98, batch, dtype=torch.float64)
    condition = Condition(
        labels=torch.tensor([0, 1, 2, 0, 1, 2]), tokens=torch.randint(0, 3, (batch, 3)), mask=torch.ones(batch, 3) > 0
    )
    weights = torch.rand(batch, len(experts)).softmax(1)

    def router(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return weights

    mixed = Mixture.of(experts, router)(x, t, condition).value
    alone = torch.stack([expert(x, t, condition).value for expert in experts], dim=1)
    assert torch.isfinite(mixed).all()
    torch.testing.assert_close(mixed, (weights[:, :, None, None, None] * alone).sum(1), atol=1e-4, rtol=1e-4)
