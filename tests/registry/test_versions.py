"""A model's versions: created and never overwritten; what cannot be read blocks nothing that does not need it."""

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
from atoll.model import load
from atoll.registry.changes import (
    begun,
    change_ensemble,
    register_monolith,
    register_orders,
    register_router,
    remove_expert,
    roll_back,
    set_route,
    use_expert,
)
from atoll.registry.versions import Member, SetAside, ValidationLoss, Version, open_ensemble, read_version
from atoll.sampling import Sampling
from runs import resealed, versions_of


def rewrite(path: Path, data: bytes) -> None:
    """Files of the fixture are links to the session's own."""
    path.unlink()
    path.write_bytes(data)


def damage(path: Path) -> None:
    data = path.read_bytes()
    rewrite(path, data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])


def version_file(run: Path, number: int) -> Path:
    return run / "ensemble" / f"{number:06d}.json"


def second_expert(run: Path, member: Member) -> Member:
    """Another expert for the same order, in the run and not yet in its model."""
    place = run / "contributions" / "second"
    digest = Artifact.open(resealed(run / member.path, place, images=641)).digest
    path = f"contributions/03-{digest[:12]}"
    place.rename(run / path)
    return member.model_copy(update={"path": path, "digest": digest})


def test_the_history_says_what_was_done_and_nothing_in_it_changes(run: Path) -> None:
    store = Store.at(run)
    before = {path.name: path.read_bytes() for path in (run / "ensemble").iterdir()}
    assert sorted(before) == [f"{n:06d}.json" for n in range(1, 11)]
    set_route(store, "top-1")
    remove_expert(store, 3)
    chain = versions_of(run)
    assert [v.change for v in chain[:3]] == ["no expert serves cluster 3", "route top-1", "router fuses the experts"]
    assert chain[-2].change.startswith("admitted 0")
    assert chain[-1].change == "planned orders"
    assert [newer.predecessor for newer, _ in pairwise(chain)] == [older.digest() for _, older in pairwise(chain)]
    after = {path.name: path.read_bytes() for path in (run / "ensemble").iterdir()}
    assert {name: after[name] for name in before} == before


def test_what_changes_nothing_writes_nothing(run: Path) -> None:
    store = Store.at(run)
    newest = open_ensemble(store)
    assert set_route(store, newest.route) == newest
    assert use_expert(store, newest.serving[2].name) == newest
    assert register_router(store, Artifact.open(run / "router")) == newest
    parts = [Artifact.open(run / name) for name in ("data", "partition", "orders")]
    assert register_orders(store, *parts) == newest
    assert len(list((run / "ensemble").iterdir())) == 10


def test_an_expert_is_taken_out_and_brought_back_and_another_may_take_its_seat(run: Path) -> None:
    store = Store.at(run)
    before = open_ensemble(store)
    removed = remove_expert(store, 3)
    assert removed.empty_clusters() == [3]
    assert len(removed.experts) == 8
    assert removed.model_digest() != before.model_digest()
    assert use_expert(store, "03-").model_digest() == before.model_digest(), "the same experts are the same model"
    second = second_expert(run, before.serving[3])
    version = change_ensemble(store, lambda now: begun(store, now).with_expert(second), "admitted another")
    assert [member.digest for member in version.serving if member.cluster == 3] == [second.digest]
    with pytest.raises(UserError, match="--use 03: fits several"):
        use_expert(store, "03")


def test_going_back_is_a_new_version_and_loses_no_expert(run: Path) -> None:
    store = Store.at(run)
    before = open_ensemble(store)
    second = second_expert(run, before.serving[3])
    change_ensemble(store, lambda now: begun(store, now).with_expert(second), "admitted another")
    back = roll_back(store)
    assert (back.version, back.change, back.model_digest()) == (12, "back to version 10", before.model_digest())
    assert [m.digest for m in back.experts if m not in back.serving] == [second.digest]
    early = roll_back(store, 4)
    assert ([m.cluster for m in early.serving], len(early.experts), early.router) == ([0, 1, 2], 9, None)
    assert roll_back(store).model_digest() == back.model_digest(), "going back twice takes back the going back"


def test_no_change_loses_experts_or_router_unless_it_is_told_to(run: Path) -> None:
    store = Store.at(run)
    for lost in ({"experts": ()}, {"router": None}):
        with pytest.raises(AssertionError, match="would lose"):
            change_ensemble(store, lambda now, lost=lost: begun(store, now).model_copy(update=lost), "a mistake")  # type: ignore[misc]
    assert open_ensemble(store).version == 10


