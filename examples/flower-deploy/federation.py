"""A SuperLink and its SuperNodes as processes of this machine, with TLS and node authentication.

Every process is started here, in a session of its own, and ended by its id.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certificates import make_authority, make_node_key

BIN = Path(sys.executable).parent
APP = Path(__file__).parents[1] / "flower-app"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Process:
    """A process with everything it starts, and where it writes."""

    command: list[str]
    log: Path
    env: dict[str, str]
    handle: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.handle = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.env,
                start_new_session=True,
            )  # fmt: skip

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the process and all it started, each by its id."""
        if self.handle is None:
            return
        family = _descendants(self.handle.pid)
        _send(number, [self.handle.pid])
        try:
            self.handle.wait(timeout=10)
        except subprocess.TimeoutExpired:
            _send(signal.SIGKILL, [self.handle.pid])
            self.handle.wait()
        _send(signal.SIGKILL, family)  # most have ended with it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)  # what outlived it in the session that was started for it
        self.handle = None

    @property
    def alive(self) -> bool:
        return self.handle is not None and self.handle.poll() is None


def _send(number: int, processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants(process: int) -> list[int]:
    """The processes that one has started, and those that they have; SuperExec and apps run in sessions of their own."""
    parents: dict[int, list[int]] = {}
    for line in subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        child, parent = map(int, line.split())
        parents.setdefault(parent, []).append(child)
    found, left = [], [process]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


@dataclass
class Federation:
    """`with Federation(folder, num_nodes=3) as federation:` has a SuperLink and three known SuperNodes running."""

    folder: Path
    num_nodes: int = 3
    link: Process = field(init=False)
    nodes: list[Process] = field(init=False, default_factory=list)

    def __enter__(self) -> Federation:
        self.folder = self.folder.resolve()
        make_authority(self.folder)
        self.port = free_port()
        self.env = os.environ | {
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        (self.folder / "flwr").mkdir(exist_ok=True)
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.folder / "ca.crt"}"\n'
        )
        self.link = Process(self._link_command(), self.folder / "superlink.log", self.env)
        try:
            self.start_link()
            for number in range(self.num_nodes):
                make_node_key(self.folder, f"node{number}")
                self.flwr("supernode", "register", str(self.folder / f"node{number}.pub"), "here")
                self.nodes.append(self.node(number, key=f"node{number}"))
                self.nodes[-1].start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.nodes, self.link]:
            process.stop()

    def _link_command(self) -> list[str]:
        return [
            str(BIN / "flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port),
            "--ssl-ca-certfile", str(self.folder / "ca.crt"), "--ssl-certfile", str(self.folder / "server.pem"),
            "--ssl-keyfile", str(self.folder / "server.key"), "--enable-supernode-auth",
            "--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation",
        ]  # fmt: skip

    def node(self, number: int, *, key: str, authority: Path | None = None) -> Process:
        """A SuperNode that holds partition `number`, with this key, trusting this authority. It is not started."""
        config = (
            f'partition-id={number} num-partitions={self.num_nodes} fedeve-memory="{self.folder / f"memory{number}"}"'
        )
        command = [
            str(BIN / "flower-supernode"), "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1",
            "--port", str(free_port()), "--root-certificates", str(authority or self.folder / "ca.crt"),
            "--auth-supernode-private-key", str(self.folder / key), "--node-config", config,
        ]  # fmt: skip
        return Process(command, self.folder / f"{key}.log", self.env)

    def revive(self, number: int, *, seconds: float = 150) -> None:
        """Start a node that was killed, again and again: Flower lets it in once its last heartbeat has lapsed."""
        node, end = self.nodes[number], time.monotonic() + seconds
        while time.monotonic() < end:
            node.stop()
            node.start()
            until = time.monotonic() + 20
            while node.alive and time.monotonic() < until:
                time.sleep(0.5)
            if node.alive:
                return
        raise TimeoutError(f"node {number} was not let in again: {node.log.read_text()[-2000:]}")

    def start_link(self) -> None:
        """Start the SuperLink and wait until it answers."""
        self.link.start()
        self.wait(lambda: _listens(self.port), "the SuperLink to answer", seconds=90)

    def flwr(self, *words: str) -> dict[str, Any]:
        """A command of Flower's, with its answer as JSON."""
        done = subprocess.run(
            [str(BIN / "flwr"), *words, "--format", "json"], env=self.env, capture_output=True, text=True, timeout=180
        )
        start = done.stdout.find("{")
        if done.returncode or start < 0:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(done.stdout[start:])
        return answer

    def run(self, **config: Any) -> str:
        """Submit the app with this run configuration; the run's id."""
        pairs = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        return str(self.flwr("run", str(APP), "here", "--run-config", pairs)["run-id"])

    def status(self, run: str) -> str:
        """Where a run stands, in Flower's words: pending, starting, running, finished:completed."""
        return str(self.flwr("list", "here", "--run-id", run)["runs"][0]["status"])

    def wait(self, done: Any, what: str, *, seconds: float, every: float = 0.25) -> None:
        """Until something is so."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}; the logs are in {self.folder}")
            if not self.link.alive:
                raise RuntimeError(f"the SuperLink ended: {self.link.log.read_text()[-2000:]}")
            time.sleep(every)

    def finish(self, run: str, *, seconds: float = 300) -> None:
        """Until a run has ended well."""
        self.wait(lambda: self.status(run).startswith("finished"), f"run {run} to finish", seconds=seconds, every=3)
        if self.status(run) != "finished:completed":
            raise RuntimeError(f"run {run} ended with {self.status(run)}: {self.link.log.read_text()[-3000:]}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
