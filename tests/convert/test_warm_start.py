"""Warm starts: what is kept is kept, what is derived is exact, what is fitted says how well."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from foreign import CLASSES, SIDE, network, official_dit, official_forward, randomize
from torch import Tensor

from atoll.convert.imported import ImportedNetwork
from atoll.convert.layouts import import_weights
from atoll.convert.time_conversion import keep_mean, reverse_time
from atoll.convert.warm_start import FIT_TIMES, matched_time, warm_start
from atoll.diffusion import Condition, DDPMBetas, Kind, LinearFlow
from atoll.models.dit import DiT, DiTConfig, time_frequencies

CLASSIC = DiTConfig(
    latent=(4, SIDE, SIDE), patch=2, width=32, depth=3, heads=2, variant="adaln", condition="labels", classes=CLASSES
)
SINGLE = replace(CLASSIC, variant="adaln-single")
TEXT = replace(SINGLE, condition="tokens", classes=None, text_width=12, text_length=4)
DDPM = (DDPMBetas("linear"), Kind.EPSILON)
FLOW = (LinearFlow(), Kind.VELOCITY)
B = 6


def trained(config: DiTConfig, seed: int = 0) -> ImportedNetwork:
    """Random, but smooth in time as trained networks are: deaf to the frequencies that turn more than once."""
    model = DiT(config)
    randomize(model, seed, std=0.15)
    fast = config.time_scale * time_frequencies(config.frequency_shift, torch.device("cpu")) > 2 * math.pi
    with torch.no_grad():
        model.conditioning.time.enter.weight[:, torch.cat([fast, fast])] = 0.0
    return ImportedNetwork(config, {k: v.detach() for k, v in model.state_dict().items()}, *DDPM)


def null_call(config: DiTConfig, weights: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
    length, width = config.text_length or 1, config.text_width or 1
    words = torch.zeros(B, length, dtype=torch.int64)
    tokens = words if config.condition == "words" else torch.zeros(B, length, width)
    condition = Condition(labels=words[:, 0], tokens=tokens, pooled=torch.zeros(B, width)).null()
    with torch.inference_mode():
        return network(config, weights)(x, config.time_scale * t, condition)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, 4, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def t() -> Tensor:
    return torch.linspace(0.05, 0.95, B, dtype=torch.float64)


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def test_the_same_network_and_objective_is_a_copy() -> None:
    old = trained(CLASSIC)
    new = warm_start(old, CLASSIC, *DDPM, generator=seed(), keep_labels=True)
    assert new.count() == {"kept": len(old.weights)}
    assert all(torch.equal(new.weights[k], old.weights[k]) for k in old.weights)


@pytest.mark.parametrize("condition", ["none", "words", "pooled"])
def test_another_condition_starts_as_the_unconditional_network(x: Tensor, t: Tensor, condition: str) -> None:
    """The null label is folded into the time embedder: dropped, both networks answer the same."""
    old = trained(CLASSIC)
    extra = {"none": {}, "words": {"vocabulary": 9}, "pooled": {"text_width": 12}}[condition]
    config = replace(CLASSIC, condition=condition, classes=None, **extra)
    new = warm_start(old, config, *DDPM, generator=seed())
    found, expected = null_call(config, new.weights, x, t), null_call(CLASSIC, old.weights, x, t)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert "null row lives on" in new.dropped["conditioning.labels.weight"]


@pytest.mark.parametrize("classes", [5, CLASSES])
def test_other_classes_start_as_the_null_label(x: Tensor, t: Tensor, classes: int) -> None:
    """Even if there are just as many: label 3 of other data means something else."""
    old = trained(CLASSIC)
    config = replace(CLASSIC, classes=classes)
    new = warm_start(old, config, *DDPM, generator=seed())
    expected = null_call(CLASSIC, old.weights, x, t)
    with torch.inference_mode():
        found = network(config, new.weights)(x, 999 * t, Condition(labels=torch.tensor([0, 1, 2, 3, 4, 0])))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_single_to_classic_blocks_are_exact(x: Tensor, t: Tensor) -> None:
    """Only the head's modulation is fitted; on a smooth curve of t the fit is close."""
    old = trained(SINGLE)
    new = warm_start(old, CLASSIC, *DDPM, generator=seed())
    assert {key.split(".")[0] for key, fate in new.fates.items() if fate.how == "fitted"} == {"head"}
    fitted = max(fate.residual for fate in new.fates.values() if fate.residual is not None)
    assert fitted < 0.02
    found, expected = null_call(CLASSIC, new.weights, x, t), null_call(SINGLE, old.weights, x, t)
    assert (found - expected).norm() / expected.norm() < 0.05


def test_classic_to_single_is_exact_where_an_exact_answer_exists(x: Tensor, t: Tensor) -> None:
    """Blocks that already share one map (different biases) are reproduced, and the residual says so."""
    old = trained(CLASSIC)
    shared = old.weights["blocks.0.modulation.weight"]
    weights = dict(old.weights, **{f"blocks.{i}.modulation.weight": shared for i in range(CLASSIC.depth)})
    new = warm_start(replace(old, weights=weights), SINGLE, *DDPM, generator=seed(), keep_labels=True)
    residuals = {key: fate.residual for key, fate in new.fates.items() if fate.how == "fitted"}
    assert max(residuals[f"blocks.{i}.table"] for i in range(CLASSIC.depth)) < 1e-6
    for i in range(CLASSIC.depth):
        bias = new.weights["conditioning.modulation.bias"] + new.weights[f"blocks.{i}.table"].flatten()
        torch.testing.assert_close(bias, weights[f"blocks.{i}.modulation.bias"], atol=1e-5, rtol=1e-5)


