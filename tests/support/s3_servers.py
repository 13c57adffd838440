"""A real S3 server on loopback that honours conditions: moto."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BUCKET = "bucket"


@contextmanager
def reached_at(port: int) -> Iterator[None]:
    """Let fsspec, here and in processes started from here, find the server; and forget it afterwards."""
    import s3fs

    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield
        s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def moto_bucket() -> Iterator[str]:
    """The URL of an empty bucket on a server that honours conditions, in a process of its own."""
    pytest.importorskip("s3fs", reason="needs s3fs: S3 NOT TESTED HERE")
    pytest.importorskip("moto", reason="needs moto: CONDITIONAL WRITES NOT TESTED HERE")
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        with reached_at(int(server.stdout.readline())):
            import s3fs

            s3fs.S3FileSystem().mkdir(BUCKET)
            yield f"s3://{BUCKET}"
    finally:
        server.kill()
        server.wait()


def upload(folder: Path, url: str) -> None:
    """Copy a folder to an object store as it is."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            filesystem.pipe_file(f"{root}/{file.relative_to(folder).as_posix()}", file.read_bytes())


def serve() -> None:
    """A server until standard input closes; prints its port."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve()
