"""Students on a real GPU compared with the same ones on a CPU: teachers in bfloat16, steps compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, Store
from atoll.distill.plan import student_plan
from atoll.distill.stage import Teachers, distill
from atoll.training.resources import Resources
from killed import finish, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: NOT TESTED HERE")

IMAGES, BATCH = 1024, 64
PLAIN = {"compile": "none", "precision": "float32"}


def rows_of(student: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in Artifact.open(student, "expert").read("metrics.jsonl").splitlines()]


def distilled(
    run: Path, out: Path, device: str, settings: Mapping[str, str], **changes: object
) -> list[dict[str, float]]:
    """Rows of metrics of an unbroken student."""
    store = Store.at(run)
    plan = student_plan(Teachers.of(store).orders)
    training = plan.training.over(IMAGES).model_copy(update={"batch": BATCH})
    distill(
        store,
        out,
        plan.model_copy(update={"training": training, **changes}),
        resources=Resources(device, settings=settings),
    )
    return rows_of(out)


@pytest.mark.parametrize("settings", [PLAIN, {}], ids=["plain", "as chosen"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"samples": 64, "steps": 4, "prompts": ("a handwritten one", "a handwritten two")}],
    ids=["data", "samples"],
)
def test_it_learns_what_it_learns_on_a_cpu(
    changes: dict[str, object], settings: dict[str, str], tiny_demo: Path, tmp_path: Path
) -> None:
    """From teachers of two objectives; on the data, and on images that they generated."""
    here = distilled(tiny_demo, tmp_path / "here", "cpu", {}, **changes)
    there = distilled(tiny_demo, tmp_path / "there", "cuda", settings, **changes)
    assert [row["images"] for row in there] == [row["images"] for row in here]
    for row, expected in zip(there, here, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-2), "teachers predict in bfloat16"
        assert ("val_loss" in row) == ("val_loss" in expected)
        if "val_loss" in row:
            assert row["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-2)


def test_killed_and_gone_on_with_it_has_seen_the_same(tiny_demo: Path, tmp_path: Path) -> None:
    """In the memory of a small card."""
    command = ["distill", str(tiny_demo), "--device", "cuda", "--memory", "4GB", "--checkpoint-seconds", "0"]
    command += ["--set", f"training.images={IMAGES}", "--set", f"training.batch={BATCH}", "--out"]
    finish([*command, "unbroken"], tmp_path)
    process = start([*command, "broken"], tmp_path)
    state = tmp_path / "broken" / "state"
    while process.is_alive() and not list(state.glob("*.safetensors")):
        process.join(0.002)
    process.kill()
    process.join()
    assert not (tmp_path / "broken" / "manifest.json").exists(), "it ended before it could be killed"
    finish([*command, "broken"], tmp_path)
    rows, unbroken = rows_of(tmp_path / "broken"), rows_of(tmp_path / "unbroken")
    assert [row["images"] for row in rows] == [row["images"] for row in unbroken]
    # on other images, or with other noise, every row's loss would differ by percents
    for row, expected in zip(rows, unbroken, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-3)
