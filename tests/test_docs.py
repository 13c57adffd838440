"""What the documentation lists is what there is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from atoll.artifacts import Store
from atoll.cli import main
from atoll.registry.status import stages
from atoll.registry.versions import Newest, read_version
from atoll.sampling import Sampling
from atoll.training.compute import ComputeConfig
from late_story import small, story, tell
from pages import DOCS
from runs import scores_in, versions_of


def test_training_md_lists_every_setting_of_an_execution() -> None:
    expected = [row_of(name) for name in ComputeConfig.model_fields]
    assert rows_below("training.md", "| setting |") == expected, "docs/training.md should have\n" + "\n".join(expected)


def test_sampling_md_lists_every_field_of_sampling() -> None:
    expected = [
        f"| `{each.name}` | {'none' if each.default is None else each.default} | {each.metadata['help']} |"
        for each in fields(Sampling)
    ]
    assert rows_below("sampling.md", "| field |") == expected, "docs/sampling.md should have\n" + "\n".join(expected)


def rows_below(page: str, head: str) -> list[str]:
    """The rows of the table that begins with this."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(head)) + 2
    return lines[start : next(n for n in range(start, len(lines)) if not lines[n].startswith("|"))]


def row_of(name: str) -> str:
    field = ComputeConfig.model_fields[name]
    default = "none" if field.default is None else field.default
    values = "a number" if field.annotation in (int, int | None) else "a name"
    if get_origin(field.annotation) is Literal:
        values = ", ".join(get_args(field.annotation))
    return f"| `{name}` | {default} | {values} | {field.description} |"


def test_the_story_of_late_data_goes_as_it_is_told(late: Path) -> None:
    """Old experts stay, new ones join, and everything works on the newest."""
    run = Store.at(late / "runs" / "digits")
    told = [version.change for version in reversed(versions_of(run))]
    moved = told.index("grew onto partition-2")
    version = Newest.of(run).version
    assert version is not None
    assert (version.data.path, version.partition.path) == ("data-2", "partition-2")
    assert [reference.path for reference in version.orders] == ["orders", "orders-2", "orders-3"]
    assert version.router is not None
    assert version.router.path == "router-2"
    before = read_version(run, moved)  # numbers begin with one
    assert {m.digest for m in before.experts} < {m.digest for m in version.experts}
    assert [m.cluster for m in version.experts] == [0, 0, 1, 1, 2, 2, 3]
    assert [m.cluster for m in version.serving] == [0, 1, 2, 3]
    stayed = [m.cluster for m in version.serving if m.digest in {m.digest for m in before.experts}]
    assert 3 in stayed  # no new order was for it
    assert all(stage.digest for stage in stages(run)), "nothing is missing"
    evaluation = json.loads(run.read("evaluation.json"))
    assert evaluation["data"] == version.data.digest


def test_every_command_of_the_story_can_be_given_twice(late: Path) -> None:
    """Whatever has come since: each finds its work done, and no version is written.

    But for --reissue: once its expert is admitted, the same words ask to train that one on.
    """
    run = late / "runs" / "digits"
    before = sorted(p.relative_to(late) for p in late.rglob("*") if "samples" not in p.parts)
    again = [small(line) for line in story() if "evaluate" not in line and "--reissue" not in line]
    again = [words for words in again if words != small("atoll router runs/digits")]  # the first is now the second
    tell([*again, ["router", "runs/digits", "--device", "cpu"]], late)
    assert sorted(p.relative_to(late) for p in late.rglob("*") if "samples" not in p.parts) == before
    assert len(list((run / "ensemble").iterdir())) == Newest.of(Store.at(run)).next_number - 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_late_digits_are_recognised_as_before_or_better(tmp_path: Path) -> None:
    """1,500 digits, then 297: the story as it stands. A share of 97 % of 1,000 is known to about half a point."""
    lines = story()
    ends = [n for n, line in enumerate(lines) if line.startswith("atoll evaluate")]
    tell([shlex.split(line)[1:] for line in lines[: ends[0] + 1]], tmp_path)
    run = tmp_path / "runs" / "digits"
    (before,) = scores_in(run, "class_accuracy")
    tell([shlex.split(line)[1:] for line in lines[ends[0] + 1 : ends[1] + 1]], tmp_path)
    (after,) = scores_in(run, "class_accuracy")
    assert after >= before - 0.01
    assert after > 0.95
    version = Newest.of(Store.at(run)).version
    assert version is not None
    errors = {m.serving: m.val_loss.inside for m in version.experts if m.cluster == 0 and m.val_loss is not None}
    assert errors[True] < errors[False], "what it was trained on for has made the expert better on the newest holdout"


def test_every_command_of_ensemble_md_does_what_it_says(
    tiny_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other on a demo: each writes a version, and the last brings back the tenth."""
    run = Path(shutil.copytree(tiny_demo, tmp_path / "demo"))
    commands = re.findall(
        r"^atoll (ensemble runs/demo.*?)(?:  #.*)?$", (DOCS / "ensemble.md").read_text(), re.MULTILINE
    )
    assert len(commands) == 7
    for command in commands:
        main(shlex.split(command.replace("runs/demo", str(run))))
    told = capsys.readouterr().out
    assert len(list((run / "ensemble").iterdir())) == 15
    for words in ("route top-1", "no expert serves cluster 3", "serves cluster 3", "to version 12", "to version 10"):
        assert words in told
    kept = [json.loads((run / "ensemble" / name).read_bytes()) for name in ("000010.json", "000015.json")]
    for content in kept:
        for told_of in ("digest", "version", "predecessor", "change"):
            del content[told_of]
    assert kept[0] == kept[1]
