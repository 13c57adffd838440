"""Sources on real files: what they read, what they list, what it costs, and what a failing read does."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import subprocess
import tarfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from atoll.artifacts import UserError
from atoll.data.gather import GatherTask, gather, read_rejects
from atoll.data.prepare import prepare
from atoll.data.sources import Reject, Sample, Source, SourceConfig, folder, open_source, reading
from hostile_images import tar
from image_forms import CONFIG, FORMS, parquet, pictures, saved_to_disk, tars
from image_forms import folder as image_folder
from runs import atoll


def everything(source: Source) -> tuple[list[Sample], list[Reject]]:
    """As workers see it: source and units travel to them."""
    found = [
        f for unit in source.units() for f in pickle.loads(pickle.dumps(source)).read(pickle.loads(pickle.dumps(unit)))
    ]
    return [f for f in found if isinstance(f, Sample)], [f for f in found if isinstance(f, Reject)]


# --- tars


def test_joined_tars_with_the_same_keys_keep_their_captions(tmp_path: Path) -> None:
    one = tar({"000.png": b"first", "000.txt": b"the first"})
    two = tar({"000.png": b"second", "000.txt": b"the second"})
    (tmp_path / "a.tar").write_bytes(one + two)
    samples, rejects = everything(open_source(str(tmp_path / "a.tar")))
    assert [(s.content, s.captions) for s in samples] == [(b"first", ("the first",)), (b"second", ("the second",))]
    assert rejects == []


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_of_tar_is_read(form: int, tmp_path: Path) -> None:
    names = ["short.png", f"{'d' * 60}/{'n' * 90}.png", "ünïcode.png"]
    if form != tarfile.USTAR_FORMAT:
        names.append(f"{'long' * 60}.png")
    content = tar({name: name.encode() for name in names}, form)
    (tmp_path / "a.tar").write_bytes(content)
    samples, rejects = everything(open_source(str(tmp_path / "a.tar")))
    assert [(s.name, s.content) for s in samples] == [(f"a.tar/{name}", name.encode()) for name in names]
    assert rejects == []


def test_tars_of_real_tools_are_read(tmp_path: Path) -> None:
    """GNU tar: folders, links, long names, compression of three kinds."""
    place = tmp_path / "in" / ("d" * 80) / ("e" * 80)
    place.mkdir(parents=True)
    (place / "a.png").write_bytes(b"a")
    os.link(place / "a.png", place / "b.png")
    (place / "c.png").symlink_to("a.png")
    os.mkfifo(place / "d.png")
    for option, name in (("", "plain.tar"), ("z", "gzip.tar"), ("j", "bzip2.tar"), ("J", "xz.tar")):
        subprocess.run(["tar", f"-c{option}f", tmp_path / name, "--sort=name", "in"], cwd=tmp_path, check=True)
        samples, rejects = everything(open_source(str(tmp_path / name)))
        assert [s.content for s in samples] == [b"a"], name
        found = {(r.name[-5:], r.reason, r.detail) for r in rejects}
        assert found == {
            ("b.png", "not a file", "hard link"),
            ("c.png", "not a file", "symbolic link"),
            ("d.png", "not a file", "pipe"),
        }
        whole = (tmp_path / name).read_bytes()
        (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
        _, rejects = everything(open_source(str(tmp_path / "cut.tar")))
        assert "broken tar" in {r.reason for r in rejects}, name


def test_names_that_are_not_utf8_can_be_listed(tmp_path: Path) -> None:
    for place in (tmp_path / "images", tmp_path / "tars"):
        place.mkdir()
    (tmp_path / "images" / os.fsdecode(b"caf\xe9.png")).write_bytes(b"no image")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, encoding="latin-1") as file:
        info = tarfile.TarInfo("caf\xe9.png")
        info.size = 8
        file.addfile(info, io.BytesIO(b"no image"))
    (tmp_path / "tars" / "a.tar").write_bytes(buffer.getvalue())
    for kind in ("images", "tars"):
        source = open_source(str(tmp_path / kind))
        (tmp_path / "chunks" / kind).mkdir(parents=True)
        (unit,) = source.units()
        gather(GatherTask(source, unit, 0, tmp_path / "chunks" / kind, 16, 3, 1))
        (reject,) = read_rejects(tmp_path / "chunks" / kind)
        assert reject.name.endswith("caf\\udce9.png")


# --- folders


def write_folder(place: Path, count: int, *, records: bool = False) -> Path:
    place.mkdir(parents=True)
    for number in range(count):
        (place / f"{number:05d}.png").write_bytes(b"image %d" % number)
    if records:
        lines = [{"file_name": f"{number:05d}.png", "text": f"number {number}"} for number in range(count)]
        (place / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


class Counting(LocalFileSystem):
    """A disk that counts what is asked of it."""

    protocol = "counting"
    calls: ClassVar[Counter[str]] = Counter()
    bytes_read = 0

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.calls["ls"] += 1
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        content = bytes(super().cat_file(path, start, end, **options))
        self.calls["cat_file"] += 1
        Counting.bytes_read += len(content)
        return content


@pytest.fixture
def counting() -> type[Counting]:
    fsspec.register_implementation("counting", Counting, clobber=True)
    Counting.calls, Counting.bytes_read = Counter(), 0
    Counting.clear_instance_cache()
    return Counting


def test_work_grows_with_the_files_and_not_with_their_square(
    tmp_path: Path, counting: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty units: each byte of captions and images is read by one unit, and no unit lists the folder again."""
    monkeypatch.setattr(folder, "UNIT_FILES", 10)
    place = write_folder(tmp_path / "source", 200, records=True)
    source = open_source(f"counting://{place}")
    listings: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listings.append(str(path)) or scandir(path))
    units = source.units()
    assert len(units) == 20
    assert len(listings) == 1
    assert max(len(pickle.dumps(unit)) for unit in units) < 2_000, "a unit knows its own files only"
    samples = [found for unit in units for found in source.read(unit)]
    assert len(listings) == 1
    assert counting.calls["ls"] == 0
    assert counting.bytes_read == sum(path.stat().st_size for path in place.iterdir())
    assert [s.captions for s in samples] == [(f"number {number}",) for number in range(200)]


