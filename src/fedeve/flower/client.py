"""The client's half: two lines in an ordinary PyTorch ClientApp.

    corrected = correct(msg, context, model, optimizer)       # after the model is loaded
    ...                                                       # train as ever
    content = RecordDict({"arrays": ..., "metrics": ..., **corrected.finish()})

Every `optimizer.step()` in between uses `grad + prox (params - start) + shift`, as the method wants it. What a client
remembers (SCAFFOLD, FedDyn) is kept in `context.state`. A client without these lines works for every method that
corrects nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor, nn

from .. import methods
from ..checkpoint import Checkpoint
from ..errors import FedeveError, Words
from ..local import corrected
from ..method import Correction, Method, Sent
from .arrays import Wire
from .checks import EXTRAS, MARK
from .nodes import QUESTION

FOLDER = "fedeve-memory"
"""In a node's configuration: a folder that outlives the SuperNode and the run, for what its client remembers."""


def say_partition(message: Message, context: Context) -> Message:
    """Answers a strategy with `nodes="ask"`; in the ClientApp: `app.query("partition")(say_partition)`."""
    number = context.node_config.get("partition-id")
    answer = ConfigRecord({"partition-id": number} if isinstance(number, int) else {})
    return Message(content=RecordDict({QUESTION: answer}), reply_to=message)


def correct(
    message: Message, context: Context, model: nn.Module, optimizer: torch.optim.Optimizer, *, arrays: str = "arrays"
) -> Corrected:
    """From now on `optimizer.step()` corrects gradients as the message's method says. `model` holds what was sent."""
    config = next((c for c in message.content.config_records.values() if MARK in c), None)
    if config is None:
        raise FedeveError(
            "this message names no method",
            got=Words(f"records {list(message.content)}"),
            do="use a strategy of fedeve.flower on the server, or leave correct() out",
        )
    about = json.loads(str(config[MARK]))["method"]
    method = methods.create(about.pop("name"), **about)
    return Corrected(method, message.content, context, model, optimizer, int(str(config["server-round"])), arrays)


class Corrected:
    """A client's local work under a method: corrects every step, counts them, and says what else to send."""

    def __init__(
        self,
        method: Method,
        content: RecordDict,
        context: Context,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        server_round: int,
        key: str,
    ) -> None:
        record = content.array_records[key]
        self.method, self.optimizer, self.num_steps = method, optimizer, 0
        self._wire = Wire.of(record)
        self._named = _parameters(model, self._wire)
        extras = content.array_records.get(EXTRAS) or ArrayRecord()
        self._sent = Sent(
            self._wire.vector(record), {n: torch.from_numpy(array.numpy().copy()) for n, array in extras.items()}
        )
        self._memory = _Memory(context, method, server_round, like=self._sent.params)
        self._starts = self._parts(self._sent.params)
        correction = method.correction(self._sent, self._memory.vectors)
        self._prox = correction.prox
        self._shifts = None if correction.shift is None else self._parts(correction.shift)
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _parts(self, vector: Tensor) -> dict[str, Tensor]:
        specs = self._wire.named("params")
        pieces = vector.split([spec.size for spec in specs.values()])
        return {
            name: piece.reshape(spec.shape).to(self._named[name])
            for (name, spec), piece in zip(specs.items(), pieces, strict=True)
            if name in self._named
        }

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        self.num_steps += 1
        for name, param in self._named.items():
            if param.grad is not None:
                shift = None if self._shifts is None else self._shifts[name]
                param.grad = corrected(param.grad, param.detach(), self._starts[name], Correction(self._prox, shift))

    @torch.no_grad()
    def finish(self) -> dict[str, ArrayRecord | ConfigRecord]:
        """After the last step: what goes into the reply besides arrays and metrics; the memory is written."""
        self._hook.remove()
        end = self._sent.params.clone()
        for name, part in zip(self._wire.named("params"), end.split(self._sizes()), strict=True):
            if name in self._named:
                part.copy_(self._named[name].detach().reshape(-1))
        lr = float(self.optimizer.param_groups[0]["lr"])
        update = end - self._sent.params
        extras, remember = self.method.finish(update, self.num_steps, lr, self._sent, self._memory.vectors)
        self._memory.put(remember)
        out: dict[str, ArrayRecord | ConfigRecord] = {MARK: ConfigRecord({"method": self.method.name})}
        if extras:
            out[EXTRAS] = ArrayRecord({name: Array(vector.numpy()) for name, vector in extras.items()})
        return out

    def _sizes(self) -> list[int]:
        return [spec.size for spec in self._wire.named("params").values()]


def _parameters(model: nn.Module, wire: Wire) -> dict[str, nn.Parameter]:
    """The model's trainable parameters by their names in the record."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    strange = [name for name in named if name not in wire.named("params")]
    if strange:
        raise FedeveError(
            "the model has parameters that were not sent",
            got=strange[0],
            do="send ArrayRecord(model.state_dict()), so that arrays have the names of parameters",
        )
    return named


class _Memory:
    """What a client remembers, as of the end of each of its last two rounds.

    A round may be played again, after the server was restarted: it must start from what was known before it.
    """

    def __init__(self, context: Context, method: Method, server_round: int, *, like: Tensor) -> None:
        self.round, self.names, self.context = server_round, method.remembers, context
        self.key = f"{MARK}.{method.name}"
        folder = context.node_config.get(FOLDER)
        self.file = Path(str(folder)) / f"{method.name}.safetensors" if folder and self.names else None
        self.past = {number: vectors for number, vectors in self._read().items() if number < server_round}
        zero = {name: torch.zeros_like(like) for name in self.names}
        self.vectors = self.past[max(self.past)] if self.past else zero

    def put(self, vectors: Any) -> None:
        """Remember these, and what was known before."""
        if not self.names:
            return
        last = {max(self.past): self.vectors} if self.past else {}
        kept = {f"{number}.{name}": v for number, vs in {**last, self.round: vectors}.items() for name, v in vs.items()}
        self.context.state[self.key] = ArrayRecord({key: Array(v.contiguous().numpy()) for key, v in kept.items()})
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            Checkpoint(kept, {}).save(self.file, identity=str(self.context.node_config.get("partition-id", "")))

    def _read(self) -> dict[int, dict[str, Tensor]]:
        flat: dict[str, Tensor] = {}
        if self.key in self.context.state.array_records:
            record = self.context.state.array_records[self.key]
            flat = {key: torch.from_numpy(array.numpy().copy()) for key, array in record.items()}
        elif self.file is not None and self.file.exists():
            identity = str(self.context.node_config.get("partition-id", ""))
            flat = dict(Checkpoint.load(self.file, identity=identity).tensors)
        found: dict[int, dict[str, Tensor]] = {}
        for key, vector in flat.items():
            number, name = key.split(".", 1)
            found.setdefault(int(number), {})[name] = vector
        return found
