"""A TLS server on loopback with a certificate of an authority made for the test, honest below a folder, and hostile."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@dataclass(frozen=True)
class WebServer:
    url: str
    authority: Path
    asked: list[str]  # paths, in the order they were asked for


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """An authority, and what it signed for 127.0.0.1: a file with key and certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: HTTPS NOT TESTED HERE")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=a test's authority"
    )
    openssl("req", *key, "-keyout", "its.key", "-out", "its.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "its.csr", *signed, "-out", "its.pem")
    (folder / "server.pem").write_bytes((folder / "its.key").read_bytes() + (folder / "its.pem").read_bytes())
    return folder / "ca.pem", folder / "server.pem"


@contextmanager
def web_server(folder: Path, certificates: Path, hostile: dict[str, Answer] | None = None) -> Iterator[WebServer]:
    """Serve a folder over TLS; paths of `hostile` are answered as it likes."""
    authority, server_pem = make_certificate(certificates)
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self) -> None:
            asked.append(self.path)
            if hostile is not None and self.path in hostile:
                with suppress(OSError):  # whoever reads no further hangs up
                    hostile[self.path](self)
                self.close_connection = True
            else:
                super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_pem)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield WebServer(f"https://127.0.0.1:{server.server_port}", authority, asked)
    finally:
        server.shutdown()
        server.server_close()
