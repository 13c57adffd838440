"""Between the two passes of prepare: many sorted chunks become few sorted runs.

Every range of ids has rows in every chunk, so reading R ranges out of C chunks opens C x R files. Both grow with the
data: ten million images would open hundreds of millions. Chunks are therefore merged in groups of FAN_IN, again and
again until no more than FAN_IN are left; that copies an image log(C) / log(FAN_IN) times, and opens FAN_IN x R files.

    runs-1/plan.json       which chunks make which run, written first: a run that goes on must group them the same way
    runs-1/00000.ids.npy, .pixels.npy, .arrow      as a chunk's, any length
    runs-1/00000.json      written last: this run is done, and its chunks are removed
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from ..artifacts import atomic_file, canonical_json, write_atomic
from .engine import Workers
from .gather import CHUNK_BYTES, CHUNK_SCHEMA, chunk_stems, read_table, write_array
from .progress import Progress

FAN_IN = 64
TABLE_ROWS = 4096  # per batch of an arrow file
FILES = (".ids.npy", ".pixels.npy", ".arrow")


def merge_to_few(chunks: Path, workers: Workers, progress: Progress) -> tuple[Path, ...]:
    """The stems of at most FAN_IN sorted runs that hold all rows of the chunks in this folder."""
    stems, folder = chunk_stems(chunks), chunks
    level = 0
    while True:
        level, below = level + 1, folder
        folder = chunks.with_name(f"runs-{level}")
        plan = folder / "plan.json"
        if not plan.exists():
            if len(stems) <= FAN_IN:
                return tuple(stems)
            folder.mkdir(exist_ok=True)
            groups = np.array_split([stem.name for stem in stems], -(-len(stems) // FAN_IN))
            write_atomic(plan, canonical_json([group.tolist() for group in groups]))
        tasks = [
            MergeTask(tuple(below / name for name in group), folder / f"{number:05d}")
            for number, group in enumerate(json.loads(plan.read_bytes()))
        ]
        rows = 0
        for run_rows in workers.map(merge, tasks):
            rows += run_rows
            progress("sorting", rows, None)
        stems = [task.out for task in tasks]


@dataclass(frozen=True)
class MergeTask:
    """Sorted chunks to be merged into one at `out`, and removed."""

    stems: tuple[Path, ...]
    out: Path


def merge(task: MergeTask) -> int:
    """Merge one group of chunks, unless an earlier run has; the number of rows. Holds one chunk of pixels at most."""
    marker = task.out.with_suffix(".json")
    if not marker.exists():
        parts = [np.load(stem.with_suffix(".ids.npy")) for stem in task.stems]
        ids = np.concatenate(parts)
        words = ids.view(">u8")  # [n, 4]: an id as four numbers, the first the most significant
        order = np.lexsort(words.T[::-1])
        # the sort is stable and chunks are sorted: the rows of one chunk come out in the order they lie there
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[order]
        merge_pixels(task.stems, owner, task.out.with_suffix(".pixels.npy"))
        merge_tables(task.stems, order, task.out.with_suffix(".arrow"))
        write_array(task.out.with_suffix(".ids.npy"), ids[order])
        write_atomic(marker, canonical_json({"rows": len(ids)}))
    for stem in task.stems:
        for suffix in FILES:
            stem.with_suffix(suffix).unlink(missing_ok=True)
    return int(json.loads(marker.read_bytes())["rows"])


def merge_pixels(stems: Sequence[Path], owner: np.ndarray, out: Path) -> None:
    """Row i of `out` is the next unread row of chunk owner[i].

    Read and written as streams: pages of a memory map would count as this process's memory.
    """
    with ExitStack() as stack:
        sources: list[BinaryIO] = []
        for stem in stems:
            array = np.load(stem.with_suffix(".pixels.npy"), mmap_mode="r")
            assert isinstance(array, np.memmap)
            sources.append(stack.enter_context(stem.with_suffix(".pixels.npy").open("rb")))
            sources[-1].seek(array.offset)
            image_shape = array.shape[1:]
        image_bytes = int(np.prod(image_shape))
        block_rows = max(1, CHUNK_BYTES // image_bytes)
        target = stack.enter_context(atomic_file(out))
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(owner), *image_shape)}
        np.lib.format.write_array_header_1_0(target, header)
        for start in range(0, len(owner), block_rows):
            wanted = owner[start : start + block_rows]
            block = np.empty((len(wanted), image_bytes), np.uint8)
            for number in np.unique(wanted):
                rows = np.flatnonzero(wanted == number)
                content = sources[number].read(len(rows) * image_bytes)
                block[rows] = np.frombuffer(content, np.uint8).reshape(len(rows), image_bytes)
            target.write(block.tobytes())


def merge_tables(stems: Sequence[Path], order: np.ndarray, out: Path) -> None:
    """The rows of all tables, one after another, in this order; in batches of one length."""
    whole = pa.concat_tables(read_table(stem.with_suffix(".arrow")) for stem in stems)
    with atomic_file(out) as target, pa.ipc.new_file(target, CHUNK_SCHEMA) as writer:
        for start in range(0, len(order), TABLE_ROWS):
            part = whole.take(pa.array(order[start : start + TABLE_ROWS])).combine_chunks()
            writer.write_table(part, max_chunksize=TABLE_ROWS)
