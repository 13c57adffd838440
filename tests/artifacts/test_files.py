"""Files are whole or not there, also after kill -9; of many writers at once one creates; one process at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from atoll.artifacts import (
    LOCK,
    STATE,
    ArtifactWriter,
    Store,
    UserError,
    atomic_file,
    file_lock,
    find,
    load_if_same,
    storage_errors,
    write_atomic,
)
from s3_servers import moto_bucket

HEAD = """
import sys, time
from pathlib import Path
import atoll.artifacts.artifact as artifact
from atoll.artifacts import LOCK, STATE, ArtifactWriter, atomic_file, file_lock, finalize
place = Path(sys.argv[1])
def wait(*_):
    print('there', flush=True)
    time.sleep(60)
"""
# what a process does; it is killed at WAIT
FILE = "with atomic_file(place / 'a.json') as f: f.write(b'1'); WAIT"
DRAFT = "with ArtifactWriter(place / 'a', 'thing') as d: (d.folder / 'x').write_bytes(b'x'); WAIT; d.commit(config={})"
RESUMED = DRAFT.replace("'thing'", "'thing', resumable=True").replace(
    "WAIT", "f = atomic_file(d.folder / 'y'); f.__enter__(); WAIT"
)
COMMITTED = "artifact.fsync_path = lambda p: WAIT if p == place else None\n" + DRAFT.replace("WAIT", "pass")
TRAINED = (
    "with file_lock(place / 'a' / 'state'):\n"
    "    finalize(place / 'a', [], 'thing', config={}, parents={}, license=None); WAIT"
)
FINISHED = {"a", "a/manifest.json", "a/provenance.json"}


@contextmanager
def begun(work: str, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has come as far as `wait`."""
    command = [sys.executable, "-c", HEAD + work.replace("WAIT", "wait()"), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("work", [FILE, DRAFT, RESUMED])
def test_killed_it_is_not_there_and_repeated_it_leaves_nothing_else(work: str, tmp_path: Path) -> None:
    with begun(work, tmp_path):
        assert not {"a", "a.json"} & below(tmp_path)
    assert any(name.startswith(".") for name in below(tmp_path)), "it was killed while it worked"
    subprocess.run([sys.executable, "-c", HEAD + work.replace("WAIT", "wait"), str(tmp_path)], check=True)
    assert below(tmp_path) == ({"a.json"} if work == FILE else FINISHED | {"a/x"})


@pytest.mark.parametrize("work", [COMMITTED, TRAINED])
def test_killed_after_the_end_it_is_cleaned_up_by_the_same_command(work: str, tmp_path: Path) -> None:
    with begun(work, tmp_path):
        assert {name.partition("/")[2].partition("/")[0] for name in below(tmp_path)} & {STATE, LOCK}
    assert load_if_same(tmp_path / "a", "thing", {}, {}) is not None
    assert below(tmp_path) - {"a/x"} == FINISHED


def test_a_second_process_is_refused_and_the_lock_can_be_had_again(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            file_lock(tmp_path / "a"),
            pytest.raises(UserError, match="another process is working here"),
            file_lock(tmp_path / "a"),
        ):
            raise AssertionError("two at once")
    with ArtifactWriter(tmp_path / "b", "thing") as draft:
        with pytest.raises(UserError, match="another process"), ArtifactWriter(tmp_path / "b", "thing"):
            raise AssertionError("two at once")
        draft.commit(config={})
    assert below(tmp_path / "b") == {"manifest.json", "provenance.json"}


def test_many_writers_of_one_file_take_turns(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), atomic_file(tmp_path / "a") as stream:
        stream.write(b"half")
        raise RuntimeError("boom")
    assert below(tmp_path) == set()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: write_atomic(tmp_path / "a", bytes([k % 256]) * (1000 + k)), range(200)))
    content = (tmp_path / "a").read_bytes()
    assert content == content[:1] * (1000 + content[0])
    assert below(tmp_path) == {"a"}


def test_a_temporary_name_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / ".a.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        write_atomic(tmp_path / "a", b"x")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_resumed_draft_has_no_half_written_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ArtifactWriter(tmp_path / "a", "thing", resumable=True) as draft:
        (draft.folder / STATE).mkdir()
        for name in (".0.bin.tmp", ".tmpAbC123", "0.bin"):
            (draft.folder / name).write_bytes(b"x")
        raise RuntimeError
    assert below(tmp_path) >= {".a.partial/0.bin", f".a.partial/{LOCK}", f".a.partial/{STATE}"}
    with ArtifactWriter(tmp_path / "a", "thing", resumable=True) as draft:
        assert draft.commit(config={}).names() == ["0.bin"]
    assert below(tmp_path) == FINISHED | {"a/0.bin"}


