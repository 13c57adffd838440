"""How a training is computed: chosen here, kept when it goes on, written to provenance, and in no order or manifest."""

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
from atoll.models.accounting import account
from atoll.training.checkpoints import saved_execution
from atoll.training.execution import Execution, open_device
from atoll.training.loop import Progress
from atoll.training.resources import Resources, parse_memory
from atoll.training.stopping import StopRequested
from tiny_orders import NETWORK, TRAINING, tiny_order

COST = account(NETWORK)


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_order(tmp_path_factory.mktemp("run"), images=64, batch=8)


def trained(order: Path, out: Path, **settings: object) -> Artifact:
    artifact = train(order, out, resources=Resources("cpu", settings=settings))
    assert artifact is not None
    return artifact


def stopped(order: Path, out: Path, resources: Resources) -> None:
    """A training that was told to stop half-way."""

    def stop(now: Progress) -> None:
        if now.images == 24:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StopRequested):
        train(order, out, resources=resources, watch=stop)


def execution_of(expert: Artifact) -> dict[str, object]:
    record = json.loads((expert.store.path / "provenance.json").read_bytes())
    return dict(record["execution"])


def test_on_a_cpu_the_default_is_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has, or the same order would give another digest there."""
    constant = Execution()
    assert (constant.threads, constant.micro_batch, constant.compiling) == (1, None, "none")
    for cores, threads in ((1, 1), (64, 32)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        torch.set_num_threads(threads)
        for samples in (1, 10**12):
            assert Resources("cpu").choose(COST, TRAINING, samples, None).execution == constant
    open_device(constant)
    assert torch.get_num_threads() == 1


def test_eight_bits_are_refused_where_there_are_none(order: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"precision float8.*use bfloat16"):
        trained(order, tmp_path / "expert", precision="float8")


def test_it_is_kept_on_resume_unless_told_otherwise(order: Path, tmp_path: Path) -> None:
    out = tmp_path / "expert"
    stopped(order, out, Resources("cpu", settings={"micro_batch": 8, "recomputed_blocks": 1}))
    saved = saved_execution(out / "state")
    assert saved is not None
    assert (saved.micro_batch, saved.recomputed_blocks) == (8, 1)
    found = execution_of(trained(order, out, micro_batch=4))
    assert (found["micro_batch"], found["recomputed_blocks"]) == (4, 1), "what was not asked for stays"


@pytest.mark.parametrize("resources", [Resources(), Resources("cpu"), Resources(settings={"threads": 1})])
def test_who_asks_for_nothing_new_goes_on_as_before(order: Path, tmp_path: Path, resources: Resources) -> None:
    stopped(order, tmp_path / "expert", Resources("cpu", settings={"micro_batch": 8}))
    artifact = train(order, tmp_path / "expert", resources=resources)
    assert artifact is not None
    assert execution_of(artifact)["micro_batch"] == 8
    unbroken = trained(order, tmp_path / "unbroken", micro_batch=8)
    assert artifact.digest == unbroken.digest


def test_it_is_in_provenance_and_in_no_manifest(order: Path, tmp_path: Path) -> None:
    """Two ways to compute the same bits are the same expert."""
    plain, again = trained(order, tmp_path / "plain"), trained(order, tmp_path / "again", recomputed_blocks=2)
    assert execution_of(again) == Execution(recomputed_blocks=2).model_dump()
    assert plain.digest == again.digest
    assert "provenance.json" not in again.names()
    listed = "".join(again.read(name).decode() for name in again.names() if name != "model.safetensors")
    assert "recomputed" not in listed + (tmp_path / "again" / "manifest.json").read_text()


def test_an_order_says_what_is_learned_and_not_how(order: Path, tmp_path: Path) -> None:
    content = json.loads(order.read_bytes())
    names = {*content, *content["training"], *content["architecture"]}
    assert not names & {*Execution.model_fields}
    for field in ("micro_batch", "precision", "threads", "device"):
        changed = tmp_path / f"{field}.json"
        changed.write_text(json.dumps(content | {"training": content["training"] | {field: 1}}))
        with pytest.raises(UserError, match=f"training.{field}"):
            read_order(changed)


def test_equal_orders_have_equal_digests(order: Path) -> None:
    first, _ = read_order(order)
    same = Order.model_validate_json(json.dumps(json.loads(order.read_bytes()), indent=7, sort_keys=True))
    assert same.digest() == first.digest()
    other = first.model_copy(update={"training": first.training.model_copy(update={"seed": 1})})
    assert other.digest() != first.digest()


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        (Resources("tpu9"), "--device tpu9"),
        (Resources("cuda:99"), "--device cuda:99"),
        (Resources("cpu", settings={"warp": 9}), "--set: warp"),
        (Resources("cpu", settings={"micro_batch": 0}), "--set: micro_batch"),
        (Resources("cpu", settings={"precision": "float16"}), "--set: precision"),
        (Resources("cpu", memory=24.0), "--memory"),
        (Resources("cpu", settings={"compiling": "graph"}), "compiling graph"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(order: Path, tmp_path: Path, resources: Resources, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(order, tmp_path / "expert", resources=resources)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.json"))


def test_compiling_none_can_be_said(order: Path) -> None:
    """The command line reads `none` as nothing at all, elsewhere the absence of a micro-batch."""
    asked = Resources("cpu", settings={"compiling": None, "micro_batch": None})
    chosen = asked.choose(COST, TRAINING, 0, Execution(compiling="blocks", micro_batch=8)).execution
    assert (chosen.compiling, chosen.micro_batch) == ("none", None)


@pytest.mark.parametrize(("text", "gib"), [("24GB", 24.0), ("24 GiB", 24.0), ("12.5g", 12.5), ("8", 8.0)])
def test_memory_is_read_in_gigabytes(text: str, gib: float) -> None:
    assert parse_memory(text) == gib


@pytest.mark.parametrize("text", ["0", "-3GB", "24MB", "lots"])
def test_memory_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--memory"):
        parse_memory(text)
