"""One training, from the order to the finished folder: settings kept on resume, provenance, seeds, refusals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, UserError
from atoll.islands.order import Order, read_order
from atoll.islands.train import train
from atoll.models.dit import DiT
from atoll.models.router import RouterConfig, build_router
from atoll.training import StopRequested
from atoll.training.artifact import seeded
from atoll.training.checkpoint import saved_compute
from atoll.training.compute import ComputeConfig
from atoll.training.loop import Progress
from atoll.training.resources import Resources
from tiny_orders import NETWORK, tiny_order


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), images=64, batch=8)


def trained(order: Path, out: Path, **settings: object) -> Artifact:
    artifact = train(order, out, resources=Resources("cpu", settings=settings))
    assert artifact is not None
    return artifact


def stopped(order: Path, out: Path, resources: Resources) -> None:
    """A training that was stopped half-way."""

    def stop(now: Progress) -> None:
        if now.images == 24:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StopRequested):
        train(order, out, resources=resources, watch=stop)


def compute_of(expert: Artifact) -> dict[str, object]:
    record = json.loads((expert.store.path / "provenance.json").read_bytes())
    return dict(record["compute"])


def test_settings_are_kept_on_resume_unless_others_are_asked_for(order: Path, tmp_path: Path) -> None:
    out = tmp_path / "expert"
    stopped(order, out, Resources("cpu", settings={"micro_batch": 8, "checkpointed_blocks": 1}))
    saved = saved_compute(out / "state")
    assert saved is not None
    assert (saved.micro_batch, saved.checkpointed_blocks) == (8, 1)
    found = compute_of(trained(order, out, micro_batch=4))
    assert (found["micro_batch"], found["checkpointed_blocks"]) == (4, 1), "what was not asked for stays"


def test_how_it_was_computed_is_in_provenance_and_in_no_manifest(order: Path, tmp_path: Path) -> None:
    """Two ways to compute the same bits are the same expert."""
    plain, again = trained(order, tmp_path / "plain"), trained(order, tmp_path / "again", checkpointed_blocks=2)
    assert compute_of(again) == ComputeConfig(checkpointed_blocks=2).model_dump()
    assert plain.digest == again.digest
    assert "provenance.json" not in again.names()


def test_an_order_tells_what_is_learned_and_not_how(order: Path, tmp_path: Path) -> None:
    content = json.loads(order.read_bytes())
    assert not {*content, *content["training"], *content["architecture"]} & {*ComputeConfig.model_fields}
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content | {"training": content["training"] | {"micro_batch": 1}}))
    with pytest.raises(UserError, match=r"training\.micro_batch"):
        read_order(changed)
    first, _ = read_order(order)
    same = Order.model_validate_json(json.dumps(content, indent=7, sort_keys=True))
    assert same.digest() == first.digest()
    other = first.model_copy(update={"training": first.training.model_copy(update={"seed": 1})})
    assert other.digest() != first.digest()


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        (Resources("tpu9"), "--device tpu9"),
        (Resources("cuda:99"), "--device cuda:99"),
        (Resources("cpu", settings={"warp": 9}), "--set: warp"),
        (Resources("cpu", settings={"precision": "float8"}), r"precision float8.*use bfloat16"),
        (Resources("cpu", memory=24.0), "--memory"),
        (Resources("cpu", settings={"compile": "cuda-graph"}), "compile cuda-graph"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(order: Path, tmp_path: Path, resources: Resources, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(order, tmp_path / "expert", resources=resources)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("kind", ["expert", "router"])
def test_weights_follow_from_the_seed_alone_and_the_random_state_stays(kind: str) -> None:
    def build(numbers: torch.Generator) -> torch.nn.Module:
        return (
            DiT(NETWORK, numbers)
            if kind == "expert"
            else build_router(RouterConfig(trunk=NETWORK, clusters=3), numbers)
        )

    states = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        states.append(seeded(build, 7).state_dict())
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert any(not torch.equal(value, states[0][name]) for name, value in seeded(build, 8).state_dict().items())