def test_a_units_key_covers_the_captions_above_it(tmp_path: Path) -> None:
    place = write_folder(tmp_path / "source" / "in" / "deep", 3)
    lines = tmp_path / "source" / "metadata.jsonl"
    lines.write_text('{"file_name": "in/deep/00000.png", "text": "old"}\n')
    source = open_source(str(tmp_path / "source"))
    before = [unit.key for unit in source.units()]
    assert before == [unit.key for unit in source.units()]
    lines.write_text('{"file_name": "in/deep/00000.png", "text": "edited"}\n')
    after = [unit.key for unit in source.units()]
    assert len(before) == len(after) == 1
    assert before != after
    (place / "00000.txt").write_text("beside it")
    assert after != [unit.key for unit in source.units()]


def test_unfinished_work_is_not_mixed_with_new_captions(tmp_path: Path) -> None:
    """Prepare fails after the first half has been read; in between somebody edits metadata.jsonl."""
    place = Path(image_folder(tmp_path / "source", pictures(20)))
    (place / "metadata.jsonl").write_text('{"file_name": "0000-000.png", "text": "old"}\n')

    def stop(task: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(place), tmp_path / "data", CONFIG, progress=stop)
    (place / "metadata.jsonl").write_text('{"file_name": "0000-000.png", "text": "new words"}\n')
    with pytest.raises(UserError, match=r"unfinished work on another source or size \(files"):
        prepare(str(place), tmp_path / "data", CONFIG)


