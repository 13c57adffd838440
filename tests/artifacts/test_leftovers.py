"""What killed processes leave is removed; what living ones hold is not."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.artifacts import LOCK, STATE, ArtifactWriter, file_lock, find, load_if_same, remove_stale, write_atomic
from atoll.artifacts.leftovers import remove_unfinished
from atoll.artifacts.store import atomic_file

# each ends its first line when what it makes is there, and waits to be killed
BEGUN = {
    "file": 'from atoll.artifacts.store import atomic_file\nwith atomic_file(place / "a.json") as f: wait()',
    "draft": 'from atoll.artifacts import ArtifactWriter\nwith ArtifactWriter(place / "a", "thing") as d: wait()',
    "resumable": (
        "from atoll.artifacts import ArtifactWriter, STATE\n"
        'with ArtifactWriter(place / "a", "thing", resumable=True) as d:\n'
        "    (d.folder / STATE).mkdir()\n    wait()"
    ),
    "at the end of a draft": (
        "import atoll.artifacts.artifact as a\n"
        'with a.ArtifactWriter(place / "a", "thing") as d:\n'
        "    a.fsync_path = lambda p: wait() if p == place else None\n"
        "    d.commit(config={})"
    ),
    "at the end of a training": (
        'from atoll.artifacts import file_lock, finalize\nwith file_lock(place / "a" / "state"):\n'
        '    finalize(place / "a", [], "thing", config={}, parents={}, license=None)\n    wait()'
    ),
}
HEAD = "import sys, time\nfrom pathlib import Path\nplace = Path(sys.argv[1])\n"
HEAD += "def wait():\n    print('there', flush=True)\n    time.sleep(60)\n"


@contextmanager
def begun(what: str, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has come as far as that."""
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + BEGUN[what], str(place)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("what", BEGUN)
def test_held_it_stays_and_killed_it_goes(what: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "deeper").mkdir(parents=True)
    with begun(what, run / "deeper") as process:
        before = below(run)
        remove_stale(run)
        assert below(run) == before, "it took what a living process holds"
        process.kill()
        process.wait()
        remove_stale(run)
    kept = {
        "resumable": {"deeper", "deeper/.a.partial", f"deeper/.a.partial/{LOCK}", f"deeper/.a.partial/{STATE}"},
        "at the end of a draft": {"deeper", "deeper/a", "deeper/a/manifest.json", "deeper/a/provenance.json"},
        "at the end of a training": {"deeper", "deeper/a", "deeper/a/manifest.json", "deeper/a/provenance.json"},
    }
    assert below(run) == kept.get(what, {"deeper"})


@pytest.mark.parametrize("what", ["at the end of a draft", "at the end of a training"])
def test_who_finds_it_done_tidies_up(what: str, tmp_path: Path) -> None:
    with begun(what, tmp_path) as process:
        process.kill()
        process.wait()
    assert load_if_same(tmp_path / "a", "thing", {}, {}) is not None
    assert below(tmp_path / "a") == {"manifest.json", "provenance.json"}


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Other programs have temporary files and hidden folders, too; and a link leads out of the run."""
    (tmp_path / "run").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".a.json.0123abcd.tmp").touch()
    (tmp_path / "run" / "link").symlink_to(outside)
    for name in ("notes.tmp", ".notes.tmp", ".a.json.0123ABCD.tmp", ".tmpAbC123"):
        (tmp_path / "run" / name).touch()
    (tmp_path / "run" / ".theirs.partial").mkdir()
    before = below(tmp_path)
    remove_stale(tmp_path / "run")
    assert below(tmp_path) == before


def test_a_draft_that_goes_on_leaves_no_half_written_file_in_the_artifact(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "thing", resumable=True) as draft:
        (draft.folder / "shards").mkdir()
        for name in (".0.bin.0123abcd.tmp", ".tmpAbC123", "0.bin"):
            (draft.folder / "shards" / name).write_bytes(b"x")
        draft._committed = True  # as if killed: nothing is cleared
    with ArtifactWriter(tmp_path / "a", "thing", resumable=True) as draft:
        made = draft.commit(config={})
    assert made.names() == ["shards/0.bin"]
    assert below(tmp_path) == {"a", "a/manifest.json", "a/provenance.json", "a/shards", "a/shards/0.bin"}


def test_writers_and_sweepers_at_once_lose_no_file(tmp_path: Path) -> None:
    """A writer whose file is swept before it could lock it takes another; none of 400 may be missing."""
    done = threading.Event()

    def clean() -> None:
        while not done.is_set():
            remove_unfinished(tmp_path)

    def write(first: int) -> None:
        for number in range(first, first + 100):
            write_atomic(tmp_path / f"{number}.json", b"x")

    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(100 * k,)) for k in range(4)]
    for thread in [*cleaners, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in cleaners:
        thread.join()
    assert below(tmp_path) == {f"{number}.json" for number in range(400)}


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), atomic_file(tmp_path / "a") as stream:
        stream.write(b"half")
        raise RuntimeError("boom")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_can_be_had_again(tmp_path: Path) -> None:
    with file_lock(tmp_path / "a"):
        pass
    with file_lock(tmp_path / "a"):
        assert find(tmp_path / "a") is None
