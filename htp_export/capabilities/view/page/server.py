"""One page over HTTP, on this machine alone: ``view --serve``.

Whoever can reach the port is not trusted: other users, and every site that the browser has open,
which can send requests to 127.0.0.1 and, by DNS rebinding, read the answers. So the page stands
under a random path, a request names this server as its host, and as its origin if it has one; no
file is read after the start, and nothing is written. Each connection takes a thread, and there are
few: of more connections, the oldest one ends, so that none is kept waiting by others that say
nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from htp_export.errors import InputError

_LOGGER = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_MOST_CONNECTIONS = 32
"""At a time; a browser opens six. ``docs/untrusted.md`` has the number."""

_LONGEST_REQUEST = 10.0
"""Seconds until all of a request has to be there: it may come one letter at a time."""

_MOMENT = 0.1  # seconds for a thread to end, before the next connection ends, too
_HEADERS = {
    "Cache-Control": "no-store",
    # browsers pass it over in the page's own policy
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one page, which it holds in memory, to those who know its address, on the loopback interface alone."""

    daemon_threads = True  # a client that stays connected does not keep the program from ending
    # more than connect while a thread starts; the system makes those wait for seconds
    request_queue_size = 128
    # elsewhere, that lets another program take the port over
    allow_reuse_address = os.name == "posix"

    def __init__(self, port: int = 0) -> None:
        self.page = b""
        self.path = f"/{secrets.token_urlsafe(32)}/"
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        # of each connection, in the order in which they came
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        try:
            super().__init__((_LOOPBACK, port), _Request)
        except OSError as error:
            raise InputError(
                f"cannot listen on port {port} of {_LOOPBACK}: {error.strerror or error}; give another, or --port 0"
            ) from error
        self.port: int = self.server_address[1]
        self.hosts = tuple(f"{name}:{self.port}" for name in (_LOOPBACK, "localhost"))

    @property
    def url(self) -> str:
        """The address of the page, with the token that gives access to it."""
        return f"http://{self.hosts[0]}{self.path}"

    def run(self, page: str) -> None:
        """Answer requests with a page, HTML, until Ctrl-C; earlier requests wait for it."""
        self.page = page.encode()
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            return

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; if none is left, the oldest connection ends, and this one waits for its thread."""
        wait = 0.0
        while not self._free.acquire(timeout=wait):
            with self._lock:
                oldest = next(iter(self._deadlines), None)
            self._end([] if oldest is None else [oldest])
            wait = _MOMENT
        with self._lock:
            self._deadlines[request] = time.monotonic() + _LONGEST_REQUEST
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread for it
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and let another connection have the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def service_actions(self) -> None:
        """End the connections whose request is not there in time; `serve_forever` calls this twice a second."""
        now = time.monotonic()
        with self._lock:
            late = [
                connection for connection, deadline in self._deadlines.items() if deadline < now
            ]
        self._end(late)

    def received(self, connection: socket.socket) -> None:
        """Note that the request of a connection is complete: its answer may take any time."""
        with self._lock:
            if connection in self._deadlines:
                self._deadlines[connection] = math.inf

    def shutdown_request(self, request: Any) -> None:
        """End a connection, and forget it."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def _end(self, connections: Iterable[socket.socket]) -> None:
        """Forget connections, and wake the threads that read from them, or write to them; these close them."""
        for connection in connections:
            with self._lock:
                self._deadlines.pop(connection, None)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what failed: a client that goes away while it is answered is no fault of ours."""
        _LOGGER.debug("a request was not answered", exc_info=True)


class _Request(BaseHTTPRequestHandler):
    """One request, of which nothing but the method, the path and three headers is looked at."""

    server: PageServer
    timeout = 60  # seconds; for clients that read nothing

    def _answer(self) -> None:
        self.server.received(self.connection)
        refused = self._refused()
        if refused is not None:
            self._head(
                refused,
                0,
                {"Allow": "GET, HEAD"} if refused is HTTPStatus.METHOD_NOT_ALLOWED else {},
            )
            return
        self._head(
            HTTPStatus.OK,
            len(self.server.page),
            {"Content-Type": "text/html; charset=utf-8", **_HEADERS},
        )
        if self.command == "GET":
            self.wfile.write(self.server.page)

    # Names of http.server.
    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = _answer  # noqa: N815
    do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _answer  # noqa: N815

    def _refused(self) -> HTTPStatus | None:
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            return HTTPStatus.MISDIRECTED_REQUEST
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return HTTPStatus.FORBIDDEN
        if not hmac.compare_digest(self.path.encode("utf-8", "replace"), self.server.path.encode()):
            return HTTPStatus.NOT_FOUND
        return None if self.command in ("GET", "HEAD") else HTTPStatus.METHOD_NOT_ALLOWED

    def _head(self, status: HTTPStatus, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "htp-export"

    def log_message(self, *_: Any) -> None:
        """Say nothing: addresses hold the token."""
