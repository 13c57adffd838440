"""Create-if-absent on object stores: a conditional PUT.

Of any number that create the same name at once, one succeeds, and the others are told so. A store that says yes to
two of them would lose work in silence, so each is asked once per process whether it can, and refused if not.
"""

from __future__ import annotations

import errno
import random
import threading
import time
import uuid
from typing import Any

import fsspec

from .errors import UserError

# stores whose client sends the condition along with the bytes; fsspec's own way for all others looks first and writes
# then, which two at once pass both
CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
CONFLICTS = 20  # answers 409 "somebody is writing this just now" to bear with, some seconds of them

_able: list[tuple[fsspec.AbstractFileSystem, str]] = []  # file systems and buckets that were asked, and can
_memory = threading.Lock()


def create_remote(filesystem: fsspec.AbstractFileSystem, path: str, data: bytes) -> bool:
    """Put a file under this name, unless something has the name already: then False."""
    for attempt in range(CONFLICTS):
        try:
            if "memory" in _protocols(filesystem):
                with _memory:
                    filesystem.pipe_file(path, data, mode="create")
            else:
                filesystem.pipe_file(path, data, mode="create")
            return True
        except FileExistsError:
            return False
        except OSError as error:
            code = _answer(error)
            if code == "PreconditionFailed":  # stores that do not say which condition
                return False
            if code != "ConditionalRequestConflict" or attempt == CONFLICTS - 1:
                raise
            time.sleep(random.uniform(0.02, 0.05) * (attempt + 1))
    raise AssertionError("unreachable")


def check_creates(filesystem: fsspec.AbstractFileSystem, root: str, url: str) -> None:
    """Refuse a store that lets two create the same name: asked once per process, by doing it."""
    bucket = root.partition("/")[0]
    if any(known is filesystem and name == bucket for known, name in _able):
        return
    if not CONDITIONAL & set(_protocols(filesystem)):
        raise cannot(url, "its client cannot create a file only if it is absent")
    probe = f"{root}/.atoll-probe-{uuid.uuid4().hex}"
    try:
        answers = [create_remote(filesystem, probe, b"may be removed"), create_remote(filesystem, probe, b"twice")]
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise cannot(url, "it does not know the condition") from error
    finally:
        if filesystem.exists(probe):
            filesystem.rm_file(probe)
    if answers != [True, False]:
        raise cannot(url, "it let the same file be created twice")
    _able.append((filesystem, bucket))


def cannot(url: str, why: str) -> UserError:
    return UserError(
        f"{url}: this store cannot create a file only if it is absent ({why}), so two organizers at once would undo "
        "each other; keep the run on a disk, or on S3, Google Cloud or Azure storage that honours conditions"
    )


def _protocols(filesystem: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _answer(error: BaseException) -> str:
    """The code an S3 store answered with, which s3fs keeps as the cause of its own error."""
    response: Any = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
