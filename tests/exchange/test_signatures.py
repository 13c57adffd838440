"""Signatures by ssh-keygen itself: who may contribute, and which versions are the organizer's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import atoll
from atoll.artifacts import Artifact, Store, UserError
from atoll.artifacts.signing import allowed_line, sign, signer, statement
from atoll.exchange.admission import admit
from atoll.exchange.inbox import LeftInInbox, inbox_of, refused_by_sender
from atoll.exchange.quarantine import Refused
from atoll.exchange.signed import SIGNATURE, sign_contribution
from atoll.exchange.thresholds import AdmissionThresholds
from atoll.registry.changes import set_route
from atoll.registry.signatures import KEY, begin_signing
from atoll.registry.versions import open_ensemble
from exchange.gallery import fresh, reseal

if shutil.which("ssh-keygen") is None:
    pytest.skip("needs ssh-keygen: SIGNATURES NOT TESTED HERE", allow_module_level=True)


def new_key(folder: Path, name: str) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)], check=True)
    return folder / name


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("alice", "mallory", "organizer"):
        new_key(folder, name)
    return folder


@pytest.fixture
def run(tiny_demo: Path, keys: Path, tmp_path: Path) -> Path:
    """A run that knows Alice, and calls her by a name of its own."""
    place = Path(shutil.copytree(tiny_demo, tmp_path / "run", ignore=shutil.ignore_patterns("samples")))
    (place / "allowed_signers").write_bytes(allowed_line("Alice-of-the-list", keys / "alice"))
    return place


def test_ssh_keygen_agrees_with_what_we_make(keys: Path, tmp_path: Path) -> None:
    """Checked by hand, as anybody could: the namespace is part of the signature, and so is every byte."""
    said = statement("contribution", manifest="1" * 64, order="2" * 64)
    (tmp_path / "signature").write_bytes(sign(said, keys / "alice"))
    allowed = tmp_path / "allowed"
    allowed.write_bytes(allowed_line("alice", keys / "alice"))
    verify = ["ssh-keygen", "-Y", "verify", "-f", allowed, "-I", "alice", "-s", tmp_path / "signature", "-n"]
    for namespace, data, good in (("atoll", said, True), ("git", said, False), ("atoll", said + b" ", False)):
        done = subprocess.run([*map(str, verify), namespace], input=data, capture_output=True, check=False)
        assert (done.returncode == 0) is good
    signature = (tmp_path / "signature").read_bytes()
    assert signer(said, signature, allowed.read_bytes()) == "alice"
    assert signer(said + b" ", signature, allowed.read_bytes()) is None
    assert signer(said, b"garbage", allowed.read_bytes()) is None
    assert signer(said, signature, allowed_line("mallory", keys / "mallory")) is None


def test_names_come_from_the_organizers_list(run: Path, keys: Path, tmp_path: Path) -> None:
    folder = fresh(run / "islands" / "01" / "expert", tmp_path / "it")
    sign_contribution(folder, keys / "alice")
    member = admit(Store.at(run), folder).member
    assert member.contributor == "Alice-of-the-list"
    assert (run / member.path / SIGNATURE).read_bytes() == (folder / SIGNATURE).read_bytes(), "kept as the proof"
    assert member.digest == Artifact.open(folder).digest


def test_who_sends_the_same_is_credited_too_and_named_as_such(run: Path, keys: Path, tmp_path: Path) -> None:
    """The same order on the same machine is the same expert, byte for byte: two people may honestly have made it."""
    folder = fresh(run / "islands" / "01" / "expert", tmp_path / "it")
    with (run / "allowed_signers").open("ab") as listed:
        listed.write(allowed_line("Mallory-of-the-list", keys / "mallory"))
    sign_contribution(folder, keys / "alice")
    first = admit(Store.at(run), folder).member
    again = admit(Store.at(run), folder)
    assert again.already
    assert again.copied_by is None
    model = open_ensemble(Store.at(run)).model_digest()
    sign_contribution(folder, keys / "mallory")
    for copied_by in ("Mallory-of-the-list", None):  # once
        second = admit(Store.at(run), folder)
        assert second.already
        assert second.copied_by == copied_by
        assert second.member.contributor == "Alice-of-the-list"
        assert second.member.copies == ("Mallory-of-the-list",)
    assert second.member.credits == "Alice-of-the-list; the same by Mallory-of-the-list"
    assert [m.digest for m in open_ensemble(Store.at(run)).experts].count(first.digest) == 1
    assert open_ensemble(Store.at(run)).model_digest() == model
    assert (run / first.path / SIGNATURE).exists()
    (folder / SIGNATURE).unlink()
    assert admit(Store.at(run), folder).member.copies == ("Mallory-of-the-list",), "nobody: nobody is credited"


def test_only_so_many_of_a_sender_are_checked_and_what_nobody_known_signed_is_not_copied(run: Path, keys: Path) -> None:
    """Alice sends five bad ones, of which two are checked; another replays her manifest with other files."""
    expert, inbox = run / "islands" / "01" / "expert", run / "inbox"
    for number in range(5):
        bad = fresh(expert, inbox / "alices-key" / f"bad-{number}", 1e-3 * (number + 1))
        (bad / "metrics.jsonl").write_text("garbage\n")
        reseal(bad)
        sign_contribution(bad, keys / "alice")
    replayed_by_mallory = shutil.copytree(inbox / "alices-key" / "bad-4", inbox / "a-key-of-mallorys" / "0")
    (replayed_by_mallory / "model.safetensors").write_bytes(b"spoilt")
    unknown = fresh(expert, inbox / "strangers-key" / "0", 0.01)
    sign_contribution(unknown, keys / "mallory")
    good = fresh(expert, inbox / "strangers-key" / "alices", 0.02)
    sign_contribution(good, keys / "alice")
    limits, checked = AdmissionThresholds(contributions=2), refused_by_sender(Store.at(run))
    found = []
    for place in inbox_of(inbox):
        try:
            member = admit(Store.at(run), place, unsigned_ok=False, checked=checked, thresholds=limits).member
            found.append(str(member.contributor))
        except UserError as error:
            found.append(str(error).removeprefix(f"{inbox}/").split(", ")[0])
    assert "corrupt" in found[0]
    hers = [text.partition(": ")[2] for text in found[1:6]]
    assert hers == ["line 1 of its metrics.jsonl is no row of finite metrics"] * 2 + ["left in the inbox"] * 3
    assert found[6:] == ["strangers-key/0: stays in quarantine", "Alice-of-the-list"]
    copied = list((run / "quarantine").glob("*/contribution/model.safetensors"))
    assert len(copied) == 2 + 1, "two of hers and what was spoilt; of the unknown signer's only the reason"
    assert refused_by_sender(Store.at(run)) == {"alices-key": 2, "a-key-of-mallorys": 1, "strangers-key": 1}
    with pytest.raises(LeftInInbox, match="alices-key had 2 checked or refused"):
        admit(
            Store.at(run), inbox / "alices-key" / "bad-4", checked=refused_by_sender(Store.at(run)), thresholds=limits
        )


def replayed(folder: Path, keys: Path, tmp_path: Path) -> None:
    """Alice's signature of another expert."""
    other = fresh(folder, tmp_path / "other", 1e-3)
    sign_contribution(other, keys / "alice")
    shutil.copy(other / SIGNATURE, folder / SIGNATURE)


