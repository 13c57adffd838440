"""Import rules of DESIGN section 5: which package may import which."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "atoll"
PACKAGES = sorted(p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists())


def packages_imported_by(file: Path) -> set[str]:
    """Names of atoll's packages that a source file imports, anywhere in it (lazy imports count)."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts  # atoll, package, module
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
    return found & ({*PACKAGES} | {"model", "demo"})


def modules_loaded_with(file: Path) -> set[str]:
    """Absolute names that a source file imports as soon as it is imported itself: anywhere but in a function."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found


def imports_of(package: str) -> set[str]:
    files = list((SOURCE / package).rglob("*.py"))
    assert files, f"no such package: {package}"
    return set().union(*(packages_imported_by(file) for file in files)) - {package}


def test_the_reader_sees_relative_absolute_and_lazy_imports(tmp_path: Path) -> None:
    assert "artifacts" in imports_of("islands")
    assert packages_imported_by(SOURCE / "islands" / "order.py") >= {"artifacts", "data", "models", "diffusion"}


def test_no_packages_import_each_other() -> None:
    """Not two of them, and no more in a circle: then each can be read, tested and moved without the others."""
    imports = {package: imports_of(package) for package in PACKAGES}
    imports |= {name: packages_imported_by(SOURCE / f"{name}.py") - {name} for name in ("model", "demo")}
    TopologicalSorter(imports).prepare()  # a CycleError names the packages


@pytest.mark.parametrize("package", ["islands", "training", "models", "diffusion", "artifacts"])
def test_what_an_island_is_made_of_loads_nothing_of_an_organizers(package: str) -> None:
    """tests/test_installs.py runs an island without these; this says in which file one came in."""
    for file in (SOURCE / package).rglob("*.py"):
        loaded = {name.partition(".")[0] for name in modules_loaded_with(file)}
        assert not loaded & {"faiss", "pyarrow", "sklearn", "matplotlib"}, file


def test_the_reader_of_heavy_imports_knows_a_lazy_one() -> None:
    assert "faiss" in modules_loaded_with(SOURCE / "partition" / "kmeans.py")
    report = SOURCE / "partition" / "report.py"
    assert "from sklearn.metrics import" in report.read_text()
    assert "sklearn.metrics" not in modules_loaded_with(report)


@pytest.mark.parametrize("package", ["diffusion", "artifacts"])
def test_the_foundations_import_nothing_of_ours(package: str) -> None:
    assert imports_of(package) == set()


def test_process_imports_torch_only() -> None:
    allowed = {"torch", "math", "dataclasses", "typing", "enum", "functools", "collections", "contextlib", "__future__"}
    for file in (SOURCE / "diffusion").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert {a.name.split(".")[0] for a in node.names} <= allowed, file
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] in allowed, file


def test_islands_know_nothing_of_the_others() -> None:
    assert not imports_of("islands") & {"router", "mixture", "runtime", "registry", "exchange", "serving"}


def test_sampling_sees_only_the_protocol() -> None:
    assert imports_of("sampling") <= {"diffusion", "artifacts"}


def test_models_are_modules_only() -> None:
    assert imports_of("models") <= {"diffusion", "artifacts", "kernels"}


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "cli"])
def test_nothing_imports_the_command_line(package: str) -> None:
    assert "cli" not in imports_of(package)


def test_there_is_no_junk_drawer() -> None:
    assert not [p for p in SOURCE.rglob("*.py") if p.stem in ("utils", "util", "helpers", "common", "misc")]
