"""Between the two passes of prepare: many sorted chunks become few.

Every range of ids has rows in every chunk, so reading R ranges out of C chunks opens C x R files. Both grow with the
data: ten million images would open hundreds of millions. Chunks are therefore merged in groups of FAN_IN, again and
again until no more than FAN_IN are left; that copies an image log(C) / log(FAN_IN) times, and opens FAN_IN x R files.

    runs-1/plan.json       which chunks are merged into which, written first: going on must group them the same way
    runs-1/00000.ids.npy, .pixels.npy, .arrow      a chunk again, of any length
    runs-1/00000.json      written last: this one is done, and those it was made of are removed
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..artifacts import atomic_file, canonical_json, write_atomic
from ..executor import Executor
from .gather import CHUNK_BYTES, CHUNK_SCHEMA, Slice, chunk_stems, read_rows, slices_of_range
from .progress import Progress

FAN_IN = 64
TABLE_ROWS = 4096  # per batch of an arrow file
FILES = (".ids.npy", ".pixels.npy", ".arrow")


def merge_to_few(chunks: Path, executor: Executor, progress: Progress) -> tuple[Path, ...]:
    """The stems of at most FAN_IN sorted chunks that hold all rows of the chunks in this folder."""
    stems, folder = chunk_stems(chunks), chunks
    level = 0
    while True:
        level, below = level + 1, folder
        folder = chunks.with_name(f"runs-{level}")  # another name would lose what an older version has merged
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
        for _, merged_rows in executor.map(merge, tasks, retries=3):
            rows += merged_rows
            progress("sorting", rows, None)
        stems = [task.out for task in tasks]


@dataclass(frozen=True)
class MergeTask:
    """Sorted chunks to be merged into one at `out`, and removed."""

    stems: tuple[Path, ...]
    out: Path


def merge(task: MergeTask) -> int:
    """Merge one group of chunks, unless an earlier run has; the number of rows.

    Goes through the ids range by range, so that it holds about a chunk at a time however long the new one becomes; and
    through the pixels of a range by chunks, since all copies of an image that is everywhere are in one range.
    """
    marker = task.out.with_suffix(".json")
    if not marker.exists():
        lengths = [len(np.load(stem.with_suffix(".ids.npy"), mmap_mode="r")) for stem in task.stems]
        image_shape = np.load(task.stems[0].with_suffix(".pixels.npy"), mmap_mode="r").shape[1:]
        rows, bytes_each = sum(lengths), int(np.prod(image_shape))
        ranges = -(-rows * bytes_each // CHUNK_BYTES)
        with (
            atomic_file(task.out.with_suffix(".ids.npy")) as ids_file,
            atomic_file(task.out.with_suffix(".pixels.npy")) as pixels_file,
            atomic_file(task.out.with_suffix(".arrow")) as table_file,
            pa.ipc.new_file(table_file, CHUNK_SCHEMA) as writer,
        ):
            for file, shape in ((ids_file, (rows, 32)), (pixels_file, (rows, *image_shape))):
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            waiting = CHUNK_SCHEMA.empty_table()
            for number in range(ranges):
                slices = slices_of_range(task.stems, number, ranges)
                ids, order, table = merge_slices(slices)
                ids_file.write(ids.tobytes())
                for pixels in pixels_in_order(slices, order, image_shape):
                    pixels_file.write(pixels.tobytes())
                waiting = write_full_batches(writer, pa.concat_tables([waiting, table]))
            writer.write_table(waiting)
        write_atomic(marker, canonical_json({"rows": rows}))
    for stem in task.stems:
        for suffix in FILES:
            stem.with_suffix(suffix).unlink(missing_ok=True)
    return int(json.loads(marker.read_bytes())["rows"])


def merge_slices(slices: Sequence[Slice]) -> tuple[np.ndarray, np.ndarray, pa.Table]:
    """Ids uint8 [n, 32] in order, that order int64 [n] of the slices' rows one after another, captions and labels."""
    all_ids, tables = [np.empty((0, 32), np.uint8)], [CHUNK_SCHEMA.empty_table()]
    for part in slices:
        all_ids.append(np.load(part.stem.with_suffix(".ids.npy"), mmap_mode="r")[part.start : part.stop])
        tables.append(read_rows(part.stem.with_suffix(".arrow"), part.start, part.stop))
    ids = np.concatenate(all_ids)
    # an id as four numbers, the first the most significant; lexsort takes the most significant last
    order = np.lexsort(ids.view(">u8").T[::-1])
    return ids[order], order, pa.concat_tables(tables).take(pa.array(order))


def pixels_in_order(slices: Sequence[Slice], order: np.ndarray, image_shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Pixels uint8 [n, C, S, S] of the slices' rows in this order, a chunk at a time."""
    starts = np.cumsum([0, *(part.stop - part.start for part in slices)])
    rows = max(1, CHUNK_BYTES // int(np.prod(image_shape)))
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        owner = np.searchsorted(starts, chosen, side="right") - 1
        block = np.empty((len(chosen), *image_shape), np.uint8)
        for number in np.unique(owner):
            part, here = slices[number], owner == number
            pixels = np.load(part.stem.with_suffix(".pixels.npy"), mmap_mode="r")
            block[here] = pixels[chosen[here] - starts[number] + part.start]
        yield block


def write_full_batches(writer: pa.ipc.RecordBatchFileWriter, table: pa.Table) -> pa.Table:
    """Write as many batches of TABLE_ROWS as there are, since `read_rows` counts on one length; the rows left over."""
    full = len(table) // TABLE_ROWS * TABLE_ROWS
    if full:
        writer.write_table(table.slice(0, full).combine_chunks(), max_chunksize=TABLE_ROWS)
    return table.slice(full).combine_chunks()
