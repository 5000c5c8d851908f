"""Lanes on a CPU: every lane is a process with one thread, which trains one client after another.

Small models leave a CPU nothing to gain from batching (see docs/performance.md), so the cores are what is filled. The
processes are forked, so they see the data without a copy, and exchange vectors through memory they share.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from ..errors import FedeveError, Words
from ..layout import Layout
from ..local import LocalWork
from ..method import Correction
from .pool import Progressed, Task

Train = Callable[[Tensor, Correction, LocalWork, Any], Tensor]
"""From a start, a correction, the local work and a plan of batches to where the client ends."""


class Workers:
    """Processes that train clients; `train` runs in them."""

    def __init__(self, train: Train, layout: Layout, dtype: torch.dtype, width: int) -> None:
        self.width = width
        self.start, self.shift, self.params = (_shared(width, layout.num_params, dtype) for _ in range(3))
        self._steps: dict[int, int] = {}
        self._busy: dict[Connection, int] = {}
        self._pipes: list[Connection] = []
        self._children: list[int] = []
        try:
            for lane in range(width):
                self._hire(train, lane)
        except OSError as error:
            self.close()
            raise _too_many(width, error) from error

    def _hire(self, train: Train, lane: int) -> None:
        ours, theirs = Pipe()
        child = os.fork()
        if child == 0:
            _serve(theirs, train, self.start[lane], self.shift[lane], self.params[lane])
        theirs.close()
        self._pipes.append(ours)
        self._children.append(child)

    def seat(self, tasks: Sequence[Task]) -> None:
        """Begin these tasks in lanes that are free."""
        for task in tasks:
            self.start[task.lane] = task.start
            prox, shift = task.correction
            if shift is not None:
                self.shift[task.lane] = shift
            pipe = self._pipes[task.lane]
            with _alive(task.lane):
                pipe.send((shift is not None, float(prox), task.work, task.plan))
            self._busy[pipe] = task.lane
            self._steps[task.lane] = len(task.plan)

    def advance(self) -> Progressed:
        """Wait until somebody is done."""
        done = []
        for pipe in wait(list(self._busy)):
            assert isinstance(pipe, Connection)
            lane = self._busy.pop(pipe)
            with _alive(lane):
                failed = pipe.recv()
            if failed:
                raise RuntimeError(failed)
            done.append(lane)
        moved = sum(self._steps[lane] for lane in done)
        return Progressed(done, moved, moved)

    def updates(self, lanes: list[int]) -> Tensor:
        """[lanes, D] end minus start."""
        return self.params[lanes] - self.start[lanes]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        self._pipes, self._children = [], []


class Inline:
    """One lane in this very process, where there are no others to be had."""

    width = 1

    def __init__(self, train: Train) -> None:
        self.train = train
        self._task: Task | None = None
        self._update = torch.empty(0)

    def seat(self, tasks: Sequence[Task]) -> None:
        """Take the one task there can be."""
        for task in tasks:
            self._task = task

    def advance(self) -> Progressed:
        """Do it."""
        if self._task is None:
            return Progressed([], 0, 0)
        task, self._task = self._task, None
        self._update = self.train(task.start, task.correction, task.work, task.plan) - task.start
        return Progressed([task.lane], len(task.plan), len(task.plan))

    def updates(self, lanes: list[int]) -> Tensor:
        """[lanes, D] end minus start."""
        return self._update.expand(len(lanes), -1)

    def close(self) -> None:
        """Nothing to give back."""


@contextlib.contextmanager
def _alive(lane: int) -> Iterator[None]:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise FedeveError(
            "a worker process ended in mid-work",
            got=Words(f"the process of lane {lane}"),
            do="look for a lack of memory (dmesg), then resume; width=1 works without processes",
        ) from None


def _shared(width: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[width, dim] zeros that parent and children see alike."""
    size = max(1, width * dim) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise _too_many(width, error) from error
    return torch.frombuffer(memory, dtype=dtype, count=width * dim).reshape(width, dim)


def _too_many(width: int, error: Exception) -> FedeveError:
    reason = Words(f"{width} lanes, each a process: {getattr(error, 'strerror', None) or error}")
    return FedeveError("this machine has no room for so many lanes", got=reason, do="set a smaller width")


def _serve(pipe: Connection, train: Train, start: Tensor, shift: Tensor, params: Tensor) -> None:
    """A child's life: take a task, leave its end in the shared memory, say so. It never returns."""
    try:
        # It must end with its parent, however that ends, hold none of its locks, and leave Ctrl-C to it.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        keep = pipe.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        torch.set_num_threads(1)
        _keep_memory()
        while True:
            shifted, prox, work, plan = pipe.recv()
            try:
                params.copy_(train(start.clone(), Correction(prox, shift.clone() if shifted else None), work, plan))
                pipe.send("")
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
    except (EOFError, ConnectionError):
        pass  # the parent is done with it
    except BaseException:
        traceback.print_exc()  # its parent will only see that it ended
    finally:
        os._exit(0)


def _keep_memory() -> None:
    """Let the C library keep what is freed: else a batch's tensors go back to the system and fault in at every step."""
    with contextlib.suppress(AttributeError):
        trim_threshold, mmap_threshold = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 30)
