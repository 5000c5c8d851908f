"""`--processes N`: a sweep's runs played by several processes of this machine, all into the one folder.

This module is both ends. The parent starts `python -m` of it, gives batches of runs from one queue and hears what
happens, as JSON lines through pipes. A process that dies gives its batch back; one whose parent is gone checkpoints
and ends.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import FedeveError, Words
from ..run import choose_device
from . import mps
from .sweep import Point
from .sweep_play import Event, Player
from .sweep_worker import Table, Waiting, Worker, order, work

_DEATHS = 2  # of processes with the same runs, before those runs count as the cause
_SELDOM = 0.2  # seconds between writes of a process: many rounds are told at once
_STOPS = {signal.SIGINT, signal.SIGTERM}


def play_in_processes(player: Player, points: list[Point], *, processes: int, held: int) -> None:
    """Play points by so many processes, telling the player's listener what they tell.

    `held` is the lock of the sweep's folder. Every process holds it, too, so that after a kill of this one nobody
    else begins before they have stopped.
    """
    waiting = Waiting(player, points, num_workers=processes, deaths=_DEATHS)
    num_workers = min(processes, len(waiting.batches))
    player.cores = max(1, len(os.sched_getaffinity(0)) // num_workers)
    gpu = num_workers > 1 and choose_device(player.device).type == "cuda"
    with mps.sharing() if gpu else mps.nothing() as environment:
        crew = _Crew(player, waiting, {**os.environ, **environment}, held)
        try:
            for _ in range(num_workers):
                crew.hire()
            crew.work()
        finally:
            crew.dismiss()


class _Process:
    """The parent's end of one process."""

    def __init__(self, about: Table, environment: Mapping[str, str], held: int) -> None:
        paths = os.pathsep.join(map(os.path.abspath, sys.path))  # it finds what its parent finds
        command = [sys.executable, "-P", "-m", "fedeve.experiments.sweep_processes"]
        with _undisturbed():
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**environment, "PYTHONPATH": paths},
                pass_fds=(held,),
            )
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.stdin, self.stdout = self.popen.stdin, self.popen.stdout
        self.batch: list[Point] = []
        self.at_home = False
        self._rest = b""
        self.say({**about, "parent": os.getpid()})

    def say(self, what: Table) -> None:
        with suppress(BrokenPipeError):  # that it died is found where it is listened to
            self.stdin.write(json.dumps(what).encode() + b"\n")
            self.stdin.flush()

    def hear(self) -> list[Event] | None:
        """What it told since; None when it has ended."""
        part = os.read(self.stdout.fileno(), 1 << 20)
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in lines] if part else None

    def send_home(self) -> None:
        """It ends when it has nothing to do."""
        self.at_home = True
        with suppress(BrokenPipeError):
            self.stdin.close()

    def end(self) -> int:
        """Wait for its end, close the pipes and give its exit code."""
        self.send_home()
        self.stdout.close()
        return self.popen.wait()


