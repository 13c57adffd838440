"""A run on a real S3 server on loopback: source, data, partition and orders, all by URL."""

from __future__ import annotations

import shutil
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
from s3_servers import rclone_bucket


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket on an S3 server of our own."""
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    with rclone_bucket(tmp_path / "s3") as url:
        yield url


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
