"""The command line's entry point without the seconds that a new interpreter takes."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from fedeve import cli


def in_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`fedeve` with these arguments, in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", ["fedeve", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return subprocess.CompletedProcess([], int(end.value.code or 0), output.getvalue(), errors.getvalue())
