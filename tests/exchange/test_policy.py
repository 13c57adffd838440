"""The policy that `publish` leaves for S3, on a server that enforces it: what contributors can do there, and not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.artifacts import Artifact, Store
from atoll.artifacts.signing import allowed_line, fingerprint
from atoll.exchange.published import PublishedCard, PublishedOrder, policy
from exchange.test_signatures import new_key
from policed_s3 import policed_bucket
from runs import ATOLL

URL = "s3://bucket/flowers"
ALL = json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]})
ALICE, MALLORY = "a" * 16, "b" * 16
SHARD = "clusters8/clusters/00/0.safetensors"  # of a partition by another name
LISTED = PublishedOrder(path="orders/00.json", digest="0" * 64, order="00", bytes=1, served=False)
CARD = PublishedCard(orders=(LISTED,), files={SHARD: "0" * 64, "partition/0": "0" * 64})


TRY = """
import json, sys, s3fs
files, root, answers = s3fs.S3FileSystem(), "bucket/flowers", {}
for what, line in json.load(sys.stdin).items():
    try:
        exec(line)
        answers[what] = "done"
    except Exception as error:
        answers[what] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""


def tried(environment: dict[str, str], lines: dict[str, str]) -> dict[str, str]:
    """What becomes of each line in a process with somebody's credentials; `files` is the store in their hands."""
    said = json.dumps({what: line.replace("USER", MALLORY).replace("OTHER", ALICE) for what, line in lines.items()})
    done = subprocess.run(
        [ATOLL[0], "-c", TRY], env={**os.environ, **environment}, input=said, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


ALLOWED = {
    "reads the card": "files.cat_file(f'{root}/published.json')",
    "reads an order": "files.cat_file(f'{root}/orders/00.json')",
    "reads a shard": "files.cat_file(f'{root}/clusters8/clusters/00/0.safetensors')",
    "lists leases": "files.ls(f'{root}/leases/00-x', refresh=True)",
    "reads a lease": "files.cat_file(f'{root}/leases/00-x/000001.json')",
    "writes a lease": "files.pipe_file(f'{root}/leases/01-x/000001.json', b'{}')",
    "creates the next": "files.pipe_file(f'{root}/leases/01-x/000002.json', b'{}', mode='create')",
    "sends": "files.pipe_file(f'{root}/inbox/USER/00-0/manifest.json', b'{}')",
    "sends in parts": "files.pipe_file(f'{root}/inbox/USER/00-0/weights', bytes(12 * 2**20), chunksize=5 * 2**20)",
}
FORBIDDEN = {
    "overwrites the card": "files.pipe_file(f'{root}/published.json', b'{}')",
    "overwrites an order": "files.pipe_file(f'{root}/orders/00.json', b'{}')",
    "adds an order": "files.pipe_file(f'{root}/orders/99.json', b'{}')",
    "overwrites the keys": "files.pipe_file(f'{root}/organizers', b'{}')",
    "overwrites a shard": "files.pipe_file(f'{root}/clusters8/clusters/00/0.safetensors', b'{}')",
    "removes an order": "files.rm_file(f'{root}/orders/00.json')",
    "removes a lease": "files.rm_file(f'{root}/leases/00-x/000001.json')",
    "removes what another sent": "files.rm_file(f'{root}/inbox/OTHER/00-1/manifest.json')",
    "removes what they sent": "files.rm_file(f'{root}/inbox/USER/00-1/manifest.json')",
    "reads what another sent": "files.cat_file(f'{root}/inbox/OTHER/00-1/manifest.json')",
    "reads what they sent": "files.cat_file(f'{root}/inbox/USER/00-1/manifest.json')",
    "overwrites what another sent": "files.pipe_file(f'{root}/inbox/OTHER/00-1/manifest.json', b'{}')",
    "writes beside the inboxes": "files.pipe_file(f'{root}/inbox/manifest.json', b'{}')",
    "lists the inbox": "files.ls(f'{root}/inbox', refresh=True)",
    "lists another's inbox": "files.ls(f'{root}/inbox/OTHER', refresh=True)",
    "lists the bucket": "files.ls('bucket', refresh=True)",
    "lists the run": "files.ls(root, refresh=True)",
    "reads the bucket's other things": "files.cat_file('bucket/secret')",
    "reads beside": "files.cat_file(f'{root}/allowed_signers')",
    "finds out what is there": "files.info(f'{root}/inbox/OTHER/00-2/manifest.json')",
}


@pytest.fixture(scope="module")
def users() -> Iterator[dict[str, dict[str, str]]]:
    contributors = policy(URL, CARD).decode()
    with policed_bucket({"organizer": ALL, ALICE: contributors, MALLORY: contributors}) as found:
        paths = ["published.json", "orders/00.json", "allowed_signers", "clusters8/clusters/00/0.safetensors"]
        paths += ["leases/00-x/000001.json", "inbox/USER/00-1/manifest.json", "inbox/OTHER/00-1/manifest.json"]
        put = {path: f"files.pipe_file('bucket/flowers/{path}', b'{{}}')" for path in paths}
        put["secret"] = "files.pipe_file('bucket/secret', b'{}')"
        assert set(tried(found["organizer"], put).values()) == {"done"}, "the organizer may write everything"
        yield found


@pytest.mark.slow
def test_contributors_may_do_what_the_policy_names_and_nothing_else(users: dict[str, dict[str, str]]) -> None:
    allowed, forbidden = (tried(users[MALLORY], lines) for lines in (ALLOWED, FORBIDDEN))
    assert allowed == dict.fromkeys(ALLOWED, "done")
    assert {what: said for what, said in forbidden.items() if not said.startswith("PermissionError")} == {}
    organizers = tried(users["organizer"], FORBIDDEN)
    assert {what for what, said in organizers.items() if said != "done"} == {
        "reads what another sent",  # removed a few lines above
        "reads what they sent",
        "finds out what is there",  # it is not there
    }


@pytest.mark.slow
def test_a_contributor_with_that_policy_joins_from_end_to_end(planned: Path, tmp_path: Path) -> None:
    """publish, join by a key whose user is named after it, admit: nobody needs more than the policy gives."""
    planned = shutil.copytree(planned, tmp_path / "run")
    keys = {name: new_key(tmp_path, name) for name in ("alice", "organizer")}
    user = fingerprint(keys["alice"])
    with policed_bucket(
        {"organizer": ALL, user: policy(URL, CARD).decode(), MALLORY: policy(URL, CARD).decode()}
    ) as users:

        def say(who: str, *words: object) -> subprocess.CompletedProcess[str]:
            environment = {**os.environ, **users[who], "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
            environment["ATOLL_CACHE"] = str(tmp_path / f"cache-{who}")
            command = [*ATOLL, *map(str, words)]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

        sent = say("organizer", "publish", planned, URL, "--key", keys["organizer"])
        assert sent.returncode == 0, sent.stderr
        join = ["join", URL, "--out", tmp_path / "mine", "--key", keys["alice"], "--device", "cpu"]
        dry = say(user, *join, "--dry-run")
        assert "would take order 00" in dry.stdout, dry.stderr
        for _ in range(2):  # again: nothing more is sent, and nothing is looked for that nobody may see
            done = say(user, *join)
            assert done.returncode == 0, done.stderr
        wrong = say(MALLORY, *join[:2], "--out", tmp_path / "other", *join[4:])
        assert wrong.returncode == 2
        assert f"may write to inbox/{user}" in wrong.stderr
        assert "Traceback" not in wrong.stderr
        signers = tmp_path / "allowed_signers"
        signers.write_bytes(allowed_line("alice", keys["alice"]))
        found = say("organizer", "admit", "--inbox", f"{URL}/inbox", "--signers", signers, "--out", planned)
        assert "holdout error" in found.stderr or "admitted" in found.stdout, found.stderr
    assert Store.at(tmp_path / "mine" / "expert").exists()
    assert Artifact.open(tmp_path / "mine" / "expert").manifest.kind == "expert"
