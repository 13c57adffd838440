"""The report says what is true of this run: who began from whom, what a distance means, which columns are there."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from atoll.artifacts import Artifact, Store
from atoll.cli import tables
from atoll.evaluation.evaluate import EvaluationPlan, evaluate
from atoll.evaluation.report import nearness_said, write_report
from atoll.evaluation.scores import SCORES, Sets, score
from atoll.evaluation.scores.estimate import mean_of
from atoll.sampling import Sampling


def test_a_new_score_is_one_function_and_every_result_has_it(tiny_demo: Path, tmp_path: Path) -> None:
    """As a file in scores/ would put it on the list."""

    @score("toy", written={"mean_length": ".4f"})
    def toy(sets: Sets) -> dict[str, float]:
        """How long a vector of features is."""
        return {"mean_length": mean_of(sets.features.norm(dim=1)), "how_many": float(len(sets.features))}

    before = json.loads((tiny_demo / "evaluation.json").read_bytes())
    shutil.copytree(tiny_demo / "samples", tmp_path / "samples")
    shown = io.StringIO()
    try:
        made = evaluate(Store.at(tiny_demo), EvaluationPlan(**before["plan"]), Store.at(tmp_path))
        write_report(Store.at(tiny_demo), made, Store.at(tmp_path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "console", Console(file=shown, width=120))
            tables.print_evaluation(made)
    finally:
        del SCORES["toy"]
    arms = json.loads((tmp_path / "evaluation.json").read_bytes())["arms"]
    assert [arm["samples"] for arm in arms] == [arm["samples"] for arm in before["arms"]], "painted once"
    html = (tmp_path / "report.html").read_text()
    assert "<th>mean length</th>" in html
    assert "How long a vector of features is." in html
    assert "how many" in shown.getvalue()
    for arm, old in zip(arms, before["arms"], strict=True):
        assert arm["scores"]["how_many"] == 40
        low, high = arm["intervals"]["mean_length"]
        assert 0 < low < arm["scores"]["mean_length"] < high
        assert f"<td>{arm['scores']['mean_length']:.4f} \u00b1 {(high - low) / 2:.2g}</td>" in html
        assert "how_many" not in arm["intervals"]
        assert {**arm["scores"], "mean_length": 0, "how_many": 0} == {**old["scores"], "mean_length": 0, "how_many": 0}


def test_every_number_is_kept_with_what_it_was_measured_by(tiny_demo: Path) -> None:
    evaluation = json.loads((tiny_demo / "evaluation.json").read_bytes())
    data, partition = (Artifact.open(tiny_demo / name) for name in ("data", "partition"))
    for arm in evaluation["arms"]:
        basis = arm["basis"]
        assert (basis["count"], basis["seeds"], basis["extractor"]) == (40, [0, 39], "pixels")
        assert (basis["data"], basis["partition"]) == (data.digest, partition.digest)
        assert basis["against"]["frechet"] == data.config["count"]
        assert basis["lpips"] is None
        for name, (low, high) in arm["intervals"].items():
            assert low <= {**arm, **arm["scores"]}[name] <= high, name
        assert {"recognised", "kernel", "precision", "recall", "diversity", "nearest_median"} == arm["intervals"].keys()
        assert Sampling(**arm["sampling"]).route == arm["route"]


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
    assert "recognised" in shown.getvalue()
    for arm in evaluation["arms"]:
        arm["recognised"] = None
        arm["clusters"] = [{**row, "recognised": None} for row in arm["clusters"]]
    shown.truncate(0)
    tables.print_evaluation(evaluation)
    assert "recognised" not in shown.getvalue()
    shutil.copytree(tiny_demo / "samples", tmp_path / "samples")
    write_report(Store.at(tiny_demo), evaluation, Store.at(tmp_path))
    html = (tmp_path / "report.html").read_text()
    assert "recognised as asked" not in html
    assert "Frechet distance</th>" in html
