"""Sources on real files: what they list and read, what they skip, and what a failing read does."""

from __future__ import annotations

import errno
import gzip
import io
import os
import pickle
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from atoll.artifacts import AtollWarning, UserError
from atoll.cli import main
from atoll.data.images import BadImage, to_pixels
from atoll.data.sources import Example, Item, Skipped, Source, SourceConfig, files, open_source
from hostile_images import encoded, flipped, headers, picture, tar
from image_forms import FORMS, parquet, pictures, saved_to_disk, tars
from image_forms import folder as image_folder


def everything(opened: Source) -> tuple[list[Example], list[Skipped]]:
    """As workers read it: source and items travel to them, items also through the stored listing."""
    items = [Item.from_json(item.to_json()) for item in opened.list()]
    assert items == opened.list()
    found = [
        found for item in items for found in pickle.loads(pickle.dumps(opened)).read(pickle.loads(pickle.dumps(item)))
    ]
    examples = [f for f in found if isinstance(f, Example)]
    warned = [Skipped(example.name, warning) for example in examples for warning in example.note.warnings]
    return examples, [f for f in found if isinstance(f, Skipped)] + warned


def read(place: object, **options: Any) -> tuple[list[Example], list[Skipped]]:
    return everything(open_source(str(place), SourceConfig(**options)))


def reasons(skipped: list[Skipped]) -> list[tuple[str, str]]:
    return sorted((found.name, found.reason) for found in skipped)


def failing_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints that ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    printed = capsys.readouterr().err
    assert (ended.value.code, printed.count("\n")) == (2, 1), printed
    return printed


def write_folder(place: Path, count: int) -> Path:
    place.mkdir(parents=True)
    for number in range(count):
        (place / f"{number}.png").write_bytes(b"image %d" % number)
    return place


# --- which source it is


