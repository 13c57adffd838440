"""Are the fused kernels right, and are they faster? On one GPU, against the plain formulas in the same process.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json [--seconds 130]
    python benchmarks/kernels.py --out benchmarks/results/kernel_tiles.json --parts shapes tiles

Five parts, each result kept in the file as it comes; what fails is recorded and the rest goes on, in a new process if
the GPU takes no more work from this one:
  block    one XL/2 block, forward and backward, compiled, fused and plain: milliseconds, and its kernels above 0.01 ms
  times    every operator at the XL/2 shape and at a small one, forward and forward + backward, fused against eager and
           compiled torch
  errors   every operator and its gradients against the plain formula in float64 at the XL/2 shape:
           |difference| / |truth|, beside the error that the plain formula makes in the same type
  shapes   errors again: other widths, odd lengths, float32
  tiles    other ways to cut the work of each kernel (kernels.TILES), as far as the seconds go
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from atoll import kernels
from atoll.kernels import block as fused_block
from atoll.models import dit
from atoll.models.dit import Block, DiTConfig

EPS = 1e-6
XL = {"images": 128, "tokens": 256, "width": 1152, "heads": 16, "text": 77}
SMALL = {"images": 1024, "tokens": 64, "width": 384, "heads": 6, "text": 77}
SHAPES = [
    {**XL, "images": 16},
    {"images": 4, "tokens": 64, "width": 384, "heads": 6, "text": 77},
    {"images": 3, "tokens": 65, "width": 1152, "heads": 16, "text": 77},
    {"images": 3, "tokens": 65, "width": 768, "heads": 12, "text": 20},
    {"images": 5, "tokens": 7, "width": 48, "heads": 1, "text": 5},
    {"images": 2, "tokens": 257, "width": 384, "heads": 6, "text": 77},
]


@dataclass(frozen=True)
class Operator:
    """A fused operator, the formula it stands for, and the kinds of its inputs."""

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: tuple[str, ...]


def holding(held: Tensor, bias: Tensor) -> Tensor:
    """The same numbers, as a function of the bias they already hold."""
    return held + (bias - bias.detach()).reshape(held.shape[2:])


def add_modulate(h: Tensor, gate: Tensor | None, branch: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    h = h + branch if gate is None else dit.gated_add(h, gate, branch)
    return h, dit.modulate(h, shift, scale, EPS)


def plain_cross_attention(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """As CrossAttention does it with torch: text padded to whole sixteens where there is a mask."""
    if mask is not None:
        missing = -mask.shape[1] % 16
        kv, mask = F.pad(kv, (0, 0, 0, 0, 0, 0, 0, missing)), F.pad(mask, (0, missing))[:, None, None]
    heads = q.shape[2]
    (q,), (k, v) = dit.split_heads(q.flatten(2), 1, heads), dit.split_heads(kv.flatten(2), 2, heads)
    return plain_attention(q, k, v, mask)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if q.dtype == torch.float64:  # written out: the truth owes nothing to torch's kernels
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return dit.join_heads(scores.softmax(-1) @ v)
    return dit.join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


OPERATORS = {
    "norm_modulate": Operator(
        lambda h, shift, scale: kernels.norm_modulate(h, shift, scale, EPS),
        lambda h, shift, scale: dit.modulate(h, shift, scale, EPS),
        ("tokens", "vector", "vector"),
    ),
    "keep_and_norm": Operator(
        lambda h, shift, scale: kernels.keep_and_norm(h, shift, scale, EPS),
        lambda h, shift, scale: (h + 0.0, dit.modulate(h, shift, scale, EPS)),
        ("tokens", "vector", "vector"),
    ),
    "add_norm_modulate": Operator(
        lambda h, branch, shift, scale, bias: kernels.add_norm_modulate(h, branch, None, shift, scale, EPS, bias),
        lambda h, branch, shift, scale, bias: add_modulate(h, None, holding(branch, bias), shift, scale),
        ("tokens", "tokens", "vector", "vector", "bias"),
    ),
    "add_norm_modulate, gated": Operator(
        lambda h, branch, gate, shift, scale, bias: kernels.add_norm_modulate(h, branch, gate, shift, scale, EPS, bias),
        lambda h, branch, gate, shift, scale, bias: add_modulate(h, gate, holding(branch, bias), shift, scale),
        ("tokens", "tokens", "vector", "vector", "vector", "bias"),
    ),
    "gated_add": Operator(
        kernels.gated_add,
        lambda h, gate, branch, bias: dit.gated_add(h, gate, holding(branch, bias)),
        ("tokens", "vector", "tokens", "bias"),
    ),
    "self_attention": Operator(
        kernels.self_attention,
        lambda qkv, bias: plain_attention(*dit.split_heads(holding(qkv, bias).flatten(2), 3, qkv.shape[3]), None),
        ("qkv", "qkv bias"),
    ),
    "cross_attention": Operator(
        lambda q, kv, q_bias, kv_bias: kernels.cross_attention(q, kv, None, q_bias, kv_bias),
        lambda q, kv, q_bias, kv_bias: plain_cross_attention(holding(q, q_bias), holding(kv, kv_bias), None),
        ("q", "kv", "bias", "kv bias"),
    ),
    "cross_attention, masked": Operator(
        kernels.cross_attention,
        lambda q, kv, mask, q_bias, kv_bias: plain_cross_attention(holding(q, q_bias), holding(kv, kv_bias), mask),
        ("q", "kv", "mask", "bias", "kv bias"),
    ),
}


TILES = {
    "norm": [(2048, 4, 0), (4096, 4, 0), (4096, 8, 0), (8192, 8, 0)],
    "norm_backward": [(n, w, run) for n, w in ((512, 1), (1024, 1), (1024, 2), (2048, 4)) for run in (16, 32, 64)],
    "add": [(2048, 4, 0), (4096, 4, 0), (8192, 8, 0)],
    "add_backward": [(2048, 8, 32), (4096, 4, 16), (4096, 4, 32), (4096, 4, 64), (4096, 8, 32), (8192, 8, 32)],
}
HALVES = [
    (64, 64, 4, 2),
    (64, 32, 4, 3),
    (64, 32, 4, 2),
    (32, 64, 4, 3),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
    (32, 64, 4, 2),
]
ATTENTION_TILES = {
    "self": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2)],
    "cross": [(64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 1), (64, 16, 4, 3)],
    "self_dq": HALVES,
    "self_dkv": HALVES,
    "cross_dq": HALVES,
    "cross_dkv": HALVES,
}
USES = {
    **dict.fromkeys(("self", "self_dq", "self_dkv"), ("self_attention",)),
    **dict.fromkeys(("cross", "cross_dq", "cross_dkv"), ("cross_attention, masked",)),
    "norm": ("norm_modulate", "add_norm_modulate"),
    "norm_backward": ("keep_and_norm", "add_norm_modulate", "add_norm_modulate, gated"),
    "add": ("gated_add",),
    "add_backward": ("gated_add",),
}


PARTS = ("block", "times", "errors", "shapes", "tiles")
GPU_LOST = 3  # how a process ends whose GPU takes no more work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=130.0, help="start nothing new after this long")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--go-on", action="store_true", help="keep what --out holds, and measure the rest")
    parser.add_argument("--here", action="store_true", help="in this process, which a failing kernel may end")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if arguments.here:
        kernels.Switch.on = True
        measure_parts(arguments)
        return
    if not arguments.go_on:
        arguments.out.unlink(missing_ok=True)
    end = time.monotonic() + arguments.seconds
    code = GPU_LOST
    while code == GPU_LOST:  # every process keeps at least one result more
        command = [sys.executable, __file__, "--out", str(arguments.out), "--parts", *arguments.parts]
        command += ["--seconds", str(max(0.0, end - time.monotonic())), "--go-on", "--here"]
        code = subprocess.run(command, check=False).returncode
    sys.exit(code)


def measure_parts(arguments: argparse.Namespace) -> None:
    # the cache's key holds neither the tiles nor the gradients' kernels
    torch._functorch.config.enable_autograd_cache = False
    report = Report(arguments.out, arguments.seconds)
    for part in arguments.parts:
        {"errors": errors, "block": block, "times": times, "shapes": shapes, "tiles": tiles}[part](report)


class Report:
    """What was found so far, always on disk."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.began, self.end = path, time.monotonic(), time.monotonic() + seconds
        self.found: dict[str, Any] = {
            "machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
            "tiles used": {name: vars(tile) for name, tile in {**kernels.TILES, **kernels.ATTENTION_TILES}.items()},
        }
        if path.exists():
            self.found = json.loads(path.read_text()) | self.found

    def keep(self, part: str, name: str, value: Any) -> None:
        self.found.setdefault(part, {})[name] = value
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"{time.monotonic() - self.began:6.1f} s  {part}: {name}: {json.dumps(value)[:400]}", flush=True)

    def measure(self, part: str, name: str, work: Callable[[], Any]) -> None:
        """Keep what the work returns, or how it failed: one failure must not lose the rest."""
        if "skipped" not in self.found.get(part, {}).get(name, {"skipped": "so far"}):
            return
        if time.monotonic() > self.end:
            self.keep(part, name, {"skipped": "out of time"})
            return
        try:
            self.keep(part, name, work())
        except Exception as error:  # noqa: BLE001
            self.keep(part, name, {"error": f"{type(error).__name__}: {error}"[:3000]})
            try:
                torch.cuda.synchronize()
            except Exception:  # noqa: BLE001
                os._exit(GPU_LOST)  # after an illegal access every further call fails, torch's own at exit too


