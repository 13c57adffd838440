"""Create-if-absent: of many at once one succeeds, and a store that would let two is refused."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from atoll.artifacts import Store, UserError
from atoll.artifacts.create import check_creates, create_remote
from s3_servers import moto_bucket

MANY = 16


@pytest.fixture(params=["disk", "disk without links", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "memory":
        return Store.at(f"memory://{uuid.uuid4().hex}/run")
    if request.param == "disk without links":

        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))  # what vfat and exfat answer

        monkeypatch.setattr(os, "link", refuse)
    return Store.at(tmp_path / "run")


def test_the_first_creates_and_the_second_changes_nothing(store: Store) -> None:
    assert store.create("folder/name.json", b"first")
    assert not store.create("folder/name.json", b"second")
    assert store.read("folder/name.json") == b"first"
    visible = [name for name in store.child("folder").children() if name != ".lock"]
    assert visible == ["name.json"], "nothing temporary is left"


def test_of_many_at_once_exactly_one_gets_each_name_and_no_reader_sees_a_part(store: Store) -> None:
    size, rounds = 100_000, 10
    start = threading.Barrier(MANY)
    parts: list[str] = []

    def work(who: int) -> list[int]:
        won = []
        for number in range(rounds):
            start.wait()
            if store.create(f"{number}.json", bytes([who]) * size):
                won.append(number)
            found = store.read(f"{number}.json")
            if len(found) != size or len(set(found)) != 1:
                parts.append(f"{number}: {len(found)} bytes of {sorted(set(found))}")
        return won

    with ThreadPoolExecutor(MANY) as pool:
        won = [number for each in pool.map(work, range(MANY)) for number in each]
    assert sorted(won) == list(range(rounds))
    assert not parts


def test_a_name_that_leaves_the_folder_is_refused(store: Store) -> None:
    with pytest.raises(UserError, match="unsafe file name"):
        store.create("../elsewhere", b"")


def test_a_store_that_only_looks_before_it_writes_is_refused_by_name(tmp_path: Path) -> None:
    """fsspec's own way for local files: 3 of 32 threads were told that they had created the same file."""
    with pytest.raises(UserError, match="sftp://host/run: this store cannot create a file only if it is absent"):
        check_creates(LocalFileSystem(), str(tmp_path), "sftp://host/run")
    assert list(tmp_path.iterdir()) == []


def test_an_honest_server_is_asked_once_and_nothing_is_left_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_bucket() as bucket:
        store = Store.at(f"{bucket}/deep/run")
        asked: list[str] = []

        def counted(filesystem: fsspec.AbstractFileSystem, path: str, data: bytes) -> bool:
            asked.append(path)
            return create_remote(filesystem, path, data)

        monkeypatch.setattr("atoll.artifacts.create.create_remote", counted)  # which only the question goes through
        assert [store.create(name, b"1") for name in ("a", "a", "b", "b")] == [True, False, True, False]
        assert store.parent.child("other").create("c", b"1")
        assert len(asked) == 2
        assert store.children() == ["a", "b"]
        assert store.read("a", most=10) == b"1"
        store.write("empty", b"")
        assert store.read("empty", most=10) == b""


def test_a_listing_is_never_an_old_one() -> None:
    """s3fs keeps listings; another organizer's version must be seen all the same."""
    with moto_bucket() as bucket:
        store = Store.at(f"{bucket}/run/ensemble")
        assert store.children() == []
        assert store.create("000001.json", b"")
        assert store.children() == ["000001.json"]
        filesystem, root = fsspec.core.url_to_fs(store.url)
        other = type(filesystem)(skip_instance_cache=True)  # as another process has it
        other.pipe_file(f"{root}/000002.json", b"")
        assert store.children() == ["000001.json", "000002.json"]
        other.rm_file(f"{root}/000001.json")
        assert not store.exists("000001.json")


class Answers:
    """A store that gives these answers, one after the other: S3's, as s3fs passes them on."""

    protocol = ("s3", "s3a")

    def __init__(self, *codes: str) -> None:
        self.codes = list(codes)

    def pipe_file(self, path: str, data: bytes, mode: str) -> None:
        assert mode == "create"
        if code := self.codes.pop(0):
            cause = RuntimeError(code)
            cause.response = {"Error": {"Code": code}}  # type: ignore[attr-defined]
            raise OSError(errno.EIO, code) from cause


def test_a_conflict_is_tried_again_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    busy = "ConditionalRequestConflict"
    assert create_remote(Answers(busy, busy, ""), "b/k", b"")
    assert not create_remote(Answers(busy, "PreconditionFailed"), "b/k", b"")
    with pytest.raises(OSError, match="AccessDenied"):
        create_remote(Answers("AccessDenied"), "b/k", b"")
    with pytest.raises(OSError, match=busy):
        create_remote(Answers(*[busy] * 100), "b/k", b"")
