"""The report says what is true of this run: who began from whom, what a distance means, which columns are there."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from atoll.artifacts import Store
from atoll.cli import tables
from atoll.evaluation.report import nearness_said, write_report


@pytest.mark.parametrize(
    ("nearest", "frechet", "said"),
    [
        (10.0, 30.0, ""),  # as far as real ones: new
        (4.0, 30.0, "look for copies"),
        (4.0, 3000.0, "more likely blurred than copied"),  # mush lies near to everything
        (30.0, 3000.0, "not copies, and not like the data either"),
    ],
)
def test_what_nearness_means_depends_on_how_good_the_images_are(nearest: float, frechet: float, said: str) -> None:
    sentence = nearness_said("top-1", {"frechet": frechet, "nearest_median": nearest}, real=10.0, floor=20.0)
    assert said in sentence
    assert bool(sentence) == bool(said)


def test_warm_starts_are_named(late: Path) -> None:
    """After late data three experts have grown from older ones."""
    html = (late / "runs" / "digits" / "report.html").read_text()
    assert "<h1>Painted by experts trained apart</h1>" in html
    assert "never exchanged a gradient, a weight" not in html
    found = re.search(r"Not all began with random weights: (.*?)\.</b>", html)
    assert found is not None
    told = found[1].split("; ")
    assert [line.split(" from ")[0] for line in told] == ["expert 0", "expert 3"]
    assert all(re.search(r"from 0[03]-[0-9a-f]{12}, an expert of its own cluster$", line) for line in told)


def test_experts_that_never_met_are_called_that(tiny_demo: Path) -> None:
    html = (tiny_demo / "report.html").read_text()
    assert "<h1>Painted by experts that never met</h1>" in html
    assert "never exchanged a gradient, a weight or a sample" in html
    assert "by chance it would be 10.0%" in html
    assert "demo --compare" not in html, "advice that is of no use in another run"
    assert html.count("t, from noise (1) to data (0)") >= 4, "every chart over t runs as images are painted"
    assert "from data (0)" not in html


def test_a_column_without_a_number_is_left_out(
    tiny_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `evaluate` on data without labels."""
    evaluation = json.loads((tiny_demo / "evaluation.json").read_bytes())
    shown = io.StringIO()
    monkeypatch.setattr(tables, "console", Console(file=shown, width=120))
    tables.print_evaluation(evaluation)
    assert "right" in shown.getvalue()
    for arm in evaluation["arms"]:
        arm["recognised"] = None
    shown.truncate(0)
    tables.print_evaluation(evaluation)
    assert "right" not in shown.getvalue()
    shutil.copytree(tiny_demo / "samples", tmp_path / "samples")
    write_report(Store.at(tiny_demo), evaluation, Store.at(tmp_path))
    html = (tmp_path / "report.html").read_text()
    assert "recognised as asked" not in html
    assert "Frechet distance</th>" in html