def test_of_many_at_once_one_creates_a_file_and_no_reader_sees_a_part(tmp_path: Path) -> None:
    store, start = Store.at(tmp_path / "run"), threading.Barrier(16)

    def work(who: int) -> list[int]:
        won = []
        for number in range(5):
            start.wait()
            created = store.create(f"deep/{number}.json", bytes([who]) * 100_000)
            while not store.exists(f"deep/{number}.json"):
                time.sleep(0.001)
            assert store.read(f"deep/{number}.json").count(store.read(f"deep/{number}.json")[:1]) == 100_000
            won += [number] * created
        return won

    with ThreadPoolExecutor(16) as pool:
        assert sorted(n for each in pool.map(work, range(16)) for n in each) == list(range(5))
    assert store.child("deep").children() == [f"{number}.json" for number in range(5)], "nothing temporary is left"
    with pytest.raises(UserError, match="unsafe file name"):
        store.create("../elsewhere", b"")


def test_on_s3_a_file_is_created_once_and_no_listing_is_an_old_one() -> None:
    """Many processes at once: tests/registry/test_races.py."""
    with moto_bucket() as bucket:
        store = Store.at(f"{bucket}/run")
        assert [store.create(name, b"12 bytes long") for name in ("deep/0.json", "deep/0.json")] == [True, False]
        store.write("empty", b"")
        assert store.read("empty", most=10) == b""
        assert store.read("deep/0.json", most=10) == store.read("deep/0.json")[:11]
        filesystem, root = fsspec.core.url_to_fs(store.url)
        other = type(filesystem)(skip_instance_cache=True)  # as another process has it
        assert store.children() == ["deep", "empty"]
        other.pipe_file(f"{root}/new", b"")
        assert store.children() == ["deep", "empty", "new"]
        other.rm_file(f"{root}/empty")
        assert not store.exists("empty")


class Plain(MemoryFileSystem):
    """A store whose client looks first and writes then."""

    protocol = "dropbox"


def test_a_store_that_only_looks_before_it_writes_is_refused() -> None:
    fsspec.register_implementation("dropbox", Plain, clobber=True)
    place = "dropbox://run/a"
    for attempt in (lambda: Store.at(place).create("b", b""), ArtifactWriter(place, "thing").__enter__):
        with pytest.raises(UserError, match="dropbox:// cannot create a file only if it is absent, so two organizers"):
            attempt()
    assert find(place) is None, "but it can be read"


def test_a_conflict_and_a_refused_condition_create_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of S3 as s3fs passes them on; any other is an error."""

    def answer(code: str) -> bool:
        def fail(*_: object, **__: object) -> None:
            cause = RuntimeError(code)
            cause.response = {"Error": {"Code": code}}  # type: ignore[attr-defined]
            raise OSError(5, code) from cause

        monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
        return Store.at("memory://run").create("a", b"")

    assert not answer("ConditionalRequestConflict")
    assert not answer("PreconditionFailed")
    with pytest.raises(OSError, match="AccessDenied"):
        answer("AccessDenied")


def test_remote_work_has_a_private_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two URLs that differ in a `/` shared one, at a name in /tmp that anybody could take first."""
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    unique = uuid.uuid4().hex
    folders = [ArtifactWriter(f"memory://{unique}{mark}run/data", "data").folder for mark in "/-"]
    assert folders[0] != folders[1]
    assert {folder.parent for folder in folders} == {tmp_path / "cache" / "work"}
    assert (tmp_path / "cache" / "work").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("keys", [False, True])
def test_a_store_that_is_unreachable_or_lacks_credentials_is_one_line(
    keys: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs: S3 NOT TESTED HERE")
    settings = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1"}
    settings |= {"AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    settings |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"} if keys else {}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    reason = r"s3://b/run: does not answer \(" if keys else "s3://b/run: no credentials .*AWS_ACCESS_KEY_ID"
    with pytest.raises(UserError, match=reason), storage_errors("s3://b/run"):
        find("s3://b/run")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
