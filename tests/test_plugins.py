"""Plugins: a source in a file of the user's own, through the real command and in its worker processes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from atoll import plugins
from atoll.artifacts import Artifact, UserError
from atoll.plugins import load_plugins
from image_forms import folder, pictures
from runs import atoll

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _no_plugin_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process would send the plugins loaded here to their workers."""
    monkeypatch.setattr(plugins, "_loaded", {})


def test_a_source_of_forty_lines_is_prepared_by_two_workers(tmp_path: Path) -> None:
    items = pictures(30)
    with closing(sqlite3.connect(tmp_path / "photos.sqlite")) as file, file:
        file.execute("CREATE TABLE images (image BLOB, caption TEXT, label INTEGER)")
        file.executemany("INSERT INTO images VALUES (?, ?, ?)", [(i.content, i.caption, i.label) for i in items])
        file.execute("INSERT INTO images VALUES (NULL, 'nothing', 0)")
    plugin = EXAMPLES / "sqlite_source.py"
    settings = ["--size", "16", "--features", "pixels", "--workers", "2"]
    atoll("prepare", tmp_path / "photos.sqlite", "--plugin", plugin, "--out", tmp_path / "data", *settings)
    atoll("prepare", folder(tmp_path / "photos", items), "--out", tmp_path / "same", *settings)
    made, same = Artifact.open(tmp_path / "data"), Artifact.open(tmp_path / "same")
    assert {key: made.config[key] for key in ("count", "splits", "labels", "text")} == {
        key: same.config[key] for key in ("count", "splits", "labels", "text")
    }
    assert made.config["skipped"] == {"no image bytes": 1}
    provenance = json.loads((tmp_path / "data" / "provenance.json").read_bytes())
    assert provenance["plugins"] == {str(plugin): hashlib.sha256(plugin.read_bytes()).hexdigest()}


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (None, "cannot be read"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("1 +", "SyntaxError"),
        ("from atoll.data.sources import *\nsource('folder')(Source)", "source folder: is registered already"),
    ],
)
def test_a_plugin_that_does_not_load_is_one_line(code: str | None, line: str, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    if code is not None:
        plugin.write_text(code)
    with pytest.raises(UserError, match=line) as caught:
        load_plugins({str(plugin): None})
    assert "\n" not in str(caught.value)


def test_a_plugin_is_run_once_and_must_not_change(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")
    load_plugins({str(plugin): None})
    load_plugins({str(plugin): hashlib.sha256(plugin.read_bytes()).hexdigest()})
    assert (tmp_path / "runs").read_text() == "x"
    with pytest.raises(UserError, match="differs between machines"):
        load_plugins({str(plugin): "0" * 64} if plugin.write_text("pass") else {})
    other = tmp_path / "other.py"
    other.write_text("pass")
    with pytest.raises(UserError, match="differs between machines"):
        load_plugins({str(other): "0" * 64})
