"""Kernels compile for a GPU, also where there is none: the interpreter accepts more than the compiler does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fedeve import engines

STARTED = re.compile(r"^ +(_\w+)\[(?:grid|\()", re.MULTILINE)


def test_every_kernel_that_is_started_anywhere_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # nothing compiled earlier counts
    program = Path(__file__).with_name("compiling.py")
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    folder = Path(engines.__file__).parent
    started = {f"{path.stem}.{name}" for path in folder.glob("*.py") for name in STARTED.findall(path.read_text())}
    assert len(started) > 15
    assert set(ended.stdout.split()) == started
