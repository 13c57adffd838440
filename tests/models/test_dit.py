"""The backbone's promises: conditions, null embeddings, starts, precision, compilation, checkpointing."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from atoll.diffusion import Condition
from atoll.models.dit import DiT, DiTConfig, sincos_positions
from atoll.models.router import RouterConfig, build_router

BASE = DiTConfig(latent=(3, 4, 8), patch=2, width=32, depth=2, heads=4)
EXTRA: dict[str, dict[str, int]] = {
    "none": {},
    "labels": {"classes": 5},
    "words": {"vocabulary": 7, "text_length": 3},
    "pooled": {"text_width": 6},
    "tokens": {"text_width": 6, "text_length": 3},
}
CONDITIONS = list(EXTRA)
CONFIGS = [
    replace(BASE, variant=variant, condition=condition, qk_norm=qk_norm, **EXTRA[condition])
    for variant in ("adaln", "adaln-single")
    for condition in CONDITIONS
    for qk_norm in (False, True)
]
B = 5


def name(config: DiTConfig) -> str:
    return f"{config.variant}-{config.condition}{'-qk' if config.qk_norm else ''}"


def alive(network: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights everywhere, so that nothing is hidden behind a zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return network


def inputs(config: DiTConfig) -> tuple[Tensor, Tensor, Condition]:
    g = torch.Generator().manual_seed(1)
    words = torch.randint(0, 7, (B, 3), generator=g)
    condition = Condition(
        labels=torch.tensor([0, 1, 2, 3, 4]),
        pooled=torch.randn(B, 6, generator=g),
        tokens=words if config.condition == "words" else torch.randn(B, 3, 6, generator=g),
        mask=torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]).bool(),
        dropped=torch.tensor([0, 0, 0, 0, 1]).bool(),
    )
    return torch.randn(B, *config.latent, generator=g), 999 * torch.rand(B, generator=g, dtype=torch.float64), condition


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_each_condition_matters_and_can_be_dropped(config: DiTConfig) -> None:
    network = alive(DiT(config)).eval()
    x, time, condition = inputs(config)
    with torch.inference_mode():
        answer, null = network(x, time, condition), network(x, time, condition.null())
    assert answer.shape == x.shape
    if config.condition == "none":
        torch.testing.assert_close(answer, null)
        return
    torch.testing.assert_close(answer[4], null[4], atol=1e-5, rtol=1e-5)
    assert ((answer - null)[:4].abs().amax((1, 2, 3)) > 1e-3).all()


@pytest.mark.parametrize("config", [c for c in CONFIGS if not c.qk_norm], ids=name)
def test_the_null_answer_does_not_depend_on_the_condition(config: DiTConfig) -> None:
    """Not on the caption, and not on its length."""
    network = alive(DiT(config)).eval()
    x, time, condition = inputs(config)
    other = condition[torch.tensor([3, 4, 1, 0, 2])]
    with torch.inference_mode():
        torch.testing.assert_close(network(x, time, condition.null()), network(x, time, other.null()))


@pytest.mark.parametrize("config", [c for c in CONFIGS if not c.qk_norm], ids=name)
def test_samples_do_not_see_each_other(config: DiTConfig) -> None:
    network = alive(DiT(config)).eval()
    x, time, condition = inputs(config)
    with torch.inference_mode():
        together = network(x, time, condition)
        alone = torch.cat([network(x[i : i + 1], time[i : i + 1], condition[i : i + 1]) for i in range(B)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("condition", ["words", "tokens"])
def test_words_behind_the_mask_are_not_read_and_no_words_is_the_null_caption(condition: str) -> None:
    config = replace(BASE, condition=condition, **EXTRA[condition])
    network = alive(DiT(config)).eval()
    x, time, full = inputs(config)
    assert full.tokens is not None
    assert full.mask is not None
    changed = replace(full, tokens=full.tokens.masked_fill(~_expand(full.mask, full.tokens), 3))
    empty = replace(full, mask=torch.zeros_like(full.mask), dropped=None)
    with torch.inference_mode():
        torch.testing.assert_close(network(x, time, full), network(x, time, changed))
        torch.testing.assert_close(network(x, time, empty), network(x, time, full.null()), atol=1e-5, rtol=1e-5)


def _expand(mask: Tensor, like: Tensor) -> Tensor:
    return mask if like.ndim == 2 else mask[..., None].expand_as(like)


def test_an_image_without_label_is_unconditional() -> None:
    config = replace(BASE, condition="labels", classes=5)
    network = alive(DiT(config)).eval()
    x, time, condition = inputs(config)
    unlabelled = Condition(labels=torch.full((B,), -1))
    with torch.inference_mode():
        torch.testing.assert_close(network(x, time, unlabelled), network(x, time, condition.null()))


@pytest.mark.parametrize("condition", CONDITIONS[1:])
def test_a_missing_condition_is_refused(condition: str) -> None:
    config = replace(BASE, condition=condition, **EXTRA[condition])
    network = DiT(config)
    x, time, _ = inputs(config)
    field = {"labels": "labels", "pooled": "pooled"}.get(condition, "tokens")
    for given in (None, Condition(dropped=torch.zeros(B, dtype=torch.bool))):
        with pytest.raises(ValueError, match=rf"needs Condition\.{field}.*condition\.null\(\)"):
            network(x, time, given)


def test_wrong_shapes_are_refused() -> None:
    config = replace(BASE, condition="tokens", **EXTRA["tokens"])
    network = DiT(config)
    x, time, condition = inputs(config)
    with pytest.raises(ValueError, match=r"latents of shape \[3, 4, 8\], got \[3, 8, 4\]"):
        network(x.transpose(2, 3), time, condition)
    with pytest.raises(ValueError, match=r"text of shape \[B, 3, 6\], got \[5, 2, 6\]"):
        network(x, time, Condition(tokens=torch.zeros(B, 2, 6)))
    words = DiT(replace(BASE, condition="words", vocabulary=7))
    with pytest.raises(ValueError, match="int64 word ids"):
        words(x, time, condition)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"patch": 3}, "patch 3 does not divide the latent 4x8"),
        ({"heads": 5}, "heads 5 does not divide width 32"),
        ({"width": 30, "heads": 2}, "multiple of 4"),
        ({"depth": 0}, "at least 1"),
        ({"condition": "labels"}, "needs classes"),
        ({"condition": "tokens", "text_width": 8}, "needs text_length"),
        ({"classes": 4}, "classes 4 has no meaning for condition 'none'"),
        ({"condition": "music"}, "condition must be one of"),
        ({"variant": "adaln-zero"}, "variant must be one of"),
        ({"frequency_shift": 2}, "frequency_shift must be one of"),
        ({"time_scale": 0.0}, "time_scale must be a positive number"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio must be a positive number"),
        ({"out_channels": 0}, "out_channels"),
    ],
)
def test_configs_that_cannot_work_are_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(BASE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["adaln", "adaln-single"])
def test_the_first_answer_is_zero_and_the_first_gradient_is_not(variant: str) -> None:
    config = replace(BASE, variant=variant, condition="tokens", **EXTRA["tokens"])
    network = DiT(config)
    x, time, condition = inputs(config)
    answer = network(x, time, condition)
    assert not answer.any()
    (answer - 1).square().mean().backward()
    assert network.head.project.weight.grad.abs().sum() > 0


def test_the_same_seed_gives_the_same_weights_whatever_the_global_one_is() -> None:
    config = replace(BASE, condition="tokens", **EXTRA["tokens"])
    torch.manual_seed(1)
    first = DiT(config, torch.Generator().manual_seed(7)).state_dict()
    torch.manual_seed(2)
    second = DiT(config, torch.Generator().manual_seed(7)).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("config", [c for c in CONFIGS if not c.qk_norm], ids=name)
def test_recomputed_blocks_change_no_bit_of_the_gradient(config: DiTConfig) -> None:
    network = alive(DiT(config))
    x, time, condition = inputs(config)
    gradients = []
    for count in (0, 1, config.depth):
        for index, block in enumerate(network.blocks):
            block.recompute = index < count
        network.zero_grad()
        network(x, time, condition).square().mean().backward()
        gradients.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_bfloat16_is_near_float32(config: DiTConfig) -> None:
    """Autocast, and all weights in bf16: time is embedded in float32 either way."""
    network = alive(DiT(config)).eval()
    x, time, condition = inputs(config)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = network(x, time, condition)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = network(x, time, condition)
        low = network.bfloat16()(x, time, condition)
    assert low.dtype == torch.float32
    for answer in (autocast, low):
        assert (answer - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.qk_norm and c.variant == "adaln-single"], ids=name)
def test_it_compiles_into_one_graph(config: DiTConfig) -> None:
    torch._dynamo.reset()
    network = alive(DiT(config))
    x, time, condition = inputs(config)
    compiled = torch.compile(network, fullgraph=True, backend="eager")  # traces; code generation is torch's own affair
    torch.testing.assert_close(compiled(x, time, condition), network(x, time, condition), atol=1e-5, rtol=1e-5)


def test_positions_tell_rows_from_columns() -> None:
    """All positions differ, and neighbours are more alike than far ones, along either axis."""
    table = sincos_positions((4, 6), 32, 1.0).view(4, 6, 32)
    flat = table.flatten(0, 1)
    distances = torch.cdist(flat, flat) + 10 * torch.eye(24)
    assert distances.min() > 0.1
    assert (table[0, 0] - table[0, 1]).norm() < (table[0, 0] - table[0, 3]).norm()
    assert (table[0, 0] - table[1, 0]).norm() < (table[0, 0] - table[3, 0]).norm()
    torch.testing.assert_close(table[0, 0, :16], table[3, 0, :16])  # the first half encodes the column only


def test_learned_positions_start_from_the_fixed_table() -> None:
    fixed, learned = DiT(BASE), DiT(replace(BASE, positions="learned"))
    torch.testing.assert_close(learned.patches.positions.detach(), fixed.patches.positions)
    assert "patches.positions" in learned.state_dict()
    assert "patches.positions" not in fixed.state_dict()


def test_a_network_built_without_memory_is_whole_once_its_weights_are_assigned() -> None:
    config = replace(BASE, condition="labels", classes=5)
    expected = alive(DiT(config)).eval()
    with torch.device("meta"):
        empty = DiT(config)
    empty.load_state_dict(expected.state_dict(), strict=True, assign=True)
    x, time, condition = inputs(config)
    with torch.inference_mode():
        torch.testing.assert_close(empty(x, time, condition), expected(x, time, condition))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_it_learns(condition: str) -> None:
    """A few steps of Adam on one batch bring the loss down: every part passes a gradient."""
    config = replace(BASE, condition=condition, **EXTRA[condition])
    torch.manual_seed(0)
    network = DiT(config)
    x, time, given = inputs(config)
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = (network(x, time, given) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("config", [c for c in CONFIGS if not c.qk_norm], ids=name)
def test_a_router_starts_undecided_and_learns_clusters(config: DiTConfig) -> None:
    torch.manual_seed(0)
    router = build_router(RouterConfig(trunk=config, clusters=4))
    x, time, condition = inputs(config)
    logits = router(x, time, condition)
    assert logits.shape == (B, 4)
    assert not logits.any()
    clusters = torch.tensor([0, 1, 2, 3, 0])
    optimizer = torch.optim.Adam(router.parameters(), lr=3e-3)
    for _ in range(60):
        loss = nn.functional.cross_entropy(router(x, time, condition), clusters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (router(x, time, condition).argmax(1) == clusters).all()


def test_a_router_shares_the_backbones_blocks_and_refuses_nonsense() -> None:
    backbone, router = DiT(BASE), build_router(RouterConfig(trunk=BASE, clusters=3))
    shared = [key for key in backbone.state_dict() if not key.startswith("head.project")]
    assert all(backbone.state_dict()[key].shape == router.state_dict()[key].shape for key in shared)
    with pytest.raises(ValueError, match="clusters"):
        RouterConfig(trunk=BASE, clusters=0)
    with pytest.raises(ValueError, match="out_channels"):
        RouterConfig(trunk=replace(BASE, out_channels=4), clusters=2)


def test_a_router_with_a_float32_head_has_float32_logits() -> None:
    """Two experts whose logits differ by less than bfloat16 has digits for are told apart."""
    network = alive(build_router(RouterConfig(trunk=BASE, clusters=2)))
    with torch.no_grad():
        network.head.project.weight[1] = network.head.project.weight[0]
        network.head.project.bias.copy_(torch.tensor([10.0, 10.01]))
    for name, part in network.named_children():
        if name != "head":
            part.bfloat16()
    x, time, condition = inputs(BASE)
    logits = network(x, time, condition)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[:, 1] - logits[:, 0], torch.full((B,), 0.01), atol=1e-5, rtol=0)
