"""``view --serve``: one page over HTTP, on this machine alone.

Any client that can reach the port is untrusted: other users, and every site that the browser has
open, which can send requests to 127.0.0.1 and, by DNS rebinding, read the answers. Therefore the
page has a random path; a request must name this server as its host, and as its origin if it has
one; of files, only the weights of the model in the page are read after the start, by the name of a
tensor (``tensor?name=`` below the path), and nothing is written. Each connection takes a thread, of
which there are few: if all are in use, the oldest connection ends, so that idle connections cannot
block others.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import math
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeAlias
from urllib.parse import unquote

from htp_export.errors import InputError

_LOGGER = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_TENSOR = "tensor?name="
Values: TypeAlias = Callable[[str], dict[str, Any] | None]
_MOST_CONNECTIONS = 32
"""Connections at the same time; a browser opens six. ``docs/untrusted.md`` has the number."""

_LONGEST_REQUEST = 10.0
"""Seconds in which a request has to arrive completely; a client may send one byte at a time."""

_MOMENT = 0.1  # seconds in which a thread should end, before the next connection is ended, too
_HEADERS = {
    "Cache-Control": "no-store",
    # Browsers ignore this directive in the page's own policy.
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one page from memory, on the loopback interface, to clients that know its address."""

    daemon_threads = True  # an open connection does not keep the program from ending
    # More than connect while a thread starts: a full queue makes clients wait for seconds.
    request_queue_size = 128
    # On Windows, this option lets another program take over the port.
    allow_reuse_address = os.name == "posix"

    def __init__(self, port: int = 0) -> None:
        self.page = b""
        self.values: Values = lambda _name: None
        self.path = f"/{secrets.token_urlsafe(32)}/"
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        # Deadlines of connections, the oldest connection first.
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
        """The address of the page, with its access token."""
        return f"http://{self.hosts[0]}{self.path}"

    def run(self, page: str, values: Values | None = None) -> None:
        """Answer requests with an HTML page until Ctrl-C; earlier requests wait for it.

        ``values`` returns data about the tensor of a name; None if there is no such tensor.
        """
        self.page = page.encode()
        if values is not None:
            self.values = values
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            return

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; if none is free, end the oldest connection and use its thread."""
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
        except RuntimeError:  # the system cannot start a thread
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request, and release the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def service_actions(self) -> None:
        """End connections whose request is late; `serve_forever` calls this twice a second."""
        now = time.monotonic()
        with self._lock:
            late = [
                connection for connection, deadline in self._deadlines.items() if deadline < now
            ]
        self._end(late)

    def received(self, connection: socket.socket) -> None:
        """Record that a request has arrived completely: its answer may take any time."""
        with self._lock:
            if connection in self._deadlines:
                self._deadlines[connection] = math.inf

    def shutdown_request(self, request: Any) -> None:
        """End a connection and forget it."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def _end(self, connections: Iterable[socket.socket]) -> None:
        """Forget connections and wake the threads that use them; the threads close them."""
        for connection in connections:
            with self._lock:
                self._deadlines.pop(connection, None)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error: a client that disconnects during an answer is not a fault of the server."""
        _LOGGER.debug("a request was not answered", exc_info=True)


class _Request(BaseHTTPRequestHandler):
    """One request, of which only the method, the path and three headers are used."""

    server: PageServer
    timeout = 60  # seconds, for clients that do not read

    def _answer(self) -> None:
        """Answer a valid request with the page, and any other with a status."""
        self.server.received(self.connection)
        refused = self._refused()
        if refused is not None:
            is_wrong_method = refused is HTTPStatus.METHOD_NOT_ALLOWED
            self._head(refused, 0, {"Allow": "GET, HEAD"} if is_wrong_method else {})
            return
        name = self._tensor()
        if name is None:
            self._send(self.server.page, "text/html; charset=utf-8")
            return
        found = self.server.values(name)
        if found is None:
            self._head(HTTPStatus.NOT_FOUND, 0, {})
            return
        self._send(json.dumps(found, allow_nan=False).encode(), "application/json")

    def _send(self, body: bytes, kind: str) -> None:
        self._head(HTTPStatus.OK, len(body), {"Content-Type": kind, **_HEADERS})
        if self.command == "GET":
            self.wfile.write(body)

    def _tensor(self) -> str | None:
        """The name of the tensor that is asked for; None for the page."""
        query = self.path[len(self.server.path) :]
        return unquote(query.removeprefix(_TENSOR)) if query else None

    # Names required by http.server.
    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = _answer  # noqa: N815
    do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _answer  # noqa: N815

    def _refused(self) -> HTTPStatus | None:
        """The status of a request that is refused; None for one that is answered."""
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            return HTTPStatus.MISDIRECTED_REQUEST
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return HTTPStatus.FORBIDDEN
        address, query = self.path[: len(self.server.path)], self.path[len(self.server.path) :]
        if not hmac.compare_digest(address.encode("utf-8", "replace"), self.server.path.encode()):
            return HTTPStatus.NOT_FOUND
        if query and not query.startswith(_TENSOR):
            return HTTPStatus.NOT_FOUND
        if self.command not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED
        return None

    def _head(self, status: HTTPStatus, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "htp-export"

    def log_message(self, *_: Any) -> None:
        """Log nothing: addresses contain the token."""