# Damage


def test_an_old_damaged_version_does_not_unmake_newer_ones(run: Path) -> None:
    """hostile-2, point 4: one bit in an old file threw the model back, and `admit` went on from there."""
    expected = load(str(run)).digest
    damage(version_file(run, 5))
    version_file(run, 1).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(str(run)).digest == expected
        after = set_route(Store.at(run), "top-1")
    assert (after.version, len(after.serving)) == (11, 8)
    assert roll_back(Store.at(run), 10).model_digest() == expected
    with pytest.raises(UserError, match=r"--rollback 5: .*no such version \(it is damaged"):
        roll_back(Store.at(run), 5)


def test_a_damaged_newest_version_is_set_aside_and_no_command_goes_on_without_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.at(run)
    set_route(store, "full")
    damage(version_file(run, 11))
    with pytest.warns(SetAside, match=r"11.json is damaged .*; version 10 is used .* --rollback 10") as told:
        assert open_ensemble(store).version == 10
    assert "\n" not in str(told[0].message)
    for change in (["--route", "top-1"], ["--remove", "3"], ["--use", "03-"]):
        with pytest.raises(SystemExit):
            main(["ensemble", str(run), *change])
        assert "000011.json is damaged" in capsys.readouterr().err
    assert not version_file(run, 12).exists()
    main(["ensemble", str(run), "--rollback"])
    after = open_ensemble(store)
    assert (after.version, after.change, after.route) == (12, "back to version 10", "top-2")


@pytest.mark.parametrize("what", ["a newer atoll's", "no JSON", "a pipe", "a folder", "a link to itself", "endless"])
def test_what_is_no_version_is_set_aside(what: str, run: Path) -> None:
    place = version_file(run, 11)
    match what:
        case "a newer atoll's":
            content = json.loads(version_file(run, 10).read_bytes()) | {"schema_version": 3, "color": "red"}
            place.write_text(json.dumps(content))
        case "no JSON":
            place.write_bytes(b"[" * 100_000)
        case "a pipe":
            os.mkfifo(place)
        case "a folder":
            place.mkdir()
        case "a link to itself":
            place.symlink_to(place.name)
        case "endless":
            with place.open("wb") as stream:
                stream.truncate(100 * 2**30)  # sparse: it takes no room on the disk
    with pytest.warns(SetAside, match=r"000011.json is "):
        assert open_ensemble(Store.at(run)).version == 10
    assert roll_back(Store.at(run)).version == 12


