"""Checkpoints: where a run stands, as one safetensors file with JSON beside the tensors, written atomically.

It holds the server's state, what clients remember, the round, and the facts not yet in the record. A checksum over
all of it, and the run's identity, make sure that a damaged or foreign file is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from .errors import FedeveError, Words
from .record import write_atomically

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors and plain values."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    def save(self, path: Path, *, identity: str) -> None:
        """Write the file, beside and renamed."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        text = json.dumps({"identity": identity, **self.values}, sort_keys=True)
        metadata = {"fedeve-checkpoint": str(FORMAT), "values": text, "checksum": _checksum(tensors, text)}
        write_atomically(path, safetensors.torch.save(tensors, metadata))

    @classmethod
    def load(cls, path: Path, *, identity: str) -> Checkpoint:
        """Read the file back, refusing one that is damaged, of another version or of another run."""
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise _refused("cannot be read", path, str(error)) from error
        if metadata.get("fedeve-checkpoint") != str(FORMAT):
            found = metadata.get("fedeve-checkpoint", "no fedeve checkpoint")
            raise _refused(f"is not a checkpoint of format {FORMAT}", path, found)
        if metadata.get("checksum") != _checksum(tensors, metadata.get("values", "")):
            raise _refused("is damaged", path, "a checksum that does not match")
        values = json.loads(metadata["values"])
        if values.pop("identity") != identity:
            raise _refused("belongs to another run", path, "another method, data set, model or setting")
        return cls(tensors, values)

    @staticmethod
    def reached(path: Path) -> int:
        """How many rounds were done when a checkpoint was written, without reading its tensors."""
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                return int(json.loads((file.metadata() or {})["values"])["num_rounds"])
        except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise _refused("cannot be read", path, str(error)) from error


def _refused(what: str, path: Path, got: str) -> FedeveError:
    return FedeveError(
        f"checkpoint {path} {what}", got=Words(got), do="restore it from a copy, or start in a new folder"
    )


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].dtype}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
