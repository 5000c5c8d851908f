"""What the tests of sweeps share: a small sweep, the command line without a new interpreter, and files compared."""

from __future__ import annotations

from pathlib import Path

from commandline import in_process as fedeve
from fedeve.checkpoint import Checkpoint
from fedeve.record import Record

__all__ = ["SWEEP", "assert_same_runs", "fedeve", "write"]

SWEEP = """
title = "Small"
seeds = [1, 2]
[grid]
method = ["fedavg", "scaffold"]
data.alpha = [1, 0.1]
[base]
rounds = 30
cohort = 4
model = "linear"
eval_every = 5
dropout = 0.1
[base.data]
name = "digits"
partition = "dirichlet"
num_clients = 20
[base.local]
lr = 0.1
"""


def write(folder: Path, text: str = SWEEP) -> Path:
    path = folder / "some.toml"
    path.write_text(text)
    return path


def assert_same_runs(ours: Path, theirs: Path) -> None:
    """Every record is the same byte for byte, and every checkpoint holds the same tensors."""
    names = sorted(path.name for path in (theirs / "runs").iterdir())
    assert names == sorted(path.name for path in (ours / "runs").iterdir())
    for name in names:
        first, second = ours / "runs" / name, theirs / "runs" / name
        assert (first / "record.jsonl").read_bytes() == (second / "record.jsonl").read_bytes(), name
        identity = Record.read(first / "record.jsonl").header["identity"]
        one, other = (Checkpoint.load(f / "checkpoint.safetensors", identity=identity) for f in (first, second))
        assert one.values == other.values and one.tensors.keys() == other.tensors.keys()
        assert all(one.tensors[key].equal(other.tensors[key]) for key in one.tensors)
