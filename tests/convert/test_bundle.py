"""One file out of many sources: made of them, changing with them, and running without them."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.convert import bundle as bundling
from atoll.convert.bundle import Bundle, bundle, load

ALLOWED = {"torch", "numpy", "safetensors", "diffusers"} | sys.stdlib_module_names


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of our sources that bundles are made of in this test."""
    copy = tmp_path / "atoll"
    shutil.copytree(bundling.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(bundling, "PACKAGE", copy)
    bundling.collected.cache_clear()
    yield copy
    bundling.collected.cache_clear()


def changed(file: Path, old: str, new: str) -> Bundle:
    """The bundle after a change of one source."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    bundling.collected.cache_clear()
    made = bundle(2)
    file.write_text(text)
    return made


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("process/bridge.py", "y = scaled(x, scale)", "y = scaled(x, scale * 2)"),
        ("models/dit.py", "NORM_EPS = 1e-6", "NORM_EPS = 1e-3"),
        ("convert/pipeline.py", '"""Generate images.', '"""Generate pictures.'),
    ],
)
def test_it_is_made_of_our_sources_and_changes_with_them(sources: Path, file: str, old: str, new: str) -> None:
    plain, other = bundle(2), changed(sources / file, old, new)
    assert plain.text.replace(old, new) == other.text
    assert other.name != plain.name, "other code has another name, since diffusers keeps all code in one place"


def test_what_the_pipeline_does_not_need_is_not_in_it(sources: Path) -> None:
    plain = bundle(2)
    assert "PaperFusion" not in plain.text
    assert changed(sources / "process" / "bridge.py", "Our reading of HDDM's", "A reading of HDDM's") == plain


def test_it_imports_nothing_of_atoll_and_nothing_that_diffusers_does_not_bring(tmp_path: Path) -> None:
    from diffusers.utils.dynamic_modules_utils import get_relative_imports

    made = bundle(1)
    imported = set()
    for node in ast.walk(ast.parse(made.text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
    assert imported <= ALLOWED
    path = tmp_path / f"{made.name}.py"
    path.write_text(made.text)
    assert get_relative_imports(path) == [], "diffusers reads imports by a pattern, also out of docstrings"
    words = re.findall(r"^\s*(?:import|from)\s+([\w.]+)", made.text, flags=re.MULTILINE)
    assert {word.partition(".")[0] for word in words} - ALLOWED <= {"the"}, "it tries to import what looks like one"


def test_every_name_in_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "bundle.py"
    path.write_text(bundle(2).text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,F811,F823", path]
    found = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_a_second_run_of_the_file_changes_no_class() -> None:
    """diffusers runs it once for the pipeline and once more for every component."""
    module = load(bundle(2))
    before = module.AtollExpert, module.Kind, module.Bridge
    assert module.__spec__ is not None
    module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    assert (module.AtollExpert, module.Kind, module.Bridge) == before
    assert load(bundle(2)) is module


def package(folder: Path, **modules: str) -> Path:
    """A little package called atoll, to bundle `convert.pipeline` of."""
    for name, text in modules.items():
        file = folder / "atoll" / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "atoll"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def collect(**modules: str) -> str:
        monkeypatch.setattr(bundling, "PACKAGE", package(tmp_path, **modules))
        return bundling.collected.__wrapped__(bundling.START)

    return collect


def run(text: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(text, "bundle", "exec"), names)
    return names


def test_equal_names_of_two_modules_stay_apart(small) -> None:  # type: ignore[no-untyped-def]
    text = small(
        a="from math import tau\n\n\ndef shape():\n    return 'round'\n\n\ndef of_a():\n    return shape()\n",
        b="from .a import shape as first\n\n\n@staticmethod\ndef shape() -> str:\n    return 'not ' + first()\n",
        convert__pipeline="from ..a import of_a\nfrom ..b import shape\n\nboth = [of_a(), shape()]  # é\n",
    )
    assert run(text)["both"] == ["round", "not round"]
    assert "tau" not in text


def test_what_cannot_be_bundled_is_said(small) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError, match=r"atoll.a.card needs pydantic, which is not there without atoll"):
        small(
            a="import pydantic\n\n\ndef card():\n    return pydantic.BaseModel\n",
            convert__pipeline="from ..a import card\n\nuse = card\n",
        )
    with pytest.raises(AssertionError, match="neither a definition nor an import"):
        small(a="x = []\nx.append(1)\n", convert__pipeline="from ..a import x\n\nuse = x\n")
    with pytest.raises(AssertionError, match="imports nothing of ours by itself"):
        small(a="y = 1\n", convert__pipeline="def f():\n    from ..a import y\n\n    return y\n")
