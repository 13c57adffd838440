"""A router by default costs at most 8 % of an expert, in operations per call: DDM's share."""

from __future__ import annotations

import pytest
import torch

from atoll.models.accounting import flops_forward
from atoll.models.dit import DiTConfig
from atoll.models.presets import preset
from atoll.models.router import RouterConfig, build_router
from atoll.router.recipes import blinded, router_network

TEXT = {"condition": "tokens", "text_width": 768, "text_length": 77}
LABELS = {"condition": "labels", "classes": 1000}


@pytest.mark.parametrize(("variant", "condition"), [("adaln", LABELS), ("adaln-single", TEXT)], ids=["labels", "text"])
@pytest.mark.parametrize("name", ["xl/2", "s/2", "3b/2"])
@pytest.mark.parametrize("latent", [(4, 32, 32), (32, 8, 8)])
def test_the_default_router_is_within_its_share(
    latent: tuple[int, int, int], name: str, condition: dict[str, object], variant: str
) -> None:
    expert = preset(name, latent=latent, variant=variant, **condition)  # type: ignore[arg-type]
    trunk = router_network(expert)
    share = flops_forward(trunk) / flops_forward(expert)
    if latent == (32, 8, 8) and name == "s/2":
        assert share < 0.2, "sixteen tokens of an S: nothing that still sees the text costs less"
    else:
        assert 0.01 < share <= 0.08
    assert trunk.image_tokens >= 16
    assert trunk.condition == expert.condition, "it sees what the experts see"
    with torch.device("meta"):
        build_router(RouterConfig(trunk=trunk, clusters=8))
        build_router(RouterConfig(trunk=blinded(trunk), clusters=8))


def test_beside_an_xl2_it_is_ddms_router_with_larger_patches() -> None:
    expert = preset("xl/2", latent=(4, 32, 32), **TEXT)  # type: ignore[arg-type]
    trunk = router_network(expert)
    assert (trunk.width, trunk.depth, trunk.heads, trunk.patch) == (768, 12, 12, 4)
    assert flops_forward(trunk) / flops_forward(expert) == pytest.approx(0.053, abs=0.001)
    ddms = preset("b/2", latent=(4, 32, 32), **TEXT)  # type: ignore[arg-type]
    assert flops_forward(ddms) / flops_forward(expert) > 0.19, "what it was before"


def test_an_expert_so_small_that_nothing_is_a_tenth_of_it_gets_the_smallest() -> None:
    expert = DiTConfig(latent=(1, 8, 8), patch=4, width=48, depth=3, heads=4)
    assert router_network(expert).width == 32
