"""Whatever happens to the JSON files of a run: it is refused in one line, or nobody can see it in what is painted."""

from __future__ import annotations

import os
import resource
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch
from mutations import Mutator
from torch import Tensor

from atoll.artifacts import Store, UserError
from atoll.model import load
from atoll.registry.changes import set_route
from atoll.sampling import Sampling

SECONDS = 20.0  # for one load and two images, on a machine that has other things to do
OUTCOMES = ("refused", "told", "no effect")
MEGABYTES = 600  # more than an unharmed run needs


def painted(run: Path) -> tuple[str, Tensor]:
    """The model's digest and what it paints: two steps are enough to tell any two models apart."""
    model = load(str(run), device="cpu")
    seeds = [0, 1]
    prompts = ["a handwritten three", "a handwritten eight"]
    return model.digest, model.latents(prompts, seeds, Sampling(steps=2, guidance=2.0))


def outcome(run: Path, expected: tuple[str, Tensor]) -> str:
    """What came of a damaged run: refused, told (a warning in one line) or nothing; anything else is raised."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            digest, latents = painted(run)
        except UserError as error:
            return "refused" if is_a_line(str(error)) else f"not one line: {error}"
    ours = [w for w in told if w.category.__module__.startswith("atoll.")]
    if ours:
        assert all(is_a_line(str(w.message)) for w in ours)
        return "told"
    assert digest == expected[0], "another model in silence"
    assert torch.equal(latents, expected[1]), "another painting in silence"
    return "no effect"


def is_a_line(text: str) -> bool:
    return text.isprintable() and 0 < len(text) < 1000


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_mutation_changes_what_is_painted_in_silence(count: int, tiny_demo: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_demo, tmp_path / "run", copy_function=os.link))
    for route in ("full", "top-1"):  # so that without the last version, or the one before it, the model is another
        set_route(Store.at(run), route)
    files = [path for path in run.rglob("*.json") if path.is_file()]
    assert {"000012.json", "ensemble.json", "manifest.json", "expert.json", "router.json", "00.json"} <= {
        path.name for path in files
    }
    expected = painted(run)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mutator = Mutator(count, files)
    counts = dict.fromkeys(OUTCOMES, 0)
    for number in range(count):
        path, how, data = mutator.draw()
        unharmed = path.read_bytes()
        path.unlink()  # it is another name of the demo's own file
        path.write_bytes(data)
        began = time.monotonic()
        try:
            what = outcome(run, expected)
        except Exception as error:
            raise AssertionError(f"mutation {number}: {how} of {path.relative_to(run)}: {data[:300]!r}") from error
        finally:
            path.write_bytes(unharmed)
        assert time.monotonic() - began < SECONDS, f"mutation {number}: {how} of {path.relative_to(run)}"
        assert what in OUTCOMES, f"mutation {number}: {how} of {path.relative_to(run)}"
        counts[what] += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES
    assert counts["refused"] > count / 10, counts
    assert counts["told"] > 0, counts
    assert torch.equal(painted(run)[1], expected[1]), "the run itself is unharmed"
    print(f"{count} mutations: {counts}, {grown:.0f} MB more memory")
