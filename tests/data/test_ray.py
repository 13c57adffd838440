"""The Ray engine gives what the local one gives, digest for digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.data.prepare import prepare
from atoll.executor import Executor, RayExecutor
from atoll.partition.methods import PartitionConfig
from atoll.partition.stage import partition
from image_forms import CONFIG, pictures, tars


@pytest.mark.slow
def test_ray_and_local_agree(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: NOT TESTED HERE")
    source = tars(tmp_path / "source", pictures(100))
    local = prepare(source, tmp_path / "local", CONFIG)
    remote = prepare(source, tmp_path / "remote", CONFIG, executor=RayExecutor())
    assert local.digest == remote.digest
    for config in (PartitionConfig(clusters=3), PartitionConfig(clusters=3, method="random")):
        here = partition(tmp_path / "local", tmp_path / f"here-{config.method}", config, executor=Executor())
        there = partition(tmp_path / "local", tmp_path / f"there-{config.method}", config, executor=RayExecutor())
        assert here.digest == there.digest
