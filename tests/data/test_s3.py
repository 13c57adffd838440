"""A real S3 server on loopback: sources are read there as on a disk, and a run there is the run on a disk."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.artifacts import Artifact
from atoll.data.prepare import prepare
from atoll.data.sources import Example, open_source
from atoll.partition.methods import PartitionConfig
from atoll.partition.stage import partition
from atoll.planning.stage import plan
from image_forms import CONFIG, FORMS, folder, pictures
from s3_servers import moto_bucket, upload


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with moto_bucket() as url:
        yield url


def contents(place: str) -> list[Example]:
    """As a worker reads them; sorted, since a local tar may be cut where a remote one is not."""
    opened = open_source(place)
    items = opened.items
    assert abs(opened.count() - 20) < 21, "a remote tar's images are not counted"
    found = [found for item in items for found in pickle.loads(pickle.dumps(opened)).read(item)]
    assert all(isinstance(each, Example) for each in found)
    return sorted((each for each in found if isinstance(each, Example)), key=lambda each: each.name)


@pytest.mark.parametrize("form", FORMS)
def test_a_source_on_s3_is_read_as_on_a_disk(form: str, bucket: str, tmp_path: Path) -> None:
    place = FORMS[form](tmp_path / "source", pictures(20))
    upload(Path(place), f"{bucket}/{form}")
    examples = contents(f"{bucket}/{form}")
    assert len(examples) == 20
    assert examples == contents(place)
    if form == "folder":
        assert contents(f"{bucket}/{form}/*.png") == examples, "captions beside images come along"


def test_the_same_run_on_s3_and_on_disk(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    place = folder(tmp_path / "source", pictures(60))
    upload(Path(place), f"{bucket}/source")
    for run, source in ((f"{tmp_path}/run", place), (f"{bucket}/run", f"{bucket}/source")):
        data = prepare(source, f"{run}/data", CONFIG)
        cut = partition(f"{run}/data", f"{run}/partition", PartitionConfig(clusters=3))
        plan(data.store, cut.store, f"{run}/orders")
    for kind in ("data", "partition", "orders"):
        local, remote = Artifact.open(f"{tmp_path}/run/{kind}"), Artifact.open(f"{bucket}/run/{kind}")
        assert local.digest == remote.digest
        assert all(local.read(name) == remote.read(name) for name in local.names())
    assert prepare(f"{bucket}/source", f"{bucket}/run/data", CONFIG).digest == data.digest, "it is there"
