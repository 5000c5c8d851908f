"""Checkpoints come back as they were, and anything else is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedeve.checkpoint import Checkpoint
from fedeve.errors import FedeveError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.safetensors"
    tensors = {"a": torch.arange(1000.0), "b": torch.tensor(1 / 3, dtype=torch.float64)}
    Checkpoint(tensors, {"num_rounds": 3, "pending": [{"gain": 0.1}]}).save(path, identity="mine")
    return path


def test_what_is_saved_comes_back_to_the_bit(saved: Path) -> None:
    found = Checkpoint.load(saved, identity="mine")
    assert torch.equal(found.tensors["a"], torch.arange(1000.0))
    assert found.tensors["b"].dtype == torch.float64 and found.tensors["b"].item() == 1 / 3
    assert found.values == {"num_rounds": 3, "pending": [{"gain": 0.1}]}


def test_a_checkpoint_of_another_run_is_refused(saved: Path) -> None:
    with pytest.raises(FedeveError, match="belongs to another run"):
        Checkpoint.load(saved, identity="yours")


def test_every_flipped_byte_is_noticed(saved: Path) -> None:
    good = saved.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for place in [*range(header), *range(header, len(good), 37)]:
        damaged = bytearray(good)
        damaged[place] ^= 0x41
        saved.write_bytes(damaged)
        with pytest.raises(FedeveError, match="checkpoint"):
            Checkpoint.load(saved, identity="mine")


def test_a_file_cut_anywhere_is_refused(saved: Path) -> None:
    good = saved.read_bytes()
    for length in (0, 1, 7, 8, 100, len(good) // 2, len(good) - 1):
        saved.write_bytes(good[:length])
        with pytest.raises(FedeveError, match="cannot be read"):
            Checkpoint.load(saved, identity="mine")


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(FedeveError, match="is not a checkpoint of format 1: got no fedeve checkpoint"):
        Checkpoint.load(path, identity="mine")


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "newer.safetensors"
    metadata = {"fedeve-checkpoint": "2", "values": "{}", "checksum": ""}
    safetensors.torch.save_file({"w": torch.zeros(3)}, path, metadata)
    with pytest.raises(FedeveError, match="format 1: got 2"):
        Checkpoint.load(path, identity="mine")


def test_a_failed_save_leaves_the_old_file_and_nothing_beside(saved: Path) -> None:
    before = saved.read_bytes()
    saved.with_name(saved.name + ".part").mkdir()  # what is written beside cannot be opened
    with pytest.raises(FedeveError, match="cannot write"):
        Checkpoint({"a": torch.zeros(1)}, {}).save(saved, identity="mine")
    assert saved.read_bytes() == before