def test_without_any_readable_version_there_is_no_model(run: Path, tmp_path: Path) -> None:
    for number in range(1, 11):
        damage(version_file(run, number))
    for verb in (open_ensemble, lambda store: set_route(store, "full")):
        with pytest.raises(UserError, match=r"000010.json is damaged .*no version of this model can be read"):
            verb(Store.at(run))
    with pytest.raises(UserError, match=r"holds no model yet.*atoll plan"):
        open_ensemble(Store.at(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        open_ensemble(Store.at(tmp_path / "nowhere"))


def test_a_store_that_does_not_answer_is_no_reason_to_undo_what_somebody_did(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Store.read

    def failing(self: Store, name: str, most: int | None = None) -> bytes:
        if name == "000010.json":
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        return whole(self, name, most)

    monkeypatch.setattr(Store, "read", failing)
    for verb in (open_ensemble, lambda store: set_route(store, "full")):
        with pytest.raises(UserError, match=r"000010.json: cannot be read \(timed out\); try again"):
            verb(Store.at(run))


def test_orders_and_experts_of_a_newer_atoll_block_nothing_that_does_not_need_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """newcomer-2, bug 3: one order of a newer build took `sample`, `status` and `ensemble --rollback` down."""
    newer = run / "orders" / "03.json"
    rewrite(newer, newer.read_bytes().replace(b"{", b'{"color": "red",', 1))
    expert = run / open_ensemble(Store.at(run)).serving[5].path
    rewrite(expert / "expert.json", (expert / "expert.json").read_bytes().replace(b"{", b'{"color": "red",', 1))
    main(["sample", str(run), "--prompt", "a handwritten one", "--steps", "2", "--out", str(tmp_path / "s")])
    told = capsys.readouterr().err
    assert "sampling without the expert of cluster 5" in told
    assert "no router" not in told
    main(["status", str(run)])
    assert "set aside" in capsys.readouterr().err
    for change in (["--route", "top-1"], ["--rollback"], ["--remove", "5"]):
        main(["ensemble", str(run), *change])
    assert open_ensemble(Store.at(run)).version == 13


# What a version names, against what lies there


def first_expert(**said: Any) -> Callable[[Version], dict[str, Any]]:
    return lambda v: {"experts": (v.experts[0].model_copy(update=said), *v.experts[1:])}


def swapped_clusters(version: Version) -> dict[str, Any]:
    a, b, *rest = version.experts
    return {"experts": (b.model_copy(update={"cluster": 0}), a.model_copy(update={"cluster": 1}), *rest)}


LIES: dict[str, tuple[Callable[[Version], dict[str, Any]], str]] = {
    "clusters swapped": (swapped_clusters, "is of cluster 1, the model says 0"),
    "another order": (first_expert(order="0" * 64), "is of order"),
    "another expert's folder": (lambda v: first_expert(path=v.experts[1].path)(v), "is not the expert that the model"),
    "another latent space": (lambda v: {"latent": v.latent.model_copy(update={"mean": (0.25,)})}, "latent space"),
    "no text": (lambda v: {"text": None}, "text encoder"),
    "fewer clusters": (lambda v: {"clusters": 9}, "8 clusters, the model has 9"),
    "the data as router": (lambda v: {"router": v.data}, "is a data artifact, expected router"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_fit_is_not_used_in_silence(lie: str, run: Path) -> None:
    """Each of these versions is whole by its own digest."""
    change, reason = LIES[lie]
    newest = open_ensemble(Store.at(run))
    version = newest.model_copy(update={"version": 11, "predecessor": newest.digest(), **change(newest)})
    version_file(run, 11).write_bytes(version.to_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((UserError, Warning), match=reason) as caught:
            load(str(run))
    assert "\n" not in str(caught.value)


def test_what_does_not_belong_to_the_model_is_not_made_part_of_it(run: Path) -> None:
    store = Store.at(run)
    expert = Artifact.open(run / open_ensemble(store).serving[0].path)
    with pytest.raises(UserError, match="is an expert of cluster 0, no monolith"):
        register_monolith(store, expert)
    shutil.rmtree(run / open_ensemble(store).serving[3].path)
    remove_expert(store, 3)
    with pytest.raises(UserError, match=r"/03-.*check the path"):
        use_expert(store, "03-")


BOUNDS: dict[str, tuple[Callable[[Version], dict[str, Any]], str]] = {
    "a billion clusters": (lambda v: {"clusters": 10**9}, "clusters: input should be less than or equal to 4096"),
    "one expert twice": (lambda v: {"experts": (v.experts[0], *v.experts)}, "each there once"),
    "two serve": (
        lambda v: {"experts": (*v.experts, v.experts[7].model_copy(update={"digest": "f" * 64}))},
        "more than",
    ),
    "beyond the clusters": (lambda v: {"clusters": 4}, "is of a cluster beyond the 4"),
    "a route that is none": (lambda v: {"route": "best"}, "unknown route 'best'"),
    "a path out of the run": (first_expert(path="../../etc"), "must be relative"),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_no_model_can_be_is_refused(bound: str, run: Path) -> None:
    change, reason = BOUNDS[bound]
    store = Store.at(run)
    with pytest.raises(UserError, match=reason):
        change_ensemble(store, lambda now: begun(store, now).model_copy(update=change(begun(store, now))), "too much")


def test_the_digest_of_the_model_is_that_of_what_decides_its_images(run: Path) -> None:
    version = open_ensemble(Store.at(run))
    loss = ValidationLoss(inside=1.0, outside=None, gaussian=1.0)
    told = [m.model_copy(update={"val_loss": loss, "copies": ("bob",)}) for m in version.experts]
    same = version.model_copy(update={"change": "other words", "version": 99, "experts": tuple(told)})
    assert same.model_digest() == version.model_digest()
    assert version.model_copy(update={"route": "top-1"}).model_digest() != version.model_digest()


def test_an_older_version_generates_what_it_did(run: Path) -> None:
    prompts, seeds, sampling = ["a handwritten three"], [0], Sampling(steps=2)
    before = load(str(run)).latents(prompts, seeds, sampling)
    set_route(Store.at(run), "top-1")
    remove_expert(Store.at(run), 2)
    roll_back(Store.at(run), 10)
    assert torch.equal(load(str(run)).latents(prompts, seeds, sampling), before)
    assert read_version(Store.at(run), 10).route == "top-2"
