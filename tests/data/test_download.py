"""Downloads from a real server on loopback that cuts off, throttles, changes its mind and lies."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pty
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fedeve import FedeveError
from fedeve.data import commands, download
from fedeve.data.datasets import Arrays, Dataset
from fedeve.data.download import Step
from fedeve.data.files import FileDataset, Remote
from fedeve.registry import subclasses_in

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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


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


# Whole files


def test_a_file_is_downloaded_and_nothing_else_is_left_beside_it(server: Server, tmp_path: Path) -> None:
    remote = server.remote(sha256=sha256(CONTENT).upper(), size=len(CONTENT))
    steps: list[Step] = []
    assert download.get(remote, tmp_path / "new" / "folder", progress=steps.append) == tmp_path / "new/folder/some.bin"
    assert (tmp_path / "new/folder/some.bin").read_bytes() == CONTENT
    assert names(tmp_path / "new/folder") == ["some.bin"]
    assert list(dict.fromkeys(step.state for step in steps)) == ["downloading", "checking", "done"]
    done = [step.done for step in steps]
    assert done == sorted(done) and done[0] == 0 and done[-1] == len(CONTENT)
    assert {step.total for step in steps} == {len(CONTENT)} and len(done) > 10


def test_a_complete_file_causes_no_request(server: Server, tmp_path: Path) -> None:
    remote, steps = server.remote(), []
    for _ in range(3):
        download.get(remote, tmp_path, progress=steps.append)
    assert len(server.log) == 1 and server.log[0].sent == len(CONTENT)
    assert [step.state for step in steps[-2:]] == ["here", "here"]


def test_a_file_put_there_by_hand_is_taken_if_it_is_the_right_one(server: Server, tmp_path: Path) -> None:
    remote = server.remote(sha256=sha256(CONTENT))
    (tmp_path / "some.bin").write_bytes(CONTENT)
    assert download.get(remote, tmp_path) == tmp_path / "some.bin"
    (tmp_path / "some.bin").write_bytes(OTHER)
    with pytest.raises(FedeveError) as refused:
        download.get(remote, tmp_path)
    assert sha256(CONTENT) in str(refused.value) and sha256(OTHER) in str(refused.value)
    assert (tmp_path / "some.bin").read_bytes() == OTHER, "a user's file is not ours to remove"
    assert server.log == []


def test_a_redirect_is_followed_and_a_resumed_one_too(server: Server, tmp_path: Path) -> None:
    target = begin(server, tmp_path)
    moved = server.remote(Served(b"", status=302, headers={"Location": target.url}), name="old.bin")
    remote = Remote("some.bin", moved.url)
    finish(remote, tmp_path)  # the part was of another address, so it is not continued
    assert server.log[-1].sent == len(CONTENT)
    (tmp_path / "some.bin").unlink()
    server.files["/some.bin"].cut = HALF
    with pytest.raises(FedeveError, match="stopped"):
        download.get(remote, tmp_path)
    server.files["/some.bin"].cut = None
    finish(remote, tmp_path)
    assert server.log[-1].sent == len(CONTENT) - HALF


def test_bytes_are_kept_as_they_are_even_if_the_server_calls_them_an_encoding(server: Server, tmp_path: Path) -> None:
    import gzip

    packed = gzip.compress(CONTENT[:1000])
    remote = server.remote(Served(packed, headers={"Content-Encoding": "gzip"}), name="some.gz")
    assert download.get(remote, tmp_path).read_bytes() == packed
    assert server.log[0].headers["Accept-Encoding"] == "identity"


def test_an_empty_file_is_a_file(server: Server, tmp_path: Path) -> None:
    finish(server.remote(Served(b""), size=0, sha256=sha256(b"")), tmp_path, content=b"")


# Resuming


def test_a_cut_off_download_is_continued_and_only_the_rest_is_asked_for(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path)
    assert (tmp_path / "some.bin.part").read_bytes() == CONTENT[:HALF]
    steps: list[Step] = []
    download.get(remote, tmp_path, progress=steps.append)
    assert (tmp_path / "some.bin").read_bytes() == CONTENT
    (asked,) = server.log
    assert asked.headers["Range"] == f"bytes={HALF}-" and asked.headers["If-Range"] == '"one"'
    assert asked.status == 206 and asked.sent == len(CONTENT) - HALF
    assert steps[0] == Step("some.bin", "downloading", HALF, len(CONTENT))
    assert names(tmp_path) == ["some.bin", "some.bin.sha256"]


def test_a_download_cut_off_many_times_asks_for_every_byte_once(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(cut=300_000))
    for _ in range(3):
        with pytest.raises(FedeveError, match="stopped"):
            download.get(remote, tmp_path)
    finish(remote, tmp_path)
    assert [asked.sent for asked in server.log] == [300_000, 300_000, 300_000, 100_003]


@pytest.mark.parametrize(
    ("served", "known", "resumes"),
    [
        (Served(etag=None, modified="Tue, 01 Jul 2025 10:00:00 GMT"), False, True),
        (Served(etag='W/"weak"', modified="Tue, 01 Jul 2025 10:00:00 GMT"), False, True),
        (Served(etag='W/"weak"'), False, False),
        (Served(etag=None), False, False),
        (Served(etag=None), True, True),
        (Served(ranges="no"), True, False),
        (Served(ranges="refuse"), True, False),
        (Served(ranges="refuse"), False, False),
        (Served(ranges="shifted"), True, False),
        (Served(length="chunked"), True, False),
    ],
)
def test_what_cannot_be_continued_safely_starts_afresh(
    server: Server, tmp_path: Path, served: Served, known: bool, resumes: bool
) -> None:
    remote = begin(server, tmp_path, served, **({"sha256": sha256(CONTENT)} if known else {}))
    steps: list[Step] = []
    finish(remote, tmp_path, progress=steps.append)
    assert steps[0].done == (HALF if resumes else 0)
    assert server.log[-1].sent == len(CONTENT) - (HALF if resumes else 0)
    if resumes and served.modified:
        assert server.log[0].headers["If-Range"] == served.modified


@pytest.mark.parametrize(
    ("served", "change", "known", "requests"),
    [
        (Served(), Served(OTHER, etag='"two"'), False, 1),
        (Served(), Served(OTHER, etag='"two"', ranges="blind"), False, 2),
        (Served(etag=None), Served(OTHER[:800_000], etag=None), True, 2),
        (Served(etag=None), Served(OTHER, etag=None), True, 2),
    ],
    ids=["told by If-Range", "told by the tag", "told by the length", "told by the checksum"],
)
def test_a_file_that_changed_in_between_is_fetched_whole(
    server: Server, tmp_path: Path, served: Served, change: Served, known: bool, requests: int
) -> None:
    remote = begin(server, tmp_path, served, sha256=sha256(change.content) if known else None)
    server.files["/some.bin"] = change
    finish(remote, tmp_path, content=change.content)
    assert len(server.log) == requests and server.log[-1].sent == len(change.content)


def test_a_damaged_part_is_fetched_again(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path, sha256=sha256(CONTENT))
    (tmp_path / "some.bin.part").write_bytes(OTHER[:HALF])
    finish(remote, tmp_path)
    assert [asked.sent for asked in server.log] == [len(CONTENT) - HALF, len(CONTENT)]


def test_a_part_longer_than_the_file_is_fetched_again(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path)
    (tmp_path / "some.bin.part").write_bytes(CONTENT + b"more")
    finish(remote, tmp_path)


@pytest.mark.parametrize("note", ["", "{", "[]", "{}", '{"url": 1}', '{"more": 1}'])
def test_a_part_with_a_note_that_says_nothing_is_fetched_again(server: Server, tmp_path: Path, note: str) -> None:
    remote = begin(server, tmp_path)
    (tmp_path / "some.bin.part").write_bytes(OTHER)
    (tmp_path / "some.bin.part.json").write_text(note)
    finish(remote, tmp_path)
    assert "Range" not in server.log[0].headers


def test_a_complete_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path)
    (tmp_path / "some.bin.part").write_bytes(CONTENT)
    finish(remote, tmp_path)
    assert server.log == []


# Checks


def test_a_wrong_checksum_leaves_nothing_and_names_both(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(OTHER), sha256=sha256(CONTENT))
    with pytest.raises(FedeveError) as refused:
        download.get(remote, tmp_path)
    assert f"sha256 {sha256(CONTENT)}: got {sha256(OTHER)}" in str(refused.value)
    assert names(tmp_path) == []


def test_a_published_md5_is_checked_and_the_sha256_recorded(server: Server, tmp_path: Path) -> None:
    digest = hashlib.md5(CONTENT).hexdigest()
    remote = server.remote(md5=digest)
    finish(remote, tmp_path)
    assert download.verify(remote, tmp_path / "some.bin").compared == "published md5"
    (tmp_path / "some.bin").unlink()
    server.files["/some.bin"].content = OTHER
    with pytest.raises(FedeveError, match=f"md5 {digest}: got {hashlib.md5(OTHER).hexdigest()}"):
        download.get(remote, tmp_path)
    assert names(tmp_path) == ["some.bin.sha256"]


def test_a_wrong_size_is_refused_before_the_body_is_fetched(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(pause=0.05), size=len(CONTENT) + 1)
    with pytest.raises(FedeveError, match=r"must have 1000004 bytes: got 1000003 bytes"):
        download.get(remote, tmp_path)
    assert names(tmp_path) == [] and server.log[0].sent < len(CONTENT)


def test_a_wrong_size_that_was_not_announced_is_refused_afterwards(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(length="chunked"), size=len(CONTENT) - 1)
    with pytest.raises(FedeveError, match=r"must have 1000002 bytes: got 1000003 bytes"):
        download.get(remote, tmp_path)
    assert names(tmp_path) == []


def test_without_a_published_checksum_the_first_one_is_recorded_and_compared(server: Server, tmp_path: Path) -> None:
    remote = server.remote()
    finish(remote, tmp_path)
    assert (tmp_path / "some.bin.sha256").read_text() == f"{sha256(CONTENT)}  some.bin\n"
    assert download.verify(remote, tmp_path / "some.bin").compared == "sha256 of the first download"
    (tmp_path / "some.bin").unlink()
    finish(remote, tmp_path)
    (tmp_path / "some.bin").unlink()
    server.files["/some.bin"] = Served(OTHER)
    with pytest.raises(FedeveError) as refused:
        download.get(remote, tmp_path)
    assert sha256(CONTENT) in str(refused.value) and sha256(OTHER) in str(refused.value)
    assert "some.bin.sha256" in refused.value.do and names(tmp_path) == ["some.bin.sha256"]
    (tmp_path / "some.bin.sha256").unlink()
    finish(remote, tmp_path, content=OTHER)


def test_a_damaged_record_of_the_checksum_is_an_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "some.bin.sha256").write_text("what is this\n")
    with pytest.raises(FedeveError, match=r"some.bin.sha256 must hold a sha256"):
        download.get(server.remote(), tmp_path)


@pytest.mark.parametrize("known", [{}, {"size": len(CONTENT)}, {"sha256": sha256(CONTENT)}])
def test_an_answer_of_unknown_length_is_taken_only_if_its_end_can_be_told(
    server: Server, tmp_path: Path, known: dict[str, Any]
) -> None:
    remote = server.remote(Served(length="unknown", cut=HALF), **known)
    with pytest.raises(FedeveError, match="stopped" if "size" in known else None):
        download.get(remote, tmp_path)
    assert not (tmp_path / "some.bin").exists()
    server.files["/some.bin"].cut = None
    if known:
        finish(remote, tmp_path)
    else:
        with pytest.raises(FedeveError, match="does not say how long it is"):
            download.get(remote, tmp_path)


# Servers and networks that fail


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (Served(b"no", status=404), ("404 Not Found", "address may have changed")),
        (Served(b"no", status=403), ("403 Forbidden", "address may have changed")),
        (Served(b"no", status=503), ("503 Service Unavailable", "try again later")),
        (Served(b"no", status=429), ("429 Too Many Requests", "try again later")),
        (Served(b"no", status=206), ("206 Partial Content",)),
        (Served(b"<html>log in</html>", headers={"Content-Type": "text/html; charset=utf-8"}), ("a web page",)),
    ],
)
def test_a_refusal_names_the_file_where_to_get_it_and_where_to_put_it(
    server: Server, tmp_path: Path, served: Served, words: tuple[str, ...]
) -> None:
    remote = server.remote(served)
    with pytest.raises(FedeveError) as refused:
        download.get(remote, tmp_path)
    for word in ("some.bin", remote.url, str(tmp_path), *words):
        assert word in str(refused.value)
    assert names(tmp_path) == []


def test_a_page_is_no_reason_to_refuse_where_the_checksum_is_known(server: Server, tmp_path: Path) -> None:
    finish(server.remote(Served(headers={"Content-Type": "text/html"}), sha256=sha256(CONTENT)), tmp_path)


def test_a_refusal_in_the_middle_keeps_what_was_there(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path)
    whole, server.files["/some.bin"] = server.files["/some.bin"], Served(b"no", status=503)
    with pytest.raises(FedeveError, match="503"):
        download.get(remote, tmp_path)
    server.files["/some.bin"] = whole
    finish(remote, tmp_path)
    assert server.log[-1].sent == len(CONTENT) - HALF


def test_without_a_network_the_error_says_what_to_put_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.socket() as taken:  # bound but not listening, so nobody else answers there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/some.bin"
        for address, reason in ((url, "Connection refused"), ("http://nowhere.invalid/some.bin", "")):
            with pytest.raises(FedeveError) as refused:
                download.get(Remote("some.bin", address), tmp_path)
            for word in ("cannot download some.bin", address, str(tmp_path), reason, "check the network"):
                assert word in str(refused.value)
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_a_server_that_falls_silent_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", (1, 0.1))
    remote = server.remote(Served(pause=0.3))
    with pytest.raises(FedeveError, match=r"the download of some.bin stopped: got 0 of 1000003 bytes"):
        download.get(remote, tmp_path)


def test_without_requests_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "requests", None)
    with pytest.raises(FedeveError, match=r"pip install 'fedeve\[data\]'") as refused:
        download.get(Remote("some.bin", "http://127.0.0.1:1/some.bin"), tmp_path)
    assert "http://127.0.0.1:1/some.bin" in refused.value.do and str(tmp_path) in refused.value.do


# Disks that fail


@contextmanager
def somebody() -> Iterator[None]:
    """Root may write everywhere, so it steps down."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_refused_unless_the_file_is_there(server: Server) -> None:
    remote = server.remote(sha256=sha256(CONTENT))
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are not open to somebody else
    try:
        folder.chmod(0o555)
        with somebody(), pytest.raises(FedeveError, match=r"cannot write .*some.bin: got Permission denied"):
            download.get(remote, folder)
        assert names(folder) == [] and server.log == []
        folder.chmod(0o755)
        (folder / "some.bin").write_bytes(CONTENT)
        folder.chmod(0o555)
        with somebody():
            assert download.get(remote, folder).read_bytes() == CONTENT
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_that_is_a_file_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedeveError, match="cannot write"):
        download.get(server.remote(), tmp_path / "file")


