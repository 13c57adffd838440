"""Half-finished runs on disk: whole or not there, whatever kills the process that writes them."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from toys import TRAINING, ToyTask, fitted, fresh, same

from atoll.artifacts import UserError
from atoll.training import checkpoint as module
from atoll.training.checkpoint import Checkpoints, Ledger, TrainingState, save_compute, saved_compute
from atoll.training.compute import ComputeConfig

GIB = 2**30


def state_of(seed: int = 0, *, size: int = 4, images: int = 0, **compute: object) -> TrainingState:
    """A state full of different numbers."""
    state = TrainingState(fresh(size), TRAINING, ComputeConfig.model_validate(compute))
    numbers = torch.Generator().manual_seed(seed)
    for value in state.tensors().values():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=numbers).abs())
    state.images = images
    return state


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    saved = state_of(1, images=160)
    ledger = Ledger([{"images": 80, "loss": 0.30000000000000004}, {"images": 160, "loss": None}])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved, ledger)
        checkpoints.finish()
    other = state_of(2)
    assert Checkpoints(tmp_path).restore(other) == ledger
    assert other.images == 160
    expected = saved.tensors()
    assert other.tensors().keys() == expected.keys()
    for name, value in other.tensors().items():
        assert torch.equal(value, expected[name]), name


def test_without_a_checkpoint_it_is_a_fresh_start(tmp_path: Path) -> None:
    state = state_of(1)
    before = {name: value.clone() for name, value in state.tensors().items()}
    assert Checkpoints(tmp_path).restore(state) == Ledger()
    assert state.images == 0
    assert all(torch.equal(value, before[name]) for name, value in state.tensors().items())


def test_saving_returns_before_the_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is the state at the call, though training goes on while it is written."""
    may_write = threading.Event()
    write = module.save_file

    def slowly(*arguments: object, **settings: object) -> None:
        assert may_write.wait(20)
        write(*arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "save_file", slowly)
    state = state_of(1, images=16)
    expected = {name: value.clone() for name, value in state.tensors().items()}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, Ledger())
        assert names(tmp_path) == []
        for value in state.tensors().values():
            value.zero_()
        state.images = 32
        may_write.set()
    assert names(tmp_path) == ["000000000016.safetensors"], "the end of the context waits for the file"
    other = state_of(2)
    Checkpoints(tmp_path).restore(other)
    assert other.images == 16
    for name, value in other.tensors().items():
        assert torch.equal(value, expected[name]), name


def test_only_the_newest_two_stay(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for images in (16, 32, 48, 64, 80):
            checkpoints.save(state_of(images=images), Ledger())
    assert names(tmp_path) == ["000000000064.safetensors", "000000000080.safetensors"]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".000000000016.writing").write_bytes(b"half")
    (tmp_path / "somebody-elses.writing").write_bytes(b"kept")
    Checkpoints(tmp_path).begin({}, "order")
    assert names(tmp_path) == ["config.json", "somebody-elses.writing"]


@pytest.mark.parametrize("damage", ["empty", "header", "cut", "not json", "no state"])
def test_a_damaged_newest_file_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state_of(1, images=16), Ledger([{"images": 16}]))
        checkpoints.save(state_of(2, images=32), Ledger())
    newest = tmp_path / "000000000032.safetensors"
    content = newest.read_bytes()
    if damage == "no state":
        module.save_file({"x": torch.zeros(1)}, newest)
    else:
        damaged = {"empty": b"", "header": content[:20], "cut": content[:-5], "not json": b"\x10" + b"\0" * 50}
        newest.write_bytes(damaged[damage])
    state = state_of(3)
    assert Checkpoints(tmp_path).restore(state) == Ledger([{"images": 16}])
    assert state.images == 16


def test_the_interval_follows_the_size(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).interval(0) == 60
    assert Checkpoints(tmp_path).interval(100 * 2**20) == 60
    assert Checkpoints(tmp_path).interval(10 * GIB) >= 600
    assert Checkpoints(tmp_path).interval(20 * GIB) == 2 * Checkpoints(tmp_path).interval(10 * GIB)
    assert Checkpoints(tmp_path, seconds=3.0).interval(10 * GIB) == 3


def test_it_is_saved_when_it_is_time_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with Checkpoints(tmp_path) as checkpoints:
        for second, images in ((0, 16), (59, 32), (61, 48), (100, 64), (120, 80), (122, 96)):
            clock[0] = 1000.0 + second
            checkpoints.keep(state_of(images=images), Ledger(), stopping=False)
            checkpoints.finish()
    assert names(tmp_path) == ["000000000048.safetensors", "000000000096.safetensors"]


def test_told_to_stop_it_saves_first(tmp_path: Path) -> None:
    Checkpoints(tmp_path).keep(state_of(images=4800), Ledger(), stopping=True)
    assert names(tmp_path) == ["000000004800.safetensors"]


def test_a_changed_identity_is_refused_with_the_field(tmp_path: Path) -> None:
    Checkpoints(tmp_path).begin({"training": {"batch": 8}}, "order")
    Checkpoints(tmp_path).begin({"training": {"batch": 8}}, "order")
    with pytest.raises(UserError, match=r"another order \(training\.batch: 8 -> 16\)"):
        Checkpoints(tmp_path).begin({"training": {"batch": 16}}, "order")


def test_a_failure_while_writing_is_raised_by_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(module, "save_file", broken)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(), Ledger())
    with pytest.raises(RuntimeError, match="the device is lost"):
        checkpoints.finish()


