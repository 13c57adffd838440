"""ptxas 12.8 made attention kernels that add to a register nobody set (kernels/attention.py): tiles in use have none.

No GPU is needed: Triton compiles for one it does not see, and brings NVIDIA's disassembler.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

from atoll.kernels import attention
from atoll.kernels.attention import TILES, Tile

KERNELS = {"": "attention_kernel", "_dq": "dq_kernel", "_dkv": "dkv_kernel"}
POINTERS = {"z_ptr": "*fp32", "delta_ptr": "*fp32", "mask_ptr": "*i1"}  # all others: bfloat16


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [20, 77, 120, 256])
@pytest.mark.parametrize("tile", TILES)
def test_no_kernel_reads_a_register_nobody_set(tile: str, keys: int, masked: bool, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (pip install triton): machine code NOT LOOKED AT HERE")
    if tile.startswith("self") and (masked or keys != 256):
        pytest.skip("self-attention has no mask, and as many keys as tokens")
    code = machine_code(tile, keys, masked, tmp_path)
    assert "MMA" in code, "no tensor core is used"
    assert not never_written(code)


def test_the_tile_that_went_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (pip install triton): machine code NOT LOOKED AT HERE")
    monkeypatch.setitem(TILES, "cross", Tile(rows=64, columns=128, warps=4, stages=1))
    code = machine_code("cross", 77, True, tmp_path)
    if not never_written(code):
        pytest.skip("this version of ptxas does it right: kernels/attention.py may say so")


def machine_code(tile: str, keys: int, masked: bool, folder: Path) -> str:
    """A kernel at the XL/2 shape (256 tokens, 16 heads of 72), compiled for compute capability 9.0, as text."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kind, _, backward = tile.partition("_")
    kernel = getattr(attention, KERNELS[backward and f"_{backward}"])
    q = torch.empty(1, 256, 16 * 72 * (3 if kind == "self" else 1), device="meta")
    kv = None if kind == "self" else torch.empty(1, keys, 2 * 16 * 72, device="meta")
    sizes = attention.sizes_of(q, kv, q if masked else None, 16, backward and f"_{backward}")
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    known = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in known else POINTERS.get(name, "*bf16") for name in kernel.arg_names},
        constexprs=known,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, "-c", binary], capture_output=True, text=True, check=True).stdout


def never_written(code: str) -> set[int]:
    """Uniform registers (UR0, UR1, ...) that some instruction reads and none writes."""
    read, written = set(), set()
    for name, arguments in re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s+(.*?);", code):
        read |= {int(number) for number in re.findall(r"\bUR(\d+)\b", arguments)}
        target = re.match(r"UR(\d+)\b", arguments)
        if target is not None:  # an instruction's first argument is what it writes
            width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            written |= {int(target[1]) + offset for offset in range(width)}
    return read - written
