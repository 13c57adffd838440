"""One file out of many sources: free of atoll, and run once."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from atoll.convert.bundle import bundle, load, modules

ALLOWED = {"torch", "numpy", "safetensors", "diffusers"} | sys.stdlib_module_names


def test_it_imports_nothing_of_atoll_and_nothing_that_diffusers_does_not_bring(tmp_path: Path) -> None:
    from diffusers.utils.dynamic_modules_utils import get_relative_imports

    made = bundle(1)
    for text in (made.text, *modules().values()):
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= ALLOWED
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] in ALLOWED
    path = tmp_path / f"{made.name}.py"
    path.write_text(made.text)
    assert get_relative_imports(path) == [], "diffusers reads imports by a pattern, also out of strings"
    words = re.findall(r"^\s*(?:import|from)\s+([\w.]+)", made.text, flags=re.MULTILINE)
    assert {word.partition(".")[0] for word in words} <= ALLOWED


def test_a_second_run_of_the_file_changes_no_class() -> None:
    """diffusers runs it once for the pipeline and once more for every component."""
    module = load(bundle(2))
    before = module.AtollExpert, module.AtollScheduler, module.pipeline
    assert module.__spec__ is not None
    module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    assert (module.AtollExpert, module.AtollScheduler, module.pipeline) == before
    assert load(bundle(2)) is module
    assert module.AtollExpert.forward.__code__.co_filename.endswith("/convert/pipeline.py"), "tracebacks name it"
