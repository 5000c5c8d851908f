"""`fedeve data get` and `fedeve data check`, what they fetch, count and say."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pty
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from loopback import CONTENT, Served, Server, finish, names, sha256

from fedeve import FedeveError
from fedeve.data import commands, download
from fedeve.data.datasets import Arrays, Dataset
from fedeve.data.files import FileDataset, Remote
from fedeve.registry import subclasses_in

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
