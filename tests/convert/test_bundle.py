"""One file out of many sources: complete, free of atoll, and run once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from atoll.convert.bundle import bundle, load

ALLOWED = {"torch", "numpy", "safetensors", "diffusers"} | sys.stdlib_module_names


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
