"""A real server on loopback that cuts off, throttles, changes its mind and lies, and what tests ask of it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedeve import FedeveError
from fedeve.data import download
from fedeve.data.files import Remote

CONTENT = np.random.default_rng(7).bytes(1_000_003)
OTHER = np.random.default_rng(8).bytes(1_000_003)
HALF = 500_000


@dataclass
class Served:
    """A file and how the server behaves about it."""

    content: bytes = CONTENT
    status: int = 200
    etag: str | None = '"one"'
    modified: str | None = None
    ranges: str = "yes"
    """yes; no: always the whole; blind: If-Range is not looked at; refuse: 416; shifted: another range than asked."""
    cut: int | None = None
    """Body bytes after which the connection is closed."""
    pause: float = 0.0
    """Seconds before each 20 kB."""
    length: str = "known"
    """known, chunked, or unknown: the body ends when the connection does."""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    """A request as the server saw it."""

    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, Served] = {}
        self.log: list[Asked] = []

    def remote(self, served: Served | None = None, *, name: str = "some.bin", **known: Any) -> Remote:
        """Serve a file, and what is published of it."""
        self.files[f"/{name}"] = served or Served()
        return Remote(name, f"http://127.0.0.1:{self.server_port}/{name}", **known)

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients are killed here


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        asked = Asked(self.path, dict(self.headers))
        self.server.log.append(asked)
        served = self.server.files.get(self.path, Served(content=b"nothing here", status=404))
        start = self._start_of_range(served)
        asked.status = served.status if start is None else 206
        if start is not None and served.ranges == "refuse":
            asked.status, served, start = 416, Served(b"<html>no</html>", headers={"Content-Type": "text/html"}), None
        body = served.content[start or 0 :]
        self.send_response(asked.status)
        if start is not None:
            first = start + (served.ranges == "shifted")
            self.send_header("Content-Range", f"bytes {first}-{len(served.content) - 1}/{len(served.content)}")
        named = {"ETag": served.etag, "Last-Modified": served.modified, "Content-Type": "application/octet-stream"}
        for name, value in (named | served.headers).items():
            if value is not None:
                self.send_header(name, value)
        lengths = {"known": ("Content-Length", str(len(body))), "chunked": ("Transfer-Encoding", "chunked")}
        self.send_header(*lengths.get(served.length, ("Connection", "close")))
        self.end_headers()
        self._send(served, body[: served.cut], asked)
        if served.cut is None and served.length == "chunked":
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = served.cut is not None or served.length == "unknown"

    def _start_of_range(self, served: Served) -> int | None:
        asked, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if asked is None or served.ranges == "no" or served.status != 200:
            return None
        stale = condition is not None and condition not in (served.etag, served.modified)
        return None if stale and served.ranges != "blind" else int(asked.removeprefix("bytes=").removesuffix("-"))

    def _send(self, served: Served, body: bytes, asked: Asked) -> None:
        for start in range(0, len(body), 20_000):
            time.sleep(served.pause)
            block = body[start : start + 20_000]
            asked.sent += len(block)  # before the client can have it
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block) if served.length == "chunked" else block)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def begin(server: Server, folder: Path, served: Served | None = None, **known: Any) -> Remote:
    """Get half of a file before the server closes the connection; then it serves the whole."""
    served = served or Served()
    remote = server.remote(replace(served, cut=HALF), **known)
    with pytest.raises(FedeveError, match="stopped"):
        download.get(remote, folder)
    assert not (folder / remote.name).exists()
    server.files["/some.bin"] = served
    server.log.clear()
    return remote


def finish(remote: Remote, folder: Path, *, content: bytes = CONTENT, progress: Any = None) -> None:
    path = download.get(remote, folder, progress=progress)
    assert path.read_bytes() == content
    assert names(folder) == [remote.name] + ([] if remote.sha256 else [f"{remote.name}.sha256"])
