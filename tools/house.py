"""`make house`: how large every package is, beside commit 3167457 and the limits of the design."""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "atoll"
LONGEST = 450
LONGER = {"models/dit.py": 600}
# lines at commit 3167457, and at most; a package that was split or renamed stands where most of it went
PACKAGES = {
    "artifacts": (1661, 600),
    "data": (3674, 1500),
    "partition": (951, 450),
    "planning": (1110, 600),
    "pipeline": (587, None),
    "exchange": (2368, 1300),
    "cli": (3356, 2100),
    "convert": (2942, 2000),
    "executor.py": (0, 150),
    "diffusion": (1067, 700),
    "models": (1871, 1300),
    "kernels": (1935, 1000),
    "training": (2789, 1350),
    "islands": (1023, 600),
    "router": (504, 300),
    "mixture": (0, 450),
    "runtime": (0, 550),
    "registry": (3186, 650),
    "sampling": (833, 550),
    "distill": (1289, 450),
    "evaluation": (2532, 1450),
}
TOTALS = {"src": ("src", 18_500), "tests": ("tests", 15_000), "benchmarks": ("benchmarks", 3_500)}


def code_lines(text: str) -> tuple[int, int]:
    """(lines of code without docstrings, comments and blanks; lines of docstrings)."""
    tree = ast.parse(text)
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                prose |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - prose), len(prose)


def measure(files: list[Path]) -> tuple[int, int, int]:
    """(lines, code lines, docstring lines) of some files."""
    texts = [path.read_text(encoding="utf-8") for path in files]
    parts = [code_lines(text) for text in texts]
    return sum(text.count("\n") for text in texts), sum(code for code, _ in parts), sum(prose for _, prose in parts)


def python_files(place: Path) -> list[Path]:
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", str(place)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(ROOT / name for name in set(listed) if name.endswith(".py") and (ROOT / name).exists())


def main() -> None:
    files = python_files(SOURCE)
    names = {path.relative_to(SOURCE).parts[0] for path in files}
    print(f"{'package':14} {'3167457':>8} {'now':>7} {'at most':>8} {'code':>7} {'docstrings':>11}")
    for name in [*(n for n in PACKAGES if n in names), *sorted(names - PACKAGES.keys())]:
        lines, code, prose = measure([path for path in files if path.relative_to(SOURCE).parts[0] == name])
        before, limit = PACKAGES.get(name, (None, None))
        shown = ["" if value is None else f"{value:,}" for value in (before, limit)]
        print(f"{name:14} {shown[0]:>8} {lines:>7,} {shown[1]:>8} {code:>7,} {prose / max(lines, 1):>11.0%}")
    for name, (place, limit) in TOTALS.items():
        lines, code, prose = measure(python_files(ROOT / place))
        print(f"{name:14} {'':8} {lines:>7,} {limit:>8,} {code:>7,} {prose / lines:>11.0%}")
    for path in files:
        lines, place = path.read_text().count("\n"), path.relative_to(SOURCE).as_posix()
        if lines > LONGER.get(place, LONGEST):
            print(f"over {LONGER.get(place, LONGEST)} lines: {place} {lines}")


if __name__ == "__main__":
    main()
