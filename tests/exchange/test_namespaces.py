"""Three contributors who reach the store and nothing else, one of them only by files: from publish to a painted image.

Each lives in a network namespace of its own (Linux, root). Elsewhere this is skipped, loudly.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from atoll.artifacts import Store
from atoll.artifacts.signing import allowed_line
from atoll.ensemble.versions import open_ensemble
from exchange.test_signatures import new_key
from runs import ATOLL

TINY = ["training.images=640", "training.batch=32", "training.warmup_images=64", "training.ema_images=64"]
TINY += ["network.width=32", "network.depth=2", "acceptance.max_ratio_to_gaussian=1000"]
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="0.0.0.0", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespace(number: int, *, linked: bool) -> Iterator[str]:
    """A network of one machine; `linked`: with a cable to us, 10.77.N.1, and no route to anywhere else."""
    name = f"atoll-{os.getpid()}-{number}"
    outside = f"at{os.getpid() % 10**6}{number}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        if linked:
            ip("link", "add", outside, "type", "veth", "peer", "name", "inside", "netns", name)
            ip("addr", "add", f"10.77.{number}.1/24", "dev", outside)
            ip("link", "set", outside, "up")
            ip("-n", name, "addr", "add", f"10.77.{number}.2/24", "dev", "inside")
            ip("-n", name, "link", "set", "inside", "up")
        yield name
    finally:
        ip("netns", "del", name)  # takes both ends of the cable along


@pytest.fixture
def islands() -> Iterator[list[str]]:
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs Linux, root and iproute2 for network namespaces: ISOLATED CONTRIBUTORS NOT TESTED HERE")
    with ExitStack() as stack:
        try:
            names = [stack.enter_context(namespace(n, linked=n < 3)) for n in (1, 2, 3)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made ({error.stderr!r}): ISOLATED CONTRIBUTORS NOT TESTED HERE")
        yield names


def environment(host: str, port: int) -> dict[str, str]:
    given = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    return {**os.environ, **given, "AWS_DEFAULT_REGION": "us-east-1", "OMP_NUM_THREADS": "1"}


def say(env: dict[str, str], *words: object, within: str | None = None) -> str:
    """The command line, in a namespace or here."""
    prefix = [] if within is None else ["ip", "netns", "exec", within]
    command = [*prefix, *ATOLL, *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def reaches(within: str, host: str, port: int) -> bool:
    command = ["ip", "netns", "exec", within, sys.executable, "-c", REACH, host, str(port)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_islands_that_reach_only_the_store_make_one_model(islands: list[str], tmp_path: Path) -> None:
    pytest.importorskip("moto", reason="needs moto: ISOLATED CONTRIBUTORS NOT TESTED HERE")
    run, url = tmp_path / "run", "s3://bucket/digits"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        ours = environment("127.0.0.1", port)
        make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
        subprocess.run([sys.executable, "-c", make], env=ours, check=True)
        alice, bob, carol = islands
        assert reaches(alice, "10.77.1.1", port)
        assert reaches(bob, "10.77.2.1", port)
        assert not reaches(alice, "10.77.2.1", port), "nothing beyond its own cable"
        assert not any(reaches(carol, f"10.77.{n}.1", port) for n in (1, 2)), "she has no cable at all"

        (tmp_path / "keys").mkdir()
        keys = {name: new_key(tmp_path / "keys", name) for name in ("alice", "bob", "carol", "organizer")}
        say(ours, "prepare", "digits[:600]", "--out", run / "data")
        say(ours, "partition", run / "data", "-k", "3")
        say(ours, "plan", run / "data", *[part for setting in TINY for part in ("--set", setting)])
        say(ours, "publish", run, url, "--key", keys["organizer"])
        say(ours, "publish", run, tmp_path / "stick", "--read-only", "--key", keys["organizer"])
        (run / "allowed_signers").write_bytes(b"".join(allowed_line(n, keys[n]) for n in ("alice", "bob", "carol")))

        for who, name, number in ((alice, "alice", 1), (bob, "bob", 2)):
            home = ["--out", tmp_path / name, "--key", keys[name], "--device", "cpu"]
            cache = {"ATOLL_CACHE": str(tmp_path / f"cache-{name}")}
            said = say({**environment(f"10.77.{number}.1", port), **cache}, "join", url, *home, within=who)
            assert "sent: expert" in said
        home = ["--out", tmp_path / "carol", "--key", keys["carol"], "--device", "cpu", "--order", "02"]
        assert "send this folder back" in say(ours, "join", tmp_path / "stick", *home, within=carol)

        say(ours, "admit", "--inbox-at", f"{url}/inbox", "--out", run, "--device", "cpu")
        say(ours, "admit", tmp_path / "carol" / "expert", "--out", run, "--device", "cpu")
        version = open_ensemble(Store.at(run))
        assert {m.cluster: m.contributor for m in version.serving} == {0: "alice", 1: "bob", 2: "carol"}
        say(ours, "router", run, "--set", "training.images=640", "--device", "cpu")
        say(ours, "sample", run, "--prompt", "a handwritten three", "--steps", "4", "--out", tmp_path / "painted")
        assert list((tmp_path / "painted").glob("*.png"))
    finally:
        server.kill()
        server.wait()
