"""NVIDIA's MPS, which lets the kernels of several processes run on one GPU side by side; without it they take turns.

The daemon started here is private: its directory is temporary, only processes that are given its variables use it,
and it ends with the sweep. No setting of the card is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from ..errors import FedeveError
from ..lock import locked

_CONTROL = "nvidia-cuda-mps-control"
_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_LOG = "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT = Path("/tmp/nvidia-mps")  # where processes look unless told otherwise
_PREFIX = "fedeve-mps-"

Environment = dict[str, str]


def nothing() -> nullcontext[Environment]:
    """No daemon and no variables."""
    return nullcontext({})


@contextmanager
def sharing() -> Iterator[Environment]:
    """The variables with which processes share the GPU; a daemon that serves them runs meanwhile."""
    if _PIPE in os.environ or (_DEFAULT / "control").exists():
        yield {}  # somebody's daemon serves them already
        return
    if shutil.which(_CONTROL) is None:
        _warn(f"{_CONTROL} is not installed")
        yield {}
        return
    _clear_up()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name, locked(Path(name)):
        place = Path(name)
        try:
            problem = _start(place)
            if problem:
                _warn(problem)
            yield {} if problem else _variables(place)
        finally:
            _end(place)


def _variables(place: Path) -> Environment:
    return {_PIPE: str(place / "pipe"), _LOG: str(place / "log")}


def _start(place: Path) -> str:
    """Start a daemon; why it could not be, if it could not."""
    try:
        for folder in _variables(place).values():
            Path(folder).mkdir()
        code, words = _run(place, "-d", seconds=20)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if code == 0 else f"{_CONTROL} ended with exit code {code} {words}".rstrip()


def _end(place: Path) -> None:
    with suppress(OSError, subprocess.SubprocessError):  # where none was started there is nobody to tell
        _run(place, says="quit\n", seconds=10)


def _run(place: Path, *arguments: str, says: str = "", seconds: float) -> tuple[int, str]:
    """The program's exit code and what it said; into a file, since a daemon may keep a pipe open for ever."""
    with (place / "said").open("w+") as said:
        ended = subprocess.run(
            [_CONTROL, *arguments],
            input=says,
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is not the daemon's: processes still checkpoint
            timeout=seconds,
            check=False,
            env={**os.environ, **_variables(place)},
        )
        said.seek(0)
        return ended.returncode, " ".join(said.read().split())[:200]


def _clear_up() -> None:
    """End daemons whose sweep was killed before it could."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(FedeveError), locked(place):
            _end(place)
            shutil.rmtree(place, ignore_errors=True)


def _warn(why: str) -> None:
    print(f"fedeve: without NVIDIA's MPS the processes take turns on the GPU: {why}", file=sys.stderr)
