"""What a run left in its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from fedeve import Record
from fedeve.checkpoint import Checkpoint
from fedeve.store import CHECKPOINT, RECORD


def tensors(out: Path, identity: str) -> dict[str, torch.Tensor]:
    return dict(Checkpoint.load(out / CHECKPOINT, identity=identity).tensors)


def assert_same_files(first: Path, second: Path) -> None:
    assert (first / RECORD).read_bytes() == (second / RECORD).read_bytes()
    identity = Record.read(first / RECORD).header["identity"]
    ours, theirs = tensors(first, identity), tensors(second, identity)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