SMALL_DISK = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from atoll.artifacts import UserError
from atoll.training.checkpoint import Checkpoints, Ledger
from test_checkpoint import state_of
try:
    with Checkpoints(Path("small/state"), seconds=0) as checkpoints:
        checkpoints.begin({{}}, "order")
        checkpoints.keep(state_of(size=10_000), Ledger(), stopping=False)
        checkpoints.keep(state_of(size=10_000), Ledger(), stopping=True)
except UserError as error:
    print(error)
    print(*sorted(p.name for p in Path("small/state").iterdir()))
"""


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    """And nothing half-written is left on it."""
    (tmp_path / "small").mkdir()
    (tmp_path / "fill.py").write_text(SMALL_DISK.format(path=sys.path))
    command = f"mount -t tmpfs -o size=300k none small && {sys.executable} fill.py"
    process = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"NOT TESTED HERE, no mount namespaces: {process.stderr}")
    assert process.returncode == 0, process.stderr
    said, left = process.stdout.splitlines()
    assert said == "small/state: disk full while writing; free some space and run the same command again"
    assert left == "config.json"


def write_for_ever(folder: Path) -> None:
    """Checkpoints of 4 MB, one after the other, each full of its own number."""
    state = state_of(size=60_000)
    with Checkpoints(folder) as checkpoints:
        checkpoints.begin({}, "order")
        while True:
            state.images += 16
            for value in state.tensors().values():
                value.fill_(state.images)
            checkpoints.save(state, Ledger([{"images": state.images}]))


def test_killed_while_it_writes_no_reader_sees_a_part_of_a_file(tmp_path: Path) -> None:
    """kill -9 a process that does nothing but write, at twelve moments of its writing."""
    numbers = random.Random(0)
    unfinished = 0
    for _ in range(12):
        before = set(names(tmp_path))
        process = os.fork()  # what takes seconds to import is here already
        if process == 0:
            try:
                write_for_ever(tmp_path)
            finally:
                os._exit(1)
        while not set(tmp_path.glob("*.safetensors")) - {tmp_path / name for name in before}:
            time.sleep(0.001)
            assert os.waitpid(process, os.WNOHANG) == (0, 0), "it ended by itself"
        time.sleep(numbers.uniform(0, 0.03))
        os.kill(process, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
        unfinished += any(name.endswith(".writing") for name in names(tmp_path))
        complete = sorted(tmp_path.glob("*.safetensors"))
        assert 1 <= len(complete) <= 3, "the newest two, and one that was about to be removed"
        for path in complete:
            images = int(path.stem)
            with safe_open(path, framework="pt") as file:
                assert json.loads(file.metadata()["state"]) == {"images": images, "rows": [{"images": images}]}
                for name in file.keys():  # noqa: SIM118
                    assert bool((file.get_tensor(name) == images).all()), name
            path.unlink()
    assert unfinished > 0, "never killed in the midst of writing, so nothing was tested"
    Checkpoints(tmp_path).begin({}, "order")
    assert names(tmp_path) == ["config.json"]


def test_saving_at_every_step_changes_no_bit(tmp_path: Path) -> None:
    assert same(fitted(tmp_path / "often", checkpoint_seconds=0.0), fitted(tmp_path / "never"))


def test_a_training_goes_on_from_any_checkpoint(tmp_path: Path) -> None:
    """Whatever step the newest file is of, the end is the same: all that matters is in it."""
    unbroken = fitted(tmp_path / "unbroken")
    kept: dict[int, bytes] = {}

    class Keeping(ToyTask):
        def batch(self, images: int, size: int, rows: slice) -> dict[str, torch.Tensor]:
            while any(thread.name == "atoll-checkpoint" for thread in threading.enumerate()):
                time.sleep(0.001)  # so that every step is saved
            if images:
                kept[images] = (tmp_path / "often" / f"{images:012d}.safetensors").read_bytes()
            return super().batch(images, size, rows)

    fitted(tmp_path / "often", Keeping(), checkpoint_seconds=0.0)
    assert len(kept) == 39
    for images, content in sorted(kept.items())[::6]:
        folder = tmp_path / f"from-{images}"
        folder.mkdir()
        (folder / f"{images:012d}.safetensors").write_bytes(content)
        learner = ToyTask()
        assert same(fitted(folder, learner), unbroken)
        assert learner.drawn[0][0] == images


def test_the_execution_is_kept_beside_the_state(tmp_path: Path) -> None:
    assert saved_compute(tmp_path) is None
    execution = ComputeConfig(micro_batch=8, precision="bfloat16")
    save_compute(tmp_path, execution)
    assert saved_compute(tmp_path) == execution
    (tmp_path / "compute.json").write_text('{"device": "cpu", "warp": 9}')
    with pytest.raises(UserError, match="warp") as caught:
        saved_compute(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_state_of_another_network_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state_of(), Ledger())
    with pytest.raises(RuntimeError, match="size mismatch"):
        Checkpoints(tmp_path).restore(state_of(size=5))


def test_buffers_of_a_network_are_saved_too(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("count", torch.tensor(3))

    network = Counting()
    state = TrainingState(network, TRAINING, ComputeConfig())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, Ledger())
    other = TrainingState(copy.deepcopy(network), TRAINING, ComputeConfig())
    other.network.get_buffer("count").zero_()
    Checkpoints(tmp_path).restore(other)
    assert int(other.network.get_buffer("count")) == 3
    assert int(other.averaged_weights()["count"]) == 3
    assert os.listdir(tmp_path) == ["000000000000.safetensors"]