def test_a_folder_in_the_place_of_the_file_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "some.bin").mkdir()
    with pytest.raises(FedeveError, match=r"cannot write .*some.bin"):
        download.get(server.remote(), tmp_path)


# Processes

SCRIPT = """
import json, sys
from pathlib import Path
from fedeve.data import download
assert "requests" not in sys.modules and "pooch" not in sys.modules
remote = download.Remote(**json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
download.get(remote, Path(sys.argv[2]), progress=lambda step: print(step.state, step.done, flush=True))
"""


def process(remote: Remote, folder: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(vars(remote)), str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes, **options)  # type: ignore[call-overload,no-any-return]


def test_of_two_processes_one_downloads_and_the_other_waits(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(pause=0.01), sha256=sha256(CONTENT))
    both = [process(remote, tmp_path) for _ in range(2)]
    for one in both:
        assert one.stdout and one.stdout.readline() == "ready\n"
    for one in both:
        assert one.stdin
        one.stdin.write("\n")
        one.stdin.flush()
    outputs = [one.communicate(timeout=30) for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    assert len(server.log) == 1 and server.log[0].sent == len(CONTENT)
    assert sorted(output.splitlines()[-1].split()[0] for output, _ in outputs) == ["done", "here"]
    assert any(output.startswith("waiting") for output, _ in outputs)
    assert (tmp_path / "some.bin").read_bytes() == CONTENT and names(tmp_path) == ["some.bin"]


def test_many_threads_and_failures_leave_one_whole_file(server: Server, tmp_path: Path) -> None:
    """Locks are per open file, so threads contend as processes do; each failure hands the part to the next."""
    remote = server.remote(Served(cut=150_000))

    def try_until_there() -> None:
        for _ in range(20):
            try:
                download.get(remote, tmp_path)
                return
            except FedeveError:
                continue

    threads = [threading.Thread(target=try_until_there) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "some.bin").read_bytes() == CONTENT
    assert sum(asked.sent for asked in server.log) == len(CONTENT)
    assert names(tmp_path) == ["some.bin", "some.bin.sha256"]


def test_a_download_killed_in_the_middle_is_continued(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(pause=0.02))
    one = process(remote, tmp_path)
    assert one.stdin and one.stdout
    one.stdin.write("\n")
    one.stdin.flush()
    for line in one.stdout:
        if line.startswith("downloading") and int(line.split()[1]) > 200_000:
            break
    one.send_signal(signal.SIGKILL)
    one.communicate()
    part = (tmp_path / "some.bin.part").read_bytes()
    assert 200_000 <= len(part) < len(CONTENT) and CONTENT.startswith(part)
    assert not (tmp_path / "some.bin").exists()
    server.files["/some.bin"].pause = 0.0
    server.log.clear()
    finish(remote, tmp_path)
    assert [asked.sent for asked in server.log] == [len(CONTENT) - len(part)]


def test_a_full_disk_is_an_error_and_the_rest_is_fetched_when_there_is_room(server: Server, tmp_path: Path) -> None:
    remote = server.remote(sha256=sha256(CONTENT))
    room = 300_000
    one = process(remote, tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
    _, errors = one.communicate("\n", timeout=30)
    assert one.returncode == 1 and "FedeveError: cannot write" in errors and "File too large" in errors
    assert "goes on where it stopped" in errors and not (tmp_path / "some.bin").exists()
    part = (tmp_path / "some.bin.part").read_bytes()
    assert 0 < len(part) <= room and CONTENT.startswith(part)
    server.log.clear()
    finish(remote, tmp_path)
    assert [asked.sent for asked in server.log] == [len(CONTENT) - len(part)]


# The commands

TRAIN = np.array([[k % 3, k % 5, k, 0, 1, 2] for k in range(60)], np.uint8)
TEST = TRAIN[:10]


@pytest.fixture
def letters(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path]:
    """A data set in two public files: rows of an owner, a label and four pixels."""
    train = server.remote(Served(TRAIN.tobytes()), name="letters-train.bin", sha256=sha256(TRAIN.tobytes()))
    test = server.remote(Served(TEST.tobytes()), name="letters-test.bin", size=TEST.nbytes)

    @dataclass(frozen=True, kw_only=True)
    class Letters(FileDataset):
        """Letters."""

        remotes: ClassVar[tuple[Remote, ...]] = (train, test)
        homepage: ClassVar[str] = "http://127.0.0.1/letters"

        def arrays(self) -> Arrays:
            rows, rows_test = (
                np.frombuffer(self.find(remote.name).read_bytes(), np.uint8).reshape(-1, 6) for remote in self.remotes
            )
            y, y_test = rows[:, 1].astype(np.int64), rows_test[:, 1].astype(np.int64)
            return Arrays(rows[:, 2:], y, rows[:, 0].astype(np.int64), rows_test[:, 2:], y_test, 5)

    monkeypatch.setitem(subclasses_in("fedeve.data", Dataset), "letters", Letters)  # as a file in the folder would
    monkeypatch.setenv("FEDEVE_DATA", str(tmp_path / "data"))
    return lambda: tmp_path / "data" / "letters"


def test_getting_a_data_set_fetches_what_is_missing_and_then_it_loads(
    server: Server, letters: Callable[[], Path]
) -> None:
    with pytest.raises(FedeveError, match="run 'fedeve data get letters'"):
        commands.check("letters")
    assert server.log == [], "looking for files must not download them"
    report = commands.get("letters")
    assert [file["downloaded"] for file in report["files"]] == [True, True]
    assert names(letters()) == ["letters-test.bin", "letters-test.bin.sha256", "letters-train.bin"]
    (letters() / "letters-test.bin").unlink()
    report = commands.get("letters")
    assert [file["downloaded"] for file in report["files"]] == [False, True]
    assert [asked.path for asked in server.log] == ["/letters-train.bin", "/letters-test.bin", "/letters-test.bin"]
    lines = commands.get_lines(report)
    assert lines[0].endswith("360 bytes  was there") and lines[1].endswith("60 bytes  downloaded")


def test_files_elsewhere_below_the_root_are_found_and_checked(
    server: Server, letters: Callable[[], Path], tmp_path: Path
) -> None:
    root = tmp_path / "elsewhere"
    (root / "letters-test").mkdir(parents=True)
    (root / "letters-train.bin").write_bytes(TRAIN.tobytes())
    (root / "letters-test" / "letters-test.bin").write_bytes(TEST.tobytes())
    report = commands.get("letters", root=str(root))
    assert [file["path"] for file in report["files"]] == [
        str(root / "letters-train.bin"),
        str(root / "letters-test" / "letters-test.bin"),
    ]
    assert server.log == []
    (root / "letters-train.bin").write_bytes(TRAIN.tobytes()[::-1])
    for command in (commands.get, commands.check):
        with pytest.raises(FedeveError, match=f"must have sha256 {sha256(TRAIN.tobytes())}"):
            command("letters", root=str(root))


def test_a_check_counts_what_is_in_the_data_set(letters: Callable[[], Path]) -> None:
    commands.get("letters")
    report = commands.check("letters")
    assert (report["clients"], report["examples"], report["test_examples"], report["classes"]) == (3, 60, 10, 5)
    assert report["client_sizes"] == {"min": 20, "median": 20.0, "max": 20} and report["missing"] == []
    assert [file["compared"] for file in report["files"]] == ["published sha256", "sha256 of the first download"]
    assert [file["sha256"] for file in report["files"]] == [sha256(TRAIN.tobytes()), sha256(TEST.tobytes())]
    assert report["fingerprint"] == commands.check("letters")["fingerprint"]
    assert json.loads(json.dumps(report)) == report
    text = "\n".join(commands.check_lines(report))
    for words in ("60 examples of 3 clients (natural), 20 to 20 each, median 20", "10 test examples, 5 classes"):
        assert words in text


def test_a_check_says_where_nothing_could_be_compared(letters: Callable[[], Path]) -> None:
    commands.get("letters")
    (letters() / "letters-test.bin.sha256").unlink()
    assert commands.check("letters")["files"][1]["compared"] == "nothing: no checksum is known"
    (letters() / "letters-test.bin").write_bytes(TEST.tobytes()[:-1])
    with pytest.raises(FedeveError, match="must have 60 bytes: got 59 bytes"):
        commands.check("letters")


def test_an_embedded_data_set_needs_no_download_but_can_be_checked() -> None:
    report = commands.get("digits")
    assert report["files"] == [] and commands.get_lines(report) == ["digits needs no download: in scikit-learn"]
    checked = commands.check("digits")
    assert checked["examples"] + checked["test_examples"] == 1797 and checked["files"] == []


def test_an_unknown_data_set_is_named_with_its_nearest() -> None:
    for command in (commands.get, commands.check):
        with pytest.raises(FedeveError, match="did you mean 'digits'"):
            command("digit")


def test_piped_progress_is_a_few_plain_lines(server: Server, tmp_path: Path) -> None:
    remote, stream = server.remote(), io.StringIO()
    with commands.watching(stream=stream) as progress:
        download.get(remote, tmp_path, progress=progress)
        download.get(remote, tmp_path, progress=progress)
    lines = ["some.bin  0 bytes of 1.0 MB", "some.bin  checking", "some.bin  done", "some.bin  here"]
    assert stream.getvalue().splitlines() == lines


def test_progress_for_machines_is_json_lines(server: Server, tmp_path: Path) -> None:
    stream = io.StringIO()
    with commands.watching(as_json=True, stream=stream) as progress:
        download.get(server.remote(), tmp_path, progress=progress)
    steps = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [step["state"] for step in steps] == ["downloading", "checking", "done"]
    assert steps[-1] == {"name": "some.bin", "state": "done", "done": len(CONTENT), "total": len(CONTENT)}


def test_progress_on_a_terminal_is_a_bar(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with os.fdopen(reader, "rb", 0) as file:
            try:
                while block := file.read(4096):
                    seen.append(block)
            except OSError:  # the other end is closed
                return

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with commands.watching() as progress:
            download.get(server.remote(Served(pause=0.005)), tmp_path, progress=progress)
        monkeypatch.undo()
    thread.join()
    text = b"".join(seen).decode()
    assert "some.bin" in text and "━" in text and "1.0/1.0 MB" in text and "done" in text


@pytest.mark.skipif(not os.environ.get("FEDEVE_DATA"), reason="needs the real files: set FEDEVE_DATA")
def test_the_real_movielens_archive_survives_an_interrupted_download(server: Server, tmp_path: Path) -> None:
    content = (Path(os.environ["FEDEVE_DATA"]) / "ml-1m" / "ml-1m.zip").read_bytes()
    remote = server.remote(Served(content, cut=3_000_000), md5="c4d9eecfca2ab87c1945afe126590906", size=len(content))
    with pytest.raises(FedeveError, match="3000000 of 5917549 bytes"):
        download.get(remote, tmp_path)
    finish(remote, tmp_path, content=content)
    assert [asked.sent for asked in server.log] == [3_000_000, 2_917_549]


def test_a_copy_that_was_compressed_again_is_as_good_and_another_content_is_not(tmp_path: Path) -> None:
    first, again, other = (gzip.compress(CONTENT, 9), gzip.compress(CONTENT, 1), gzip.compress(CONTENT[:-1], 1))
    known = {"size": len(first), "sha256": sha256(first), "content_md5": hashlib.md5(CONTENT).hexdigest()}
    remote = Remote("images.gz", "http://127.0.0.1:9/images.gz", **known)
    path = tmp_path / "images.gz"
    path.write_bytes(first)
    assert download.verify(remote, path).compared == "published sha256"
    path.write_bytes(again)
    assert "compressed again" in download.verify(remote, path).compared
    for bad in (other, again[:-9], b"no gzip"):
        path.write_bytes(bad)
        with pytest.raises(FedeveError, match="must have"):
            download.verify(remote, path)
