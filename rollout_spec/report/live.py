"""The live page: tails event logs and sends what they tell by server-sent events. Loopback unless bound elsewhere, which needs a token."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rollout_spec.report.page import live_page, page_data
from rollout_spec.report.runs import RunReader, unique_names

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ALIVE_S = 15.0  # a comment line this often tells both sides that the other is there


class Watcher:
    """The runs under watch; one thread reads, every page waits for its news."""

    def __init__(self, paths: Sequence[Path], *, every_s: float = 2.0) -> None:
        self._readers = [RunReader(path, name) for path, name in zip(paths, unique_names(list(paths)), strict=True)]
        self._every_s = every_s
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._number = 0
        self._data: dict[str, Any] = {}
        self._poll()
        self._thread = threading.Thread(target=self._run, name="watch-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def latest(self) -> tuple[int, dict[str, Any]]:
        """The number of the newest data, and these."""
        with self._changed:
            return self._number, self._data

    def wait(self, number: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """As ``latest``, once there is something newer than ``number`` or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number or self.stopping, timeout_s)
            return self._number, self._data

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._poll()

    def _poll(self) -> None:
        news = [reader.poll() for reader in self._readers]
        if any(news) or not self._data:
            data = page_data([reader.run for reader in self._readers])
            with self._changed:
                self._number, self._data = self._number + 1, data
                self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    watcher: Watcher
    token: str | None
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        if self.token is None:
            # Without a token only this machine's own names are served: a foreign page may have made its name point here.
            if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in LOOPBACK:
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"open the address that the command printed\n")
                return
        else:
            given = parse_qs(split.query).get("token", [""])[0]
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                self._answer(
                    HTTPStatus.FORBIDDEN, "text/plain", b"the token is missing or wrong: open the address that the command printed\n"
                )
                return
        if split.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", live_page(self.watcher.latest()[1]).encode())
        elif split.path == "/events":
            self._stream()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /events\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.close_connection = True
        number = 0
        try:
            while not self.watcher.stopping:
                newer, data = self.watcher.wait(number, _ALIVE_S)
                line = f"data: {json.dumps(data, separators=(',', ':'))}\n\n" if newer > number else ": still here\n\n"
                self.wfile.write(line.encode())
                self.wfile.flush()
                number = newer
        except (BrokenPipeError, ConnectionResetError):
            return  # the page was closed

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests of a dashboard are no news."""


class Dashboard:
    """The server. ``token``: what addresses must carry when ``host`` is not this machine alone."""

    def __init__(self, watcher: Watcher, *, host: str, port: int, token: str | None) -> None:
        if host not in LOOPBACK and not token:
            raise ValueError(f"--host {host} shows the runs to whoever can reach this machine: give a --token as well, or leave --host out")
        handler = type("Handler", (_Handler,), {"watcher": watcher, "token": token})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise ValueError(f"--port {port} of {host} cannot be used ({error.strerror}): choose another") from error
        self._server.daemon_threads = True
        self._watcher = watcher
        query = "" if token is None else f"?token={token}"
        self.address = f"http://{host}:{self._server.server_port}/{query}"

    def serve(self, started: Callable[[str], None]) -> None:
        """Until ``stop`` is called, or Ctrl-C."""
        self._watcher.start()
        started(self.address)
        try:
            self._server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            self._watcher.stop()
            self._server.server_close()

    def stop(self) -> None:
        self._server.shutdown()
