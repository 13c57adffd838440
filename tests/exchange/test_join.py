"""From `publish` to `admit --inbox`: what leaves, who works on what, and that a stop at any moment loses nothing."""

from __future__ import annotations

import fnmatch
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, Store, UserError, find, sha256_file
from atoll.data.shards import pack_captions, write_shard
from atoll.data.space import TextConfig
from atoll.exchange.join import JOINED, Joining, check_text_encoder
from atoll.exchange.lease_status import lease_status
from atoll.exchange.leases import LeaseFile, Leases
from atoll.exchange.published import CARD, ORGANIZERS, find_card, policy, publish
from atoll.islands.order import read_order
from atoll.registry.changes import register_orders
from exchange.test_signatures import new_key
from runs import ATOLL, atoll
from s3_servers import moto_bucket, reached_at

ALICE, BOB = "a" * 16, "b" * 16


@pytest.fixture
def published(planned: Path, tmp_path: Path) -> Path:
    publish(Store.at(planned), Store.at(tmp_path / "public"))
    return tmp_path / "public"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_what_contributors_need_leaves_the_run(planned: Path, published: Path) -> None:
    """Orders and the shards they name, and not one file more: no holdout, no index, no manifest with its digests."""
    orders = [json.loads((planned / "orders" / f"0{k}.json").read_text()) for k in range(3)]
    shards = {ref["path"] for order in orders for ref in order["shards"]}
    assert names(published) == {"published.json", *(f"orders/0{k}.json" for k in range(3)), *shards}
    assert not any("holdout" in name or name.startswith("data") for name in names(published))
    before = {name: (published / name).stat().st_mtime_ns for name in shards}
    publish(Store.at(planned), Store.at(published))
    assert before == {name: (published / name).stat().st_mtime_ns for name in shards}, "sent once"


