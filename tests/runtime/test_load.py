"""A real run that has lost experts: it paints on, says so, and is another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import atoll
from atoll.artifacts import UserError
from atoll.cli import main
from atoll.mixture.missing import ExpertsMissing

PAINT = ["--prompt", "a handwritten one", "-n", "4", "--steps", "2"]


@pytest.fixture
def run(tiny_demo: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_demo, tmp_path / "run", ignore=shutil.ignore_patterns("islands", "samples")))


def expert_of(run: Path, cluster: int) -> Path:
    (folder,) = (run / "contributions").glob(f"{cluster:02d}-*")
    return folder


def lose(run: Path, cluster: int, how: str) -> None:
    folder = expert_of(run, cluster)
    if how == "gone":
        shutil.rmtree(folder)
    elif how == "unfinished":
        (folder / "manifest.json").unlink()
    else:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")


REASONS = {"gone": "03-", "unfinished": "no finished expert", "damaged": "corrupt"}


@pytest.mark.parametrize("how", REASONS)
@pytest.mark.parametrize("weights", ["own", "conditional"])
def test_it_paints_on_and_says_so(
    how: str, weights: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(run, 3, how)
    main(["sample", str(run), *PAINT, "--guidance-weights", weights, "--out", str(tmp_path / "s")])
    told = capsys.readouterr().err
    assert "sampling without the expert of cluster 3 (" in told
    assert REASONS[how] in told
    assert told.count("\n") == 1
    record = json.loads((tmp_path / "s" / "calls" / "0001" / "samples.json").read_bytes())
    assert record["missing"] == [3]
    assert all(shares[3] == 0 for shares in record["experts_at_time"])
    assert sum(record["experts_at_time"][0]) == pytest.approx(1)


def test_python_is_warned_and_the_model_is_another(run: Path, tiny_demo: Path) -> None:
    whole = atoll.load(str(run))
    assert whole.missing == {}
    lose(run, 3, "gone")
    lose(run, 5, "damaged")
    with pytest.warns(ExpertsMissing, match=r"cluster 3 .*; cluster 5 .*: the other 6 are weighted up"):
        model = atoll.load(str(run))
    assert sorted(model.missing) == [3, 5]
    assert model.digest != whole.digest
    (image,) = model.generate(["a handwritten three"], steps=2, route="top-2")
    assert image.size == (8, 8)


def test_another_expert_in_its_place_is_not_used(run: Path) -> None:
    place = expert_of(run, 3)
    shutil.rmtree(place)
    shutil.copytree(expert_of(run, 4), place)
    with pytest.warns(ExpertsMissing, match=r"cluster 3 \(.*: is not the expert that the model names"):
        assert list(atoll.load(str(run)).missing) == [3]


def test_with_nobody_there_is_one_line(run: Path) -> None:
    shutil.rmtree(run / "contributions")
    with pytest.raises(UserError, match="has no expert") as caught:
        atoll.load(str(run))
    assert "\n" not in str(caught.value)


def test_it_is_evaluated_and_reported_without_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lose(run, 0, "gone")
    main(["evaluate", str(run), "-n", "20", "--steps", "2", "--route", "top-1"])
    told = capsys.readouterr()
    assert told.err.count("sampling without the expert of cluster 0") == 1
    (row,) = json.loads((run / "evaluation.json").read_bytes())["configurations"]
    assert row["missing"] == [0]
    html = (run / "report.html").read_text()
    assert "Sampled without an expert for cluster 0." in html
    assert "0: missing" in html
