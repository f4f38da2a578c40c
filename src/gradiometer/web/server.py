"""Serve the report page of a run on this machine, with new data while the run goes on."""

from __future__ import annotations

import secrets
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from gradiometer.runs import RunError
from gradiometer.web.page import contents, document, to_json

if TYPE_CHECKING:
    from gradiometer.runs import Run

ADDRESS: Final = "127.0.0.1"
# the time between two requests of an open page, and the largest share of the time for reading the run again
SECONDS: Final = 2.0
SHARE: Final = 0.2


class PageServer(ThreadingHTTPServer):
    """An HTTP server on the loopback interface for the page of one run.

    Only requests with the secret of `url` are answered, and only if their Host is this machine: a name that
    an attacker resolves to 127.0.0.1 (DNS rebinding) is refused. The run is read when an open page asks for
    changes, in at most a fifth of the time. Its folder is not written to.

    Args:
        run: the run; it is refreshed.
        port: the port; 0 selects a free one.

    Raises:
        OSError: if the port is in use.

    Example:
        >>> server = PageServer(gm.read_run("runs/mine"))                        # doctest: +SKIP
        >>> server.url                                                           # doctest: +SKIP
        'http://127.0.0.1:41825/q3v5Kd0JbXGx0V1rY0CfUw/'
        >>> server.serve_forever()                                               # doctest: +SKIP
    """

    daemon_threads = True

    def __init__(self, run: Run, port: int = 0) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.token = secrets.token_urlsafe(16)
        self._run = run
        self._lock = threading.Lock()
        self._version = 0
        self._next_read = 0.0
        self._values: dict[str, Any] = {}
        self._matrices: dict[str, str] = {}

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, str]:
        """The values of the Host header that are accepted."""
        return f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"

    def page(self) -> bytes:
        """Return the page of the run as it is now."""
        with self._lock:
            self._read()
            return document(self._values, self._matrices)

    def changes(self, version: int) -> bytes | None:
        """Return the page's data as JSON if they are newer than a version; None if not."""
        with self._lock:
            self._read()
            if version == self._version:
                return None
            return to_json({"values": self._values, "matrices": self._matrices}).encode()

    def _read(self) -> None:
        began = time.monotonic()
        if began < self._next_read:
            return
        is_first = not self._version
        if self._run.refresh() or is_first:
            values, matrices = contents([self._run])
            self._version += 1
            self._values = values | {"live": {"version": self._version, "seconds": SECONDS}}
            self._matrices = matrices
        if not is_first:
            ended = time.monotonic()
            self._next_read = ended + (ended - began) / SHARE


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30  # seconds without data until a connection is closed

    def parse_request(self) -> bool:
        """Refuse all requests without the token, whatever their method."""
        if not super().parse_request():
            return False
        try:
            address = urlsplit(self.path)
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, b"The address of the request is not valid.\n")
            return False
        self.query = address.query
        token, _, self.name = address.path.removeprefix("/").partition("/")
        is_known = secrets.compare_digest(token.encode(), self.server.token.encode())
        hosts = self.headers.get_all("Host", [])
        if is_known and len(hosts) == 1 and hosts[0] in self.server.hosts:
            return True
        self._answer(HTTPStatus.FORBIDDEN, b"Open the address that gradiometer serve has printed.\n")
        return False

    def do_GET(self) -> None:
        try:
            if self.name == "":
                self._answer(HTTPStatus.OK, self.server.page(), "text/html")
            elif self.name == "data":
                self._answer_changes()
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"There is no such page.\n")
        except RunError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())

    def _answer_changes(self) -> None:
        have = parse_qs(self.query).get("have", ["0"])[0]
        found = self.server.changes(int(have) if have.isdecimal() and len(have) < 10 else 0)
        if found is None:
            self._answer(HTTPStatus.NO_CONTENT, b"")
        else:
            self._answer(HTTPStatus.OK, found, "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        """Name no versions."""
        return "gradiometer"

    def log_message(self, *_: object) -> None:
        """Print nothing: the token is in the address."""

    def handle(self) -> None:
        """A browser that closes a connection is not an error."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True


_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
