"""A plain web server as a store: what it holds is read, and what it may try comes to nothing."""

from __future__ import annotations

import hashlib
import http.server
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.artifacts import Store, UserError, web
from atoll.artifacts.away import reaching
from web_servers import WebServer, web_server

Handler = http.server.BaseHTTPRequestHandler
BODY = b"some bytes of a shard" * 1000
DIGEST = hashlib.sha256(BODY).hexdigest()


def answer(handler: Handler, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def endless(handler: Handler) -> None:
    answer(handler)
    while True:
        handler.wfile.write(b"x" * 65536)


def chunks_without_end(handler: Handler) -> None:
    answer(handler, Transfer_Encoding="chunked")
    while True:
        handler.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def short(handler: Handler) -> None:
    answer(handler, Content_Length=str(len(BODY) + 100))
    handler.wfile.write(BODY)


def huge(handler: Handler) -> None:
    answer(handler, Content_Length=str(10**15))
    handler.wfile.write(BODY)


def broken_chunks(handler: Handler) -> None:
    answer(handler, Transfer_Encoding="chunked")
    handler.wfile.write(b"\x1b[2Jnot a number\r\n")


def trickle(handler: Handler) -> None:
    answer(handler, Content_Length=str(10**6))
    import time

    while True:
        handler.wfile.write(b"x")
        time.sleep(0.05)


def to(target: str, status: int = 302):  # type: ignore[no-untyped-def]
    return lambda handler: answer(handler, status, Location=target)


HOSTILE = {
    "/endless": endless,
    "/chunks": chunks_without_end,
    "/short": short,
    "/huge": huge,
    "/broken": broken_chunks,
    "/trickle": trickle,
    "/to-file": to("file:///etc/passwd"),
    "/to-ftp": to("ftp://127.0.0.1/x", 301),
    "/to-data": to("data:text/plain,hello", 307),
    "/to-http": to("http://127.0.0.1:1/x"),
    "/to-escape": to("gopher://\x1b[2J"),
    "/to-loopback": to("https://127.0.0.2:4/x"),
    "/to-name": to("https://localhost:4/x"),
    "/round": to("/round"),
    "/moved": to("/folder/file", 308),
    "/failing": lambda handler: answer(handler, 500),
    "/closed": lambda handler: answer(handler, 403),
}
# whether it is read as a small file or downloaded: one line, and nothing kept
READING = {
    "/short": "21,000 bytes came, it said 21,100",
    "/broken": "its answer broke off",
    "/to-file": "redirected to file:///etc/passwd",
    "/to-ftp": "redirected to ftp://127.0.0.1/x",
    "/to-data": "redirected to data:text/plain,hello",
    "/to-http": "redirected to http://127.0.0.1:1/x",
    "/to-escape": "redirected to gopher",
    "/round": "does not answer",
    "/failing": "it answers 500",
}
DOWNLOADING = {
    "/endless": "does not say how long|does not end after",
    "/chunks": "does not say how long|does not end after",
    "/huge": "has 1,000,000,000,000,000 bytes|came, it said",
    "/trickle": "find a faster way|has 1,000,000 bytes",
    **READING,
    "/broken": "its answer broke off|does not say how long",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    place = tmp_path_factory.mktemp("web")
    for folder in ("served/folder", "certificates"):
        (place / folder).mkdir(parents=True)
    (place / "served" / "folder" / "file").write_bytes(BODY)
    (place / "served" / "folder" / "it's a file").write_bytes(BODY)
    with web_server(place / "served", place / "certificates", HOSTILE) as running:
        yield running


@pytest.fixture
def store(server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority))
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(web, "PATIENCE", 0.5)
    return Store.at(server.url)


def test_files_are_read_in_part_whole_and_into_the_cache(store: Store) -> None:
    folder = store.child("folder")
    assert folder.read("file") == BODY
    assert folder.read("file", 10) == BODY[:11]
    assert folder.read("it's a file", 10) == BODY[:11]
    assert folder.download("file", DIGEST, len(BODY)).read_bytes() == BODY
    assert folder.exists("file")
    assert not folder.exists("other")
    with pytest.raises(FileNotFoundError):
        folder.read("other")
    assert folder.modified("file") is not None
    assert Store(f"{store}").read("moved") == BODY, "a redirect within the host is followed"
    with folder.opened("file") as stream:
        assert stream.read(5) == BODY[:5]


def test_a_certificate_of_nobody_known_is_refused(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with (
        pytest.raises(UserError, match=r"does not answer .*CERTIFICATE_VERIFY_FAILED"),
        reaching(server.url, "mend it"),
    ):
        Store.at(server.url).read("folder/file")


def test_nothing_is_written_or_listed(store: Store) -> None:
    for attempt in (lambda: store.write("x", b""), lambda: store.create("x", b""), store.children):
        with pytest.raises(UserError, match=r"nothing can be written|cannot create|does not say what it has"):
            attempt()


@pytest.mark.parametrize("path", READING)
def test_a_bad_answer_is_one_line(path: str, store: Store) -> None:
    with pytest.raises(UserError, match=READING[path]) as caught, reaching(store.url, "ask them"):
        store.read(path[1:], 10**6)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", ["/endless", "/chunks", "/huge"])
def test_of_a_body_without_end_no_more_is_read_than_was_asked_for(path: str, store: Store) -> None:
    assert len(store.read(path[1:], 1000)) == 1001


@pytest.mark.parametrize("most", [None, 100_000])
@pytest.mark.parametrize("path", DOWNLOADING)
def test_a_bad_download_is_one_line_and_nothing_is_kept(
    path: str, most: int | None, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=DOWNLOADING[path]), reaching(store.url, "ask them"):
        store.download(path[1:], DIGEST, most)
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


@pytest.mark.parametrize("path", ["/to-loopback", "/to-name"])
def test_a_redirect_leads_to_no_address_inside_a_network(path: str, store: Store, tmp_path: Path) -> None:
    """Told from the open socket: somebody listens there, and is asked nothing."""
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.2" if path == "/to-loopback" else "127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        target = f"https://{'127.0.0.2' if path == '/to-loopback' else 'localhost'}:{port}/x"
        HOSTILE[path] = to(target)
        with pytest.raises(UserError, match=r"an address inside a network; nothing is asked there"):
            store.read(path[1:])
        listening.settimeout(5)
        connection, _ = listening.accept()
        connection.settimeout(5)
        assert connection.recv(10) == b"", "not even a greeting"


def test_who_asks_for_a_password_is_told_so(store: Store) -> None:
    with pytest.raises(PermissionError, match="wants credentials"):
        store.read("closed")