def test_a_publication_that_was_stopped_resumes_and_deleted_files_are_published_again(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, upload = Store.at(tmp_path / "public"), Store.upload
    sent: list[str] = []

    def stopped(place: Store, source: Path, name: str) -> None:
        if len(sent) == 3:
            raise KeyboardInterrupt
        sent.append(name)
        upload(place, source, name)

    monkeypatch.setattr(Store, "upload", stopped)
    with pytest.raises(KeyboardInterrupt):
        publish(Store.at(planned), public)
    card = find_card(public)
    assert card is not None
    assert card.orders == ()
    monkeypatch.setattr(Store, "upload", lambda *words: (sent.append(words[2]), upload(*words)))
    card = publish(Store.at(planned), public)
    assert sorted(sent) == sorted(card.files), "each file once"
    lost = tmp_path / "public" / sent[0]
    lost.unlink()
    publish(Store.at(planned), public)
    assert lost.is_file()
    assert len(sent) == len(card.files) + 1


def test_a_policy_lets_contributors_read_what_the_card_names_and_write_to_two_places(published: Path) -> None:
    card = find_card(Store.at(published))
    assert card is not None
    order = card.orders[0].model_copy(update={"path": "work/00.json"})
    files = {**card.files, "converted/dit/model.safetensors": "0" * 64, "clusters8/clusters/00/0.safetensors": "0" * 64}
    card = card.model_copy(update={"orders": (order, *card.orders[1:]), "files": files})
    statements = json.loads(policy("s3://bucket/flowers", card))["Statement"]
    writes = {r for s in statements if "s3:PutObject" in s["Action"] for r in s["Resource"]}
    reads = {r for s in statements if s["Action"] == ["s3:GetObject"] for r in s["Resource"]}
    root = "arn:aws:s3:::bucket/flowers"
    assert writes == {f"{root}/leases/*", f"{root}/inbox/${{aws:username}}/*"}

    def readable(path: str) -> bool:
        return any(fnmatch.fnmatchcase(f"{root}/{path}", pattern) for pattern in reads)

    named = [CARD, ORGANIZERS, *files, *(path for o in card.orders for path in (o.path, f"{o.path}.sig"))]
    assert all(readable(path) for path in [*named, "work-2/00.json", "contributions/00-x/expert.json"])
    assert not any(readable(path) for path in ("inbox/x/0/manifest.json", "allowed_signers", "data/index.parquet"))
    assert not any("Delete" in action for s in statements for action in s["Action"])


def test_a_folder_that_contributors_may_write_to_is_not_published(planned: Path, tmp_path: Path) -> None:
    run = shutil.copytree(planned, tmp_path / "run")
    (run / "orders").rename(run / "inbox-2")
    for file in (run / "ensemble").glob("*.json"):
        file.unlink()
    register_orders(Store.at(run), *(Artifact.open(run / name) for name in ("data", "partition", "inbox-2")))
    with pytest.raises(UserError, match="folders called inbox; use another name"):
        publish(Store.at(run), Store.at(tmp_path / "public"))


def aged(place: Path, seconds: float) -> None:
    """As if the store had got this file so long ago."""
    then = place.stat().st_mtime - seconds
    os.utime(place, (then, then))


def test_a_lease_is_renewed_lost_and_taken_over_by_the_stores_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(Store.at(tmp_path), seconds=100)
    mine = leases.take("00-x", ALICE)
    assert mine is not None
    assert leases.take("00-x", BOB) is None, "it has a holder"
    assert leases.take("00-x", ALICE) is not None, "its own holder finds it again"
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a skewed clock of one's own counts for nothing
    assert leases.take("00-x", BOB) is None
    file = tmp_path / "leases" / "00-x" / "000001.json"
    aged(file, 150)
    assert leases.renew(mine, LeaseFile(holder=ALICE, images=5, total=10)), "late, but nobody took it"
    assert leases.take("00-x", BOB) is None
    aged(file, 150)
    taken = leases.take("00-x", BOB)
    assert taken is not None
    assert taken.epoch == 2
    assert not leases.renew(mine, LeaseFile(holder=ALICE)), "lost"
    assert json.loads(file.read_text())["images"] == 5, "and not written"
    (tmp_path / "leases" / "01-y").mkdir()
    (tmp_path / "leases" / "01-y" / "000001.json").write_text("\x1b[2J garbage")
    garbage = leases.take("01-y", ALICE)
    assert garbage is not None
    assert garbage.epoch == 2, "what is no lease holds nobody up"


def test_a_lease_keeps_others_from_an_order_unless_they_name_it(published: Path, tmp_path: Path) -> None:
    card = find_card(Store.at(published))
    assert card is not None
    leases = Leases(Store.at(published), card.lease_seconds)
    for order in card.orders[:2]:
        assert leases.take(order.lease, BOB) is not None
    shown = {row.order: row.state for row in lease_status(Store.at(published), card)}
    assert shown == {"00": "taken", "01": "taken", "02": "free"}
    command = ["join", published, "--out", tmp_path / "mine", "--unsigned", "--dry-run", "--device", "cpu"]
    dry = atoll(*command).stdout
    assert "would take order 02" in dry
    assert dry.count("taken") == 2
    assert "which is taken" in atoll(*command, "--order", "00").stdout


def test_join_trains_signs_and_sends_and_says_when_there_is_nothing_left(
    planned: Path, published: Path, tmp_path: Path
) -> None:
    """A whole life: three orders, each taken once; stopped by kill -9 in between; admitted by the list's name."""
    key = new_key(tmp_path, "key")
    command = ["join", published, "--out", tmp_path / "mine", "--key", key, "--device", "cpu"]
    dry = atoll(*command, "--dry-run")
    assert f"would take order 00: train it in {tmp_path / 'mine'}, and send it, signed with {key}" in dry.stdout
    assert not (tmp_path / "mine").exists()
    assert not (published / "leases").exists()
    process = subprocess.Popen([*ATOLL, *map(str, command)], stdout=subprocess.DEVNULL)
    while not (tmp_path / "mine" / "expert" / "state").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    atoll(*command)
    (sent,) = (published / "inbox").glob("*/*/manifest.json")
    assert sent.parent.parent.name == json.loads((tmp_path / "mine" / JOINED).read_text())["holder"]
    assert not (sent.parent / "provenance.json").exists(), "nothing about this machine"
    assert Artifact.open(sent.parent).digest == Artifact.open(tmp_path / "mine" / "expert").digest
    assert "sent: expert" in atoll(*command).stdout, "again: nothing new"
    leases = sorted(path.parent.name for path in (published / "leases").glob("0*/*.json"))
    assert [name[:2] for name in leases] == ["00"], "one lease, one epoch, through the kill"
    assert json.loads(next((published / "leases").glob("0*/*.json")).read_text())["done"]


def test_an_upload_that_is_cut_is_no_contribution_and_the_same_call_finishes_it(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = Joining(Store.at(published), tmp_path / "mine", device="cpu")
    upload, cut = Store.upload, []

    def failing(self: Store, source: Path, name: str) -> None:
        if name == "model.safetensors" and not cut:
            cut.append(name)
            self.write(name, source.read_bytes()[:1000])
            raise ConnectionResetError("cut")
        upload(self, source, name)

    monkeypatch.setattr(Store, "upload", failing)
    with pytest.raises(UserError, match=r"does not answer .cut.; .*run the same command again"):
        joining.run()
    (half,) = (published / "inbox").glob("*/*")
    assert find(half) is None, "no manifest: not there"
    sent = Joining(Store.at(published), tmp_path / "mine", device="cpu").run()
    assert sent.place is not None
    assert Artifact.open(sent.place).digest == sent.expert.digest
    for name in sent.expert.names():
        Artifact.open(sent.place).file(name)


def test_a_store_that_is_away_stops_no_training(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewals fail from the first to the last; the expert is made and sent all the same."""
    monkeypatch.setattr(Leases, "renew", lambda *_: (_ for _ in ()).throw(ConnectionError("away")))
    sent = Joining(Store.at(published), tmp_path / "mine", device="cpu").run()
    assert sent.place is not None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_anywhere_the_same_command_ends_with_the_same_expert(published: Path, tmp_path: Path) -> None:
    """kill -9 at ten random moments; then it is let finish: one contribution, whole, as if nothing had happened."""
    unbroken = Joining(Store.at(published), tmp_path / "unbroken", device="cpu").run("00").expert.digest
    key, numbers = new_key(tmp_path, "key"), random.Random(0)
    command = ["join", "--order", "00", published, "--out", tmp_path / "mine", "--key", key, "--device", "cpu"]
    began = time.monotonic()
    atoll("join", "--order", "00", published, "--out", tmp_path / "timed", "--unsigned", "--device", "cpu")
    whole = time.monotonic() - began
    for _ in range(10):
        process = subprocess.Popen([*ATOLL, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(whole * numbers.uniform(0.3, 1.0))
        process.kill()
        process.wait()
        for manifest in (published / "inbox").glob("*/*/manifest.json"):
            artifact = Artifact.open(manifest.parent)  # at every moment what has a manifest is whole
            for name in artifact.names():
                artifact.file(name)
    atoll(*command)
    holder = json.loads((tmp_path / "mine" / JOINED).read_text())["holder"]
    (sent,) = (published / "inbox" / holder).glob("*/manifest.json")
    assert Artifact.open(sent.parent).digest == unbroken


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs: S3 NOT TESTED HERE")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with reached_at(9), pytest.raises(UserError, match="does not answer"):  # port 9: nobody listens
        Joining(Store.at("s3://bucket/it"), tmp_path / "mine")


def test_several_may_work_on_one_order_and_an_expired_lease_costs_nothing(published: Path, tmp_path: Path) -> None:
    first = Joining(Store.at(published), tmp_path / "a", device="cpu")
    listed = first.take(None)[0].listed
    first.write_joined(order=listed.digest)
    (file,) = (published / "leases").glob("0*/000001.json")
    aged(file, 10_000)
    second = Joining(Store.at(published), tmp_path / "b", device="cpu").run(listed.order)
    said: list[str] = []
    third = Joining(Store.at(published), tmp_path / "a", device="cpu", say=said.append).run()
    assert second.place != third.place
    assert second.expert.digest == third.expert.digest, "the same order on the same kind of machine"


def test_a_damaged_order_keeps_nobody_from_another(published: Path, tmp_path: Path) -> None:
    (published / "orders" / "01.json").write_text("{")
    joining = Joining(Store.at(published), tmp_path / "mine", device="cpu")
    assert [offer.listed.order for offer in joining.candidates("00")] == ["00"]
    with pytest.raises(UserError, match=r"01\.json: not a valid order"):
        joining.candidates(None)


def test_without_leases_the_folder_is_left_to_be_sent(planned: Path, tmp_path: Path) -> None:
    publish(Store.at(planned), Store.at(tmp_path / "public"), read_only=True)
    sent = Joining(Store.at(tmp_path / "public"), tmp_path / "mine", device="cpu").run("01")
    assert sent.place is None
    assert find(tmp_path / "mine" / "expert") is not None
    assert not (tmp_path / "public" / "inbox").exists()


@pytest.mark.parametrize("what", ["changed", "unsigned", "another key"])
def test_an_order_that_is_not_the_organizers_is_not_trained(what: str, planned: Path, tmp_path: Path) -> None:
    public, key = tmp_path / "public", new_key(tmp_path, "organizer")
    publish(Store.at(planned), Store.at(public), key=key)
    joining = Joining(Store.at(public), tmp_path / "mine", device="cpu")
    (listed,) = [listed for listed in joining.card.orders if listed.order == "00"]
    joining.order_of(listed)
    if what == "changed":
        text = (public / "orders" / "00.json").read_text()
        (public / "orders" / "00.json").write_text(text.replace('"seed": ', '"seed": 1'))
    elif what == "unsigned":
        (public / "orders" / "00.json.sig").unlink()
    else:
        joining.write_joined(order=listed.digest)
        publish(Store.at(planned), Store.at(public), key=new_key(tmp_path, "mallory"))
    with pytest.raises(UserError, match=r"is not the order|not signed by the organizer|has changed since"):
        Joining(Store.at(public), tmp_path / "mine", device="cpu").run("00")
    assert not (tmp_path / "mine" / "expert").exists()


@pytest.mark.parametrize(
    "encoder",
    [
        "t5:evil/model@0123456789ab",
        "t5:evil/model",
        "clip:/etc",
        "clip:../..@0123456789ab",
        "clip:.@0123456789ab",
        "os",
    ],
)
def test_what_an_order_only_names_is_neither_fetched_nor_loaded(
    encoder: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions kept as text, and an encoder that the order only names: one line, before anything is fetched."""
    from atoll.models import pretrained, text_encoders

    def asked(*words: object) -> None:
        raise AssertionError(f"was asked for {words}")

    monkeypatch.setattr(pretrained, "_download", asked)
    monkeypatch.setattr(text_encoders, "_load_transformer", asked)
    order, _ = read_order(published / "orders" / "00.json")
    captions = {**pack_captions(["a flower"]), "captions": torch.tensor([0, 1])}
    shard = {"latents": torch.zeros(1, *order.latent.shape), "labels": torch.tensor([-1]), **captions}
    write_shard(tmp_path / "place" / "shard.safetensors", shard)
    ref = order.shards[0].model_copy(
        update={"path": "shard.safetensors", "sha256": sha256_file(tmp_path / "place" / "shard.safetensors")}
    )
    text = TextConfig(encoder=encoder, kind="tokens", length=4, width=8)
    hostile = order.model_copy(update={"text": text, "shards": (ref,)})
    with pytest.raises(UserError, match="which is not on this machine, and nothing is fetched"):
        check_text_encoder(hostile, Store.at(tmp_path / "place"))
    check_text_encoder(order, Store.at(published))


def test_a_damaged_card_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is published here"):
        Joining(Store.at(tmp_path), tmp_path / "mine")
    for text in ("[" * 100_000, "{}", '{"orders": [{"path": "../../etc/passwd"}]}', "\x1b[2J"):
        (tmp_path / "published.json").write_text(text)
        with pytest.raises(UserError, match="cannot be read") as caught:
            find_card(Store.at(tmp_path))
        assert str(caught.value).isprintable()


# ---- races on S3 ----


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with moto_bucket() as url:
        yield url


def test_on_s3_one_lease_has_one_holder_and_a_run_goes_through(planned: Path, bucket: str, tmp_path: Path) -> None:
    place = Store.at(f"{bucket}/quick")
    publish(Store.at(planned), place)
    leases = Leases(place, 3600)
    assert leases.take("00-x", ALICE) is not None
    assert leases.take("00-x", BOB) is None
    sent = Joining(place, tmp_path / "mine", device="cpu").run()
    assert sent.place is not None
    assert Artifact.open(sent.place).digest == sent.expert.digest