def test_a_stray_tar_or_table_hides_no_images_and_is_named(tmp_path: Path) -> None:
    place = Path(image_folder(tmp_path / "photos", pictures(5)))
    (place / "backup.tar").write_bytes(tar({"a.png": b"x"}))
    (place / "numbers.parquet").write_bytes(b"x")
    with pytest.warns(
        AtollWarning, match="read as folder; files left out: 1 \\(--format webdataset\\), 1 \\(--format p"
    ):
        opened = open_source(str(place))
    examples, skipped = everything(opened)
    assert len(examples) == opened.count() == 5
    assert reasons(skipped) == [("backup.tar", "not an image"), ("numbers.parquet", "not an image")]
    assert len(read(place, format="webdataset")[0]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # img2dataset's statistics beside each tar are no reason to warn
        assert len(read(tars(tmp_path / "tars", pictures(6)))[0]) == 6


@pytest.mark.parametrize(
    ("place", "options", "line"),
    [
        ("nowhere", {}, "source nowhere: no such folder or file"),
        ("{tmp}/*.webp", {}, "no file fits this pattern"),
        ("{tmp}", {"format": "webdatset"}, r"--format webdatset: no such format; did you mean webdataset\?"),
        ("{tmp}", {"format": "webdataset"}, r"no \.tar files there"),
        ("{tmp}", {"image_column": "x"}, "--image-column x: .* is read as folder, which has no such option"),
        ("digits", {"labels": "folder"}, "--labels folder: digits is read as digits"),
        ("digits[5:2]", {}, r"there are 1,797 digits, in order"),
        (os.fsdecode(b"caf\xe9"), {}, r"source caf\?: the path is not UTF-8"),
    ],
)
def test_a_mistake_is_one_line(place: str, options: dict[str, str], line: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "images", 1)
    with pytest.raises(UserError, match=line) as caught:
        open_source(place.format(tmp=tmp_path), SourceConfig(**options)).list()
    assert "\n" not in str(caught.value)


def test_a_source_path_that_is_not_utf8_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write_folder(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")), 3)
    for command in ("prepare", "run"):
        assert "the path is not UTF-8" in failing_line(capsys, command, str(place), "--out", str(tmp_path / "run"))


# --- folders


def test_captions_beside_images_and_in_lists(tmp_path: Path) -> None:
    """Several lists, at and above the image; lines for none; captions for none; names that are not UTF-8."""
    place = tmp_path / "source"
    write_folder(place / "a" / "b", 5)
    (place / os.fsdecode(b"caf\xe9.png")).write_bytes(b"coffee")
    (place / "a" / "b" / "0.TXT").write_text("beside it\nanother")
    (place / "a" / "b" / "0.json").write_text('{"caption": "json", "label": 1}')
    (place / "lonely.txt").write_text("about nothing")
    (place / "a" / "z.jsonl").write_bytes(
        b'\n{"file_name": "b/3.png",\r "text": "near"}\r\r\n{"file_name": "./b/1.png", "label": 5}\n'
        b'[1]\n{"file_name": "b/1.png", "text": "no newline"}'
    )
    (place / "m.JSONL").write_text(
        '{"file_name": "a/b/3.png", "text": "far"}\n{"file_name": "a/b/gone.png", "text": "x"}\n'
        '{"file_name": "a/b/0.png", "label": 2}\n{"file_name": "a/b/4.png", "text": 7}\n'
    )
    (place / "broken.png").symlink_to(place / "nowhere")
    (place / "loop").symlink_to(place)
    os.mkfifo(place / "pipe.png")
    with (place / "disk.image").open("wb") as file:
        file.truncate(2**40)  # takes no space on the disk, and would take a terabyte of memory
    examples, skipped = read(place)
    assert {e.name: (e.note.captions, e.note.label) for e in examples} == {
        "a/b/0.png": (("beside it", "another", "json"), None),
        "a/b/1.png": (("no newline",), 5),
        "a/b/2.png": ((), None),
        "a/b/3.png": (("near", "far"), None),
        "a/b/4.png": ((), None),
        "caf?.png": ((), None),
    }
    assert reasons(skipped) == [
        ("a/b/0.png", "bad label: two labels for one image"),
        ("a/b/4.png", "bad caption: not text"),
        ("a/b/gone.png", "caption without image"),
        ("a/z.jsonl:4", "bad caption: not a record with file_name"),
        ("broken.png", "not a file"),
        ("disk.image", "file too large"),
        ("lonely.txt", "caption without image"),
        ("pipe.png", "not a file"),
    ]


def test_an_item_changes_with_its_image_and_its_captions(tmp_path: Path) -> None:
    place = write_folder(tmp_path / "source", 3)
    listings = [open_source(str(place)).list()]
    changes: list[Callable[[], object]] = [
        lambda: (place / "1.png").write_bytes(b"another image"),
        lambda: (place / "1.txt").write_text("beside it"),
        lambda: (place / "1.txt").write_text("longer than before"),
        lambda: (place / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "in a list"}'),
    ]
    for change in changes:
        change()
        listings.append(open_source(str(place)).list())
        before, after = listings[-2:]
        assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_a_folder_is_listed_once_and_its_folders_are_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(image_folder(tmp_path / "source" / "one", pictures(3))).parent
    write_folder(place / "two", 2)
    seen: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(str(path)) or scandir(path))
    for labels, classes in (("given", None), ("auto", ("one", "two")), ("folder", ("one", "two"))):
        seen.clear()
        opened = open_source(str(place), SourceConfig(labels=labels))
        assert (opened.classes, opened.count()) == (classes, 5)
        copy = pickle.loads(pickle.dumps(opened))
        found = [each.note.label for item in opened.items for each in copy.read(item) if isinstance(each, Example)]
        assert found[-1] == (None if classes is None else 1)
        assert sorted(seen) == sorted(str(folder) for folder in (place, place / "one", place / "two"))
        assert len(pickle.dumps(opened)) < 1000, "the listing stays here"
    assert open_source(str(place / "one"), SourceConfig(labels="auto")).classes is None


def test_patterns(tmp_path: Path) -> None:
    place = write_folder(tmp_path / "A", 3)
    (place / "photo.jpg").write_bytes(b"a photo")
    (place / "photo.txt").write_text("beside it")
    (place / "list.jsonl").write_text('{"file_name": "more/deep/1.png", "text": "in a list"}')
    write_folder(place / "more" / "deep", 2)
    write_folder(tmp_path / "brackets[1]", 1)
    cases = {
        "A/*.png": ["0.png", "1.png", "2.png"],
        "A/[12].png": ["1.png", "2.png"],
        "A/photo.jpg": ["photo.jpg"],
        "A/*.jpg": ["photo.jpg"],
        "A/*/deep/*.png": ["more/deep/0.png", "more/deep/1.png"],
        "A/mo*": ["more/deep/0.png", "more/deep/1.png"],
        "A/**/1.png": ["1.png", "more/deep/1.png"],
        "brackets[1]": ["0.png"],
    }
    captions = {}
    for pattern, names in cases.items():
        examples, skipped = read(tmp_path / pattern)
        assert ([e.name for e in examples], skipped) == (names, []), pattern
        captions |= {e.name: e.note.captions for e in examples if e.note.captions}
    assert captions == {"photo.jpg": ("beside it",), "more/deep/1.png": ("in a list",)}
    tars(tmp_path / "tars", pictures(12))
    parquet(tmp_path / "tables", pictures(12))
    for pattern, count in (("tars/*.tar", 12), ("tars/0000[01].*r", 8), ("t*s/*.tar", 12), ("tables/*1.*", 6)):
        assert len(read(tmp_path / pattern)[0]) == count, pattern


# --- tars


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_rows_of_a_tar_are_read_where_they_begin(form: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of three rows each, of every format of tar, with long names, plain and compressed."""
    monkeypatch.setattr("atoll.data.sources.webdataset.ROWS", 3)
    deep = "d" * 60 if form == tarfile.USTAR_FORMAT else "d" * 200
    members = {f"{deep}/{i:03d}.{kind}": b"%d %s" % (i, kind.encode()) for i in range(10) for kind in ("png", "txt")}
    content = tar(members, form)
    for name, packed, count in (("a", content, 4), ("z", gzip.compress(content), 1)):
        (tmp_path / f"{name}.tar").write_bytes(packed)
        opened = open_source(str(tmp_path / f"{name}.tar"))
        examples, skipped = everything(opened)
        expected = [(f"{name}.tar/{deep}/{i:03d}.png", b"%d png" % i, (f"{i} txt",)) for i in range(10)]
        assert [(e.name, e.content, e.note.captions) for e in examples] == expected
        assert (len(opened.list()), skipped) == (count, [])


def test_a_tar_of_gnu_tar_is_read(tmp_path: Path) -> None:
    """Folders, links, pipes, holes, compression of three kinds."""
    place = tmp_path / "in" / ("d" * 80) / ("e" * 80)
    place.mkdir(parents=True)
    (place / "a.png").write_bytes(b"a")
    os.link(place / "a.png", place / "b.png")
    (place / "c.png").symlink_to("a.png")
    os.mkfifo(place / "d.png")
    with (place / "holes.png").open("wb") as file:
        file.seek(2**19)
        file.write(b"something")
    for option, name in (("", "plain.tar"), ("z", "gzip.tar"), ("j", "bzip2.tar"), ("J", "xz.tar")):
        subprocess.run(["tar", f"-cS{option}f", tmp_path / name, "--sort=name", "in"], cwd=tmp_path, check=True)
        examples, skipped = read(tmp_path / name)
        assert [e.content for e in examples] == [b"a", (place / "holes.png").read_bytes()], name
        assert [(r.name[-5:], r.reason) for r in skipped] == [(f"{c}.png", "not a file") for c in "bcd"]


def test_a_damaged_tar_gives_what_lies_before_the_damage(tmp_path: Path) -> None:
    images = {f"{number:03d}.png": encoded(picture(number), "PNG") for number in range(10)}
    whole = tar(images)
    starts = headers(whole)
    cases = {
        "a header": (flipped(whole, starts[4] + 3), 4),
        "the first header": (flipped(whole, 3), 0),
        "cut in a header": (whole[: starts[5] + 100], 5),
        "cut in an image": (whole[: starts[4] + 600], 4),
        "cut between two": (whole[: starts[5]], 5),
        "a page after the end": (whole + b"<html>" * 10, 10),
        "another tar after the end": (whole + whole, 10),
        "no tar": (b"<html>" * 1000, 0),
        "empty": (b"", 0),
        "cut and compressed": (gzip.compress(whole)[:-2000], None),
    }
    for case, (content, count) in cases.items():
        (tmp_path / "a.tar").write_bytes(content)
        examples, skipped = read(tmp_path / "a.tar")
        kept = [e.content for e in examples]
        assert kept == list(images.values())[: len(kept) if count is None else count], case
        assert reasons(skipped) == [("a.tar", "broken tar")], case


# --- tables


def test_rows_of_a_table_are_read_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["atoll.data.sources.source"], "ROWS", 7)
    items = pictures(60)
    for make, ranges in ((parquet, 10), (saved_to_disk, 9)):
        opened = open_source(make(tmp_path / make.__name__, items))
        assert len(opened.list()) == ranges
        examples, skipped = everything(opened)
        assert [(e.content, e.note.captions, e.note.label) for e in examples] == [
            (i.content, (i.caption,), i.label) for i in items
        ]
        assert (skipped, opened.count()) == ([], 60)


def test_a_damaged_table_is_listed_and_one_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    items = pictures(40)
    place = Path(parquet(tmp_path / "parquet", items))
    damaged = bytearray((place / "train-00001.parquet").read_bytes())
    damaged[len(damaged) // 3 : len(damaged) // 3 + 3000] = bytes(3000)
    (place / "train-00001.parquet").write_bytes(damaged)
    examples, skipped = read(place)
    assert {e.content for e in examples} == {item.content for item in items[:20]}
    assert [found.reason for found in skipped] == ["broken table"]
    for ending in (".parquet", ".arrow"):
        (tmp_path / f"x{ending}").write_bytes(b"PAR1" + bytes(range(200)) + b"PAR1")
        with pytest.raises(UserError, match="not a readable"):
            read(tmp_path / f"x{ending}")
    kind = pa.struct([("bytes", pa.string()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array([{"bytes": "no bytes", "path": "x"}], kind)}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"--image-column: name one of the columns of .* that can hold images"):
        read(tmp_path / "a.parquet")


# --- failing reads


class Failing(LocalFileSystem):
    """A disk on which whole reads of a file, and reads past its first 4 KB, fail."""

    protocol = "failing"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:  # type: ignore[override]
        return FailingFile(Path(self._strip_protocol(path)).read_bytes())


class FailingFile(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        if 4096 <= self.tell() < len(self.getbuffer()) - 4096:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(min(size or 4096, 4096))


@pytest.mark.parametrize("form", FORMS)
def test_a_failing_read_is_no_damage_and_ends_the_run(form: str, tmp_path: Path) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    place = FORMS[form](tmp_path / "source", pictures(30))
    with pytest.raises(UserError, match=r"source .*: cannot be read \(OSError: .*run the same command"):
        read(f"failing://{place}")


def test_a_file_that_is_gone_is_listed(tmp_path: Path) -> None:
    place = write_folder(tmp_path / "source", 3)
    (tmp_path / "a.tar").write_bytes(tar({"a.png": b"x"}))
    for opened, path in (
        (open_source(str(place)), place / "1.png"),
        (open_source(f"{tmp_path}/a.tar"), tmp_path / "a.tar"),
    ):
        items = opened.list()
        path.unlink()
        found = [found for item in items for found in opened.read(item)]
        assert [(f.name, f.reason) for f in found if isinstance(f, Skipped)] == [(path.name, "unreadable")]


def test_access_denied_is_listed_here_and_ends_the_run_far_away() -> None:
    with pytest.raises(PermissionError), files.reading("/x"):
        raise PermissionError("denied")
    with (
        pytest.raises(UserError, match=r"s3://bucket/x: cannot be read \(PermissionError: ExpiredToken\).*to resume"),
        files.reading("s3://bucket/x"),
    ):
        raise PermissionError("ExpiredToken")


def test_missing_credentials_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs: S3 NOT TESTED HERE")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # nothing may be found: no file of the user, no service of a cloud machine
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    line = failing_line(capsys, "prepare", "s3://bucket/images", "--out", str(tmp_path / "data"))
    assert "s3://bucket" in line
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in line
    assert not (tmp_path / "data").exists()


# --- images


def test_an_image_is_measured_before_it_is_shrunk() -> None:
    """A decoder that shrinks a JPEG while it reads must not make it too small."""
    large = encoded(picture(1, width=2000, height=1500), "JPEG")
    assert to_pixels(large, 64, 3, smallest=512).shape == (3, 64, 64)
    with pytest.raises(BadImage, match="too small") as caught:
        to_pixels(large, 64, 3, smallest=1501)
    assert caught.value.detail == "2000x1500, need 1501 a side"