class _Crew:
    """The processes, and what each of them is doing."""

    def __init__(self, player: Player, waiting: Waiting, environment: Mapping[str, str], held: int) -> None:
        self.player, self.waiting, self.environment, self.held = player, waiting, environment, held
        self.selector = selectors.DefaultSelector()
        self.processes: list[_Process] = []

    def hire(self) -> None:
        process = _Process(order(self.player), self.environment, self.held)
        self.processes.append(process)
        self.selector.register(process.stdout, selectors.EVENT_READ, process)

    def work(self) -> None:
        """Until every batch is done, or the time is up, and every process has ended."""
        while self.processes:
            for key, _ in self.selector.select(self._seconds_left()):
                process: _Process = key.data
                events = process.hear()
                for event in events or ():
                    self._take_in(process, event)
                if events is None:
                    self._bury(process)
            if not self.player.has_time():
                self._spare()

    def _seconds_left(self) -> float | None:
        """None where there is no end, or it has passed and those who play are about to stop."""
        left = None if self.player.until is None else self.player.until - time.monotonic()
        return left if left is None or left > 0 else None

    def _spare(self) -> None:
        """End those who are still getting ready when the time is up; they hold nothing."""
        for process in self.processes:
            if not process.batch and not process.at_home:
                process.popen.kill()
                process.send_home()

    def _take_in(self, process: _Process, event: Event) -> None:
        if event["event"] == "error":
            raise FedeveError(event["what"], got=Words(event["got"]), do=event["do"])
        if event["event"] != "free":
            self.player.tell(event)
            return
        process.batch = [] if process.at_home else self.waiting.take()
        if process.batch:
            process.say(work(self.player, process.batch))
        else:
            process.send_home()

    def _bury(self, process: _Process) -> None:
        """Take leave of a process; one that was not sent home died, and another takes its place."""
        died = not process.at_home
        self.selector.unregister(process.stdout)
        self.processes.remove(process)
        code = process.end()
        if died:
            fate = f"its {len(process.batch)} runs go on from their checkpoints" if process.batch else "it had none"
            print(f"fedeve: process {process.popen.pid} died with exit code {code}; {fate}", file=sys.stderr)
            self.waiting.died(process.batch, f"process died with exit code {code}")
            if self.waiting.batches and self.player.has_time():
                self.hire()

    def dismiss(self) -> None:
        """Let every process checkpoint and end, and hear it to the end; who interrupts that kills them."""
        try:
            for process in self.processes:
                process.popen.terminate()
                process.send_home()
            while self.processes:
                with suppress(FedeveError):  # one error is told already
                    self.work()
        finally:
            for process in self.processes:
                process.popen.kill()
                process.end()
            self.selector.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait, in this process for a moment, and in one started here until it lets them through.

    So a terminal's Ctrl-C, which reaches all, is its parent's alone.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Voice:
    """A process's end: tells its parent what happens, and stops it when asked to or when nobody listens."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.waiting: list[str] = []
        self.told_at = 0.0
        self.writing = self.stopping = self.late = False
        self.pipe = os.dup(1)
        os.dup2(2, 1)  # what others print is no event

    def stop(self, *_: Any) -> None:
        """Take a signal: raise once, and not in the middle of a line."""
        if not self.stopping:
            self.stopping, self.late = True, self.writing
            if not self.late:
                raise KeyboardInterrupt

    def tell(self, event: Event) -> None:
        self.waiting.append(json.dumps(event) + "\n")
        if event["event"] != "round" or time.monotonic() - self.told_at > _SELDOM:
            self.flush()

    def flush(self) -> None:
        text, self.waiting = "".join(self.waiting).encode(), []
        self.writing = True
        try:
            while text:
                text = text[os.write(self.pipe, text) :]
        except OSError:
            self.late = True
        finally:
            self.writing = False
        self.told_at = time.monotonic()
        if self.late or os.getppid() != self.parent:
            self.stopping, self.late = True, False
            raise KeyboardInterrupt


def main() -> int:
    """A process's life, and its exit code."""
    voice = _Voice()
    try:
        signal.signal(signal.SIGTERM, voice.stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            _serve(voice)
        except FedeveError as error:
            got = error.got if isinstance(error.got, Words) else repr(error.got)
            voice.tell({"event": "error", "what": error.what, "got": got, "do": error.do})
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            voice.flush()
        return 130
    return 0


def _serve(voice: _Voice) -> None:
    """Say that it is free, play a batch, and again, until there are no more."""
    about = json.loads(sys.stdin.readline() or "{}")
    if about.pop("parent", None) != voice.parent:
        return  # who started it is gone already
    worker = Worker(about, voice.tell)
    voice.tell({"event": "free"})
    for line in sys.stdin:
        worker.play(json.loads(line))
        voice.tell({"event": "free"})


if __name__ == "__main__":
    sys.exit(main())
