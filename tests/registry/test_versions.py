"""A model's versions: a chain that nobody rewrites, checked against everything it names."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.artifacts import Artifact, Store, UserError
from atoll.cli import main
from atoll.diffusion import CosineVP
from atoll.model import load
from atoll.registry.changes import (
    begun,
    change_ensemble,
    register_orders,
    register_router,
    remove_expert,
    roll_back,
    set_route,
    use_expert,
)
from atoll.registry.checks import Checks
from atoll.registry.versions import (
    DamagedHistory,
    History,
    Member,
    Reference,
    ValidationLoss,
    Version,
    find_ensemble,
    open_ensemble,
)
from atoll.sampling import Sampling
from runs import resealed


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def forged(run: Path, **fields: Any) -> Version:
    """A next version that says what it likes, digest and all, as somebody with bad intentions would write it."""
    newest = open_ensemble(Store.at(run))
    told = {"version": newest.version + 1, "predecessor": newest.digest(), "change": "trust me"}
    version = newest.model_copy(update={**told, **fields})
    (run / "ensemble" / version.name).write_bytes(version.to_bytes())
    return version


def test_the_history_says_what_was_done_and_nothing_in_it_changes(run: Path) -> None:
    store = Store.at(run)
    before = {path.name: path.read_bytes() for path in (run / "ensemble").iterdir()}
    assert sorted(before) == [f"{n:06d}.json" for n in range(1, 11)]
    set_route(store, "top-1")
    remove_expert(store, 3)
    told = [version.change for version in History.of(store).chain()]
    assert told[:3] == ["no expert serves cluster 3", "route top-1", "router fuses the experts"]
    assert told[-2].startswith("admitted 00-")
    assert told[-1] == "planned orders"
    after = {path.name: path.read_bytes() for path in (run / "ensemble").iterdir()}
    assert {name: after[name] for name in before} == before
    assert (run / "ensemble.json").read_bytes() == after["000012.json"]


def test_each_version_names_by_digest_the_one_before_it(run: Path) -> None:
    chain = History.of(Store.at(run)).chain()
    for newer, older in pairwise(chain):
        assert newer.predecessor == older.digest() == json.loads((run / "ensemble" / older.name).read_bytes())["digest"]
    assert chain[-1].predecessor is None


def test_what_changes_nothing_writes_nothing(run: Path) -> None:
    store = Store.at(run)
    newest = open_ensemble(store)
    assert set_route(store, newest.route) == newest
    assert use_expert(store, newest.serving[2].name) == newest
    assert register_router(store, Artifact.open(run / "router")) == newest
    parts = [Artifact.open(run / name) for name in ("data", "partition", "orders")]
    assert register_orders(store, *parts) == newest
    assert len(list((run / "ensemble").iterdir())) == 10


def test_the_copy_for_people_is_mended_and_never_believed(run: Path) -> None:
    store = Store.at(run)
    lie = open_ensemble(store).model_copy(update={"route": "full"})
    (run / "ensemble.json").write_bytes(lie.to_bytes())
    assert open_ensemble(store).route == "top-2"
    set_route(store, "top-2")  # changes nothing else
    assert (run / "ensemble.json").read_bytes() == (run / "ensemble" / "000010.json").read_bytes()


def test_an_expert_is_taken_out_and_brought_back(run: Path) -> None:
    store = Store.at(run)
    before = open_ensemble(store)
    removed = remove_expert(store, 3)
    assert removed.empty_clusters() == [3]
    assert len(removed.experts) == 8
    assert removed.model_digest() != before.model_digest()
    assert use_expert(store, "03-").model_digest() == before.model_digest(), "the same experts are the same model"


def test_of_two_experts_of_a_cluster_one_serves(run: Path, tmp_path: Path) -> None:
    store = Store.at(run)
    first = open_ensemble(store).serving[3]
    second = second_expert(run, first)
    version = change_ensemble(store, lambda now: begun(store, now).with_expert(second), "admitted another")
    assert [member.digest for member in version.serving if member.cluster == 3] == [second.digest]
    assert len(version.experts) == 9
    assert use_expert(store, first.name).model_digest() != version.model_digest()
    with pytest.raises(UserError, match=f"--use 03: fits several; .* {min(first.name, second.name)}"):
        use_expert(store, "03")


def second_expert(run: Path, member: Member) -> Member:
    """Another expert for the same order, in the run and not yet in its model."""
    place = run / "contributions" / "second"
    digest = Artifact.open(resealed(run / member.path, place, images=641)).digest
    path = f"contributions/03-{digest[:12]}"
    place.rename(run / path)
    return member.model_copy(update={"path": path, "digest": digest})


def test_going_back_is_a_new_version_and_undoes_what_it_should(run: Path) -> None:
    store = Store.at(run)
    before = open_ensemble(store)
    set_route(store, "top-1")
    back = roll_back(store)
    assert (back.version, back.change) == (12, "back to version 10")
    assert back.model_digest() == before.model_digest()
    remove_expert(store, 1)
    remove_expert(store, 2)
    assert roll_back(store, 10).model_digest() == before.model_digest()
    assert roll_back(store).empty_clusters() == [1, 2], "going back twice takes back the going back"


def test_going_back_keeps_experts_that_came_since_at_rest(run: Path) -> None:
    store = Store.at(run)
    second = second_expert(run, open_ensemble(store).serving[3])
    change_ensemble(store, lambda now: begun(store, now).with_expert(second), "admitted another")
    back = roll_back(store, 4)
    assert [member.cluster for member in back.serving] == [0, 1, 2]
    assert len(back.experts) == 9
    assert back.router is None
    assert use_expert(store, second.name).serving[-1].digest == second.digest


def test_going_back_does_not_undo_what_somebody_did_just_now(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.at(run)
    set_route(store, "top-1")
    whole = History.of

    def slow(place: Store) -> History:
        """The history is read, and then somebody else is faster."""
        monkeypatch.setattr(History, "of", whole)
        history = whole(place)
        set_route(place, "full")
        return history

    monkeypatch.setattr(History, "of", slow)
    with pytest.raises(UserError, match="somebody changed the model just now"):
        roll_back(store)
    assert open_ensemble(store).route == "full"


# Damage


def damaged(path: Path) -> None:
    rewrite(path, path.read_bytes().replace(b'"top-2"', b'"top-1"'))


def test_a_damaged_newest_version_is_told_of_and_the_one_before_it_used(run: Path) -> None:
    store = Store.at(run)
    set_route(store, "full")
    file = run / "ensemble" / "000011.json"
    rewrite(file, file.read_bytes().replace(b"full", b"top-1"))
    with pytest.warns(DamagedHistory, match=r"000011.json is damaged .*; version 10 is used instead") as told:
        assert open_ensemble(store).version == 10
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    with pytest.warns(DamagedHistory):
        after = set_route(store, "fixed")
    assert (after.version, after.predecessor) == (12, History.of(store).versions[10].digest()), "its name stays taken"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_ensemble(store).route == "fixed", "once gone on from, it is history"


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_broken_chain_is_not_followed_but_its_content_can_be_brought_back(how: str, run: Path) -> None:
    store = Store.at(run)
    lost = run / "ensemble" / "000006.json"
    kept = lost.read_bytes()
    damaged(lost) if how == "changed" else lost.unlink()
    told = "000006.json is damaged" if how == "changed" else "000007.json rests on"
    with pytest.warns(DamagedHistory, match=told):
        assert open_ensemble(store).version == 5
    with pytest.warns(DamagedHistory):
        assert roll_back(store, 10).model_digest() == load(str(run)).digest
    assert open_ensemble(store).version == 11
    lost.unlink(missing_ok=True)
    lost.write_bytes(kept)
    history = History.of(store)
    assert not history.unused, "once restored, all are there again"
    assert [version.version for version in history.chain()] == [11, 5, 4, 3, 2, 1], "and the newest is still the newest"


def test_without_any_whole_version_there_is_no_model(run: Path) -> None:
    damaged(run / "ensemble" / "000001.json")
    for verb in (open_ensemble, lambda store: set_route(store, "full")):
        with pytest.raises(UserError, match=r"000001.json is damaged .*no version of this model is whole"):
            verb(Store.at(run))


def test_a_rewritten_past_is_noticed_even_with_its_digest_made_to_fit(run: Path) -> None:
    file = run / "ensemble" / "000005.json"
    version = History.of(Store.at(run)).versions[5]
    rewrite(file, version.model_copy(update={"change": "something nicer"}).to_bytes())
    with pytest.warns(DamagedHistory, match=r"000006.json rests on a version that is damaged or missing; 4 more"):
        assert open_ensemble(Store.at(run)).change == "something nicer"


def test_a_version_of_absurd_size_is_not_read(run: Path) -> None:
    with (run / "ensemble" / "000011.json").open("wb") as stream:
        stream.truncate(100 * 2**30)  # sparse: it takes no room on the disk
    with pytest.warns(DamagedHistory, match="larger than"):
        assert open_ensemble(Store.at(run)).version == 10


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "link to nowhere", "link to itself"])
def test_what_is_no_file_is_not_waited_for(what: str, run: Path) -> None:
    place = run / "ensemble" / "000011.json"
    if what == "pipe":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    else:
        place.symlink_to({"device": "/dev/zero", "link to nowhere": "nowhere", "link to itself": place.name}[what])
    with pytest.warns(DamagedHistory, match=r"000011.json is no file"):
        assert open_ensemble(Store.at(run)).version == 10


def test_a_store_that_does_not_answer_is_no_reason_to_undo_what_somebody_did(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest version cannot be read for a moment: nobody may go on from the one before it."""
    whole = Store.read

    def failing(self: Store, name: str, most: int | None = None) -> bytes:
        if name == "000010.json":
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        return whole(self, name, most)

    monkeypatch.setattr(Store, "read", failing)
    for verb in (open_ensemble, lambda store: set_route(store, "full")):
        with pytest.raises(UserError, match=r"000010.json: cannot be read \(timed out\); try again"):
            verb(Store.at(run))
    assert len(list((run / "ensemble").iterdir())) == 10


