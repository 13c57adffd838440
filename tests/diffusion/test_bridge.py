"""The bridge against the closed form: exact inside an expert's band, bounded outside, honest about noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from atoll.diffusion import (
    VE,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Kind,
    LinearFlow,
    NetworkDenoiser,
    Schedule,
    x0_gain,
)
from atoll.diffusion.schedule import ddpm_log_snr
from closed_form import ExactDenoiser, ImperfectDenoiser
from gaussian_world import PRODUCT, WORLD, covered, name, relative_error, states
from paper_fusion import PaperFusion

TIMES = [0.001, 0.002, 0.005, 0.011, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.93, 0.98, 0.987, 0.992, 0.997, 0.999]
ENDS = [0.0, 1e-6, 0.5, 1 - 1e-6, 1.0]
TRUTH = ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY)


def expert(schedule: Schedule, kind: Kind) -> ExactDenoiser:
    return ExactDenoiser(WORLD, schedule, kind)


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_an_ideal_expert_gives_the_ideal_velocity_wherever_its_schedule_reaches(schedule: Schedule, kind: Kind) -> None:
    x, t = states(16, TIMES)
    error = relative_error(Bridge(expert(schedule, kind), limit=None)(x, t, None).value, TRUTH(x, t, None).value)
    inside = covered(schedule, t)
    assert inside.sum() >= 16 * 6
    assert error[inside].max() < 1e-9


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_in_float32_it_is_right_to_three_digits(schedule: Schedule, kind: Kind) -> None:
    x, t = states(16, TIMES)
    truth = TRUTH(x, t, None).value
    answer = Bridge(expert(schedule, kind), limit=None)(x.float(), t, None).value
    assert answer.dtype == torch.float32
    assert relative_error(answer, truth)[covered(schedule, t)].max() < 1e-3


@pytest.mark.parametrize("limit", [None, 100.0])
@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_in_bfloat16_it_is_finite_from_end_to_end(schedule: Schedule, kind: Kind, limit: float | None) -> None:
    x, t = states(8, [*ENDS, *TIMES])
    answer = Bridge(expert(schedule, kind), limit=limit)(x.bfloat16(), t, None).value
    assert answer.isfinite().all()
    if not (schedule == LinearFlow() and kind is Kind.VELOCITY):  # that one passes untouched
        assert answer.dtype == torch.float32


@pytest.mark.parametrize("onto", [CosineVP(), DDPMBetas("cosine"), VE()], ids=name)
@pytest.mark.parametrize("kind", Kind, ids=name)
def test_the_reference_path_may_be_any_other(onto: Schedule, kind: Kind) -> None:
    x, t = states(16, [0.05, 0.3, 0.6, 0.8], schedule=onto)
    truth = expert(onto, Kind.VELOCITY)(x, t, None).value
    for own in (LinearFlow(), CosineVP()):
        answer = Bridge(expert(own, kind), onto=onto, limit=None)(x, t, None)
        assert relative_error(answer.value, truth).max() < 1e-9


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_outside_its_band_an_expert_is_asked_at_the_bands_end_and_stays_bounded(schedule: Schedule, kind: Kind) -> None:
    x, t = states(32, [0.0, 1e-5, 0.0005, 0.004, 0.02, 0.95, 0.99, 0.996, 0.9999, 1.0])
    bridge = Bridge(expert(schedule, kind), limit=None)
    log_snr = schedule.log_snr(bridge.expert_time(t))
    assert log_snr.min() >= schedule.band[0] - 1e-6
    assert log_snr.max() <= schedule.band[1] + 1e-6
    # the ideal expert is off because it is told of more signal, or more noise, than there is: by what the band's end
    # still holds of signal, or of noise next to the finest detail of the data
    outside = ~covered(schedule, t)
    error = relative_error(bridge(x, t, None).value, TRUTH(x, t, None).value)
    noisiest, cleanest = (math.exp(-0.5 * end) for end in schedule.band)  # as sigma/alpha
    finest = torch.linalg.eigvalsh(WORLD.covariances).min().sqrt().item()
    assert 0 <= error[outside & (t > 0.5)].max() < 2 / noisiest
    assert 0 <= error[outside & (t < 0.5)].max() < 2 * cleanest / finest
    if schedule != LinearFlow() or kind is not Kind.VELOCITY:
        assert error[outside].max() > 1e-5


@pytest.mark.parametrize("kind", Kind, ids=name)
def test_the_limit_holds_kinds_made_of_noise_and_no_others(kind: Kind) -> None:
    t = torch.tensor([0.5, 0.99, 0.995, 0.9999, 1.0], dtype=torch.float64)
    for schedule in (LinearFlow(), CosineVP(), VE()):
        free, held = (Bridge(expert(schedule, kind), limit=limit).expert_time(t) for limit in (None, 10.0))
        ratio = schedule.sigma(held) / schedule.alpha(held)
        if kind in (Kind.EPSILON, Kind.SCORE) or (kind is Kind.VELOCITY and schedule == VE()):
            assert ratio.max() < 10.0 + 1e-6
            assert held[0] == free[0]
        else:
            assert torch.equal(free, held)


def test_a_velocity_on_the_reference_path_passes_untouched() -> None:
    x, t = states(4, ENDS)
    answer = TRUTH(x, t, None)
    assert torch.equal(Bridge(TRUTH)(x, t, None).value, answer.value)
    assert Bridge(TRUTH)(x.bfloat16(), t, None).value.dtype == torch.bfloat16


def test_the_network_is_asked_in_its_own_time_unit_and_precision() -> None:
    asked: dict[str, Tensor] = {}

    def network(x: Tensor, time: Tensor, condition: Condition | None) -> Tensor:
        asked.update(x=x, time=time)
        return x

    schedule = DDPMBetas("linear")
    bridge = Bridge(NetworkDenoiser(network, schedule, Kind.EPSILON, time_scale=999.0))
    x, t = states(2, [0.2, 0.6])
    bridge(x.bfloat16(), t, None)
    assert asked["x"].dtype == torch.bfloat16
    torch.testing.assert_close(asked["time"], 999.0 * schedule.time_at(LinearFlow().log_snr(t)))
    # a variance-preserving expert gets inputs of the size it was trained on
    size = (x.square().mean(1) / ((1 - t) ** 2 + t**2)).sqrt()
    torch.testing.assert_close(asked["x"].double().square().mean(1).sqrt(), size, rtol=0.02, atol=0)


@pytest.mark.parametrize("kind", Kind, ids=name)
def test_a_small_mistake_travels_as_the_gain_says(kind: Kind) -> None:
    """Linear velocity error of a bridged VP expert: |a' dx0 + b' deps| with deps = -(alpha/sigma) dx0."""
    schedule = CosineVP()
    x, t = states(256, [0.02, 0.1, 0.5, 0.9, 0.98])
    imperfect = ImperfectDenoiser(expert(schedule, kind), 0.01)
    plain, wrong = (Bridge(denoiser, limit=None) for denoiser in (imperfect.denoiser, imperfect))
    moved = (wrong(x, t, None).value - plain(x, t, None).value).norm(dim=1)
    s = plain.expert_time(t)
    mistake = imperfect.mistake(x, s)
    # on the linear path v = (x - x0) / t, so an error of x0 counts 1/t
    torch.testing.assert_close(moved, x0_gain(kind, schedule, s) / t * mistake.norm(dim=1), rtol=1e-7, atol=1e-12)


def test_the_limit_tames_a_noisy_epsilon_expert_and_only_there() -> None:
    """1 % wrong: without a limit the velocity error follows sigma/alpha to the band's end, with it it stops."""
    x, t = states(512, [0.5, 0.9, 0.99, 0.999, 1.0])
    truth = TRUTH(x, t, None).value

    def error(limit: float | None, share: float) -> list[float]:
        answer = Bridge(ImperfectDenoiser(expert(CosineVP(), Kind.EPSILON), share), limit=limit)(x, t, None).value
        return relative_error(answer, truth).reshape(5, -1).median(dim=1).values.tolist()

    free, held = error(None, 0.01), error(100.0, 0.01)
    assert free[0] == held[0] < 0.03
    assert free[3] > 4.0
    assert free[4] > 40.0
    assert max(held) < 1.5
    # it vanishes with the expert's own error, down to what being asked at sigma/alpha = 100 costs: about 1/limit
    smaller = error(100.0, 0.0001)
    assert max(smaller) < 0.03
    assert max(error(100.0, 0.0)) < 0.02
    assert max(error(1000.0, 0.0)) < 0.002


