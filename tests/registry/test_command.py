"""atoll ensemble at the command line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from atoll.artifacts import Store
from atoll.cli import main, progress
from atoll.registry.changes import begun, change_ensemble
from atoll.registry.versions import open_ensemble


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.console, "width", 160)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["ensemble", *arguments])
    return capsys.readouterr().out


def test_it_shows_every_expert_and_the_whole_story(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, str(run))
    version = open_ensemble(Store.at(run))
    for member in version.experts:
        assert member.val_loss is not None
        words = [str(member.cluster), member.name, member.objective, f"{member.val_loss.inside:.4f}", "yes"]
        assert re.search(" .*".join(words), shown)
    assert len(re.findall(r"\byes\b", shown)) == 8
    assert "version 10" in shown
    assert "top-2 on linear-flow" in shown
    assert [int(n) for n in re.findall(r"^ +(\d+)  20\d\d-", shown, re.MULTILINE)] == list(range(10, 0, -1))
    earlier = told(capsys, str(run), "2")
    assert "version 2" in earlier
    assert earlier.count("none yet") == 8  # seven clusters and the router


def test_each_change_is_a_version_and_can_be_undone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = open_ensemble(Store.at(run))
    name = first.serving[3].name
    assert "version 11" in told(capsys, str(run), "--remove", "3")
    assert open_ensemble(Store.at(run)).empty_clusters() == [3]
    assert "version 12" in told(capsys, str(run), "--use", name)
    assert "version 13" in told(capsys, str(run), "--route", "top-1")
    assert "nothing to do" in told(capsys, str(run), "--route", "top-1")
    assert "back to version 12" in told(capsys, str(run), "--rollback")
    assert "nothing to do" in told(capsys, str(run), "--rollback", "10")
    assert "back to version 11" in told(capsys, str(run), "--rollback", "11")
    assert open_ensemble(Store.at(run)).empty_clusters() == [3]
    assert "back to version 10" in told(capsys, str(run), "--rollback", "10")
    assert open_ensemble(Store.at(run)).model_digest() == first.model_digest()
    assert open_ensemble(Store.at(run)).version == 16


MISTAKES = {
    "unknown expert": (["--use", "77-"], r"--use 77-: no such expert was admitted; .* has 00-.*, 07-"),
    "unknown cluster": (["--remove", "8"], r"--remove 8: no such cluster; they are 0 to 7"),
    "unknown route": (["--route", "best"], r"unknown route 'best': use full, top-K"),
    "unknown version": (["--rollback", "77"], r"--rollback 77: .* has no such version .*; there are 1, 2, .*9$"),
    "version to show": (["77"], r"77: .* has no such version .*; there are 1, .*10$"),
    "two changes": (["--remove", "3", "--route", "full"], r"--remove and --route: one change at a time"),
    "change of the past": (["4", "--remove", "3"], r"--remove: changes the newest version; leave out 4"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_what_is_possible(
    mistake: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = MISTAKES[mistake]
    with pytest.raises(SystemExit) as exit_:
        main(["ensemble", str(run), *arguments])
    assert exit_.value.code == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    assert re.search(words, line), line
    assert open_ensemble(Store.at(run)).version == 10


def test_a_strangers_words_reach_the_terminal_as_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A license is free text from a card; here the card has gone, so that nothing contradicts it."""
    store = Store.at(run)
    member = open_ensemble(store).serving[0]
    shutil.rmtree(run / member.path)
    forged = member.model_copy(update={"license": "[red]\x1b[2Jadmitted\nall[/nope]"})
    change_ensemble(store, lambda now: begun(store, now).with_expert(forged), "told \x1b[31m")
    shown = told(capsys, str(run))
    assert "\x1b" not in shown
    assert "[red]?[2Jadmitted?all[/nope]" in "".join(shown.split())
    assert "is missing" in shown


def test_on_a_narrow_terminal_names_are_whole(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.console, "width", 80)
    shown = told(capsys, str(run))
    assert all(member.name in shown for member in open_ensemble(Store.at(run)).experts)
    assert max(map(len, shown.splitlines()[1:])) <= 80


def test_a_long_history_is_cut_short(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        main(["ensemble", str(run), "--route", f"top-{number + 3}"])
    capsys.readouterr()
    assert "and 2 older ones, in ensemble/" in told(capsys, str(run))