def test_a_run_of_an_older_atoll_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "ensemble.json").write_text(json.dumps({"schema_version": 1, "clusters": 8}))
    assert find_ensemble(Store.at(tmp_path)) is None
    with pytest.raises(UserError, match=r"written by an older atoll.*`atoll plan .*`atoll admit"):
        load(str(tmp_path))


def test_a_run_without_a_model_says_how_to_begin_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no model yet.*atoll plan"):
        open_ensemble(Store.at(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        open_ensemble(Store.at(tmp_path / "nowhere"))


# Every field against what it names: each of these is whole by its own digest, and wrong


def swapped_clusters(version: Version) -> dict[str, Any]:
    a, b, *rest = version.experts
    return {"experts": (b.model_copy(update={"cluster": 0}), a.model_copy(update={"cluster": 1}), *rest)}


def first_expert(**said: Any) -> Callable[[Version], dict[str, Any]]:
    return lambda v: {"experts": (v.experts[0].model_copy(update=said), *v.experts[1:])}


def pointing_at(name: str, other: str) -> Callable[[Version], dict[str, Any]]:
    return lambda v: {name: getattr(v, name).model_copy(update={"path": getattr(v, other).path})}


def plain_reference(member: Member) -> Reference:
    return Reference(path=member.path, digest=member.digest)


LIES: dict[str, tuple[Callable[[Version], dict[str, Any]], str]] = {
    "clusters swapped": (swapped_clusters, "cluster of expert .*: 0, its card says 1"),
    "another objective": (first_expert(objective="x0 on ve"), "objective of expert 00-.*its card says 'epsilon on"),
    "another license": (first_expert(license="CC0-1.0"), "license of expert 00-.*'CC0-1.0', its card says None"),
    "another order": (first_expert(order="0" * 64), "order of expert 00-"),
    "another expert's folder": (
        lambda v: first_expert(path=v.experts[1].path)(v),
        "is .*, but the model of .* was made with",
    ),
    "another reference path": (lambda v: {"reference": CosineVP()}, "reference path cosine-vp"),
    "another latent space": (lambda v: {"latent": v.latent.model_copy(update={"mean": (0.25,)})}, "latent: is not"),
    "no text": (lambda v: {"text": None}, "text: is not the text space of data"),
    "fewer clusters": (lambda v: {"clusters": 9}, "clusters: 9, but partition has 8"),
    "the partition as data": (pointing_at("data", "partition"), "partition: is .*, but the model of"),
    "the data as router": (pointing_at("router", "data"), "data: is .*, but the model of"),
    "an expert as router": (lambda v: {"router": plain_reference(v.experts[0])}, "but the model of"),
    "an expert as monolith": (lambda v: {"monolith": plain_reference(v.experts[0])}, "is an expert of cluster 0"),
    "the orders of nobody": (lambda v: {"orders": (v.partition,)}, "partition: is"),
    "a partition it grew from": (lambda v: {"earlier": (v.data,)}, "partition did not grow from data"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_version_that_lies_is_refused_when_it_is_loaded_and_when_it_is_written(lie: str, run: Path) -> None:
    change, reason = LIES[lie]
    newest = open_ensemble(Store.at(run))
    fields = change(newest)
    with pytest.raises(UserError, match=reason):
        change_ensemble(Store.at(run), lambda now: begun(Store.at(run), now).model_copy(update=fields), "a lie")
    assert open_ensemble(Store.at(run)) == newest
    forged(run, **fields)
    with pytest.raises(UserError, match=reason) as caught:
        load(str(run))
    assert "\n" not in str(caught.value)


BOUNDS: dict[str, tuple[Callable[[Version], dict[str, Any]], str]] = {
    "a billion clusters": (lambda v: {"clusters": 10**9}, "clusters: input should be less than or equal to 4096"),
    "one expert twice": (lambda v: {"experts": (v.experts[0], *v.experts)}, "each there once"),
    "two that serve": (
        lambda v: {"experts": (v.experts[0], v.experts[1].model_copy(update={"cluster": 0, "digest": "f" * 64}))},
        "cluster 0 has more than one serving expert",
    ),
    "a cluster beyond": (
        lambda v: {"experts": (*v.experts, v.experts[0].model_copy(update={"cluster": 8}))},
        "beyond the 8 there are",
    ),
    "a path that leaves": (first_expert(path="../../elsewhere"), "unsafe file name"),
    "a path elsewhere": (first_expert(path="s3://elsewhere/expert"), "unsafe file name"),
    "an unknown route": (lambda v: {"route": "best-of-all"}, "unknown route"),
    "a route that needs more": (lambda v: {"route": "oracle"}, "route 'oracle' needs"),
    "a digest that is none": (first_expert(digest="abc"), "string should match pattern"),
    "an endless license": (first_expert(license="x" * 3000), "at most 2000 characters"),
    "a negative error": (
        first_expert(val_loss=ValidationLoss.model_construct(inside=-1.0, outside=None, gaussian=1.0)),
        "greater than or equal to 0",
    ),
}


@pytest.mark.parametrize("beyond", BOUNDS)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_version_beyond_all_bounds_is_refused_before_it_costs_anything(beyond: str, run: Path) -> None:
    change, reason = BOUNDS[beyond]
    newest = open_ensemble(Store.at(run))
    fields = change(newest)
    with pytest.raises(UserError, match=reason):
        change_ensemble(Store.at(run), lambda now: begun(Store.at(run), now).model_copy(update=fields), "too much")
    forged(run, **fields)
    with pytest.warns(DamagedHistory, match=r"000011.json is damaged"):
        assert open_ensemble(Store.at(run)) == newest


def test_another_expert_in_the_place_of_an_admitted_one_is_refused(run: Path) -> None:
    version = open_ensemble(Store.at(run))
    shutil.rmtree(run / version.serving[2].path)
    shutil.copytree(run / version.serving[3].path, run / version.serving[2].path)
    with pytest.raises(UserError, match=f"{version.serving[2].path}: is {version.serving[3].digest[:12]}"):
        Checks(Store.at(run)).check(version)


def test_what_has_been_taken_away_does_not_stop_a_model_that_paints_without_it(run: Path) -> None:
    before = load(str(run))
    for name in ("data", "partition", "orders"):
        shutil.rmtree(run / name)
    after = load(str(run))
    assert after.digest == before.digest
    assert torch.equal(*(m.latents(["a handwritten one"], [0], Sampling(steps=2)) for m in (before, after)))


# Orders


def test_more_orders_are_accepted_beside_the_first(run: Path) -> None:
    command = ["plan", str(run / "data"), "--out", str(run / "orders-2"), "--objectives", "8flow"]
    main(command)
    version = open_ensemble(Store.at(run))
    assert [reference.path for reference in version.orders] == ["orders", "orders-2"]
    assert len(Checks(Store.at(run)).orders_of(version)) == 16


def test_another_partition_begins_anew_while_nobody_has_trained_and_is_refused_afterwards(run: Path) -> None:
    main(["partition", str(run / "data"), "-k", "4", "--out", str(run / "partition-4")])
    command = ["plan", str(run / "data"), "--partition", str(run / "partition-4"), "--out", str(run / "orders-4")]
    with pytest.raises(SystemExit):
        main(command)
    assert not (run / "orders-4").exists(), "nothing half-written"
    shutil.rmtree(run / "ensemble")
    main(["plan", str(run / "data"), "--objectives", "8flow", "--out", str(run / "orders-3")])
    main(command)
    version = open_ensemble(Store.at(run))
    assert (version.version, version.clusters) == (2, 4)
    assert [reference.path for reference in version.orders] == ["orders-4"]


def test_what_lies_outside_a_run_cannot_be_named_in_it(run: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(run / "data", tmp_path / "elsewhere"))
    parts = [Artifact.open(place) for place in (elsewhere, run / "partition", run / "orders")]
    with pytest.raises(UserError, match="lies outside the run"):
        register_orders(Store.at(run), *parts)
