"""Serves the page of runs while they go on: the page and what is new of it, to this machine, and nothing else."""

from __future__ import annotations

import json
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainer.config import ConfigError
from trainer.pages.page import PageRuns, content_of, data_of, render_page, security_policy

HOST = "127.0.0.1"
NAMES = ("localhost", "127.0.0.1", "[::1]")
"""What a browser on this machine may call it. A page of a stranger that has its own name lead here is turned away."""


class PageServer(ThreadingHTTPServer):
    """Answers `/`, the page, and `/live?version=N`, which is empty as long as nothing has changed since version N."""

    daemon_threads = True

    def __init__(self, shown: PageRuns, port: int, seconds: float):
        self.shown = shown
        self.version, self.seconds, self.lock = 0, seconds, threading.Lock()
        super().__init__((HOST, port), PageHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a connection that its client has dropped, and of all else what Python says."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.server_port}"

    def look(self) -> None:
        """Reads what was written since the last look; a change makes a new version."""
        self.version += self.shown.read()

    def page(self) -> str:
        with self.lock:
            self.look()
            return render_page(self.shown, str(self.version), self.seconds)

    def live(self, version: str) -> str | None:
        """What is new as JSON; None where nothing is."""
        with self.lock:
            self.look()
            if version == str(self.version):
                return None
            data = data_of(self.shown)
            fresh = {"version": self.version, "title": self.shown.title, "content": content_of(self.shown, data)}
            return json.dumps(fresh | {"data": data}, allow_nan=False)


class PageHandler(BaseHTTPRequestHandler):
    """One request. There are no files to ask for: a path is one of two, or unknown."""

    server: PageServer
    server_version, sys_version = "trainer", ""
    timeout = 60
    """Seconds after which a connection on which nothing comes is closed."""

    def do_GET(self) -> None:
        try:
            asked = urlsplit(self.path)
        except ValueError:
            return self._answer(HTTPStatus.BAD_REQUEST, "text/plain", "that is no address\n")
        if self.headers.get("Host", "").rpartition(":")[0] not in NAMES and self.headers.get("Host") not in NAMES:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page is for this machine, by the name localhost\n")
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.page())
        elif asked.path == "/live":
            fresh = self.server.live(parse_qs(asked.query).get("version", [""])[0])
            status = HTTPStatus.NO_CONTENT if fresh is None else HTTPStatus.OK
            self._answer(status, "application/json", fresh or "")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only the page, at /\n")

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode(errors="backslashreplace")
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": f"{security_policy(live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Requests are not worth a line each."""


def start_server(shown: PageRuns, port: int, seconds: float) -> PageServer:
    """A server that is ready for `serve_forever`; open pages ask every `seconds`. Raises `ConfigError` for a port that
    cannot be had."""
    try:
        return PageServer(shown, port, seconds)
    except OSError as error:
        raise ConfigError(f"port={port} cannot be used ({error.strerror}); give another one, or 0") from None
