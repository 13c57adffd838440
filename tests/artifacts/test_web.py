"""A plain web server as a store: what it holds is read, and what it may try comes to nothing."""

from __future__ import annotations

import hashlib
import http.server
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.artifacts import Store, UserError, storage_errors, store, web
from web_servers import WebServer, web_server

Handler = http.server.BaseHTTPRequestHandler
Respond = Callable[[Handler], None]
BODY = b"some bytes of a shard" * 1000
DIGEST = hashlib.sha256(BODY).hexdigest()


def answer(handler: Handler, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def to(target: str, status: int = 302) -> Respond:
    return lambda handler: answer(handler, status, Location=target)


def sends(part: bytes, *, first: bytes = b"", pause: float = 0.0, status: int = 200, **headers: str) -> Respond:
    """An answer that repeats a part for ever; with status 0, `first` is its head."""

    def respond(handler: Handler) -> None:
        if status:
            answer(handler, status, **headers)
        handler.wfile.write(first)
        while True:
            handler.wfile.write(part)
            time.sleep(pause)

    return respond


def breaks_off(said: bytes, **headers: str) -> Respond:
    def respond(handler: Handler) -> None:
        answer(handler, **headers)
        handler.wfile.write(said)

    return respond


times: list[str] = []
ANSWERS: dict[str, Respond] = {}  # by path


def fails_once(handler: Handler) -> None:
    times.append(handler.path)
    if len(times) == 1:
        breaks_off(BODY[:100], Content_Length=str(len(BODY)))(handler)
    else:
        breaks_off(BODY, Content_Length=str(len(BODY)))(handler)


CHUNKED = {"Transfer_Encoding": "chunked"}
HEADERS = b"HTTP/1.1 200 OK\r\n"
SLOW = "bytes in [01] s, too slow or too many"
REFUSED = "which is refused"
# what a path answers, and the line that follows; None: what was asked for is read, and no more
HOSTILE: dict[str, tuple[Respond, str | None]] = {
    "endless": (sends(b"x" * 65536), None),
    "endless-chunks": (sends(b"10000\r\n" + b"x" * 65536 + b"\r\n", **CHUNKED), None),
    "huge": (sends(b"x" * 65536, Content_Length=str(10**15)), None),
    "endless-headers": (sends(b"X: " + b"x" * 60000 + b"\r\n", status=0, first=HEADERS), "no valid HTTP|" + SLOW),
    "endless-trailers": (sends(b"X: " + b"x" * 60000 + b"\r\n", first=b"2\r\nab\r\n0\r\n", **CHUNKED), SLOW),
    "endless-redirect": (sends(b"x" * 65536, status=302, Location="/folder/file"), None),
    "slow-headers": (sends(b"X: x\r\n", status=0, first=HEADERS, pause=0.05), SLOW),
    "slow-line": (sends(b"x", status=0, first=HEADERS + b"X: ", pause=0.05), SLOW),
    "slow-body": (sends(b"x", pause=0.05, Content_Length=str(10**6)), SLOW),
    "slow-chunks": (sends(b"1\r\nx\r\n", pause=0.05, **CHUNKED), SLOW),
    "slow-trailers": (sends(b"X: x\r\n", first=b"2\r\nab\r\n0\r\n", pause=0.05, **CHUNKED), SLOW),
    "silent": (lambda handler: time.sleep(2), SLOW),
    "short": (breaks_off(BODY, Content_Length=str(len(BODY) + 100)), "the answer ends too early"),
    "broken-chunks": (breaks_off(b"\x1b[2Jnot a number\r\n", **CHUNKED), "does not answer"),
    "negative-chunk": (breaks_off(b"-5\r\nabc\r\n", **CHUNKED), "does not answer"),
    "to-file": (to("file:///etc/passwd"), "302"),
    "to-ftp": (to("ftp://127.0.0.1/x", 301), REFUSED),
    "to-data": (to("data:text/plain,hello", 307), "307"),
    "to-http": (to("http://127.0.0.1:1/x"), REFUSED),
    "to-escape": (to("gopher://\x1b[2J"), "no valid HTTP"),
    "to-nowhere": (to("https://[::"), "does not answer"),
    "round": (to("/round"), "302"),
    "failing": (lambda handler: answer(handler, 500), "the server answers 500"),
    "unauthorized": (lambda handler: answer(handler, 401), r"access denied \(401\); check the URL"),
    "closed": (lambda handler: answer(handler, 403), r"access denied \(403\); check the URL"),
    "moved": (to("/folder/file", 308), None),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    place = tmp_path_factory.mktemp("web")
    for folder in ("served/folder", "certificates"):
        (place / folder).mkdir(parents=True)
    for name in ("file", "it's a file", "fünf"):
        (place / "served" / "folder" / name).write_bytes(BODY)
    ANSWERS.update({"/once": fails_once, **{f"/{path}": respond for path, (respond, _) in HOSTILE.items()}})
    with web_server(place / "served", place / "certificates", ANSWERS) as running:
        yield running


@pytest.fixture
def place(server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority))
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(web, "PATIENCE", 0.5)
    monkeypatch.setattr(store, "PAUSES", (0.0,))
    return Store.at(server.url)


def test_files_are_read_in_part_whole_and_into_the_cache(place: Store) -> None:
    folder = place.child("folder")
    assert folder.read("file") == BODY
    assert folder.read("file", 10) == BODY[:11]
    assert folder.read("it's a file", 10) == folder.read("fünf", 10) == BODY[:11]
    assert folder.download("file", DIGEST, len(BODY)).read_bytes() == BODY
    with pytest.raises(FileNotFoundError):
        folder.read("other")
    assert place.read("moved") == BODY, "a redirect within the host is followed"
    with folder.opened("file", 5) as stream:
        assert stream.read(5) == BODY[:5]


def test_a_lost_connection_is_tried_again(place: Store) -> None:
    times.clear()
    assert place.download("once", DIGEST).read_bytes() == BODY
    times.clear()
    assert place.read("once") == BODY


def test_a_certificate_of_an_unknown_authority_is_refused(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setattr(store, "PAUSES", ())
    with pytest.raises(UserError, match=r"does not answer .*CERTIFICATE_VERIFY_FAILED"), storage_errors(server.url):
        Store.at(server.url).read("folder/file")


def test_nothing_is_written_or_listed(place: Store) -> None:
    for attempt in (lambda: place.write("x", b""), lambda: place.create("x", b""), place.children):
        with pytest.raises(UserError, match=r"can only be read|cannot create"):
            attempt()


@pytest.mark.parametrize("path", HOSTILE)
def test_what_is_read_is_bounded_in_bytes_and_time_and_else_it_is_one_line(path: str, place: Store) -> None:
    reason, began = HOSTILE[path][1], time.monotonic()
    if reason is None:
        assert len(place.read(path, 1000)) == 1001
    else:
        with pytest.raises(UserError, match=reason) as caught, storage_errors(place.url):
            place.read(path, 10**6)
        assert str(caught.value).isprintable()
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize("path", HOSTILE)
def test_a_bad_download_is_one_line_and_nothing_is_kept(
    path: str, place: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAUSES", ())
    with pytest.raises(UserError), storage_errors(place.url):
        place.download(path, "0" * 64, 10_000)
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost"])
def test_a_redirect_leads_to_no_private_address(host: str, place: Store) -> None:
    """Told from the open socket: a server listens there, and receives nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.2" if host == "127.0.0.2" else "127.0.0.1", 0))
        listening.listen()
        ANSWERS["/to-private"] = to(f"https://{host}:{listening.getsockname()[1]}/x")
        with pytest.raises(UserError, match="a private address"):
            place.read("to-private")
        listening.settimeout(5)
        connection, _ = listening.accept()
        connection.settimeout(5)
        assert connection.recv(10) == b"", "not even a greeting"
