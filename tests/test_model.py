"""The model a user sees: watching changes nothing, batches change nothing, and what is left open is settled."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import atoll
from atoll import Model, Sampling, StepInfo
from atoll.artifacts import UserError
from atoll.diffusion import Condition
from atoll.mixture.mixture import Mixture
from atoll.runtime.load import Ensemble
from atoll.runtime.placing import Placed, Placement, SingleExpert
from atoll.sampling import image_seeds
from atoll.sampling.noise import initial_noise
from atoll.sampling.settings import GuidanceWeights

PROMPTS = ["a handwritten seven", "a handwritten two", "a handwritten nine", "a handwritten one", "a handwritten six"]


@pytest.fixture(scope="module")
def ensemble(tiny_demo: Path) -> Model:
    return atoll.load(tiny_demo, device="cpu")


@pytest.fixture(scope="module")
def expert(tiny_demo: Path) -> Model:
    member = json.loads((tiny_demo / "ensemble" / "000010.json").read_bytes())["experts"][3]
    return atoll.load(tiny_demo / member["path"], device="cpu")


@pytest.fixture(params=["ensemble", "expert"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def pixels(images: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(image) for image in images]).astype(int)


def vandal(moment: StepInfo) -> None:
    """Looks at everything, and spoils whatever it is given."""
    assert moment.previews
    assert moment.decoded
    assert (moment.finished is not None) == (moment.step == moment.steps)
    for tensor in (moment.x0, moment.weights, moment.expert_weights):
        if tensor is not None:
            tensor.fill_(float("nan"))
    torch.manual_seed(0)
    torch.randn(3)


@pytest.mark.parametrize("solver", ["dpmpp_2m", "heun", "stochastic"])
@pytest.mark.parametrize("route", ["top-2", "fixed"])
def test_watching_changes_no_bit_of_an_image(ensemble: Model, route: str, solver: str) -> None:
    sampling = Sampling(steps=4, route=route, solver=solver, route_every=2)
    seeds = image_seeds(7, len(PROMPTS))
    unwatched = ensemble.latents(PROMPTS, seeds, sampling, batch=3)
    assert torch.equal(
        ensemble.latents(PROMPTS, seeds, sampling, batch=3, on_step=lambda step: vandal(StepInfo(ensemble, 4, step))),
        unwatched,
    )
    images = ensemble.generate(PROMPTS, sampling, seed=7, batch=3)
    streamed: list[Image.Image] = []
    for moment in ensemble.stream(PROMPTS, sampling, seed=7, batch=3):
        streamed += moment.finished or []
        vandal(moment)
    assert [one.tobytes() for one in streamed] == [one.tobytes() for one in images]


def test_watching_changes_no_bit_of_a_single_experts_image(expert: Model) -> None:
    unwatched = expert.generate(PROMPTS, steps=4, seed=7, batch=3)
    watched = expert.generate(PROMPTS, steps=4, seed=7, batch=3, callback=vandal)
    assert [one.tobytes() for one in watched] == [one.tobytes() for one in unwatched]


def test_a_stream_tells_step_time_weights_and_who_paints(model: Model) -> None:
    moments = list(model.stream(PROMPTS, steps=3, seed=1, batch=4))
    assert [(m.step, m.steps, list(m.images)) for m in moments] == [
        *((step, 3, [0, 1, 2, 3]) for step in (1, 2, 3)),
        *((step, 3, [4]) for step in (1, 2, 3)),
    ]
    assert [m.time for m in moments[:3]] == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert [m.finished is not None for m in moments] == [False, False, True] * 2
    for m in moments:
        assert [image.size for image in m.previews] == [(8, 8)] * len(m.images)
        assert [image.size for image in m.decoded] == [(8, 8)] * len(m.images)
        if not isinstance(model.body, Ensemble):
            assert m.weights is m.expert_weights is None
            continue
        assert m.weights is not None
        assert m.expert_weights is not None
        assert m.weights.shape == m.expert_weights.shape == (len(m.images), 8)
        torch.testing.assert_close(m.weights.sum(1), torch.ones(len(m.images)))
        # top-2: the two largest weights, renormalized
        chosen = m.weights.sort(1, descending=True).indices[:, :2]
        assert torch.equal((m.expert_weights > 0).nonzero()[:, 1].view(-1, 2), chosen.sort(1).values)


def test_the_weights_shown_are_those_of_the_conditional_half_at_the_steps_time(ensemble: Model) -> None:
    """Heun asks the router again within a step, and guidance for the other half: neither is shown."""
    assert isinstance(ensemble.body, Ensemble)
    states: dict[int, Tensor] = {}
    body = ensemble.body

    def router(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        states.setdefault(round(t[0].item() * 4), x[: len(x) // 2].clone())
        return body.router(x, t, condition)

    watched = replace(ensemble, body=replace(body, router=router))  # type: ignore[arg-type]
    moments = list(watched.stream(PROMPTS, steps=4, solver="heun", guidance=2.0))
    condition = ensemble.condition(PROMPTS)
    # at t = 1 the first call is the step's own; later the predictor's call comes before it, at the same time
    expected = body.router(states[4], torch.ones(len(PROMPTS), dtype=torch.float64), condition)
    torch.testing.assert_close(moments[0].weights, expected)
    assert [m.time for m in moments] == [1.0, 0.75, 0.5, 0.25]


def test_a_step_is_computed_when_it_is_asked_for(ensemble: Model) -> None:
    assert isinstance(ensemble.body, Ensemble)
    calls: list[float] = []
    body = ensemble.body

    def router(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        calls.append(t[0].item())
        return body.router(x, t, condition)

    stream = replace(ensemble, body=replace(body, router=router)).stream(PROMPTS, steps=5)  # type: ignore[arg-type]
    assert calls == []
    next(stream)
    assert calls == [1.0]
    next(stream)
    assert len(calls) == 2


def test_previews_of_pixels_are_the_decoded_images(ensemble: Model) -> None:
    """For an autoencoder that does nothing, the map fitted at `prepare` is its decoder."""
    assert ensemble.latent.preview is not None
    for moment in ensemble.stream(PROMPTS, steps=3):
        assert abs(pixels(moment.previews) - pixels(moment.decoded)).max() <= 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(steps=4, route=route, route_every=every, solver=solver)
        for route, every, solver in [
            ("top-1", 1, "dpmpp_2m"),
            ("top-2", 3, "heun"),
            ("full", 1, "stochastic"),
            ("top-1", 2, "unipc"),
            ("fixed", 1, "dpmpp_2m"),
        ]
    ],
    ids=lambda s: f"{s.route}-{s.route_every}-{s.solver}",
)
def test_order_and_size_of_a_batch_change_no_image(ensemble: Model, sampling: Sampling) -> None:
    """In float32, by at most one of 255 grey values."""
    prompts, seeds = PROMPTS * 3, list(range(40, 55))
    together = pixels(ensemble.generate(prompts, sampling, seed=seeds, batch=15))
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0)).tolist()
    mixed = pixels(ensemble.generate([prompts[i] for i in order], sampling, seed=[seeds[i] for i in order], batch=4))
    assert abs(mixed - together[order]).max() <= 1
    one_by_one = pixels(ensemble.generate(prompts[:3], sampling, seed=seeds[:3], batch=1))
    assert abs(one_by_one - together[:3]).max() <= 1
    assert abs(pixels(ensemble.generate(prompts, sampling, seed=0)) - together).max() > 1, "seeds do matter"


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("route", ["top-1", "full", "fixed"])
def test_a_router_that_is_certain_paints_what_that_expert_paints(
    ensemble: Model, expert: Model, route: str, guidance: float
) -> None:
    assert isinstance(ensemble.body, Ensemble)

    def router(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return torch.nn.functional.one_hot(torch.full((len(x),), 3), 8).float()

    sure = replace(ensemble, body=replace(ensemble.body, router=router))  # type: ignore[arg-type]
    seeds, sampling = image_seeds(0, len(PROMPTS)), Sampling(steps=4, guidance=guidance)
    alone = expert.latents(PROMPTS, seeds, sampling)
    assert torch.equal(sure.latents(PROMPTS, seeds, replace(sampling, route=route)), alone)


def test_identical_experts_paint_what_one_paints(ensemble: Model, expert: Model) -> None:
    assert isinstance(ensemble.body, Ensemble)
    assert isinstance(expert.body, SingleExpert)
    eight = Placed([expert.body.expert] * 8, Placement())
    same = replace(ensemble, body=replace(ensemble.body, placed=eight))
    alone = pixels(expert.generate(PROMPTS, steps=4))
    for route in ("top-1", "top-2", "full", "threshold-0.2", "fixed"):
        assert abs(pixels(same.generate(PROMPTS, steps=4, route=route)) - alone).max() <= 1, route


def test_in_bfloat16_networks_compute_in_it_and_states_stay_float32(model: Model) -> None:
    seeds = image_seeds(0, len(PROMPTS))
    half, single = (
        model.latents(PROMPTS, seeds, Sampling(steps=4, precision=precision))  # type: ignore[arg-type]
        for precision in ("bfloat16", "float32")
    )
    assert half.dtype == single.dtype == torch.float32
    # the mean: with weights as equal as those of a router that has learned nothing, an expert may be another
    difference = (half - single).abs().mean()
    assert 1e-5 < difference < 0.1, "computed otherwise, and alike"


def test_keywords_change_the_object_and_one_prompt_may_stand_alone(ensemble: Model) -> None:
    everything = Sampling(steps=3, guidance=1.0, route="top-1", solver="heun", grid="shifted-3")
    by_object = ensemble.generate(PROMPTS[0], everything, seed=5)
    by_both = ensemble.generate(
        PROMPTS[:1], Sampling(grid="shifted-3", steps=9), seed=5, steps=3, guidance=1.0, route="top-1", solver="heun"
    )
    assert by_object[0].tobytes() == by_both[0].tobytes()
    other = ensemble.generate(PROMPTS[0], Sampling(steps=3, guidance=1.0, route="top-1", solver="heun"), seed=5)
    assert other[0].tobytes() != by_object[0].tobytes(), "the grid means something"


def test_what_is_left_open_is_settled(ensemble: Model, expert: Model) -> None:
    assert ensemble.resolved(Sampling()) == Sampling(route="top-2", precision="float32")
    assert expert.resolved(Sampling(route_every=4)) == Sampling(precision="float32")
    # a model that reads nothing has nothing to guide towards
    deaf = replace(expert, text=None)
    assert deaf.resolved(Sampling(guidance=3.0)).guidance == 1.0
    assert ensemble.resolved(ensemble.resolved(Sampling())) == ensemble.resolved(Sampling())


MISTAKES: dict[str, tuple[Callable[[Model], object], str]] = {
    "a route that is none": (lambda m: m.generate(PROMPTS, route="best"), "unknown route 'best'"),
    "a stream's, before its first step": (lambda m: m.stream(PROMPTS, route="best"), "unknown route 'best'"),
    "a number for a text": (lambda m: m.generate([3]), "--prompt 3: this model reads no class numbers"),
    "no prompt at all": (lambda m: m.generate([None]), "a prompt is a text in quotes, or the number"),  # type: ignore[list-item]
    "nothing to lead away": (
        lambda m: m.generate("one", negative_prompt="two", guidance=1.0),
        "no effect at guidance 1",
    ),
    "negatives for others": (lambda m: m.generate("one", negative_prompt=["two"] * 3), "each of the 1 prompts, not 3"),
    "an unknown negative": (lambda m: m.generate("one", negative_prompt="tow"), "did you mean two"),
    "an unknown word": (lambda m: m.stream("a painted one"), "unknown word 'painted'"),
    "no steps": (lambda m: m.generate(PROMPTS, steps=0), "--steps 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(ensemble: Model, mistake: str) -> None:
    call, words = MISTAKES[mistake]
    with pytest.raises(UserError, match=words):
        call(ensemble)


def test_a_single_expert_has_nothing_to_route(expert: Model) -> None:
    with pytest.raises(UserError, match="--route top-1: this is a single expert"):
        expert.generate(PROMPTS, route="top-1")


def test_a_device_that_is_not_there_is_named(tiny_demo: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one: NOT TESTED HERE")
    with pytest.raises(UserError, match="--device cuda: this machine has none"):
        atoll.load(tiny_demo, device="cuda")


@pytest.mark.parametrize("route", ["top-1", "top-2", "fixed"])
def test_room_for_two_of_eight_experts_paints_the_same_images(ensemble: Model, tiny_demo: Path, route: str) -> None:
    """Bit for bit, in turns."""
    small = atoll.load(tiny_demo, device="cpu", memory=0.001)
    assert "room for 2 at a time on cpu (--memory 0.001GB)" in small.placement
    assert "all on cpu" in ensemble.placement
    assert small.digest == ensemble.digest
    expected = pixels(ensemble.generate(PROMPTS, steps=4, route=route))
    seen: list[tuple[int, int]] = []
    images = small.generate(PROMPTS, steps=4, route=route, callback=lambda s: seen.append((s.images[0], s.step)))
    assert abs(pixels(images) - expected).max() == 0
    assert sorted(seen) == [(image, step) for image in range(len(PROMPTS)) for step in (1, 2, 3, 4)]


def test_weights_of_eight_bits_are_another_model(ensemble: Model, tiny_demo: Path) -> None:
    rounded = atoll.load(tiny_demo, device="cpu", weights="int8")
    assert "in int8 and float32" in rounded.placement
    assert rounded.digest != ensemble.digest
    seeds = image_seeds(0, len(PROMPTS))
    one, other = (model.latents(PROMPTS, seeds, Sampling(steps=4, route="full")) for model in (ensemble, rounded))
    assert 1e-6 < (one - other).abs().mean() < 0.05


def test_prompts_as_people_write_them(ensemble: Model) -> None:
    one = ensemble.generate("a handwritten seven", steps=2)
    four = ensemble.generate(["a handwritten seven"] * 4, steps=2, guidance=2.0)
    assert (len(one), len(four)) == (1, 4)
    assert abs(pixels(one) - pixels(four[:1])).max() <= 1
    assert len({image.tobytes() for image in four}) == 4, "image i uses seed + i"


@pytest.mark.parametrize("weights", ["own", "conditional"])
@pytest.mark.parametrize("memory", [None, 0.001])
def test_a_negative_prompt_takes_the_place_of_no_prompt(
    tiny_demo: Path, weights: GuidanceWeights, memory: float | None
) -> None:
    """v = v(negative) + scale (v(prompt) - v(negative)): checked against the two velocities, each asked for alone.

    With room for two experts images go out of step, and it is the same.
    """
    model = atoll.load(tiny_demo, device="cpu", memory=memory)
    sampling = Sampling(steps=1, solver="euler", guidance=3.0, route="full", guidance_weights=weights)
    seeds = image_seeds(3, 2)
    prompts, away = PROMPTS[:2], "a handwritten one"
    alone = replace(sampling, guidance=1.0)
    towards, other = model.latents(prompts, seeds, alone), model.latents([away] * 2, seeds, alone)
    if weights == "conditional":
        mixture, noise, ones = (
            model.denoiser(sampling),
            initial_noise(seeds, model.latent.shape),
            torch.ones(2).double(),
        )
        assert isinstance(mixture, Mixture)
        weights_of = mixture.routed(noise, ones, model.condition(prompts))
        other = noise - mixture.velocity(noise, ones, model.condition([away] * 2), weights_of)
    found = model.latents(prompts, seeds, sampling, negative=away)
    torch.testing.assert_close(found, other + 3.0 * (towards - other), atol=1e-4, rtol=1e-4)
    assert (found - model.latents(prompts, seeds, sampling)).abs().max() > 1e-3, "and it is not the same as none"


def test_a_negative_prompt_in_batches_and_one_for_each_image(ensemble: Model) -> None:
    away = ["a handwritten one", "a handwritten zero", "a handwritten two", "a handwritten one", "a handwritten four"]
    together = ensemble.generate(PROMPTS, steps=2, negative_prompt=away)
    in_twos = ensemble.generate(PROMPTS, steps=2, negative_prompt=away, batch=2)
    assert abs(pixels(together) - pixels(in_twos)).max() <= 1
    (last,) = (m.finished for m in ensemble.stream(PROMPTS, steps=2, negative_prompt=away) if m.finished)
    assert abs(pixels(last) - pixels(together)).max() <= 1


def test_a_model_says_what_it_is_in_a_line(model: Model) -> None:
    what = "8 experts" if isinstance(model.body, Ensemble) else "one expert"
    assert repr(model) == f"<atoll.Model {model.digest[:12]}: {what}, latents 1x8x8, reads text, on cpu>"


def test_what_the_package_offers_is_seen() -> None:
    """In a process of its own: a name that was asked for once is there anyway."""
    command = [sys.executable, "-c", "import atoll; print(dir(atoll))"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {"load", "Model", "Sampling", "StepInfo", "UserError"} <= set(ast.literal_eval(told.stdout))


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cpu,cuda:99", "mps:7"])
def test_a_wrong_device_is_one_line(tiny_demo: Path, name: str) -> None:
    with pytest.raises(UserError, match="--device") as raised:
        atoll.load(tiny_demo, device=name)
    assert "\n" not in str(raised.value)


def test_a_device_may_be_torchs_own(tiny_demo: Path) -> None:
    assert atoll.load(tiny_demo, device=torch.device("cpu")).device.type == "cpu"