@contextmanager
def plain_formulas() -> Iterator[None]:
    kernels.Switch.on = False
    try:
        yield
    finally:
        kernels.Switch.on = True


@contextmanager
def plain_attention_only() -> Iterator[None]:
    kept = fused_block.attends
    fused_block.attends = lambda h, tokens, keys, head: False
    try:
        yield
    finally:
        fused_block.attends = kept


# ------------------------------------------------------------------------------------------------------- errors


def errors(report: Report) -> None:
    for name in OPERATORS:
        keep_error(report, name, SHAPES[0], torch.bfloat16)


def shapes(report: Report) -> None:
    for shape in SHAPES[1:]:
        for name in OPERATORS:
            keep_error(report, name, shape, torch.bfloat16)
    for shape in (SHAPES[0], SHAPES[2], SHAPES[4]):
        for name in OPERATORS:
            if "attention" not in name:  # which leaves float32 to torch
                keep_error(report, name, shape, torch.float32)


def keep_error(report: Report, name: str, shape: dict[str, int], dtype: torch.dtype) -> None:
    if "attention" in name and not kernels.fits(shape["tokens"], shape["text"], shape["width"] // shape["heads"]):
        return
    label = f"{name} {str(dtype).removeprefix('torch.')} " + " ".join(f"{k}={v}" for k, v in shape.items())
    report.measure("errors", label, lambda: error_of(OPERATORS[name], shape, dtype))


def error_of(operator: Operator, shape: dict[str, int], dtype: torch.dtype) -> dict[str, list[float]]:
    """Relative error of every output, then of every gradient, of the fused operator and of the plain formula."""
    inputs = random_inputs(operator, shape, dtype)
    truth = results(operator.plain, [x.double() if x.is_floating_point() else x for x in inputs])
    torch.cuda.synchronize()  # an illegal access of torch's must not be blamed on the kernels
    return {
        "fused": [relative(a, b) for a, b in zip(results(operator.fused, inputs), truth, strict=True)],
        "plain": [relative(a, b) for a, b in zip(results(operator.plain, inputs), truth, strict=True)],
    }


def random_inputs(operator: Operator, shape: dict[str, int], dtype: torch.dtype) -> list[Tensor]:
    images, tokens, width = shape["images"], shape["tokens"], shape["width"]
    six = torch.randn(images, 6, 1, width, device="cuda", dtype=dtype).unbind(1)  # views, as a block has them
    vectors = iter(six)
    heads, text = (shape["heads"], width // shape["heads"]), shape["text"]
    sizes = {
        "tokens": (images, tokens, width),
        "qkv": (images, tokens, 3, *heads),
        "q": (images, tokens, *heads),
        "kv": (images, text, 2, *heads),
        "bias": (width,),
        "kv bias": (2 * width,),
        "qkv bias": (3 * width,),
    }
    made: list[Tensor] = []
    for kind in operator.inputs:
        if kind == "vector":
            made.append(next(vectors))
        elif kind == "mask":
            lengths = torch.randint(1, text + 1, (images, 1), device="cuda")
            made.append(torch.arange(text, device="cuda")[None] < lengths)
        else:
            made.append(torch.randn(sizes[kind], device="cuda", dtype=dtype) + 0.5 * (kind == "tokens"))
    return made


def results(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, then gradients of a fixed random sum of them."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    with plain_formulas() if function in [o.plain for o in OPERATORS.values()] else nothing():
        outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator("cuda").manual_seed(1)
    weights = [torch.randn(y.shape, device="cuda", generator=generator).bfloat16().to(y.dtype) for y in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, wanted, weights)]


@contextmanager
def nothing() -> Iterator[None]:
    yield


def relative(found: Tensor, truth: Tensor) -> float:
    difference = (found.double() - truth).norm() / truth.norm()
    return float(f"{difference.item():.3g}")


# -------------------------------------------------------------------------------------------------------- block


def block(report: Report) -> None:
    for variant in ("fused", "fused norms, torch's attention", "plain"):
        report.measure("block", variant, lambda v=variant: block_time(v))


def block_time(variant: str) -> dict[str, Any]:
    """One XL/2 block with cross-attention, bfloat16 autocast, compiled as training compiles it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    width = XL["width"]
    config = DiTConfig(
        latent=(4, 32, 32), patch=2, width=width, depth=1, heads=XL["heads"], condition="tokens",
        text_width=768, text_length=XL["text"],
    )  # fmt: skip
    with torch.device("cuda"):
        layer = Block(config)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        h = torch.randn(XL["images"], XL["tokens"], width, dtype=torch.bfloat16, requires_grad=True)
        signal = torch.randn(6, XL["images"], width, dtype=torch.bfloat16, requires_grad=True)
        text = torch.randn(XL["images"], XL["text"], width, dtype=torch.bfloat16, requires_grad=True)
        lengths = torch.randint(1, XL["text"] + 1, (XL["images"], 1))
        mask = (torch.arange(XL["text"])[None] < lengths)[:, None, None]
    push = torch.randn_like(h)
    wanted = [h, signal, text, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)

    def step() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            y = compiled(h, signal, text, mask)
        return torch.autograd.grad(y, wanted, push.to(y.dtype))

    with {"fused": nothing, "plain": plain_formulas}.get(variant, plain_attention_only)():
        began = time.monotonic()
        step()
        compile_seconds = time.monotonic() - began
        torch.cuda.reset_peak_memory_stats()
        milliseconds = median_ms(step)
        memory = torch.cuda.max_memory_allocated() / 2**30
        return {
            "ms": milliseconds,
            "peak GiB": round(memory, 3),
            "compile s": round(compile_seconds, 1),
            "kernels": kernel_table(step),
        }


def kernel_table(step: Callable[[], Any], steps: int = 3) -> dict[str, list[float]]:
    """Milliseconds per step and launches per step of every kernel above 0.01 ms, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / 1000 / steps, e.count / steps) for e in profile.key_averages()]
    rows.sort(key=lambda row: -row[1])
    table = {key[:120]: [round(ms, 4), round(count, 2)] for key, ms, count in rows if ms > 0.01}
    return {"sum": [round(sum(ms for _, ms, _ in rows), 4), 1.0], **table}


