"""A server for the tests of downloads, files for those of Federated EMNIST, and a test's own folder for everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from emnist_files import make, write_leaf, write_tff
from loopback import Server


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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDEVE_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def tff(tmp_path: Path) -> Path:
    root = tmp_path / "tff"
    root.mkdir()
    write_tff(root / "fed_emnist_train.h5", make(0))
    write_tff(root / "fed_emnist_test.h5", make(1))
    return root


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    write_leaf(tmp_path / "leaf" / "train", make(0))
    write_leaf(tmp_path / "leaf" / "test", make(1))
    return tmp_path / "leaf"


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside of the test's folder is touched or reached."""
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
