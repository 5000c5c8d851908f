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
from collections.abc import Mapping
from logging import WARNING, getLogger
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
from .checks import EXTRAS, MARK, needs_correction
from .nodes import QUESTION

FOLDER = "fedeve-memory"
"""In a node's configuration: a folder that outlives the SuperNode and the run, for what its client remembers."""
log = getLogger("flwr")


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
    record = message.content.array_records.get(arrays)
    if record is None:
        raise FedeveError(
            f"this message has no arrays under {arrays!r}",
            got=Words(f"records {list(message.content)}"),
            do="write correct(..., arrays=KEY) with the strategy's arrayrecord_key",
        )
    told = json.loads(str(config[MARK]))
    method = methods.create(told["method"].pop("name"), **told["method"])
    wire = Wire.of(record, statistics=tuple(told["statistics"]))
    extras = message.content.array_records.get(EXTRAS) or ArrayRecord()
    sent = Sent(wire.vector(record), {n: torch.from_numpy(array.numpy().copy()) for n, array in extras.items()})
    server_round = int(str(config["server-round"]))
    memory = _Memory(context, method, server_round, federation=told["federation"], like=sent.params)
    return Corrected(method, sent, memory, wire, model, optimizer)


class Corrected:
    """A client's local work under a method: corrects every step, counts them, and says what else to send."""

    def __init__(
        self,
        method: Method,
        sent: Sent,
        memory: _Memory,
        wire: Wire,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.method, self.optimizer, self.num_steps = method, optimizer, 0
        self._sent, self._memory, self._wire = sent, memory, wire
        self._named = _parameters(model, wire)
        self._starts = self._parts(sent.params)
        correction = method.correction(sent, memory.vectors)
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
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # `args` begin with the optimiser. A closure computes gradients after this, so they would stay as they are.
        if needs_correction(self.method) and any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            raise FedeveError(
                f"{self.method.name} cannot correct the gradients of a closure",
                got=Words("optimizer.step(closure)"),
                do="call loss.backward() first and optimizer.step() then",
            )
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
        if _is_finite(extras) and _is_finite(remember):
            self._memory.put(remember)
        elif _is_finite({"update": update}):
            raise FedeveError(
                f"what {self.method.name} makes of this training is not finite",
                got=Words(f"{self.num_steps} steps, the last at rate {lr:g}"),
                do="train with plain SGD at a constant rate above 0",
            )
        # Otherwise training diverged: the server refuses this reply, and what was remembered before stays.
        out: dict[str, ArrayRecord | ConfigRecord] = {MARK: ConfigRecord({"method": self.method.name})}
        if extras:
            out[EXTRAS] = ArrayRecord({name: Array(vector.numpy()) for name, vector in extras.items()})
        return out

    def _sizes(self) -> list[int]:
        return [spec.size for spec in self._wire.named("params").values()]


def _is_finite(vectors: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(vector).all()) for vector in vectors.values())


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
    """What a client remembers of a federation, as of the end of each of its last two rounds.

    A round may be played again, after the server was restarted: it must start from what was known before it.
    """

    def __init__(self, context: Context, method: Method, server_round: int, *, federation: str, like: Tensor) -> None:
        self.round, self.names, self.context, self.federation = server_round, method.remembers, context, federation
        self.key = f"{MARK}.{method.name}"
        self.partition = str(context.node_config.get("partition-id", ""))
        folder = context.node_config.get(FOLDER)
        self.file = Path(str(folder)) / f"{method.name}.safetensors" if folder and self.names else None
        found = self._mine(self._kept()) or self._mine(self._saved())
        self.past = {number: vectors for number, vectors in found.items() if number < server_round}
        if len(found) > 1 and not self.past:  # with one round, there was nothing before it
            log.log(
                WARNING, "%s: this client remembers rounds %s and is asked for round %d: it begins anew",
                method.name, sorted(found), server_round,
            )  # fmt: skip
        zero = {name: torch.zeros_like(like) for name in self.names}
        self.vectors = self.past[max(self.past)] if self.past else zero

    def put(self, vectors: Any) -> None:
        """Remember these, and what was known before."""
        if not self.names:
            return
        last = {max(self.past): self.vectors} if self.past else {}
        rounds = {**last, self.round: vectors}
        kept = {f"{self.federation}.{number}.{name}": v for number, vs in rounds.items() for name, v in vs.items()}
        self.context.state[self.key] = ArrayRecord({key: Array(v.contiguous().numpy()) for key, v in kept.items()})
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            Checkpoint(kept, {}).save(self.file, identity=self.partition)

    def _kept(self) -> dict[str, Tensor]:
        record = self.context.state.array_records.get(self.key) or ArrayRecord()
        return {key: torch.from_numpy(array.numpy().copy()) for key, array in record.items()}

    def _saved(self) -> dict[str, Tensor]:
        if self.file is None or not self.file.exists():
            return {}
        return dict(Checkpoint.load(self.file, identity=self.partition).tensors)

    def _mine(self, flat: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """By round, what belongs to this federation: another's rounds say nothing about this one's."""
        found: dict[int, dict[str, Tensor]] = {}
        for key, vector in flat.items():
            federation, _, rest = key.partition(".")
            if federation == self.federation:
                number, name = rest.split(".", 1)
                found.setdefault(int(number), {})[name] = vector
        return found