# -------------------------------------------------------------------------------------------------------- times


def times(report: Report) -> None:
    for label, shape in (("", XL), (", small", SMALL)):
        for name, operator in OPERATORS.items():
            # torch's attention is one kernel, compiled or not
            for way in ("fused", "eager") if "attention" in name else ("fused", "compiled", "eager"):
                work = lambda o=operator, w=way, s=shape: operator_time(o, w, s)  # noqa: E731
                report.measure("times", f"{name}, {way}{label}", work)


def operator_time(operator: Operator, way: str, shape: dict[str, int]) -> dict[str, float]:
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in random_inputs(operator, shape, torch.bfloat16)]
    wanted = [x for x in inputs if x.requires_grad]
    function = operator.fused if way == "fused" else operator.plain
    if way == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, dynamic=False)

    def forward() -> tuple[Tensor, ...]:
        outputs = function(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    with nothing() if way == "fused" else plain_formulas():
        weights = [torch.randn_like(y) for y in forward()]
        return {
            "forward": median_ms(forward),
            "forward + backward": median_ms(lambda: torch.autograd.grad(forward(), wanted, weights)),
        }


def median_ms(work: Callable[[], Any], repeats: int = 5, calls: int = 8) -> float:
    """Median over repeats of the mean over calls, in GPU milliseconds.

    The GPU first spins for some milliseconds, so that the calls wait in its queue and Python's pace does not count.
    """
    for _ in range(3):
        work()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / calls)
    return round(statistics.median(found), 4)


# -------------------------------------------------------------------------------------------------------- tiles


def tiles(report: Report) -> None:
    for label, shape in (("", XL), (", small", SMALL)):
        for used, choices, make in (
            (kernels.TILES, TILES, kernels.Tile),
            (kernels.ATTENTION_TILES, ATTENTION_TILES, kernels.AttentionTile),
        ):
            for kernel, cuts in choices.items():
                for cut, name in ((cut, name) for cut in cuts for name in USES[kernel]):
                    work = lambda u=used, k=kernel, t=make(*cut), n=name, s=shape: tile_time(u, k, t, n, s)  # noqa: E731
                    report.measure("tiles", f"{kernel} {cut}: {name}{label}", work)


def tile_time(used: dict[str, Any], kernel: str, tile: Any, name: str, shape: dict[str, int]) -> dict[str, float]:
    kept = used[kernel]
    used[kernel] = tile
    try:
        return operator_time(OPERATORS[name], "fused", shape)
    finally:
        used[kernel] = kept


if __name__ == "__main__":
    main()
