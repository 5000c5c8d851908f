"""Store: a run's folder on disk. Its record, its latest checkpoint, and a lock (`lock.py`) against a second process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .errors import FedeveError, Words
from .lock import locked
from .memory import Memory
from .record import RECORD, Record, RecordFile

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Position:
    """Where a run stands: rounds done, the server's state, notes not yet in the record, the last turn's writes."""

    num_rounds: int
    state: Any
    pending: tuple[dict[str, Any], ...] = ()
    writes: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Store:
    """The folder of the run with this identity."""

    out: Path
    identity: str

    @property
    def file(self) -> RecordFile:
        return RecordFile(self.out / RECORD)

    def create(self, header: dict[str, Any]) -> None:
        """Begin a new run here."""
        refuse_occupied(self.out)
        self.file.create(header)

    def save(self, position: Position, memory: Memory) -> None:
        """Write a checkpoint."""
        tensors = {f"state.{name}": tensor for name, tensor in position.state._asdict().items()}
        tensors |= {f"memory.{name}": tensor for name, tensor in memory.tensors().items()}
        values = {"num_rounds": position.num_rounds, "pending": position.pending}
        self.file.sync()  # so that no power cut leaves a checkpoint without the lines before it
        Checkpoint(tensors, values).save(self.out / CHECKPOINT, identity=self.identity)

    def restore(self, start: Position, memory: Memory) -> tuple[Position, Record]:
        """The checkpoint's position, or the start where there is none yet, and the record rewound to it."""
        record = _recorded(self.out)
        if record.header["identity"] != self.identity:
            raise FedeveError(
                f"{self.out} belongs to another run",
                got=Words(f"identity {record.header['identity']}"),
                do="resume it with the configuration and data it was started with",
            )
        if not (self.out / CHECKPOINT).exists():
            return start, Record(record.header, self.file.rewind(0))
        found = Checkpoint.load(self.out / CHECKPOINT, identity=self.identity)
        device = start.state.params.device
        state = {name: found.tensors[f"state.{name}"].to(device) for name in start.state._fields}
        memory.load({n.removeprefix("memory."): t for n, t in found.tensors.items() if n.startswith("memory.")})
        num_rounds, pending = found.values["num_rounds"], tuple(found.values["pending"])
        noted = max([0, *(reached for reached in record.evaluated.tolist() if reached <= num_rounds)])
        if noted != num_rounds - len(pending):
            raise FedeveError(
                f"{self.out / RECORD} lacks lines that its checkpoint relies on",
                got=Words(f"rounds up to {noted} instead of {num_rounds - len(pending)}"),
                do="restore it from a copy, or run again in another folder",
            )
        position = Position(num_rounds, start.state._replace(**state), pending)
        return position, Record(record.header, self.file.rewind(num_rounds))

    @property
    def is_begun(self) -> bool:
        """Whether there is a run here."""
        return (self.out / RECORD).exists()

    def locked(self) -> AbstractContextManager[int]:
        """Hold the folder for this process alone."""
        return locked(self.out)


def refuse_occupied(out: Path) -> None:
    """Raise if a folder holds a run."""
    if (out / RECORD).exists():
        raise FedeveError(
            "this folder holds a run already",
            got=str(out),
            do=f"continue it with 'fedeve resume {out}' or choose another",
        )


def recorded_header(out: Path) -> dict[str, Any]:
    """The header of the run that a folder holds: its configuration, its engine and what else it was made with."""
    return _recorded(out).header


def _recorded(out: Path) -> Record:
    if not (out / RECORD).exists():
        raise FedeveError("there is no run to resume", got=str(out), do="give a folder made by 'fedeve run'")
    record = Record.read(out / RECORD)
    if not all(isinstance(record.header.get(key), str) for key in ("identity", "engine")):
        do = "restore the file from a copy or run again"
        raise FedeveError(f"line 1 of {out / RECORD} is damaged", got=record.header, do=do)
    return record
