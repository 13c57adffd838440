"""Processes that see only some of the packages installed here, as on a machine that has no more."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# what finds installed packages is told not to find these; modules of Python itself are found by others
HIDE = """
import sys
from importlib.machinery import PathFinder
hidden, find = {hidden!r}, PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in hidden else find(name, *rest)
"""
RUN_ATOLL = "from atoll.cli import main\nmain()\n"


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content


def brought_by(*requirements: str) -> set[str]:
    """The distributions that installing these would bring, by canonical name."""
    brought: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in brought and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            brought.add(name)
            waiting += [Requirement(line) for line in metadata.requires(name) or ()]
    return brought


def beyond_the_core() -> set[str]:
    """Top-level modules installed here that `pip install atoll-diffusion` would not bring."""
    core = brought_by(*project()["dependencies"])
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if module != "atoll" and not core & {canonicalize_name(owner) for owner in owners}
    }


def environment_with(place: Path, *requirements: str) -> Path:
    """The Python of a new virtual environment that has what these requirements bring, and nothing else.

    The packages are links to those installed here.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    for name in brought_by(*requirements):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (site / top).symlink_to(str(distribution.locate_file(top)))
    return place / "bin" / "python"


def atoll_without(
    hidden: Collection[str], *arguments: str | Path, then: str = "", check: bool = True
) -> subprocess.CompletedProcess[str]:
    """The command line where these top-level modules are not installed; `then` is Python code to run after it."""
    code = HIDE.format(hidden=set(hidden)) + RUN_ATOLL + then
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    if check and process.returncode != 0:
        raise AssertionError(f"atoll {' '.join(map(str, arguments))} failed:\n{process.stdout}\n{process.stderr}")
    return process
