"""Servers, networks, disks and processes that fail while something is downloaded."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from loopback import CONTENT, HALF, Served, Server, begin, finish, names, sha256

from fedeve import FedeveError
from fedeve.data import download
from fedeve.data.files import Remote

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
