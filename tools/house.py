"""Print the size of every package against DESIGN section 5, files that are too long, and totals: `make house`."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "atoll"
BEFORE, MAX_FILE, MAX_ALL = "3167457", 450, 18_500
# name -> (its files below src/atoll, under their old names too, and at most so many lines)
LIMITS = {
    "diffusion": (r"(diffusion|process)/", 700),
    "models": (r"models/[^/]*$", 1300),
    "kernels": (r"(kernels|models/fused)/", 1000),
    "convert": (r"convert/", 2000),
    "data": (r"data/(?!engine\.py)", 1500),
    "partition": (r"partition/", 450),
    "planning": (r"planning/", 600),
    "training": (r"training/", 1350),
    "executor": (r"(executor|data/engine)\.py", 150),
    "islands, router": (r"(islands|router)/", 900),
    "ensemble": (r"(ensemble|mixture|runtime|registry)/", 1650),
    "sampling": (r"sampling/", 550),
    "distill": (r"distill/", 450),
    "evaluation": (r"evaluation/", 1450),
    "exchange": (r"exchange/", 1300),
    "artifacts": (r"artifacts/", 600),
    "pipeline, cli, API": (r"(pipeline|cli)/|demo\.py|model\.py", 2200),
    "other": (r"", 0),
}


def count(text: str) -> tuple[int, int, int]:
    """(lines, of docstrings, of code without docstrings, comments and blanks)."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node):
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(text.splitlines()), len(documented), len(code - documented)


def package_of(path: str) -> str:
    return next(name for name, (pattern, _) in LIMITS.items() if re.match(pattern, path))


def lines_before() -> dict[str, int]:
    """Lines of every file below src/atoll at BEFORE; nothing where that commit is not there."""
    command = ["git", "-C", str(ROOT), "grep", "-c", "", BEFORE, "--", "src/atoll/*.py"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = (line.removeprefix(f"{BEFORE}:src/atoll/").rsplit(":", 1) for line in found.splitlines())
    return {name: int(lines) for name, lines in rows}


def row(name: str, before: int, limit: int, texts: Iterable[str]) -> str:
    counts = [count(text) for text in texts]
    now, documented, code = (sum(one[k] for one in counts) for k in range(3))
    return f"{name:<20}{before:>8,}{now:>8,}{limit:>8,}{code:>8,}{documented / max(now, 1):>12.0%}"


def table() -> list[str]:
    files = {str(file.relative_to(PACKAGE)): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    before = lines_before()
    rows = [f"{'package':<20}{'before':>8}{'now':>8}{'limit':>8}{'code':>8}{'docstrings':>12}"]
    for name, (_, limit) in LIMITS.items():
        texts = [text for path, text in files.items() if package_of(path) == name]
        rows.append(row(name, sum(n for path, n in before.items() if package_of(path) == name), limit, texts))
    rows.append(row("all of src", sum(before.values()), MAX_ALL, files.values()))
    for folder in ("tests", "benchmarks"):
        rows.append(row(f"all of {folder}", 0, 0, [file.read_text() for file in (ROOT / folder).rglob("*.py")]))
    long = {path: len(text.splitlines()) for path, text in files.items() if len(text.splitlines()) > MAX_FILE}
    return [*rows, *(f"over {MAX_FILE} lines: {path} {lines}" for path, lines in long.items())]


if __name__ == "__main__":
    print("\n".join(table()))
