"""What the report and the tables show of a run."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from atoll.artifacts import Artifact, Store
from atoll.cli import tables
from atoll.evaluation.evaluate import EvaluationPlan, evaluate
from atoll.evaluation.report import write_report
from atoll.evaluation.scores import SCORES, Estimate, Sets, score
from atoll.evaluation.scores.estimate import mean_of
from atoll.sampling import Sampling


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the command line prints."""
    stream = io.StringIO()
    monkeypatch.setattr(tables, "console", Console(file=stream, width=150))
    return stream


def test_a_new_score_is_one_function_and_every_result_has_it(
    tiny_demo: Path, tmp_path: Path, shown: io.StringIO
) -> None:
    """As a file in scores/ would put it on the list; of features and of images."""

    @score("mean_length", format=".4f")
    def mean_length(sets: Sets) -> Estimate:
        """How long a vector of features is."""
        return mean_of(sets.features.norm(dim=1))

    @score("brightness")
    def brightness(sets: Sets) -> float | None:
        return None if sets.images is None else sets.images[:].float().mean().item()

    before = json.loads((tiny_demo / "evaluation.json").read_bytes())
    shutil.copytree(tiny_demo / "samples", tmp_path / "samples")
    try:
        made = evaluate(Store.at(tiny_demo), EvaluationPlan(**before["plan"]), Store.at(tmp_path))
        write_report(Store.at(tiny_demo), made, Store.at(tmp_path))
        tables.print_evaluation(made)
    finally:
        del SCORES["mean_length"], SCORES["brightness"]
    html = (tmp_path / "report.html").read_text()
    assert "<th>mean length</th>" in html
    assert "How long a vector of features is." in html
    assert "brightness" in shown.getvalue()
    for row, old in zip(made["configurations"], before["configurations"], strict=True):
        assert row["samples"] == old["samples"], "sampled once"
        scores = dict(row["scores"]["pixels"])
        length, bright = scores.pop("mean_length"), scores.pop("brightness")
        assert scores == old["scores"]["pixels"]
        assert 0 < length["low"] < length["value"] < length["high"]
        assert f"<td>{length['value']:.4f} \u00b1 {(length['high'] - length['low']) / 2:.2g}</td>" in html
        assert bright["value"] > 0
        assert bright["low"] is None


def test_seeds_give_a_mean_and_an_interval(tiny_demo: Path, tmp_path: Path) -> None:
    first = EvaluationPlan(**json.loads((tiny_demo / "evaluation.json").read_bytes())["plan"])
    first = first.model_copy(update={"configurations": first.configurations[:1]})
    apart = [
        evaluate(Store.at(tiny_demo), first.model_copy(update={"seed": seed}), Store.at(tmp_path / str(seed)))
        for seed in (0, 40, 80)
    ]
    together = evaluate(Store.at(tiny_demo), first.model_copy(update={"seeds": 3}), Store.at(tmp_path / "all"))
    values = torch.tensor([one["configurations"][0]["scores"]["pixels"]["fd"]["value"] for one in apart])
    (row,) = together["configurations"]
    assert row["samples"] == [one["configurations"][0]["samples"][0] for one in apart]
    found = row["scores"]["pixels"]["fd"]
    assert found["value"] == pytest.approx(values.mean().item())
    half = 4.303 * values.std().item() / 3**0.5  # Student's, two degrees of freedom
    assert (found["low"], found["high"]) == pytest.approx((found["value"] - half, found["value"] + half), rel=1e-3)


def test_every_number_is_kept_with_what_it_depends_on(tiny_demo: Path) -> None:
    evaluation = json.loads((tiny_demo / "evaluation.json").read_bytes())
    assert (evaluation["features"], evaluation["lpips"]) == (["pixels"], None)
    assert evaluation["data"] == Artifact.open(tiny_demo / "data").digest
    for row in evaluation["configurations"]:
        scores = row["scores"]["pixels"]
        assert set(scores) == {"class_accuracy", "fd", "kid", "precision", "recall", "diversity", "nearest"}
        for name, one in scores.items():
            assert name == "recall" or one["low"] <= one["value"] <= one["high"], name
        assert Sampling(**row["sampling"]).precision == "float32"


def test_a_score_without_a_number_has_no_column(tiny_demo: Path, tmp_path: Path, shown: io.StringIO) -> None:
    """As after `evaluate` on data without labels."""
    evaluation = json.loads((tiny_demo / "evaluation.json").read_bytes())
    for row in [*evaluation["configurations"], evaluation]:
        del row.get("scores", row.get("real"))["pixels"]["class_accuracy"]
    evaluation["chance"] = None
    tables.print_evaluation(evaluation)
    assert "FD" in shown.getvalue()
    assert "lass accuracy" not in shown.getvalue()
    shutil.copytree(tiny_demo / "samples", tmp_path / "samples")
    write_report(Store.at(tiny_demo), evaluation, Store.at(tmp_path))
    html = (tmp_path / "report.html").read_text()
    assert "<th>class accuracy</th>" not in html
    assert "<th>FD</th>" in html


def test_experts_that_began_with_others_are_named(late: Path) -> None:
    """After data added later some experts have grown from older ones."""
    html = (late / "runs" / "digits" / "report.html").read_text()
    found = re.findall("initialized from ([^<\\s]*)", html)
    assert found
    assert all(re.fullmatch("0[0-9]-[0-9a-f]{12}", name) for name in found)
