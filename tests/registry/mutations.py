"""Random damage to JSON files: what bit rot, careless editors and people with bad intentions do to them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    0,
    1,
    -1,
    7,
    2**31,
    10**9,
    2**63,
    10**400,
    1e308,
    -0.0,
    0.5,
    float("nan"),
    float("inf"),
    None,
    True,
    False,
    "",
    "0" * 64,
    "f" * 64,
    "top-1",
    "full",
    "top-999999999999",
    "cosine-vp",
    "../../../etc/passwd",
    "/etc/passwd",
    "s3://elsewhere/run",
    "\x1b[31mred\x1b[0m\r\nadmitted: all is well",
    "[/nope]",
    "\ud800",
    "x" * 100_000,
    [],
    [[]],
    {},
    {"a": {"b": [1, 2, 3]}},
    list(range(1000)),
)
NAMES = ("extra", "\x1b[2J", "digest", "schema_version", "serving", "path", "__class__", "")
NOISE = (b"\x00", b"\xff\xfe", b" \n\t", b"1e999", b'"', b"}", b",")


class Mutator:
    """Draws a file and something to do to it; the same seed draws the same."""

    def __init__(self, seed: int, files: Sequence[Path]) -> None:
        self.random = random.Random(seed)
        self.files = sorted(files)
        self._waiting: list[Path] = []

    def draw(self) -> tuple[Path, str, bytes]:
        """A file, what is done to it, and its new content. Every file gets its turn before one has a second."""
        if not self._waiting:
            self._waiting = self.random.sample(self.files, len(self.files))
        path = self._waiting.pop()
        content = path.read_bytes()
        while True:
            how = self.random.choice([*STRUCTURE, *BYTES])
            data = self._changed(how, path, content)
            if data != content:
                return path, how, data

    def _changed(self, how: str, path: Path, content: bytes) -> bytes:
        if how in BYTES:
            return BYTES[how](self, content)
        if how == "another file":
            kin = [other for other in self.files if other.name == path.name or other.parent == path.parent]
            return self.random.choice(kin).read_bytes()
        document = json.loads(content)
        return STRUCTURE[how](self, document)

    # JSON that stays JSON

    def replace(self, document: Any) -> bytes:
        holder, key = self._place(document)
        if holder is None:
            return written(self.random.choice(HOSTILE))
        holder[key] = self.random.choice(HOSTILE)
        return written(document)

    def nudge(self, document: Any) -> bytes:
        """A number or a letter, slightly."""
        holder, key = self._place(document)
        if holder is not None:
            value = holder[key]
            if isinstance(value, bool):
                holder[key] = not value
            elif isinstance(value, int | float):
                holder[key] = value + self.random.choice([-1, 1, 1e-9])
            elif isinstance(value, str) and value:
                at = self.random.randrange(len(value))
                holder[key] = value[:at] + self.random.choice("0a9f-/") + value[at + 1 :]
        return written(document)

    def drop(self, document: Any) -> bytes:
        holder, key = self._place(document)
        if holder is not None:
            del holder[key]
        return written(document)

    def add(self, document: Any) -> bytes:
        holder, key = self._place(document)
        if isinstance(holder, dict):
            holder[self.random.choice(NAMES)] = self.random.choice(HOSTILE)
        elif isinstance(holder, list):
            holder.insert(key, self.random.choice([holder[key], *HOSTILE]))
        return written(document)

    def swap(self, document: Any) -> bytes:
        """Two values of the document trade places, if possible two of the same name: clusters, digests, paths."""
        first, key = self._place(document)
        if first is not None:
            rivals = [(h, k) for h, k in places(document) if h is not first and (k == key or type(k) is not type(key))]
            second, other = self.random.choice(rivals or [(first, key)])
            first[key], second[other] = second[other], first[key]
        return safely_written(document)

    def twice(self, document: Any) -> bytes:
        """A key that is there twice."""
        if not isinstance(document, dict) or not document:
            return written(document)
        key = self.random.choice(sorted(document))
        value = self.random.choice([document[key], self.random.choice(HOSTILE)])
        inside = written(document)[1:]
        again = written({key: value})[1:-1]
        return b"{" + again + b"," + inside if self.random.random() < 0.5 else b"{" + inside[:-1] + b"," + again + b"}"

    def deep(self, document: Any) -> bytes:
        holder, key = self._place(document)
        text = written(document if holder is None else _with(holder, key, "@deep@", document))
        return text.replace(b'"@deep@"', b"[" * 5000 + b"]" * 5000) if holder is not None else b"[" * 100_000

    def _place(self, document: Any) -> tuple[Any, Any]:
        found = places(document)
        return self.random.choice(found) if found else (None, None)

    # bytes that may be no JSON any more

    def flip(self, content: bytes) -> bytes:
        data = bytearray(content or b"x")
        for _ in range(self.random.choice([1, 1, 1, 8])):
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def truncate(self, content: bytes) -> bytes:
        return content[: self.random.choice([0, self.random.randrange(len(content) + 1)])]

    def cut(self, content: bytes) -> bytes:
        at = self.random.randrange(len(content) + 1)
        return content[:at] + content[at + self.random.randrange(1, 200) :]

    def insert(self, content: bytes) -> bytes:
        at = self.random.randrange(len(content) + 1)
        return content[:at] + self.random.choice([*NOISE, self.random.randbytes(50)]) + content[at:]

    def lengthen(self, content: bytes) -> bytes:
        return content + self.random.choice([b" ", b"\n\n", b"{}", b"\x00" * 1000, b" " * 2_000_000])


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a document."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else []
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys]
    return found


def written(document: Any) -> bytes:
    return json.dumps(document).encode()


def safely_written(document: Any) -> bytes:
    """A swap may have put a container into itself."""
    try:
        return written(document)
    except (ValueError, RecursionError):
        return b"{}"


def _with(holder: Any, key: Any, value: Any, document: Any) -> Any:
    holder[key] = value
    return document


STRUCTURE: dict[str, Callable[[Mutator, Any], bytes]] = {
    "replace": Mutator.replace,
    "nudge": Mutator.nudge,
    "drop": Mutator.drop,
    "add": Mutator.add,
    "swap": Mutator.swap,
    "twice": Mutator.twice,
    "deep": Mutator.deep,
    "another file": Mutator.replace,  # handled before it comes to this
}
BYTES: dict[str, Callable[[Mutator, bytes], bytes]] = {
    "flip": Mutator.flip,
    "truncate": Mutator.truncate,
    "cut": Mutator.cut,
    "insert": Mutator.insert,
    "lengthen": Mutator.lengthen,
}
