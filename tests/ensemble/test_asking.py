"""A router that is asked at every n-th step: how often, about what, and that no batch sees what another kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.ensemble import AskedEvery, Fixed, Full, Mixture, Sampled, TopK
from atoll.evaluation.closed_form import ExactDenoiser, ExactRouter
from atoll.process import Condition, Kind, LinearFlow
from atoll.sampling import SOLVERS, generate, uniform
from gaussian_world import WORLD, states

STEPS = 12
TIMES = uniform(STEPS, LinearFlow())
ROUTER = ExactRouter(WORLD)
EXPERTS = [ExactDenoiser(WORLD.cluster(k), LinearFlow(), Kind.VELOCITY) for k in range(4)]


class Counted:
    """A router that remembers when it was asked, and about how many rows."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rows: list[int] = []

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        self.times.append(t[0].item())
        self.rows.append(len(x))
        return ROUTER(x, t, condition)


def every(n: int, router: object = ROUTER) -> AskedEvery:
    return AskedEvery(router, TIMES, n)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 5, STEPS])
@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
def test_it_is_asked_at_every_nth_time_of_the_grid(solver: str, n: int) -> None:
    router = Counted()
    generate(Mixture(EXPERTS, every(n, router)), (6,), range(3), steps=STEPS, solver=solver)
    assert router.times == pytest.approx(TIMES[:-1][::n].tolist())


def test_a_solver_of_two_stages_asks_at_both_stages_that_stand_there() -> None:
    """1/n of its calls too: at a time that is the first of n, whichever step calls."""
    router = Counted()
    generate(Mixture(EXPERTS, every(3, router)), (6,), range(3), steps=STEPS, solver="heun")
    stages = [t for i in range(STEPS) for t in ([TIMES[i], TIMES[i + 1]] if i + 1 < STEPS else [TIMES[i]])]
    asked = {t.item() for t in TIMES[::3]}
    assert router.times == pytest.approx([t.item() for t in stages if t.item() in asked])


@pytest.mark.parametrize("n", [2, 4])
def test_the_answer_in_between_is_the_last_one(n: int) -> None:
    """Against Euler's steps typed out, with weights computed at every n-th of them."""
    found = generate(Mixture(EXPERTS, every(n)), (6,), range(5), steps=STEPS, solver="euler")
    begun: list[Tensor] = []
    generate(
        Mixture(EXPERTS, ROUTER), (6,), range(5), steps=1, solver="euler", watch=lambda _, step: begun.append(step.x)
    )
    x = begun[0]
    for i in range(STEPS):
        t = TIMES[i].expand(5)
        weights = ROUTER(x, t, None) if i % n == 0 else weights  # noqa: F821
        velocity = sum(weights[:, k, None] * EXPERTS[k](x, t, None).value for k in range(4))
        x = (x + (TIMES[i + 1] - TIMES[i]) * velocity).float()
    torch.testing.assert_close(found, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("route", [Full(), TopK(1), Sampled(), Fixed()], ids=lambda route: type(route).__name__)
def test_every_single_step_is_the_router_itself(route: object, solver: str) -> None:
    condition = Condition(labels=torch.arange(4) % 2)
    options = {"steps": STEPS, "solver": solver, "guidance": 2.0}
    plain, kept = (
        generate(Mixture(EXPERTS, router, route), (6,), range(4), condition, **options)  # type: ignore[arg-type]
        for router in (ROUTER, every(1))
    )
    assert torch.equal(plain, kept)


def test_nothing_is_kept_from_one_batch_or_call_to_another() -> None:
    condition = Condition(labels=torch.arange(10) % 2)
    mixture = Mixture(EXPERTS, every(5), TopK(2))

    def images(seeds: list[int], batch: int) -> Tensor:
        rows = condition[torch.tensor(seeds)]
        return generate(mixture, (6,), seeds, rows, steps=STEPS, solver="dpmpp_2m", guidance=2.0, batch=batch)

    together = images(list(range(10)), 10)
    torch.testing.assert_close(images(list(range(10)), 3), together, rtol=0, atol=1e-5)
    torch.testing.assert_close(images([7, 2, 4], 2), together[[7, 2, 4]], rtol=0, atol=1e-5)
    assert torch.equal(images(list(range(10)), 10), together)


def test_both_halves_of_guidance_are_kept_and_a_half_that_is_missing_is_asked_for() -> None:
    router = Counted()
    condition = Condition(labels=torch.arange(4) % 2)
    asked = {"steps": STEPS, "solver": "euler", "guidance": 3.0}
    mixture = Mixture(EXPERTS, every(4, router), TopK(1))
    generate(mixture, (6,), range(4), condition, **asked)  # type: ignore[arg-type]
    assert router.rows == [8, 8, 8]
    # guided from step 6 (t = 0.5) on: the half that nobody asked about before is asked about there
    router.rows.clear()
    router.times.clear()
    generate(mixture, (6,), range(4), condition, guidance_interval=(0.1, 0.5), **asked)  # type: ignore[arg-type]
    assert router.times == pytest.approx(TIMES[[0, 4, 6, 8]].tolist())
    assert router.rows == [4, 4, 8, 8]


def test_images_of_a_batch_may_stand_at_different_times() -> None:
    x, _ = states(2, [0.5])
    router = every(4).bind(slice(0, 2), [0, 1])
    first = router(x, TIMES[[0, 0]], None)
    moved = router(x + 1.0, TIMES[[1, 4]], None)
    assert torch.equal(moved[0], first[0]), "kept"
    assert torch.equal(moved[1], ROUTER(x + 1.0, TIMES[[1, 4]], None)[1]), "asked"
    assert torch.equal(router(x + 2.0, TIMES[[3, 7]], None), moved)


def test_unbound_it_says_so() -> None:
    x, t = states(2, [0.5])
    with pytest.raises(ValueError, match="must be bound"):
        every(2)(x, t, None)


def test_fixed_is_drawn_from_the_conditional_half_and_shared_by_both() -> None:
    """The unconditional half follows the choice, though its own weights would choose otherwise."""
    x, t = states(64, [1.0])
    condition = Condition(labels=torch.arange(len(x)) % 2)

    def router(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """Conditional rows are of expert 1 or 2, by label; unconditional ones of expert 3."""
        assert condition is not None
        expert = torch.where(torch.zeros(len(x), dtype=torch.bool) if condition.dropped is None else condition.dropped,
                             3, 1 + condition.labels)  # fmt: skip
        return torch.nn.functional.one_hot(expert, 4).double()

    asked: list[list[int]] = [[] for _ in range(4)]

    class Watched(ExactDenoiser):
        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None):  # type: ignore[no-untyped-def]
            asked[self.number].append(len(x))
            return super().__call__(x, t, condition)

    experts = []
    for k in range(4):
        expert = Watched(WORLD.cluster(k), LinearFlow(), Kind.VELOCITY)
        object.__setattr__(expert, "number", k)
        experts.append(expert)
    mixture = Mixture(experts, router, Fixed()).bind(slice(0, len(x)), range(len(x)))
    for time in (1.0, 0.5):
        mixture.guided(x, torch.full_like(t, time), condition, 2.0)
    assert asked == [[], [64, 64], [64, 64], []], "32 images each, both halves, at both times"
