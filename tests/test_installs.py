"""What one has to install: the core for an island and a user, extras for the rest, one line where one is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from atoll.artifacts import Artifact
from atoll.cli import EXTRAS
from installs import ROOT, atoll_without, beyond_the_core, project

CORE = {"torch", "numpy", "safetensors", "pydantic", "typer", "rich", "fsspec", "pillow"}
HEAVY = {"faiss", "pyarrow", "sklearn", "matplotlib", "scipy", "pandas", "transformers", "diffusers"}
OTHERS = ("router", "mixture", "runtime", "registry", "exchange", "partition")
NOT_AN_ISLANDS = tuple(f"atoll.{name}" for name in OTHERS)
PRINT_MODULES = "print(*sys.modules)"


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def test_the_core_is_small() -> None:
    """Every contributor installs all of these."""
    assert names(project()["dependencies"]) == CORE


def test_developers_have_every_extra() -> None:
    extras = project()["optional-dependencies"]
    (ours,) = [Requirement(line) for line in extras["dev"] if line.startswith(project()["name"])]
    # tools/setup installs what the last one names without torchvision, which it declares and we have no use for
    assert ours.extras == extras.keys() - {"dev", "fidelity"}


def test_every_package_we_name_has_the_version_the_tests_run_with() -> None:
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {canonicalize_name(name) for name in pins}
    wanted = names(project()["dependencies"]).union(*map(names, project()["optional-dependencies"].values()))
    assert wanted - pinned == {project()["name"]}


def test_an_island_needs_the_core_only(planned: Path, tmp_path: Path) -> None:
    """With nothing else installed it leaves the same expert; with everything installed it loads none of it."""
    order, hidden = planned / "orders" / "00.json", beyond_the_core()
    assert {"faiss", "pyarrow", "sklearn", "matplotlib"} <= hidden
    assert not hidden & {"torch", "numpy", "PIL"}
    atoll_without(hidden, "train", order, "--out", tmp_path / "light", "--device", "cpu")
    there = atoll_without((), "train", order, "--out", tmp_path / "full", "--device", "cpu", then=PRINT_MODULES)
    assert Artifact.open(tmp_path / "light").digest == Artifact.open(tmp_path / "full").digest
    loaded = there.stdout.split()
    assert not HEAVY & set(loaded)
    assert "atoll.islands.train" in loaded
    assert not [module for module in loaded if module.startswith(NOT_AN_ISLANDS)], "an island needs no other package"


def test_sampling_needs_the_core_only(tiny_demo: Path, tmp_path: Path) -> None:
    prompt = ("--prompt", "a handwritten three", "--steps", "2")
    atoll_without(beyond_the_core(), "sample", tiny_demo, *prompt, "--out", tmp_path / "samples")
    assert list((tmp_path / "samples").glob("*.png"))


def test_the_other_commands_of_contributors_and_researchers_start_with_the_core_only() -> None:
    commands = ("status", "ensemble", "convert", "export", "join")
    others = f"import {', '.join(f'atoll.cli.{name}' for name in commands)}\nprint('started')"
    told = atoll_without(beyond_the_core(), "describe", "--help", then=others).stdout
    assert "Usage: atoll describe" in told
    assert told.endswith("started\n")


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (("prepare", "digits", "--out", "OUT"), "pyarrow", "organizer"),
        (("prepare", "digits", "--out", "OUT"), "sklearn", "organizer"),
        (("partition", "RUN/data", "-k", "3", "--out", "OUT"), "faiss", "organizer"),
        (("admit", "RUN/orders", "--out", "OUT"), "pyarrow", "organizer"),
        (("router", "RUN"), "pyarrow", "organizer"),
        (("evaluate", "RUN"), "matplotlib", "organizer"),
        (("demo", "--out", "OUT"), "faiss", "organizer"),
        (("status", "s3://bucket/run"), "s3fs", "s3"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    planned: Path, tmp_path: Path, command: tuple[str, ...], package: str, extra: str
) -> None:
    arguments = [part.replace("OUT", str(tmp_path / "out")).replace("RUN", str(planned)) for part in command]
    process = atoll_without({package}, *arguments, check=False)
    assert process.returncode == 2
    assert process.stderr == f"atoll: {command[0]}: needs {package}: pip install 'atoll-diffusion[{extra}]'\n"
    assert not (tmp_path / "out").exists()


def test_what_is_told_to_install_can_be_installed() -> None:
    assert set(EXTRAS.values()) <= project()["optional-dependencies"].keys()