def test_lines_of_several_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order, any folder above, several lines for one image, lines for none, across units."""
    monkeypatch.setattr(folder, "UNIT_FILES", 2)
    place = tmp_path / "source"
    write_folder(place / "a" / "b", 7)
    write_folder(place / "c", 1)
    (place / "a" / "z.jsonl").write_text(
        '\n{"file_name": "b/00003.png", "text": "near"}\r\n'
        '{"file_name": "./b/00001.png", "label": 5}\n'
        "[1]\n"
        '{"file_name": "../c/00000.png", "text": "not below"}\n'
        '{"file_name": "b/00001.png", "text": "last line, no newline"}'
    )
    (place / "m.JSONL").write_text(
        '{"file_name": "a/b/00003.png", "text": "far"}\n{"file_name": "c/00000.png", "text": "c"}\n'
        '{"file_name": "a/b/gone.png", "text": "x"}\n{"file_name": "a/b/gone.png", "text": "y"}\n'
        '{"file_name": "a/b", "text": "a folder"}\n'
    )
    (place / "elsewhere").write_text('{"file_name": "a/b/00006.png", "text": "by a link"}\n')
    (place / "linked.jsonl").symlink_to(place / "elsewhere")
    (place / "broken.jsonl").symlink_to(place / "nowhere")
    samples, rejects = everything(open_source(str(place)))
    assert {s.name: (s.captions, s.label) for s in samples if s.captions or s.label} == {
        "a/b/00001.png": (("last line, no newline",), 5),
        "a/b/00003.png": (("near", "far"), None),
        "a/b/00006.png": (("by a link",), None),
        "c/00000.png": (("c",), None),
    }
    assert sorted((r.name, r.reason) for r in rejects) == [
        ("a/../c/00000.png", "caption without image"),
        ("a/b", "caption without image"),
        ("a/b/gone.png", "caption without image"),
        ("a/z.jsonl:4", "bad caption: not a record with file_name"),
        ("broken.jsonl", "not a file"),
    ]


def test_captions_alone_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "UNIT_FILES", 2)
    place = write_folder(tmp_path / "source", 3)
    for name in ("00000.TXT", "00001.json", "lonely.txt", "z.json"):
        (place / name).write_text('{"caption": "said"}' if name.endswith("json") else "said")
    os.mkfifo(place / "00002.txt")
    samples, rejects = everything(open_source(str(place)))
    assert [s.captions for s in samples] == [("said",), ("said",), ()]
    assert sorted((r.name, r.reason) for r in rejects) == [
        ("00002.txt", "not a file"),
        ("lonely.txt", "caption without image"),
        ("z.json", "caption without image"),
    ]


# --- patterns


def test_patterns_of_images(tmp_path: Path) -> None:
    place = write_folder(tmp_path / "A", 4, records=True)
    (place / "photo.jpg").write_bytes(b"a photo")
    (place / "photo.txt").write_text("a caption beside it")
    (place / "00001.txt").write_text("another")
    write_folder(place / "more" / "deep", 2)
    (tmp_path / "brackets[1]").mkdir()
    (tmp_path / "brackets[1]" / "x.png").write_bytes(b"x")
    cases = {
        "A/*.png": ["00000.png", "00001.png", "00002.png", "00003.png"],
        "A/0000[12].png": ["00001.png", "00002.png"],
        "A/photo.jpg": ["photo.jpg"],
        "A/*/deep/*.png": ["more/deep/00000.png", "more/deep/00001.png"],
        "A/mo*": ["more/deep/00000.png", "more/deep/00001.png"],
        "A/**/00001.png": ["00001.png", "more/deep/00001.png"],
        "brackets[1]": ["x.png"],
    }
    for pattern, names in cases.items():
        samples, rejects = everything(open_source(str(tmp_path / pattern)))
        assert ([s.name for s in samples], rejects) == (names, []), pattern
    samples, _ = everything(open_source(str(tmp_path / "A/*1.png")))
    assert samples[0].captions == ("another", "number 1")
    samples, _ = everything(open_source(str(tmp_path / "A/*.jpg")))
    assert samples[0].captions == ("a caption beside it",)
    source = open_source(str(tmp_path / "*/more/deep/*"), SourceConfig(labels="folder"))
    assert [(s.name, s.label) for s in everything(source)[0]] == [
        ("A/more/deep/00000.png", 0),
        ("A/more/deep/00001.png", 0),
    ]
    with pytest.raises(UserError, match=r"A/\*\.webp: no file fits this pattern"):
        prepare(str(tmp_path / "A" / "*.webp"), tmp_path / "data", CONFIG)


def test_patterns_of_tars_and_tables(tmp_path: Path) -> None:
    items = pictures(12)
    tars(tmp_path / "tars", items)
    parquet(tmp_path / "tables", items)
    for pattern, count in (("tars/*.tar", 12), ("tars/0000[01]*", 8), ("t*s/*", 12), ("tables/train-00001.*", 6)):
        samples, rejects = everything(open_source(str(tmp_path / pattern)))
        assert (len(samples), rejects) == (count, []), pattern


# --- tables


def test_a_struct_of_text_is_no_image(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.string()), ("path", pa.string())])
    table = pa.table({"image": pa.array([{"bytes": "no bytes", "path": "x"}], kind), "caption": ["x"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"0 columns can hold images \[\]; choose --image-column"):
        prepare(str(tmp_path / "a.parquet"), tmp_path / "data", CONFIG)
    with pytest.raises(UserError, match=r"--image-column image: .* has no image column of that name"):
        open_source(str(tmp_path / "a.parquet"), SourceConfig(image_column="image")).units()


def test_a_table_without_rows_is_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.array([], pa.binary())}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="holds no images"):
        prepare(str(tmp_path / "a.parquet"), tmp_path / "data", CONFIG)


def test_a_damaged_table_is_listed(tmp_path: Path) -> None:
    """pyarrow raises OSError for damaged bytes too: no reason to try again, and none to stop."""
    items = pictures(40)
    place = Path(parquet(tmp_path / "parquet", items))
    damaged = bytearray((place / "train-00001.parquet").read_bytes())
    damaged[len(damaged) // 3 : len(damaged) // 3 + 3000] = bytes(3000)
    (place / "train-00001.parquet").write_bytes(damaged)
    samples, rejects = everything(open_source(str(place)))
    assert {s.content for s in samples} == {item.content for item in items[:20]}
    assert [r.reason for r in rejects] == ["broken table"]
    place = Path(saved_to_disk(tmp_path / "saved", items))
    (arrow,) = place.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[: arrow.stat().st_size // 2])
    _, rejects = everything(open_source(str(place)))
    assert [r.reason for r in rejects] == ["broken table"]


# --- failing reads


class Failing(LocalFileSystem):
    """A disk whose reads fail `failures` times each, at one place of a file."""

    protocol = "failing"
    failures = 0
    error: Exception = OSError(errno.EIO, "Input/output error")
    left: ClassVar[dict[str, int]] = {}
    lock = threading.Lock()

    @classmethod
    def fail(cls, where: str) -> None:
        with cls.lock:
            left = cls.left.setdefault(where, cls.failures)
            cls.left[where] = left - 1
        if left > 0:
            raise cls.error

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.fail(path)
        return bytes(super().cat_file(path, start, end, **options))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:  # type: ignore[override]
        return FailingFile(Path(self._strip_protocol(path)).open("rb"), str(path))


class FailingFile(io.RawIOBase):
    """Every read past the first 4 KB fails, after moving the position: as a lost connection leaves it."""

    def __init__(self, file: Any, path: str) -> None:
        self.file, self.path = file, path

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        place = self.file.tell()
        content = bytes(self.file.read(min(size, 4096) if size >= 0 else 4096))
        if place >= 4096:
            Failing.fail(f"{self.path}@{place}")
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self.file.seek(offset, whence))

    def tell(self) -> int:
        return int(self.file.tell())

    def close(self) -> None:
        self.file.close()
        super().close()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Failing]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.clear_instance_cache()
    monkeypatch.setattr(reading, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(Failing, "left", {})
    return Failing


EIO = OSError(errno.EIO, "Input/output error")
PASSING = [
    *((form, EIO) for form in FORMS),
    ("tars", OSError(errno.EMFILE, "Too many open files")),
    ("tars", TimeoutError("timed out")),
    ("parquet", EOFError("a connection closed early")),
]


@pytest.mark.parametrize(("form", "error"), PASSING)
def test_a_read_that_fails_twice_changes_nothing(
    form: str, error: Exception, tmp_path: Path, failing: type[Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    items = pictures(30)
    place = FORMS[form](tmp_path / "source", items)
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(Failing, "failures", 2)
    samples, rejects = everything(open_source(f"failing://{place}"))
    assert sorted(bytes(s.content) for s in samples) == sorted(item.content for item in items)
    assert rejects == []
    assert any(left < 2 for left in Failing.left.values()), "something must have failed"


@pytest.mark.parametrize("form", FORMS)
def test_a_read_that_goes_on_failing_ends_the_run_and_can_be_gone_on_with(
    form: str, tmp_path: Path, failing: type[Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FORMS[form](tmp_path / "source", pictures(30))
    unbroken = prepare(place, tmp_path / "unbroken", CONFIG)
    monkeypatch.setattr(Failing, "failures", 1000)
    with pytest.raises(UserError, match=r"source .*: cannot be read, tried 3 times \(OSError: .*run the same command"):
        prepare(f"failing://{place}", tmp_path / "data", CONFIG)
    assert not list(tmp_path.glob(".data.partial/state/chunks/*.json")) or form == "parquet", "no unit marked done"
    monkeypatch.setattr(Failing, "failures", 0)
    Failing.left.clear()
    assert prepare(f"failing://{place}", tmp_path / "data", CONFIG).digest == unbroken.digest


def test_a_file_that_is_gone_or_locked_is_listed(tmp_path: Path) -> None:
    place = write_folder(tmp_path / "source", 3)
    write_folder(tmp_path / "tars", 0)
    (tmp_path / "tars" / "a.tar").write_bytes(tar({"a.png": b"x"}))
    for source, path in (
        (open_source(str(place)), place / "00001.png"),
        (open_source(str(tmp_path / "tars")), tmp_path / "tars" / "a.tar"),
    ):
        units = source.units()
        path.unlink()
        found = [f for unit in units for f in source.read(unit)]
        assert [(r.name, r.reason, r.detail) for r in found if isinstance(r, Reject)] == [
            (path.name, "unreadable", "FileNotFoundError")
        ]


class Locked(LocalFileSystem):
    """Storage far away that denies access: a key has expired."""

    protocol = "locked"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        raise PermissionError("ExpiredToken")


def test_a_permission_error_is_listed_here_and_ends_the_run_far_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAUSES", ())
    system = Locked()
    with pytest.raises(PermissionError):
        reading.read_file(system, "/x")
    from fsspec.implementations.memory import MemoryFileSystem

    class FarAway(MemoryFileSystem):
        protocol = "faraway"
        cat_file = Locked.cat_file

    with pytest.raises(UserError, match=r"source faraway:///x: access denied \(ExpiredToken\).*to go on"):
        reading.read_file(FarAway(), "/x")


# --- object stores


@pytest.mark.parametrize(
    "arguments", [["s3://bucket/images", "--out", "{out}"], ["digits", "--out", "s3://bucket/run"]]
)
def test_missing_credentials_are_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs: S3 NOT TESTED HERE")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # nothing may be found: no file of the user, no service of a cloud machine
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    process = atoll("prepare", *[a.format(out=tmp_path / "data") for a in arguments], check=False)
    assert process.returncode == 2, process.stderr
    assert "s3://bucket" in process.stderr
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in process.stderr
    assert process.stderr.count("\n") == 1, process.stderr
    assert not (tmp_path / "data").exists()


def test_lines_that_end_as_windows_doubles_them(tmp_path: Path) -> None:
    place = Path(image_folder(tmp_path / "source", pictures(3)))
    (place / "metadata.jsonl").write_bytes(b'{"file_name": "0000-000.png",\r "text": "a b"}\r\r\n\r\n')
    source = open_source(str(place), SourceConfig())
    captions = [found.captions for unit in source.units() for found in source.read(unit) if isinstance(found, Sample)]
    assert ["a b" in texts for texts in captions] == [True, False, False]


def test_a_file_too_large_to_be_an_image_is_listed_unread(tmp_path: Path) -> None:
    place = Path(image_folder(tmp_path / "source", pictures(3)))
    with (place / "backup.zip").open("wb") as file:
        file.truncate(2**40)  # takes no space on the disk, and would take a terabyte of memory
    source = open_source(str(place), SourceConfig())
    found = [found for unit in source.units() for found in source.read(unit)]
    assert [(r.name, r.reason) for r in found if isinstance(r, Reject)] == [("backup.zip", "file too large")]


@pytest.mark.parametrize("file_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_file_with_holes_is_listed(file_format: int, tmp_path: Path) -> None:
    """tar -S stores such a file without its holes: its bytes in the tar are not its content."""
    with (tmp_path / "holes.png").open("wb") as file:
        file.truncate(2**20)
        file.seek(2**19)
        file.write(b"something")
    kind = {tarfile.GNU_FORMAT: "gnu", tarfile.PAX_FORMAT: "pax"}[file_format]
    subprocess.run(["tar", "-S", f"--format={kind}", "-cf", "x.tar", "holes.png"], cwd=tmp_path, check=True)
    source = open_source(str(tmp_path / "x.tar"), SourceConfig())
    found = [found for unit in source.units() for found in source.read(unit)]
    assert [(r.reason, r.detail) for r in found if isinstance(r, Reject)] == [("not a file", "sparse")]
    assert not any(isinstance(f, Sample) for f in found)


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_damaged_table_is_one_line(ending: str, tmp_path: Path) -> None:
    """pyarrow calls some damage an OSError."""
    place = tmp_path / f"x{ending}"
    table = pa.table({"image": [b"x" * 100] * 10})
    if ending == ".parquet":
        pq.write_table(table, place)
        content = bytearray(place.read_bytes())
        content[-60:-8] = bytes(range(52))
    else:
        with pa.ipc.new_stream(place, table.schema) as writer:
            writer.write_table(table)
        content = bytearray(place.read_bytes())
        content[8:60] = b"\xff" * 52
    place.write_bytes(content)
    with pytest.raises(UserError, match="not a readable"):
        open_source(str(place), SourceConfig()).units()


def test_want_of_memory_is_no_passing_failure() -> None:
    tries = []

    def read() -> bytes:
        tries.append(1)
        raise MemoryError

    with pytest.raises(MemoryError):
        reading.attempt(read, LocalFileSystem(), "/x")
    assert len(tries) == 1