def tampered(folder: Path, keys: Path, tmp_path: Path) -> None:
    """Signed, and then other metrics and a manifest that fits them."""
    sign_contribution(folder, keys / "alice")
    (folder / "metrics.jsonl").write_text('{"images": 64, "loss": 0.5}\n')
    reseal(folder)


BAD = {
    "unsigned": lambda folder, keys, tmp: None,
    "signed by a stranger": lambda folder, keys, tmp: sign_contribution(folder, keys / "mallory"),
    "garbage": lambda folder, keys, tmp: (folder / SIGNATURE).write_bytes(b"\x1b[2J" * 100),
    "endless": lambda folder, keys, tmp: (folder / SIGNATURE).write_bytes(b"x" * 2**20),
    "a link": lambda folder, keys, tmp: (folder / SIGNATURE).symlink_to("/etc/passwd"),
    "of another expert": replayed,
    "changed after signing": tampered,
}


@pytest.mark.parametrize("name", BAD)
def test_who_is_not_known_stays_in_quarantine(name: str, run: Path, keys: Path, tmp_path: Path) -> None:
    folder = fresh(run / "islands" / "01" / "expert", tmp_path / "it")
    BAD[name](folder, keys, tmp_path)
    before = open_ensemble(Store.at(run)).digest()
    with pytest.raises(Refused, match=r"stays in quarantine|link or no regular file"):
        admit(Store.at(run), folder)
    assert open_ensemble(Store.at(run)).digest() == before
    if name == "a link":
        return
    (reasons,) = (run / "quarantine").rglob("reasons.json")
    assert "not signed" in json.loads(reasons.read_text())["reason"] or "signature" in reasons.read_text()
    with pytest.raises(Refused, match="stays in quarantine"):  # it is not held against the expert itself
        admit(Store.at(run), folder)
    if name == "unsigned":
        assert admit(Store.at(run), folder, unsigned_ok=True).member.contributor is None


def test_an_agent_signs_with_the_public_key_alone(keys: Path, tmp_path: Path) -> None:
    """As git does it: the private half never leaves the agent."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("needs ssh-agent: AGENTS NOT TESTED HERE")
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert agent.poll() is None
        environment = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
        subprocess.run(["ssh-add", "-q", str(keys / "alice")], env=environment, check=True)
        public = tmp_path / "alice.pub"
        shutil.copy(keys / "alice.pub", public)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSH_AUTH_SOCK", str(socket))
            signature = sign(b"hello", public)
        assert signer(b"hello", signature, allowed_line("alice", keys / "alice")) == "alice"
    finally:
        agent.kill()
        agent.wait()


def test_without_ssh_keygen_there_is_one_clear_line(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="ssh-keygen: not found, and signatures need it; install OpenSSH"):
        sign(b"hello", keys / "alice")


def test_versions_are_signed_from_then_on_and_load_checks(
    run: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.at(run)
    begin_signing(store, keys / "organizer")
    atoll.load(run)
    with pytest.raises(UserError, match="its versions are signed; say with which key: ATOLL_KEY"):
        set_route(store, "top-1")
    monkeypatch.setenv(KEY, str(keys / "mallory"))
    with pytest.raises(UserError, match="is no key of"):
        set_route(store, "top-1")
    monkeypatch.setenv(KEY, str(keys / "organizer"))
    version = set_route(store, "top-1")
    atoll.load(run)
    atoll.load(run, organizers=run / "organizers")
    (run / "someone").write_bytes(allowed_line("mallory", keys / "mallory"))
    with pytest.raises(UserError, match="signed by no organizer"):
        atoll.load(run, organizers=run / "someone")
    signature = run / "ensemble" / "signatures" / f"{version.digest()}.sig"
    signature.write_bytes(sign(statement("version", version="0" * 64), keys / "organizer"))
    with pytest.raises(UserError, match=f"version {version.version} of its model is signed by no organizer"):
        atoll.load(run)
