"""The Ray engine gives what the local one gives, digest for digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.artifacts import UserError
from atoll.data.engine import Local, Ray, engine_named
from atoll.data.prepare import prepare
from atoll.partition.config import PartitionConfig
from atoll.partition.stage import partition
from image_forms import CONFIG, pictures, tars


@pytest.mark.slow
def test_ray_and_local_agree(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: NOT TESTED HERE")
    source = tars(tmp_path / "source", pictures(100))
    local = prepare(source, tmp_path / "local", CONFIG)
    remote = prepare(source, tmp_path / "remote", CONFIG, engine=Ray())
    assert local.digest == remote.digest
    with pytest.raises(UserError, match="the Ray cluster has no GPU"), Ray(gpu=True).start():
        pass
    for config in (PartitionConfig(clusters=3), PartitionConfig(clusters=3, by="random")):
        here = partition(tmp_path / "local", tmp_path / f"here-{config.by}", config, engine=Local())
        there = partition(tmp_path / "local", tmp_path / f"there-{config.by}", config, engine=Ray())
        assert here.digest == there.digest


def test_an_unknown_engine_is_one_line() -> None:
    with pytest.raises(UserError, match="--engine slurm: use local or ray"):
        engine_named("slurm", 1, None)
