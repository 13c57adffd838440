"""Files on a plain web server: read, and nothing else, by the standard library, so that an island installs no more.

The server may be anybody's. No more is read than was asked for, a body is as long as the server said, and it comes at
some pace. A redirect stays on the web, never goes from https back to http, and away from the host that was named it
leads to public addresses only: nobody out there makes us ask a machine of this network, or a file of this disk.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from .errors import UserError
from .manifest import sanitize

SCHEMES = ("https", "http")
PATIENCE = 60.0  # seconds without a byte, and before the pace is looked at
PACE = 1024  # bytes per second that must come on average
CHUNK = 2**18
MOST_REDIRECTS = 5
# what servers answer instead of a file that is not there, or that nobody may have
MISSING, FORBIDDEN = (404, 410), (401, 403)


class WebFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """As much of a file system as a web server is: paths are URLs, and nothing can be listed or written."""

    protocol = SCHEMES
    cachable = False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The whole of a file, or its first `end` bytes."""
        assert not start, "only from the beginning"
        with answered(path) as answer:
            return b"".join(parts(answer, path, end))

    def get_file(self, rpath: str, lpath: str, most: int | None = None, **_: Any) -> None:
        """Copy a file of a length that the server says, of at most `most` bytes."""
        with answered(rpath) as answer, Path(lpath).open("wb") as target:
            said = length_of(answer)
            if said is None and most is None:
                raise UserError(f"{rpath}: the server does not say how long it is; put it on one that does")
            if most is not None and (said or 0) > most:
                raise UserError(f"{rpath}: has {said:,} bytes, at most {most:,} were expected")
            seen = 0
            for part in parts(answer, rpath, None):
                seen += len(part)
                if most is not None and seen > most:
                    raise UserError(f"{rpath}: does not end after the {most:,} bytes that were expected")
                target.write(part)

    def exists(self, path: str, **_: Any) -> bool:
        try:
            with answered(path, "HEAD"):
                return True
        except FileNotFoundError:
            return False

    def size(self, path: str) -> int | None:
        with answered(path, "HEAD") as answer:
            return length_of(answer)

    def modified(self, path: str) -> datetime | None:
        with answered(path, "HEAD") as answer:
            said = answer.headers.get("Last-Modified")
        try:
            return None if said is None else parsedate_to_datetime(said)
        except ValueError:
            return None

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        raise UserError(f"{path}: a web server does not say what it has; name what you want")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        raise UserError(f"{path}: nothing can be written to a web server; use a folder or a store such as s3://")

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, b"")

    @contextmanager
    def open(self, path: str, mode: str = "rb", **_: Any) -> Iterator[BinaryIO]:
        """A stream of a file, whose reader says how much it wants."""
        assert mode == "rb"
        with answered(path) as answer:
            yield answer


def parts(answer: http.client.HTTPResponse, url: str, most: int | None) -> Iterator[bytes]:
    """The body in pieces, its first `most` bytes or all; UserError if it ends early, or trickles."""
    said, seen, began = length_of(answer), 0, time.monotonic()
    while most is None or seen < most:
        try:
            part = answer.read1(CHUNK if most is None else min(CHUNK, most - seen))
        except (http.client.HTTPException, ssl.SSLError, ValueError) as error:
            raise ConnectionResetError(f"its answer broke off, {type(error).__name__}") from error
        if not part:
            if said is not None and seen < said:
                raise ConnectionResetError(f"{seen:,} bytes came, it said {said:,}")
            return
        seen += len(part)
        yield part
        if time.monotonic() - began > PATIENCE + seen / PACE:
            raise UserError(f"{url}: only {seen:,} bytes in {PATIENCE + seen / PACE:.0f} s; find a faster way")


def length_of(answer: http.client.HTTPResponse) -> int | None:
    """Bytes that the server says the body has."""
    said = answer.headers.get("Content-Length", "")
    return int(said) if said.isdecimal() and len(said) < 19 else None