def test_the_literal_recipe_is_bounded_but_wrong_even_with_an_ideal_expert() -> None:
    x, t = states(512, [0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0])
    truth = TRUTH(x, t, None).value
    ideal = expert(CosineVP(), Kind.EPSILON)
    literal = relative_error(PaperFusion(ideal)(x, t, None).value, truth).reshape(7, -1).median(dim=1).values
    assert literal.isfinite().all()
    assert literal.max() < 25
    assert (literal[1:] > 0.1).all()
    bridged = relative_error(Bridge(ideal)(x, t, None).value, truth)
    assert bridged.max() < 0.05


def test_the_literal_recipe_clamps_floors_and_damps_as_stated() -> None:
    """Typed out once more for a constant answer."""
    x = torch.full((4, 1), 0.5, dtype=torch.float64)
    t = torch.tensor([0.2, 0.85, 0.95, 1.0], dtype=torch.float64)
    for eps, schedule in ((0.3, CosineVP()), (-3.0, DDPMBetas("cosine"))):

        def network(x: Tensor, time: Tensor, condition: Condition | None, eps: float = eps) -> Tensor:
            return torch.full_like(x, eps)

        got = PaperFusion(NetworkDenoiser(network, schedule, Kind.EPSILON))(x, t, None).value[:, 0].tolist()
        for time, value in zip(t.tolist(), got, strict=True):
            x0 = max(-20.0, min(20.0, (0.5 - time * eps) / max(1 - time, 0.01)))
            damping = 1.0 - (time - 0.85) if time > 0.85 else 1.0
            assert value == pytest.approx(damping * (eps - x0), rel=1e-12)


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_training_through_the_bridge_gives_finite_gradients_from_end_to_end(schedule: Schedule, kind: Kind) -> None:
    weight = torch.full((6,), 0.5, requires_grad=True)
    bridge = Bridge(NetworkDenoiser(lambda x, time, condition: weight * x, schedule, kind))
    x, t = states(4, [*ENDS, *TIMES])
    bridge(x.float(), t, None).value.square().mean().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert weight.grad.abs().min() > 0


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_a_device_without_float64_is_right_to_three_digits(
    schedule: Schedule, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apple's GPUs: as if every device were one, nothing is wider than float32 and the answer still holds."""
    x, t = states(16, TIMES)
    truth, inside = TRUTH(x, t, None).value, covered(schedule, t)
    monkeypatch.setattr("atoll.diffusion.schedule.wide_dtype", lambda device: torch.float32)
    ddpm_log_snr.cache_clear()
    ideal = expert(schedule, kind)
    seen: list[torch.dtype] = []

    def network(x: Tensor, time: Tensor, condition: Condition | None) -> Tensor:
        seen.extend([x.dtype, time.dtype])
        scale = schedule.input_scale(time)  # the ideal expert is defined on the state, so this is taken back
        return ideal(x if scale is None else x / scale[:, None], time, condition).value.float()

    bridge = Bridge(NetworkDenoiser(network, schedule, kind), limit=None)
    answer = bridge(x.float(), t.float(), None).value
    assert {*seen, answer.dtype, bridge.expert_time(t.float()).dtype} == {torch.float32}
    assert relative_error(answer, truth)[inside].max() < 1e-3


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="positive or None, got 0"):
        Bridge(TRUTH, limit=0.0)
    with pytest.raises(ValueError, match="got x0 on CosineVP"):
        PaperFusion(expert(CosineVP(), Kind.X0))
    with pytest.raises(ValueError, match=r"shape \[4\], got \[2\]"):
        Bridge(expert(CosineVP(), Kind.X0))(torch.zeros(4, 6), torch.tensor([0.5, 0.5]), None)
    variances_too = NetworkDenoiser(lambda x, time, condition: torch.cat([x, x], 1), CosineVP(), Kind.EPSILON)
    with pytest.raises(ValueError, match=r"output is \[1, 12\] for a state of shape \[1, 6\]"):
        variances_too(torch.zeros(1, 6), torch.tensor([0.5]), None)
