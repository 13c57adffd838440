"""Images are sampled part by part: what is there stays when the command is killed, and the whole is the same."""

from __future__ import annotations

import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact
from atoll.evaluation.samples import StoredImages, read_samples
from atoll.mixture.record import Record
from atoll.sampling import Request, Sampling, Step
from killed import finish, start

SAMPLED = ["-n", "60", "--batch", "8", "--steps", "3", "--route", "top-1"]


@pytest.fixture(scope="module")
def unbroken(tiny_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    finish(["evaluate", str(tiny_demo), *SAMPLED, "--out", "results"], folder)
    return folder / "results"


def wait_for(process: BaseProcess, folder: Path, pattern: str, count: int) -> list[Path]:
    """Files by a pattern, once so many are there."""
    while process.is_alive():
        if len(found := sorted(folder.glob(pattern))) >= count:
            return found
        time.sleep(0.001)
    raise AssertionError(
        f"it ended before there were {count} of {pattern}: {(folder / 'printed.txt').read_text()[-2000:]}"
    )


@pytest.mark.parametrize(
    ("moment", "count"),
    [("results/samples/.*.partial/images/0*.safetensors", 3), ("results/samples/top-*/manifest.json", 1)],
    ids=["sampling", "measuring"],
)
def test_killed_it_resumes_to_the_same_numbers(
    tiny_demo: Path, unbroken: Path, tmp_path: Path, moment: str, count: int
) -> None:
    command = ["evaluate", str(tiny_demo), *SAMPLED, "--out", "results"]
    process = start(command, tmp_path)
    there = wait_for(process, tmp_path, moment, count)
    stamps = {path: path.stat().st_mtime_ns for path in there}
    process.kill()
    process.join()
    assert not (tmp_path / "results/evaluation.json").exists(), "too late to be killed"
    finish(command, tmp_path)
    (folder,) = (tmp_path / "results/samples").glob("top-*")
    kept = {folder / "images" / path.name: stamp for path, stamp in stamps.items() if "partial" in str(path)}
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "what was there was not sampled again"
    names = ["evaluation.json", *(p.relative_to(unbroken).as_posix() for p in unbroken.glob("samples/*/[!p]*.*"))]
    names += [p.relative_to(unbroken).as_posix() for p in unbroken.glob("samples/*/images/*")]
    assert len(names) == 11
    for name in names:
        assert (tmp_path / "results" / name).read_bytes() == (unbroken / name).read_bytes(), name
    assert not list((tmp_path / "results/samples").glob(".*")), "nothing half done is left"


def test_images_are_read_where_they_lie(unbroken: Path) -> None:
    (place,) = unbroken.glob("samples/top-1*")
    images, record = read_samples(Artifact.open(place))
    stored = StoredImages(Artifact.open(place))
    assert stored.shape == images.shape == (60, 1, 8, 8)
    for index in (7, 8, 59, -1):
        assert torch.equal(stored[index], images[index])
    for part in (slice(8, 16), slice(5, 30), slice(50, 99), slice(None)):
        assert torch.equal(stored[part], images[part])
    assert len(record["expert_of_image"]) == 60


def test_a_record_in_parts_is_the_record_of_all() -> None:
    chosen = torch.rand(6, 2, 3, dtype=torch.float64)  # images, times, experts
    whole, parts = Record(6, 3), [Record(4, 3), Record(2, 3)]
    for n, time_ in enumerate((0.9, 0.4)):
        for record, first, last in ((parts[0], 0, 4), (parts[1], 4, 6)):
            some = chosen[first:last, n]
            for into, place in ((record, 0), (whole, first)):
                request = Request(range(last - first), None, Sampling(guidance=1.0), first=place)
                into.add(Step(request, n, time_, some, some, some, some))
    joined = Record.joined(part.tensors() for part in parts)
    assert joined.by_time() == whole.by_time()
    assert torch.equal(joined.by_image(), whole.by_image())
