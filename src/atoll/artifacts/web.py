"""GET from an https or http server with the standard library only, so that contributors install nothing more.

The server is untrusted. One request has one byte limit and one deadline, over connections, redirects, headers, body
and trailers. No redirect leads from https to http, or away from the named host to a private address.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from .errors import UserError, sanitize

SCHEMES = ("https", "http")
PATIENCE = 60.0  # seconds that a request may take
PACE = 4096  # bytes per second beyond that
OVERHEAD = 2**20  # bytes of redirects, headers, chunk sizes and trailers


@contextmanager
def get(url: str, most: int | None) -> Iterator[BinaryIO]:
    """The body of a file as a stream of at most `most` bytes, or of as many as the server announces."""
    limits, parts = Limits(url), urlsplit(url)
    quoted = parts._replace(path=quote(parts.path, safe="/%:@!$&'()*+,;=~-._")).geturl()
    try:
        request = Request(quoted, headers={"User-Agent": "atoll", "Accept-Encoding": "identity"})
        with build_opener(limits).open(request, timeout=PATIENCE) as answer:
            size = answer.length if most is None else most
            if size is None:
                raise UserError(f"{url}: the server does not announce its size; put it on one that does")
            limits.most += 2 * size
            yield answer
    except HTTPError as error:
        error.close()
        if error.code in (404, 410):
            raise FileNotFoundError(url) from error
        if error.code >= 500:
            raise ConnectionError(f"the server answers {error.code}") from error
        why = "access denied" if error.code in (401, 403) else f"the server answers {sanitize(str(error.reason))}"
        raise UserError(f"{url}: {why} ({error.code}); check the URL, or ask its owner") from error
    except (URLError, http.client.HTTPException, ValueError) as error:
        raise ConnectionError(str(getattr(error, "reason", f"no valid HTTP, {type(error).__name__}"))) from error


class Limits(HTTPHandler, HTTPSHandler, HTTPRedirectHandler):
    """Opens the connections of one request, follows its redirects, and counts its seconds and bytes."""

    max_redirections = 5

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.named = url, urlsplit(url).netloc
        self.began, self.seen, self.most = time.monotonic(), 0, OVERHEAD

    def seconds_left(self) -> float:
        """To the deadline; UserError after it, or if more bytes came than may."""
        took = time.monotonic() - self.began
        left = PATIENCE + self.seen / PACE - took
        if left <= 0 or self.seen > self.most:
            raise UserError(
                f"{self.url}: {self.seen:,} bytes in {took:.0f} s, too slow or too many; use another server"
            )
        return left

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith("https://" if req.type == "https" else ("https://", "http://")):
            raise UserError(f"{req.full_url}: redirects to {sanitize(newurl, 80)}, which is refused; use another URL")
        fp.close()  # its body is not read
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def do_open(self, http_class: Any, req: Any, **settings: Any) -> Any:
        def connection(host: str, **more: Any) -> Any:
            made = http_class(host, **more)
            proxied = req.has_proxy() or req._tunnel_host  # a proxy decides itself where it connects to
            made._create_connection = partial(self.connect, public=req.host != self.named and not proxied)
            made.response_class = partial(Answer, limits=self)
            return made

        return super().do_open(connection, req, **settings)  # `http_class` is only called

    def connect(self, place: tuple[str, int], *_: Any, public: bool) -> socket.socket:
        """A connection. What is checked is the address of the open socket, whatever a name server may answer."""
        made = socket.create_connection(place, self.seconds_left())
        address = ipaddress.ip_address(made.getpeername()[0].partition("%")[0])
        if public and not (getattr(address, "ipv4_mapped", None) or address).is_global:
            made.close()
            where = f"{sanitize(place[0], 60)}, a private address ({address})"
            raise UserError(f"{self.url}: redirects to {where}; refused")
        made.settimeout(self.seconds_left())
        return made


class Answer(http.client.HTTPResponse):
    """A response whose bytes all come within the limits of its request."""

    def __init__(self, sock: socket.socket, *settings: Any, limits: Limits, **more: Any) -> None:
        super().__init__(sock, *settings, **more)
        self.raw, self.sock, self.limits = self.fp.detach(), sock, limits
        self.readinto_raw, self.raw.readinto = self.raw.readinto, self.receive
        self.fp: Any = io.BufferedReader(self.raw)

    def receive(self, buffer: Any) -> int:
        """What the socket has next, bytes into `buffer`; ConnectionError if it ends before the announced size."""
        self.sock.settimeout(self.limits.seconds_left())
        try:
            count: int = self.readinto_raw(buffer)
        except OSError as error:
            self.limits.seconds_left()
            raise ConnectionError(f"the connection broke, {type(error).__name__}") from error
        if not count and self.length:
            raise ConnectionError("the answer ends too early")
        self.limits.seen += count
        return count