@contextmanager
def answered(url: str, method: str = "GET") -> Iterator[http.client.HTTPResponse]:
    """A server's answer; FileNotFoundError, PermissionError or ConnectionError where it has none to give."""
    request = urllib.request.Request(
        quoted(url), method=method, headers={"User-Agent": "atoll", "Accept-Encoding": "identity"}
    )
    try:
        answer = opener().open(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in MISSING:
            raise FileNotFoundError(url) from error
        if error.code in FORBIDDEN:
            raise PermissionError(f"{url}: the server wants credentials ({error.code})") from error
        raise ConnectionError(f"it answers {error.code} to {url}") from error
    except urllib.error.URLError as error:
        raise ConnectionError(sanitize(str(error.reason), 160)) from error
    except http.client.HTTPException as error:
        raise ConnectionError(f"it speaks no HTTP, {type(error).__name__}") from error
    with answer:
        yield answer


def quoted(url: str) -> str:
    """A URL in the characters that HTTP knows; what is escaped already stays."""
    try:
        whole = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise UserError(f"{sanitize(url, 120)}: is no URL ({error})") from error
    path = urllib.parse.quote(whole.path, safe="/%:@!$&'()*+,;=~-._")
    return urllib.parse.urlunsplit((whole.scheme, whole.netloc, path, whole.query, ""))


def opener() -> urllib.request.OpenerDirector:
    """Of https and http only, through the usual proxies: no file:, no ftp:, no data:."""
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        Redirects(),
        OverHTTP(),
        OverHTTPS(),
        urllib.request.HTTPErrorProcessor(),
    ):
        made.add_handler(handler)
    return made


class Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = MOST_REDIRECTS

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        target = headers.get("Location") or headers.get("URI") or ""
        if not is_followed(req.full_url, target):
            raise UserError(f"{req.full_url}: is redirected to {sanitize(target, 80)}, where nothing is fetched from")
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None:
            named = getattr(req, "named", urllib.parse.urlsplit(req.full_url).netloc)
            following.named = named  # type: ignore[attr-defined]
            following.away = urllib.parse.urlsplit(newurl).netloc != named  # type: ignore[attr-defined]
            following.method = req.get_method()
        return following


def is_followed(url: str, target: str) -> bool:
    """Whether a redirect stays on the web, and on https where it was."""
    try:
        now, then = urllib.parse.urlsplit(url), urllib.parse.urlsplit(urllib.parse.urljoin(url, target))
    except ValueError:  # no URL at all
        return False
    return then.scheme in SCHEMES and not (now.scheme == "https" and then.scheme == "http")


class OverHTTP(urllib.request.HTTPHandler):
    def http_open(self, req: Any) -> Any:
        return self.do_open(guarded(http.client.HTTPConnection, req), req)


class OverHTTPS(urllib.request.HTTPSHandler):
    def https_open(self, req: Any) -> Any:
        # the usual context: the system's authorities, or those of SSL_CERT_FILE
        return self.do_open(guarded(http.client.HTTPSConnection, req), req)


def guarded(kind: type[http.client.HTTPConnection], request: Any) -> Any:
    """Connections of this kind; away from the host that somebody named, to public addresses only.

    The address is that of the open socket: no name service can say one thing and then another.
    """

    def make(host: str, **settings: Any) -> http.client.HTTPConnection:
        connection = kind(host, **settings)
        if getattr(request, "away", False) and not request.has_proxy():  # a proxy decides for itself

            def create(*where: Any, **how: Any) -> socket.socket:
                opened = socket.create_connection(*where, **how)
                address = ipaddress.ip_address(opened.getpeername()[0].partition("%")[0])
                address = getattr(address, "ipv4_mapped", None) or address
                if not address.is_global:
                    opened.close()
                    raise UserError(
                        f"{request.named}: redirects to {sanitize(request.host, 60)} at {address}, an address inside "
                        "a network; nothing is asked there"
                    )
                return opened

            connection._create_connection = create  # type: ignore[attr-defined]
        return connection

    return make
