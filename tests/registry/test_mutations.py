"""Whatever happens to the JSON files of a run: it is refused in one line, or told, or changes no image."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.artifacts import Store, UserError
from atoll.model import load
from atoll.registry.changes import set_route
from atoll.sampling import Sampling

HOSTILE: tuple[Any, ...] = (
    0,
    -1,
    2**63,
    10**400,
    float("nan"),
    None,
    True,
    "",
    "f" * 64,
    "top-1",
    "cosine-vp",
    *(
        "../../../etc/passwd",
        "s3://elsewhere/run",
        "\x1b[31mred\r\nadmitted",
        "\ud800",
        "x" * 100_000,
        [],
        {"a": {"b": [1, 2, 3]}},
    ),
)


def mutated(data: bytes, numbers: random.Random) -> bytes:
    """One value of a JSON document replaced, dropped or doubled, or some of its bytes changed, cut or added."""
    how = numbers.choice(["replace", "replace", "drop", "add", "flip", "cut", "lengthen"])
    if how == "flip":
        place = numbers.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << numbers.randrange(8)]) + data[place + 1 :]
    if how == "cut":
        return data[: numbers.randrange(len(data))]
    if how == "lengthen":
        return data + numbers.choice([b"\n", b"{}", b"\x00" * 1000, b" " * 2_000_000])
    document = json.loads(data)
    found, waiting = [], [document]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else []
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys]
    holder, key = numbers.choice(found)
    if how == "drop":
        del holder[key]
    elif how == "add" and isinstance(holder, dict):
        holder[numbers.choice(["extra", "digest", "serving", ""])] = numbers.choice(HOSTILE)
    else:
        holder[key] = numbers.choice(HOSTILE)
    return json.dumps(document).encode()


def sampled(run: Path) -> tuple[str, Tensor]:
    model = load(str(run), device="cpu")
    prompts = ["a handwritten three", "a handwritten eight"]
    return model.digest, model.latents(prompts, [0, 1], Sampling(steps=2, guidance=2.0))


def outcome(run: Path, expected: tuple[str, Tensor]) -> str:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            digest, latents = sampled(run)
        except UserError as error:
            return "refused" if str(error).isprintable() else f"not one line: {error}"
    ours = [str(w.message) for w in told if w.category.__module__.startswith("atoll.")]
    assert all(message.isprintable() for message in ours)
    assert ours or (digest == expected[0] and torch.equal(latents, expected[1])), "another model in silence"
    return "told" if ours else "no effect"


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_mutation_changes_images_in_silence(count: int, tiny_demo: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_demo, tmp_path / "run", copy_function=os.link))
    set_route(Store.at(run), "top-1")
    files = sorted(path for path in run.rglob("*.json") if path.is_file())
    expected, numbers, seen = sampled(run), random.Random(count), set()
    waiting: list[Path] = []
    for _ in range(count):
        waiting = waiting or numbers.sample(files, len(files))
        path = waiting.pop()
        unharmed = path.read_bytes()
        data = mutated(unharmed, numbers)
        path.unlink()  # it is another name of the demo's own file
        path.write_bytes(data)
        try:
            seen.add(outcome(run, expected))
        except Exception as error:
            raise AssertionError(f"{path.relative_to(run)}: {data[:300]!r}") from error
        finally:
            path.write_bytes(unharmed)
    assert seen == {"refused", "told", "no effect"}
    assert torch.equal(sampled(run)[1], expected[1]), "the run itself is unharmed"
