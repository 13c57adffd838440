"""The walls of DESIGN section 5: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "atoll"
ROOMS = sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists())


def rooms_imported_by(file: Path) -> set[str]:
    """Names of atoll's rooms that a source file imports, anywhere in it (lazy imports count)."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts  # atoll, room, module
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(parts[: -node.level]) if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            modules = [stem, *[f"{stem}.{alias.name}" for alias in node.names]]
        else:
            continue
        found |= {m.split(".")[1] for m in modules if m.startswith("atoll.")}
    return found & ({*ROOMS} | {"model", "demo"})


def imports_of(room: str) -> set[str]:
    files = list((PACKAGE / room).rglob("*.py"))
    assert files, f"no such room: {room}"
    return set().union(*(rooms_imported_by(file) for file in files)) - {room}


def test_the_reader_sees_relative_absolute_and_lazy_imports(tmp_path: Path) -> None:
    assert "artifacts" in imports_of("islands")
    assert rooms_imported_by(PACKAGE / "islands" / "order.py") >= {"artifacts", "data", "models", "process"}


@pytest.mark.parametrize("room", ["process", "artifacts"])
def test_the_foundations_import_nothing_of_ours(room: str) -> None:
    assert imports_of(room) == set()


def test_process_imports_torch_only() -> None:
    allowed = {"torch", "math", "dataclasses", "typing", "enum", "functools", "collections", "__future__"}
    for file in (PACKAGE / "process").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert {a.name.split(".")[0] for a in node.names} <= allowed, file
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] in allowed, file


def test_islands_know_nothing_of_the_others() -> None:
    assert not imports_of("islands") & {"router", "ensemble", "exchange", "sampling", "serving"}


def test_sampling_sees_only_the_protocol() -> None:
    assert imports_of("sampling") <= {"process"}


def test_models_are_modules_only() -> None:
    assert imports_of("models") <= {"process", "artifacts"}


@pytest.mark.parametrize("room", [r for r in ROOMS if r != "cli"])
def test_nothing_imports_the_command_line(room: str) -> None:
    assert "cli" not in imports_of(room)


def test_there_is_no_junk_drawer() -> None:
    assert not [p for p in PACKAGE.rglob("*.py") if p.stem in ("utils", "util", "helpers", "common", "misc")]
