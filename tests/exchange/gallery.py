"""Contributions that must not come in, each built from an honest one, with the words it must be refused with.

`build(name, honest, run, place)` leaves a folder; HOSTILE maps names to a builder and a pattern of its reason. An
attack is one function, or one line where it only changes the card, the manifest, the metrics or the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILES = ("expert.json", "metrics.jsonl", "model.safetensors")
ESCAPES = "\x1b[2J\x1b[1;32madmitted: all is well\x1b[0m\r\n[/nope]\u202egnp"
HUGE = 10**9


@dataclass(frozen=True)
class Attack:
    build: Callable[[Path, Path], object]  # (an honest expert's folder, a folder for what it needs besides)
    reason: str
    sealed: bool = True  # whether the manifest is made to fit what the attack left


def entry(path: Path) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}


def reseal(folder: Path) -> None:
    """Let the manifest say of files and card what lies there: nothing is found out by a wrong digest alone."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for name in FILES:
        if (folder / name).is_file():
            manifest["files"][name] = entry(folder / name)
    try:
        card = json.loads((folder / "expert.json").read_bytes())
        if isinstance(card, dict):
            manifest["config"] = card
            manifest["license"] = card.get("license")
    except (ValueError, RecursionError):
        pass
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / name).read_bytes())
    change(content)
    (folder / name).write_text(json.dumps(content))


def card(**values: Any) -> Callable[[Path, Path], None]:
    """Change fields of the card; a name such as architecture__width reaches into it."""

    def build(folder: Path, _: Path) -> None:
        def change(content: dict[str, Any]) -> None:
            for name, value in values.items():
                *path, last = name.split("__")
                target = content
                for part in path:
                    target = target[part]
                target[last] = value

        edit(folder, "expert.json", change)

    return build


def manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Path], None]:
    return lambda folder, _: edit(folder, "manifest.json", change)


def metrics(text: str) -> Callable[[Path, Path], None]:
    def build(folder: Path, _: Path) -> None:
        (folder / "metrics.jsonl").write_text(text)

    return build


def weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None]) -> Callable[[Path, Path], None]:
    def build(folder: Path, _: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        changed = change(tensors)
        save_file(
            {k: v.contiguous() for k, v in (tensors if changed is None else changed).items()},
            folder / "model.safetensors",
        )

    return build


def first(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    """One value of the first weight whose name holds this."""

    def change(tensors: dict[str, Tensor]) -> None:
        key = next(k for k in tensors if name in k)
        tensors[key].view(-1)[0] = value

    return change


def scaled(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            if name in key:
                tensors[key] *= factor

    return change


def noisy(share: float) -> Callable[[dict[str, Tensor]], None]:
    """Every weight disturbed by a share of its own spread."""

    def change(tensors: dict[str, Tensor]) -> None:
        numbers = torch.Generator().manual_seed(0)
        for value in tensors.values():
            value += share * value.std(correction=0) * torch.randn(value.shape, generator=numbers)

    return change


def null_embedding(value: float) -> Callable[[dict[str, Tensor]], None]:
    """What is asked when the condition is dropped, the last word: the trojan of findings/hostile.md, point 1."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["conditioning.words.weight"][-1] = value

    return change


def flipped_activation(folder: Path, _: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        now = content["architecture"]["activation"]
        content["architecture"]["activation"] = "silu" if now == "gelu-tanh" else "gelu-tanh"

    edit(folder, "expert.json", change)


def replaced(name: str, make: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """Something else in a file's place."""

    def build(folder: Path, beside: Path) -> None:
        target = folder / name
        shutil.move(target, beside / f"real-{name}")
        make(target, beside / f"real-{name}")

    return build


def a_sparse_file(path: Path, _: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(100 * 2**30)


def a_header_of(text: bytes, body: bytes = b"") -> Callable[[Path, Path], None]:
    def build(folder: Path, _: Path) -> None:
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)

    return build


def overlapping(folder: Path, _: Path) -> None:
    """Every tensor of the header in the same bytes: a small file that says it is large."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for value in header.values():
        if "data_offsets" in value:
            length = value["data_offsets"][1] - value["data_offsets"][0]
            value["data_offsets"] = [0, length]
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def extra_file(name: str) -> Callable[[Path, Path], None]:
    def build(folder: Path, _: Path) -> None:
        def change(content: dict[str, Any]) -> None:
            content["files"][name] = {"sha256": "0" * 64, "bytes": 1}

        edit(folder, "manifest.json", change)

    return build


def files(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["files"][name].update(values)


def parents(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(parents={**content["parents"], **values})


def raw_manifest(text: bytes) -> Callable[[Path, Path], object]:
    return lambda folder, _: (folder / "manifest.json").write_bytes(text)


def own_start(**values: Any) -> Callable[[Path, Path], None]:
    """Says it was begun from a start of its own, and so may be of another process."""

    def build(folder: Path, beside: Path) -> None:
        edit(folder, "manifest.json", parents(init="1" * 64))
        card(origin="somebody's", **values)(folder, beside)

    return build


ORDER = "is not its order's"
VE = {"name": "ve", "sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}
HOSTILE: dict[str, Attack] = {
    # memory and architecture: held to the order before anything is built
    "width 8192": Attack(card(architecture__width=8192), ORDER),
    "width a billion": Attack(card(architecture__width=4 * HUGE), ORDER),
    "depth 100000": Attack(card(architecture__depth=100_000), ORDER),
    "mlp ratio": Attack(card(architecture__mlp_ratio=1e9), ORDER),
    "vocabulary": Attack(card(architecture__vocabulary=HUGE), ORDER),
    "small vocabulary": Attack(card(architecture__vocabulary=1), ORDER),
    "out channels": Attack(card(architecture__out_channels=HUGE), ORDER),
    "out channels 2": Attack(card(architecture__out_channels=2), ORDER),
    "huge latent": Attack(card(architecture__latent=[1, 8 * 10**6, 8]), ORDER),
    "two channels": Attack(card(architecture__latent=[2, 8, 8]), ORDER),
    "text length": Attack(card(architecture__text_length=1), ORDER),
    "other activation": Attack(flipped_activation, ORDER),
    "other heads": Attack(card(architecture__heads=2), ORDER),
    "other time scale": Attack(card(architecture__time_scale=1.0), ORDER),
    "tiny time scale": Attack(card(architecture__time_scale=1e-300), ORDER),
    "position scale": Attack(card(architecture__position_scale=1e30), ORDER),
    "labels instead of words": Attack(
        card(
            architecture__condition="labels",
            architecture__vocabulary=None,
            architecture__text_length=None,
            architecture__classes=10,
        ),
        ORDER,
    ),
    "no condition": Attack(
        card(architecture__condition="none", architecture__vocabulary=None, architecture__text_length=None), ORDER
    ),
    "unknown variant": Attack(card(architecture__variant="backdoor"), "not valid"),
    "negative width": Attack(card(architecture__width=-4), "not valid"),
    # the process
    "a table of 3e8 steps": Attack(
        card(schedule={"name": "ddpm-betas", "betas": "linear", "steps": 300_000_000}), ORDER
    ),
    "another schedule": Attack(card(schedule=VE, kind="x0"), ORDER),
    "another kind": Attack(card(kind="x0"), ORDER),
    "bridge limit 0.3": Attack(card(bridge_limit=0.3), "bridge limit"),
    "bridge limit infinite": Attack(card(bridge_limit=float("inf")), "no JSON file|bridge limit|not valid"),
    "no bridge limit": Attack(card(bridge_limit=None), "bridge limit"),
    "own start, 3e8 steps": Attack(
        own_start(schedule={"name": "ddpm-betas", "betas": "linear", "steps": 300_000_000}, kind="epsilon"),
        "no network is trained with",
    ),
    "own start, rho 1e-300": Attack(own_start(schedule={**VE, "rho": 1e-300}, kind="x0"), "no network is trained with"),
    "own start, rho NaN": Attack(
        own_start(schedule={**VE, "rho": float("nan")}, kind="x0"), "not valid|no JSON file|no network"
    ),
    "own start, endless license": Attack(own_start(license="x" * 5000), "longer than"),
    "own start, escapes in the license": Attack(own_start(license=ESCAPES), "cannot be printed"),
    "own start, other cluster": Attack(own_start(cluster=2), ORDER),
    # the card against the order
    "cluster -7": Attack(card(cluster=-7), ORDER),
    "another cluster": Attack(card(cluster=2), ORDER),
    "no cluster": Attack(card(cluster=None), ORDER),
    "no images": Attack(card(images=0), ORDER),
    "1e18 images": Attack(card(images=10**18), ORDER),
    "negative images": Attack(card(images=-1), "not valid"),
    "any license": Attack(card(license="do what you want"), ORDER),
    "a license that moves the cursor": Attack(card(license=ESCAPES), ORDER),
    "forged origin": Attack(card(origin="Stable Diffusion"), ORDER),
    "another partition": Attack(card(partition="0" * 64), ORDER),
    "another latent mean": Attack(card(latent__mean=[0.25]), ORDER),
    "another autoencoder": Attack(card(latent__autoencoder="evil/hub-model"), ORDER),
    "a hostile preview": Attack(card(latent__preview={"weights": [[1e30]], "bias": [0.0]}), ORDER),
    "another text encoder": Attack(card(text__encoder="t5:evil/model"), ORDER),
    "another vocabulary": Attack(card(text__vocabulary=[ESCAPES]), ORDER),
    "another order in the card": Attack(card(order="0" * 64), ORDER),
    "unknown field": Attack(card(**{ESCAPES: 1}), "not valid"),
    "kind with escapes": Attack(card(kind=ESCAPES), "not valid"),
    "card is a list": Attack(lambda f, _: (f / "expert.json").write_text("[]"), "not valid"),
    "card is garbage": Attack(lambda f, _: (f / "expert.json").write_bytes(os.urandom(500)), "not valid"),
    "card is nested": Attack(lambda f, _: (f / "expert.json").write_text("[" * 100_000), "not valid"),
    # the manifest
    "no such order": Attack(manifest(parents(order="0" * 64)), "no order of"),
    "width 8192 and no such order": Attack(
        lambda f, b: (card(architecture__width=8192)(f, b), edit(f, "manifest.json", parents(order="0" * 64))),
        "no order of",
    ),
    "no parents": Attack(manifest(lambda m: m.update(parents={})), "parents are not"),
    "more parents": Attack(manifest(parents(data="0" * 64)), "parents are not"),
    "parent with escapes": Attack(manifest(parents(order=ESCAPES)), "no digest"),
    "forged start": Attack(manifest(parents(init="1" * 64)), "does not name it|" + ORDER),
    "manifest config lies": Attack(manifest(lambda m: m["config"].update(cluster=2)), "another card than", False),
    "manifest license lies": Attack(manifest(lambda m: m.update(license="mine")), "another license", False),
    "kind of manifest": Attack(manifest(lambda m: m.update(kind=ESCAPES)), "expected expert"),
    "kind router": Attack(manifest(lambda m: m.update(kind="router")), "expected expert"),
    "schema version": Attack(manifest(lambda m: m.update(schema_version=99)), "schema.version"),
    "lists a pickle": Attack(extra_file("extra.pkl"), "files no expert has"),
    "lists a file with escapes": Attack(extra_file(ESCAPES), "unsafe file name"),
    "lists a path outside": Attack(extra_file("../../evil"), "unsafe file name"),
    "lists no metrics": Attack(manifest(lambda m: m["files"].pop("metrics.jsonl")), "lists no", False),
    "bytes lie": Attack(manifest(files("metrics.jsonl", bytes=3)), "corrupt", False),
    "bytes beyond all": Attack(manifest(files("model.safetensors", bytes=10**15)), "its order allows", False),
    "digest lies": Attack(manifest(files("expert.json", sha256="0" * 64)), "corrupt", False),
    "manifest is garbage": Attack(raw_manifest(b"\xff\x00garbage"), "not a valid manifest", False),
    "manifest of 2 MB": Attack(raw_manifest(b" " * 2**21), "larger than", False),
    "manifest is nested": Attack(
        raw_manifest(b'{"kind":"expert","config":' + b'{"a":' * 50_000), "not a valid manifest", False
    ),
    "half a character": Attack(
        raw_manifest(b'{"kind":"expert","license":"\\ud800"}'), "valid manifest|canonical", False
    ),
    "NaN in the manifest": Attack(
        raw_manifest(b'{"kind":"expert","config":{"a":NaN}}'), "valid manifest|canonical|lists no", False
    ),
    # files that are none
    "weights are a pipe": Attack(replaced("model.safetensors", lambda p, _: os.mkfifo(p)), "regular file", False),
    "weights are a link": Attack(replaced("model.safetensors", lambda p, real: p.symlink_to(real)), "link", False),
    "weights are /dev/zero": Attack(
        replaced("model.safetensors", lambda p, _: p.symlink_to("/dev/zero")), "link", False
    ),
    "weights are a folder": Attack(replaced("model.safetensors", lambda p, _: p.mkdir()), "regular file", False),
    "weights are 100 GB of nothing": Attack(replaced("model.safetensors", a_sparse_file), "corrupt", False),
    "weights are missing": Attack(replaced("model.safetensors", lambda p, _: None), "missing", False),
    "metrics are a link": Attack(replaced("metrics.jsonl", lambda p, _: p.symlink_to("/etc/passwd")), "link", False),
    "card is a pipe": Attack(replaced("expert.json", lambda p, _: os.mkfifo(p)), "regular file", False),
    "manifest is a pipe": Attack(replaced("manifest.json", lambda p, _: os.mkfifo(p)), "regular file", False),
    "manifest is a link": Attack(replaced("manifest.json", lambda p, real: p.symlink_to(real)), "link", False),
    # metrics
    "metrics are garbage": Attack(metrics("garbage\n"), "no row of finite metrics"),
    "metrics of zero images": Attack(metrics('{"images": 0, "loss": 1.0}\n'), "counts images"),
    "metrics go backwards": Attack(metrics('{"images": 64, "loss": 1}\n{"images": 32, "loss": 1}\n'), "counts images"),
    "metrics are not finite": Attack(metrics('{"images": 64, "loss": NaN}\n'), "no row of finite metrics"),
    "metrics beyond float": Attack(metrics('{"images": 64, "loss": 1e999}\n'), "no row of finite metrics"),
    "metrics of text": Attack(metrics(json.dumps({"images": 64, "loss": ESCAPES}) + "\n"), "no row of finite metrics"),
    "metrics with more": Attack(metrics('{"images": 64, "loss": 1, "x": 2}\n'), "no row of finite metrics"),
    "metrics without end": Attack(metrics('{"images": 64, "loss": 1}\n' * 5000), "5,000 lines"),
    "metrics are nested": Attack(metrics("[" * 50_000 + "\n"), "no row of finite metrics"),
    "no metrics": Attack(metrics(""), "has 0 lines"),
    # weights: the header
    "a pickle": Attack(
        lambda f, _: torch.save({"w": torch.zeros(1)}, f / "model.safetensors"), "not a readable safetensors"
    ),
    "empty weights": Attack(
        lambda f, _: (f / "model.safetensors").write_bytes(b""), "not a readable safetensors|corrupt"
    ),
    "a header of 2^60 bytes": Attack(
        lambda f, _: (f / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}"),
        "not a readable safetensors",
    ),
    "a header of garbage": Attack(a_header_of(b"\xff" * 64), "not a readable safetensors"),
    "a header with escapes": Attack(
        a_header_of(json.dumps({ESCAPES: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(), b"\0" * 4),
        "do not fit|unknown|not a readable",
    ),
    "tensors in the same bytes": Attack(overlapping, "not a readable safetensors"),
    "a missing tensor": Attack(weights(lambda t: dict(list(t.items())[1:])), "do not fit"),
    "one tensor more": Attack(weights(lambda t: {**t, "backdoor": torch.zeros(1)}), "unknown backdoor"),
    "a tensor's name with escapes": Attack(weights(lambda t: {**t, ESCAPES: torch.zeros(1)}), "unknown"),
    "a wrong shape": Attack(weights(lambda t: {**t, sorted(t)[0]: torch.zeros(3, 3)}), "has shape|do not fit"),
    "float64": Attack(weights(lambda t: {k: v.double() for k, v in t.items()}), "its order allows|F32"),
    "float64 of 1e300": Attack(
        weights(lambda t: {k: (v.double() * 0 + 1e300) for k, v in list(t.items())}), "its order allows|F32"
    ),
    "float16": Attack(weights(lambda t: {k: v.half() for k, v in t.items()}), "kept as F32"),
    "float8": Attack(weights(lambda t: {k: v.to(torch.float8_e4m3fn) for k, v in t.items()}), "kept as F32"),
    "weights of another size": Attack(weights(lambda t: {k: v[:1] for k, v in t.items()}), "do not fit|has shape"),
    # weights: their values
    "NaN": Attack(weights(first("blocks", float("nan"))), "not finite"),
    "infinity": Attack(weights(first("blocks", float("inf"))), "not finite"),
    "infinite in bfloat16": Attack(weights(first("blocks", 3.4028e38)), "not finite"),
    "all zero": Attack(weights(lambda t: {k: torch.zeros_like(v) for k, v in t.items()}), "holdout error"),
    "random numbers": Attack(weights(noisy(3.0)), "refused"),
    "weights a thousandfold": Attack(weights(scaled("", 1000.0)), "refused"),
    "the sign turned": Attack(weights(scaled("head.project", -1.0)), "refused"),
    "a poisoned null embedding": Attack(weights(null_embedding(1e4)), "without it"),
    "a mildly poisoned null embedding": Attack(weights(null_embedding(30.0)), "without it"),
}


def fresh(expert: Path, place: Path, share: float = 1e-3) -> Path:
    """An honest expert that nobody has seen yet: one that is there, trained a little otherwise."""
    shutil.copytree(expert, place)
    weights(noisy(share))(place, place)
    reseal(place)
    return place


def build(name: str, honest: Path, place: Path) -> Path:
    """The folder somebody hands in, made from an honest one that has not been admitted."""
    attack = HOSTILE[name]
    folder, beside = place / "contribution", place / "beside"
    shutil.copytree(honest, folder)
    beside.mkdir()
    attack.build(folder, beside)
    if attack.sealed and (folder / "manifest.json").is_file():
        reseal(folder)
    return folder
