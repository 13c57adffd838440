"""Artifacts: digests equal for equal work, checked on read, never half there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from atoll.artifacts import (
    Artifact,
    ArtifactWriter,
    FileEntry,
    Store,
    UserError,
    canonical_json,
    differences,
    digest,
    file_digest,
    finalize,
    find,
    load_if_same,
    sha256_bytes,
)


def make(place: str | Path, content: bytes = b"content", config: dict | None = None) -> Artifact:
    with ArtifactWriter(place, "thing") as draft:
        (draft.folder / "sub").mkdir()
        (draft.folder / "sub" / "file.bin").write_bytes(content)
        (draft.folder / "log.jsonl").write_bytes(os.urandom(8))
        return draft.commit(config=config or {"a": 1}, parents={"up": "0" * 64}, license="CC0-1.0")


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "there") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/there"


def test_equal_work_has_equal_digests_wherever_and_whenever_it_is_done(tmp_path: Path, place: str) -> None:
    first = make(place)
    time.sleep(1.1)  # provenance.json holds a time, and must not matter
    second = make(tmp_path / "elsewhere")
    assert first.digest == second.digest
    assert make(tmp_path / "other", b"changed").digest != first.digest
    assert make(tmp_path / "third", config={"a": 2}).digest != first.digest


def test_reads_back_what_was_written_and_lists_no_log(place: str) -> None:
    make(place, b"payload")
    artifact = Artifact.open(place, "thing")
    assert artifact.names() == ["sub/file.bin"]
    assert artifact.read("sub/file.bin") == b"payload"
    assert artifact.manifest.license == "CC0-1.0"


def test_the_digest_is_the_sha256_of_the_canonical_manifest(tmp_path: Path) -> None:
    artifact = make(tmp_path / "a")
    on_disk = json.loads((tmp_path / "a" / "manifest.json").read_bytes())
    text = json.dumps(on_disk, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert sha256_bytes(text) == artifact.digest


@pytest.mark.parametrize("what", ["pipe", "device", "too large"])
def test_a_manifest_that_is_no_file_is_refused_at_once(tmp_path: Path, what: str) -> None:
    place = tmp_path / "manifest.json"
    if what == "pipe":
        os.mkfifo(place)
    elif what == "device":
        place.symlink_to("/dev/zero")
    else:
        with place.open("wb") as stream:
            stream.truncate(100 * 2**30)  # sparse
    with pytest.raises(UserError, match=r"manifest.json: not a (regular file|valid manifest)"):
        find(tmp_path)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    make(tmp_path / "a")
    file = tmp_path / "a" / "sub" / "file.bin"
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(b"Content" if damage == "flip" else b"cont")
    with pytest.raises(UserError, match=r"file\.bin: (corrupt|file is missing)"):
        Artifact.open(tmp_path / "a").file("sub/file.bin")


def age(path: Path, seconds: float) -> None:
    then = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


def test_a_file_is_read_once_per_process_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    real = digest.sha256_file
    monkeypatch.setattr(digest, "sha256_file", lambda path: reads.append(path) or real(path))
    make(tmp_path / "a")
    file = tmp_path / "a" / "sub" / "file.bin"
    age(file, 60)
    for _ in range(2):
        Artifact.open(tmp_path / "a").file("sub/file.bin")
    monkeypatch.chdir(tmp_path)
    file_digest(Path("a/sub/file.bin"))
    assert len(reads) == 2, "one of them by the commit, under another name"
    # as long as before, and with the same time, but another file
    (tmp_path / "new").write_bytes(b"Content")
    os.utime(tmp_path / "new", ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    (tmp_path / "new").replace(file)
    with pytest.raises(UserError, match=r"file\.bin: corrupt"):
        Artifact.open(tmp_path / "a").file("sub/file.bin")
    # the same file, written to
    file.write_bytes(b"content")
    age(file, 60)
    opened = Artifact.open(tmp_path / "a")
    opened.file("sub/file.bin")
    file.write_bytes(b"cOntent")
    with pytest.raises(UserError, match=r"file\.bin: corrupt"):
        opened.file("sub/file.bin")


def test_a_time_that_has_just_passed_proves_nothing(tmp_path: Path) -> None:
    """On a file system with coarse times, a change right after the reading leaves the time as it was."""
    file, now = tmp_path / "x", time.time_ns()
    for content in (b"one", b"two"):
        file.write_bytes(content)
        os.utime(file, ns=(now, now))
        assert file_digest(file) == sha256_bytes(content)


def test_what_was_hashed_while_it_was_written_is_not_read_again(tmp_path: Path) -> None:
    entry = FileEntry(sha256=sha256_bytes(b"content"), bytes=7)
    with ArtifactWriter(tmp_path / "a", "thing") as draft:
        (draft.folder / "file.bin").write_bytes(b"Content")
        draft.commit(config={}, written={"file.bin": entry})
    with pytest.raises(UserError, match=r"file\.bin: corrupt"):
        Artifact.open(tmp_path / "a").file("file.bin")


def test_remote_files_are_checked_and_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    place = f"memory://{uuid.uuid4().hex}/a"
    make(place)
    Store.at(place).write("sub/file.bin", b"Content")
    with pytest.raises(UserError, match="sha256"):
        Artifact.open(place).file("sub/file.bin")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()], "a bad download must not stay in the cache"
    Store.at(place).write("sub/file.bin", b"content")
    kept = Artifact.open(place).file("sub/file.bin")
    Store.at(place).write("sub/file.bin", b"gone")  # the cache is named by digest, so the store is not asked again
    assert Artifact.open(place).file("sub/file.bin") == kept
    assert kept.read_bytes() == b"content"


def test_no_manifest_means_not_there_and_the_wrong_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "file.bin").write_bytes(b"x")
    for name in ("half", "nowhere"):
        with pytest.raises(UserError, match="holds no finished thing "):
            Artifact.open(tmp_path / name, "thing")
    make(tmp_path / "a")
    with pytest.raises(UserError, match="is a thing artifact, expected data"):
        Artifact.open(tmp_path / "a", "data")


def test_a_failed_draft_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), ArtifactWriter(tmp_path / "a", "thing") as draft:
        (draft.folder / "x").write_bytes(b"x")
        raise RuntimeError("boom")
    assert list(tmp_path.iterdir()) == []


def test_load_if_same_finds_equal_work_and_names_what_differs(tmp_path: Path) -> None:
    made = make(tmp_path / "a")
    parents = {"up": "0" * 64}
    assert load_if_same(tmp_path / "none", "thing", {"a": 1}, parents) is None
    found = load_if_same(tmp_path / "a", "thing", {"a": 1}, parents)
    assert found is not None
    assert found.digest == made.digest
    with pytest.raises(UserError, match=r"other settings \(a: 1 -> 2\)"):
        load_if_same(tmp_path / "a", "thing", {"a": 2}, parents)
    with pytest.raises(UserError, match=r"parent\.up"):
        load_if_same(tmp_path / "a", "thing", {"a": 1}, {"up": "1" * 64})
    with pytest.raises(UserError, match="holds a thing artifact"):
        load_if_same(tmp_path / "a", "data", {"a": 1}, parents)


def test_an_artifact_is_never_rewritten(tmp_path: Path) -> None:
    before = make(tmp_path / "a")
    with pytest.raises(UserError, match="already exists"):
        make(tmp_path / "a", b"other")
    assert Artifact.open(tmp_path / "a").digest == before.digest
    assert Artifact.open(tmp_path / "a").read("sub/file.bin") == b"content"


def test_finalize_lists_what_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    (tmp_path / "nohup.out").write_bytes(b"what the shell left here")
    sealed = finalize(tmp_path, ["model"], "expert", config={}, parents={}, license=None)
    assert Artifact.open(tmp_path, "expert").names() == ["model"]
    assert Artifact.open(tmp_path, "expert").digest == sealed.digest


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\\b", "", "c:x"])
def test_manifests_of_strangers_cannot_name_files_outside(tmp_path: Path, name: str) -> None:
    make(tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_bytes())
    manifest["files"] = {name: {"sha256": "0" * 64, "bytes": 1}}
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="unsafe file name"):
        Artifact.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not a valid manifest"),
        (b'{"kind": "x", "extra": 1}', "extra"),
        (b'{"schema_version": 1, "kind": "x"}', "schema_version: input should be 2 .got 1"),
    ],
)
def test_a_broken_manifest_is_one_clear_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        Artifact.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_canonical_json_is_one_byte_string_per_value() -> None:
    assert canonical_json({"b": 1, "a": [1.5, "é", None]}) == '{"a":[1.5,"é",null],"b":1}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_differences_name_the_path() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}}) == ["a.b: 1 -> 3"]
    assert differences({"a": 1}, {"a": 1}) == []
    assert differences({"a": "x" * 300 + "left"}, {"a": "x" * 300 + "right"}) == ["a differs"]


def test_a_newer_one_goes_beside_the_older() -> None:
    names = {
        "data": "data-2",
        "data-2": "data-3",
        "data-9": "data-10",
        "my-run": "my-run-2",
        "router-blind-2": "router-blind-3",
    }
    for older, newer in names.items():
        for run in ("/runs/a", "s3://bucket/a"):
            assert Store.at(f"{run}/{older}").successor == Store.at(f"{run}/{newer}")


def test_unknown_storage_is_refused() -> None:
    with pytest.raises(UserError, match="unknown storage scheme nosuch"):
        Store.at("nosuch://bucket/run")


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A real file system of 256 KiB, in a mount namespace of its own."""
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from atoll.artifacts import ArtifactWriter, UserError
try:
    with ArtifactWriter(Path("small/a"), "thing") as draft:
        (draft.folder / "x").write_bytes(bytes(1 << 20))
        draft.commit(config={{}})
except UserError as error:
    print(error)
    print(list(Path("small").iterdir()))
"""
    (tmp_path / "small").mkdir()
    (tmp_path / "script.py").write_text(script)
    command = f"mount -t tmpfs -o size=256k none small && {sys.executable} script.py"
    process = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in process.stderr or "mount" in process.stderr:
        pytest.skip(f"NOT TESTED HERE, no mount namespaces: {process.stderr}")
    assert "disk full while writing; free some space" in process.stdout
    assert process.stdout.strip().endswith("[]")
