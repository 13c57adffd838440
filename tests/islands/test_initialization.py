"""Growing an expert out of another one's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, UserError
from atoll.diffusion import Condition, Kind, LinearFlow, squared_error, velocity_error
from atoll.islands.expert import load_expert
from atoll.islands.order import Order, read_order
from atoll.islands.task import as_learned
from atoll.islands.train import train
from atoll.training.resources import Resources
from runs import resealed

CPU = Resources(device="cpu")


def orders(planned: Path) -> dict[Kind, list[Path]]:
    """The run's orders by the kind they ask for."""
    found: dict[Kind, list[Path]] = {}
    for path in sorted((planned / "orders").glob("0*.json")):
        found.setdefault(Order.model_validate_json(path.read_bytes()).objective.kind, []).append(path)
    return found


@pytest.fixture(scope="module")
def flow_expert(planned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flow") / "expert"
    train(orders(planned)[Kind.VELOCITY][0], out, resources=CPU)
    return out


@pytest.fixture(scope="module")
def noise_expert(planned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("noise") / "expert"
    train(orders(planned)[Kind.EPSILON][0], out, resources=CPU)
    return out


def first_loss(expert: Artifact) -> float:
    return float(json.loads(expert.read("metrics.jsonl").splitlines()[0])["loss"])


def test_an_expert_of_the_same_objective_is_trained_on(planned: Path, flow_expert: Path, tmp_path: Path) -> None:
    order = orders(planned)[Kind.VELOCITY][1]
    cold = train(order, tmp_path / "cold", resources=CPU)
    warm = train(order, tmp_path / "warm", init=flow_expert, resources=CPU)
    assert first_loss(warm) < 0.8 * first_loss(cold)
    assert warm.manifest.parents["init"] == Artifact.open(flow_expert).digest
    assert load_expert(warm.store).card.origin == f"expert {Artifact.open(flow_expert).digest[:12]}"


def test_an_expert_of_another_objective_is_trained_through_the_bridge(
    planned: Path, noise_expert: Path, tmp_path: Path
) -> None:
    """It stays a noise expert on its own schedule, and its flow loss begins where the old network was."""
    place = orders(planned)[Kind.VELOCITY][0]
    warm = load_expert(train(place, tmp_path / "warm", init=noise_expert, resources=CPU).store)
    old = load_expert(noise_expert)
    assert (warm.card.schedule, warm.card.kind) == (old.card.schedule, Kind.EPSILON)
    order, _ = read_order(place)
    assert warm.card.order == order.digest()

    numbers = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(64, *order.latent.shape, generator=numbers) for _ in range(2))
    t = torch.linspace(0.1, 0.8, 64, dtype=torch.float64)
    condition = Condition(tokens=torch.zeros(64, 3, dtype=torch.int64), mask=torch.ones(64, 3, dtype=torch.bool))
    x_t, target, weight = order.objective.corrupt(x0, eps, t)
    error = squared_error(as_learned(old.network, old.card, order.objective)(x_t, t, condition).value, target)
    expected = velocity_error(old.denoiser(LinearFlow()), x0, eps, t, condition)
    torch.testing.assert_close(weight.to(error.dtype) * error, expected)


def test_its_license_travels(planned: Path, flow_expert: Path, tmp_path: Path) -> None:
    init = resealed(flow_expert, tmp_path / "init", license="CC-BY-NC-4.0")
    warm = train(orders(planned)[Kind.VELOCITY][0], tmp_path / "warm", init=init, resources=CPU)
    assert warm.manifest.license == "CC-BY-NC-4.0"


def test_an_expert_that_does_not_fit_is_refused(
    planned: Path, flow_expert: Path, noise_expert: Path, tmp_path: Path
) -> None:
    card = load_expert(flow_expert).card
    other = resealed(flow_expert, tmp_path / "latent", latent=card.latent.model_dump(mode="json") | {"mean": [0.5]})
    with pytest.raises(UserError, match="latent space is not the order's"):
        train(orders(planned)[Kind.VELOCITY][0], tmp_path / "a", init=other)
    with pytest.raises(UserError, match="only velocity can be learned through the bridge"):
        train(orders(planned)[Kind.EPSILON][0], tmp_path / "b", init=flow_expert)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
