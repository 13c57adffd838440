"""Work published over plain https: read by strangers, trained, and brought back by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from atoll.artifacts import Store
from atoll.artifacts.signing import allowed_line
from atoll.registry.versions import open_ensemble
from exchange.test_signatures import new_key
from runs import ATOLL
from web_servers import web_server


@pytest.mark.slow
@pytest.mark.parametrize("lie", [None, "a longer shard", "an endless order"])
def test_from_publish_read_only_to_a_folder_that_is_sent_and_admitted(
    lie: str | None, tiny_demo: Path, tmp_path: Path
) -> None:
    """Over TLS with an authority that only SSL_CERT_FILE names; and with a server that lies, one line and no expert."""
    run = shutil.copytree(tiny_demo, tmp_path / "run", ignore=shutil.ignore_patterns("samples"))
    (tmp_path / "certificates").mkdir()
    keys = {name: new_key(tmp_path, name) for name in ("carol", "organizer")}

    def say(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "ATOLL_CACHE": str(tmp_path / "cache")}
        command = [*ATOLL, *map(str, words)]
        return subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, check=False)

    published = say("publish", run, tmp_path / "www", "--read-only", "--key", keys["organizer"])
    assert published.returncode == 0, published.stderr

    def endless(handler) -> None:  # type: ignore[no-untyped-def]
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * 65536)

    if lie == "a longer shard":
        (shard, *_) = (tmp_path / "www").rglob("clusters/02/**/*.safetensors")
        shard.write_bytes(shard.read_bytes() + bytes(10**7))
    hostile = {"/orders/02.json": endless} if lie == "an endless order" else None
    with web_server(tmp_path / "www", tmp_path / "certificates", hostile) as server:
        join = ["join", server.url, "--order", "02", "--out", tmp_path / "mine", "--key", keys["carol"]]
        unknown = say(*join, "--device", "cpu")
        assert unknown.returncode == 2
        assert "CERTIFICATE_VERIFY_FAILED" in unknown.stderr
        dry = say(*join, "--dry-run", "--device", "cpu", SSL_CERT_FILE=str(server.authority))
        done = say(*join, "--device", "cpu", SSL_CERT_FILE=str(server.authority))
    if lie is not None:
        assert done.returncode == 2, done.stdout
        assert "bytes" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "mine" / "expert").exists()
        return
    assert "would take order 02" in dry.stdout, dry.stderr
    assert "by hand" in dry.stdout
    assert "send this folder back" in done.stdout, done.stderr
    assert not any("leases" in path or "inbox" in path for path in server.asked)
    (run / "allowed_signers").write_bytes(allowed_line("carol", keys["carol"]))
    admitted = say("admit", tmp_path / "mine" / "expert", "--out", run, "--device", "cpu")
    assert admitted.returncode == 0, admitted.stderr
    # the same order on the same kind of machine is the same expert: both who made it are credited
    assert "carol" in admitted.stdout
    assert "carol" in str(open_ensemble(Store.at(run)).experts)
