"""New orders after data was added or for experts to train further, and experts of old orders that come back later."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import fsspec
import pytest
from safetensors.torch import load_file

from atoll.artifacts import Artifact, AtollWarning, Store, UserError
from atoll.cli import main
from atoll.exchange.admission import admit
from atoll.exchange.holdout import Holdout, validation_loss
from atoll.islands.expert import load_expert
from atoll.islands.launch import hand_out
from atoll.islands.order import read_order
from atoll.islands.train import train
from atoll.registry.checks import accepted_orders
from atoll.registry.versions import Version, open_ensemble, read_version
from atoll.training.resources import Resources
from runs import resealed, versions_of

CPU = Resources(device="cpu")
MOVED = "grew onto partition-2"


@pytest.fixture
def run(late: Path, tmp_path: Path) -> Path:
    """A copy of the run that has grown."""
    return Path(shutil.copytree(late / "runs" / "digits", tmp_path / "run"))


@pytest.fixture
def early(run: Path) -> Path:
    """The same, rolled back to where the added data had been partitioned only."""
    numbers = [v.version for v in versions_of(run) if v.change == MOVED]
    main(["ensemble", str(run), str(numbers[0] - 1), "--rollback"])
    assert open_ensemble(Store.at(run)).partition.path == "partition"
    return run


def newest(run: Path) -> Version:
    return open_ensemble(Store.at(run))


def test_experts_are_measured_anew_on_the_newest_holdout(late: Path) -> None:
    run = Store.at(late / "runs" / "digits")
    (moved,) = [version for version in versions_of(run) if version.change == MOVED]
    before = read_version(run, moved.version - 1)
    assert [m.digest for m in moved.experts] == [m.digest for m in before.experts]
    data, partition = (Artifact.open(run.child(name)) for name in ("data-2", "partition-2"))
    orders = accepted_orders(run, moved)
    for old, new in zip(before.experts, moved.experts, strict=True):
        assert old.val_loss != new.val_loss
        holdout = Holdout.of(data, partition)
        assert new.val_loss == validation_loss(load_expert(run.child(new.path)), orders[new.order].order, holdout)


def test_only_clusters_that_grew_enough_get_orders(early: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(early / "data-2"), "--onto", str(early / "orders"), "--grown-by", "5"]
    main([*words, "--out", str(early / "orders-none")])
    told = capsys.readouterr().out
    assert "0 orders" in told
    version = newest(early)
    assert version.partition.path == "partition-2"
    assert len(version.serving) == 4, "the experts serve on the new data"
    # the model has moved; those that grew less can still have theirs
    main(["plan", str(early / "data-2"), "--onto", str(early / "orders-none"), "--out", str(early / "orders-all")])
    assert Artifact.open(early / "orders-all").names() == ["00.json", "01.json", "02.json", "03.json"]


def test_new_orders_are_the_old_ones_with_the_new_shards(late: Path) -> None:
    run = late / "runs" / "digits"
    old, _ = read_order(run / "orders" / "00.json")
    new, _ = read_order(run / "orders-2" / "00.json")
    assert (new.architecture, new.objective, new.acceptance) == (old.architecture, old.objective, old.acceptance)
    same = {"seed": 0, "images": 0}
    assert new.training.model_copy(update=same) == old.training.model_copy(update=same)
    assert new.training.seed != old.training.seed
    assert {ref.sha256 for ref in old.shards} < {ref.sha256 for ref in new.shards}
    assert all(ref.path.startswith("partition-2/clusters/00/") for ref in new.shards)
    assert new.init is not None
    assert load_expert(run / new.init.path).card.order == old.digest()
    assert Artifact.open(run / "orders-2").manifest.parents["orders"] == Artifact.open(run / "orders").digest


def another(expert: Path, place: Path, factor: float) -> Path:
    """An expert of the same order with other weights."""
    weights = {name: factor * value for name, value in load_file(expert / "model.safetensors").items()}
    return resealed(expert, place, weights)


def test_an_expert_of_an_old_order_is_still_admitted(run: Path, late: Path, tmp_path: Path) -> None:
    store = Store.at(run)
    was = {m.cluster: m for m in newest(run).serving}
    # it is measured on the newest holdout, and serves if it is better, or wanted
    result = admit(store, another(late / "experts" / "02", tmp_path / "a", 0.99), replace=True)
    assert result.member.serving
    assert result.member.val_loss is not None
    assert was[2].val_loss is not None
    assert result.member.val_loss.gaussian == was[2].val_loss.gaussian
    # cluster 0 is served by an expert of a newer order: a worse one stays on the bench
    result = admit(store, another(late / "experts" / "00", tmp_path / "b", 0.97))
    assert not result.member.serving
    assert result.incumbent == was[0].name
    assert {m.cluster: m.digest for m in newest(run).serving}[0] == was[0].digest


def test_an_order_is_reissued_to_train_its_expert_further(run: Path, tmp_path: Path) -> None:
    before = newest(run)
    serving = next(m for m in before.serving if m.cluster == 2)
    for _ in range(2):  # the same words mean the same order, until its expert is there
        main(["plan", str(run), "--reissue", "2", "--images", "0.32k"])
    assert newest(run).version == before.version + 1
    place = newest(run).orders[-1].path
    assert place == "orders-4"
    order, _ = read_order(run / place / "02.json")
    assert order.training.images == 320
    assert order.init is not None
    assert order.init.digest == serving.digest
    said: list[str] = []
    made = train(run / place / "02.json", tmp_path / "e", resources=CPU, watch=lambda now: said.append(now.note or ""))
    assert f"begins from the weights of expert {serving.digest[:12]}; optimizer and average begin anew" in said
    assert made is not None
    assert made.manifest.parents["init"] == serving.digest
    result = admit(Store.at(run), tmp_path / "e")
    assert result.member.serving
    assert serving.digest in {m.digest for m in newest(run).experts}, "both stay admitted"
    main(["plan", str(run), "--reissue", "2", "--images", "320"])
    assert newest(run).orders[-1].path == "orders-5", "now the words mean to train the new one on"


def test_an_island_finds_the_expert_it_begins_from(late: Path, tmp_path: Path) -> None:
    run = late / "runs" / "digits"
    order, _ = read_order(run / "orders-2" / "00.json")
    assert order.init is not None
    trained = Artifact.open(late / "experts" / "00-2").digest
    island = hand_out(Store.at(run), "00", tmp_path / "island", orders="orders-2")
    assert train(island.order, tmp_path / "a", resources=CPU).digest == trained  # type: ignore[union-attr]
    # an order alone, with its shards in one folder: the expert lies beside them, or is given
    loose = Path(shutil.copytree(run / "partition-2" / "clusters" / "00", tmp_path / "loose"))
    shutil.copy(run / "orders-2" / "00.json", tmp_path / "00.json")
    with pytest.raises(UserError, match="get that folder of the run, too, or pass its place with --init"):
        train(tmp_path / "00.json", tmp_path / "b", data=loose, resources=CPU)
    with pytest.raises(UserError, match=f"is not expert {order.init.digest[:12]}"):
        train(tmp_path / "00.json", tmp_path / "b", data=loose, init=late / "experts" / "01", resources=CPU)
    start = late / "experts" / "00"
    assert train(tmp_path / "00.json", tmp_path / "b", data=loose, init=start, resources=CPU).digest == trained  # type: ignore[union-attr]
    shutil.copytree(run / order.init.path, loose / order.init.name)
    assert train(tmp_path / "00.json", tmp_path / "c", data=loose, resources=CPU).digest == trained  # type: ignore[union-attr]


MISTAKES = {
    "no such cluster": ("{run} --reissue 9", "--reissue 9: no such cluster; the model has 0 to 3"),
    "objectives": ("{run} --reissue 1 --objectives 4flow", "--objectives: has no meaning with --reissue"),
    "a fraction": ("{run}/data-2 --grown-by 0.5", "--grown-by: has no meaning with the first orders"),
    "no number": ("{run} --reissue 1 --images many", "--images: input should be a valid integer"),
    "another network": (
        "{run} --reissue 1 --set architecture.depth=3",
        "--set architecture: cannot be changed in order 01, since it begins from an expert: add --from-scratch",
    ),
    "another cluster": ("{run} --reissue 1 --set cluster=2", "--set cluster: cannot be changed in order 01"),
    "no such setting": ("{run} --reissue 1 --set training.speed=3", "speed: extra inputs are not permitted"),
    "no run": ("{run}/data-2/shards --reissue 1", "does not exist"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    mistake: str, late: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = late / "runs" / "digits"
    before = {p for p in run.rglob("*") if "samples" not in p.parts}
    arguments, words = MISTAKES[mistake]
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments.format(run=run).split()])
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert {p for p in run.rglob("*") if "samples" not in p.parts} == before


def test_from_scratch_an_order_may_change_and_needs_no_expert(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (member,) = [m for m in newest(run).serving if m.cluster == 1]
    shutil.rmtree(run / member.path)
    with pytest.raises(SystemExit):
        main(["plan", str(run), "--reissue", "1"])
    assert f"{member.path}: is missing, so it cannot be trained further" in capsys.readouterr().err
    main(["plan", str(run), "--reissue", "1", "--from-scratch", "--set", "architecture.depth=3"])
    order, _ = read_order(run / newest(run).orders[-1].path / "01.json")
    assert (order.init, order.architecture.depth) == (None, 3)


def test_a_damaged_expert_stops_no_change(run: Path, late: Path, tmp_path: Path) -> None:
    """It keeps its place, with a warning, until another is admitted with --replace."""
    (member,) = [m for m in newest(run).serving if m.cluster == 2]
    (run / member.path / "manifest.json").write_text("{")
    main(["ensemble", str(run), "--route", "top-1"])
    with pytest.warns(AtollWarning, match="cannot be read and keeps its place"):
        assert not admit(Store.at(run), another(late / "experts" / "02", tmp_path / "a", 0.99)).member.serving
    assert admit(Store.at(run), another(late / "experts" / "02", tmp_path / "b", 0.98), replace=True).member.serving


def test_the_router_begins_from_the_older_one(late: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (Artifact.open(late / "runs" / "digits" / name) for name in ("router", "router-2"))
    assert new.manifest.parents["start"] == old.digest
    assert new.manifest.parents["partition"] != old.manifest.parents["partition"]
    moved = next(v.version for v in versions_of(run) if v.change == MOVED)
    main(["ensemble", str(run), str(moved), "--rollback"])
    main(["router", str(run), "--from-scratch", "--out", str(run / "router-3"), "--set", "training.images=64"])
    told = capsys.readouterr().out
    assert "trains on from" not in told
    assert "start" not in Artifact.open(run / "router-3").manifest.parents


def test_a_run_on_an_object_store_grows_too(early: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    shutil.rmtree(early / "orders-2")
    run = f"memory://{uuid.uuid4().hex}/run"
    filesystem, root = fsspec.core.url_to_fs(run)
    filesystem.put(str(early), root, recursive=True)
    main(["plan", f"{run}/data-2", "--onto", f"{run}/orders", "--grown-by", "0.18", "--images", "320"])
    main(["plan", run, "--reissue", "1", "--images", "320"])
    version = open_ensemble(Store.at(run))
    assert version.partition.path == "partition-2"
    # orders-3 is there from before the model went back, and is another cluster's
    assert [reference.path for reference in version.orders] == ["orders", "orders-2", "orders-4"]
    made = train(f"{run}/orders-4/01.json", tmp_path / "e", resources=CPU)
    assert made is not None
    assert made.manifest.parents["init"] == next(m.digest for m in version.serving if m.cluster == 1)
    assert admit(Store.at(run), tmp_path / "e").member.serving
    main(["status", run])