def test_classic_to_single_beats_throwing_the_modulation_away(x: Tensor, t: Tensor) -> None:
    """With the old projection in place, the fitted network answers nearer to the old one than fresh modulation."""
    old = trained(CLASSIC)
    new = warm_start(old, SINGLE, *DDPM, generator=seed())
    residuals = {key: fate.residual for key, fate in new.fates.items() if fate.residual is not None}
    assert all(0.0 < residuals[f"blocks.{i}.table"] < 1.0 for i in range(CLASSIC.depth))
    fresh = DiT(SINGLE, seed()).state_dict()
    thrown_away = {k: (fresh if "modulation" in k or k.endswith("table") else new.weights)[k] for k in fresh}
    expected = null_call(CLASSIC, old.weights, x, t)
    fitted, without = (null_call(SINGLE, weights, x, t) for weights in (new.weights, thrown_away))
    assert (fitted - expected).norm() < 0.7 * (without - expected).norm()


def test_a_free_conditioning_vector_serves_the_head(x: Tensor, t: Tensor) -> None:
    """A single head adds the vector itself; where no label needs it, it is chosen for the head."""
    old = trained(CLASSIC)
    for key in ("head.modulation.weight", "head.modulation.bias"):
        old.weights[key].mul_(0.3)  # trained heads move little
    residuals = {}
    for keep in (False, True):
        new = warm_start(old, SINGLE, *DDPM, generator=seed(), keep_labels=keep)
        residuals[keep] = new.fates["head.table"].residual
    assert residuals[False] < 0.5 * residuals[True]


def test_a_new_schedule_keeps_the_meaning_of_time(x: Tensor, t: Tensor) -> None:
    """DDPM to flow: the trunk sees, at flow time t, the embedding of the DDPM step of equal signal-to-noise."""
    old = trained(CLASSIC)
    new = warm_start(old, CLASSIC, *FLOW, generator=seed())
    # the head is zero now; lend it the old projection to look at the trunk
    weights = {k: (old.weights if k.startswith("head.project") else new.weights)[k] for k in new.weights}
    found = null_call(CLASSIC, weights, x, t)
    expected = null_call(CLASSIC, old.weights, x, matched_time(LinearFlow(), DDPMBetas("linear"), t))
    naive = null_call(CLASSIC, old.weights, x, t)
    assert (found - expected).norm() < 0.1 * (naive - expected).norm()
    how = {key: fate.how for key, fate in new.fates.items()}
    assert how["conditioning.time.leave.weight"] == "fitted"
    assert how["head.project.weight"] == "re-initialized"
    assert not new.weights["head.project.weight"].any()


def test_imagenet_ddpm_to_text_flow(x: Tensor, t: Tensor) -> None:
    """HDDM's own conversion: classic labels DDPM to AdaLN-Single text flow. Every key is in the report once."""
    old = trained(CLASSIC)
    new = warm_start(old, TEXT, *FLOW, generator=seed())
    assert new.fates.keys() == DiT(TEXT).state_dict().keys()
    assert new.count().keys() == {"kept", "fitted", "re-initialized", "dropped"}
    assert not null_call(TEXT, new.weights, x, t).any(), "the final layer is new, so the first answer is zero"
    printed = new.rows()
    assert any(row[0] == "blocks.*.attention.qkv.weight x3" and row[2] == "kept" for row in printed)


@pytest.mark.parametrize("change", [{"width": 64}, {"depth": 2}, {"heads": 4}, {"qk_norm": True}])
def test_another_trunk_is_refused(change: dict[str, int]) -> None:
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"{name} is .* make them equal"):
        warm_start(trained(CLASSIC), replace(CLASSIC, **change), *FLOW, generator=seed())


@torch.inference_mode()
def test_sit_turned_around(x: Tensor, t: Tensor) -> None:
    """SiT runs from noise at 0 to data at 1 and answers x0 - eps; ours from data to noise and eps - x0."""
    state = official_dit()
    config = replace(CLASSIC, out_channels=8, time_scale=1.0)
    new = keep_mean(reverse_time(import_weights("dit", config, *FLOW, state, "test")))
    labels = torch.arange(B)
    found = network(new.config, dict(new.weights))(x, t, Condition(labels=labels))
    expected = -official_forward(state, x, (1.0 - t).float(), labels, heads=2)[:, :4]
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_matched_times_have_equal_signal_to_noise() -> None:
    flow, ddpm = LinearFlow(), DDPMBetas("linear")
    times = (torch.arange(FIT_TIMES, dtype=torch.float64) + 0.5) / FIT_TIMES
    inside = (flow.log_snr(times) > ddpm.band[0]) & (flow.log_snr(times) < ddpm.band[1])
    assert inside.float().mean() > 0.97
    matched = matched_time(flow, ddpm, times)
    torch.testing.assert_close(ddpm.log_snr(matched)[inside], flow.log_snr(times)[inside], atol=1e-9, rtol=1e-9)
