"""Recipes: sizes that suit the data, and settings that go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli import main
from atoll.models.accounting import account, flops_forward
from atoll.models.dit import DiTConfig
from atoll.planning.recipes import RECIPES, name_for, patch_for, recipe, rescale_hparams, suitable_recipes
from atoll.router.recipes import router_network, router_training
from atoll.training.memory import footprint, host_compute

LATENTS = [(3, 32, 32), (3, 64, 64), (4, 32, 32), (32, 8, 8), (32, 4, 4), (16, 64, 64)]


def test_no_xl_for_465_images() -> None:
    assert suitable_recipes(465) == ["laptop"]
    assert suitable_recipes(12_500)[0] == "tiny"
    assert suitable_recipes(10**7)[0] == "xl"
    data = {"source": {"kind": "images"}, "splits": {"train": 465 * 4}}
    assert name_for(data, 4) == "laptop"


def test_the_papers_expert() -> None:
    config = recipe("xl")
    network, training = config.network, config.training
    assert (network.width, network.depth, network.heads, network.patch) == (1152, 28, 16, 2)
    assert (training.batch, training.learning_rate, training.warmup_images) == (32, 1e-4, 0)
    assert training.ema_images == 222_000


@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_suits_every_latent_and_its_router_is_cheaper(name: str, latent: tuple[int, int, int]) -> None:
    config = recipe(name, latent)
    expert = DiTConfig(latent=latent, condition="labels", classes=8, **config.network.model_dump())
    assert expert.image_tokens <= max(RECIPES[name].tokens, latent[1] * latent[2] // 4)
    trunk = router_network(expert)
    assert flops_forward(trunk) <= 0.08 * flops_forward(expert)
    learns = router_training(trunk, config.training)
    cost, mine = account(trunk), account(expert)
    taken = footprint(cost, host_compute(cost, learns.batch, "cpu"), learns.batch)
    experts = footprint(mine, host_compute(mine, config.training.batch, "cpu"), config.training.batch)
    assert taken <= 1.1 * experts


def test_patches_follow_the_latents() -> None:
    assert [patch_for(latent, 64) for latent in LATENTS] == [4, 8, 4, 1, 1, 8]
    assert patch_for((4, 33, 33), 64) == 1


def test_what_follows_from_a_change() -> None:
    base = recipe("laptop")
    told = base.model_copy(
        update={
            "training": base.training.model_copy(update={"images": 20_000, "batch": 16}),
            "network": base.network.model_copy(update={"width": 64}),
        }
    )
    made = rescale_hparams(told, base, {"training.images", "training.batch", "network.width"}).training
    assert made.warmup_images == base.training.warmup_images // 10
    assert made.ema_images == base.training.ema_images // 10
    assert made.learning_rate == pytest.approx(base.training.learning_rate * 0.5 * 2)
    kept = rescale_hparams(told, base, {"training.images", "training.warmup_images", "training.learning_rate"}).training
    assert kept.warmup_images == told.training.warmup_images
    assert kept.learning_rate == told.training.learning_rate


def test_settings_are_shown_with_their_meaning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(run / "data"), "--print-config", "--recipe", "tiny", "--images", "100k"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("training.images = 100000 ") and "images seen in all" in line for line in lines)
    assert any(line.startswith("training.ema_images = 2000 ") for line in lines)
    assert not (run / "orders").exists()


def test_a_wrong_name_lists_the_near_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", str(run / "data"), "--set", "training.lerning_rate=1"])
    told = capsys.readouterr().err
    assert "did you mean" in told
    assert "training.learning_rate" in told
