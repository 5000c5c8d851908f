"""FedEve under secure aggregation: the server learns sums over the cohort, never one client's update.

Flower's SecAgg+ is a workflow of its older API (`DefaultWorkflow`, `NumPyClient`), which is why this strategy is one of
that API. What it adds up is a client's update and one more number, its squared norm; `Summary.from_sums` makes of
both all that a method needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from logging import WARNING, getLogger
from typing import Any

import numpy as np
import torch
from flwr.common import FitIns, Parameters, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from numpy.typing import NDArray
from torch import Tensor

from .. import seeds
from ..errors import FedeveError, Words
from ..method import Method
from ..summary import Summary
from .checks import needs_correction
from .options import check_method

Arrays = list[NDArray[Any]]
Evaluate = Callable[[int, Arrays], tuple[float, dict[str, Scalar]] | None]
log = getLogger("flwr")
_LEVELS = 1 << 22  # what SecAgg+ rounds a number to, its `quantization_range`: a step is 2 clip_norm / 2^22


def secure_update(start: Arrays, end: Arrays, *, clip_norm: float) -> tuple[Arrays, int, dict[str, Scalar]]:
    """What `NumPyClient.fit` returns: the update, clipped, and |u|^2 as one more array; the weight is 1 for everybody.

    All numbers lie within `clip_norm` of zero, so that is the `clipping_range` to give to SecAgg+. What is not finite
    is refused here, since nobody else can: masked, it would be any number.
    """
    update = [
        np.asarray(e, dtype=np.float64) - np.asarray(s, dtype=np.float64) for s, e in zip(start, end, strict=True)
    ]
    with np.errstate(over="ignore"):  # what is too large to square is refused below
        norm = math.sqrt(sum(float((part**2).sum()) for part in update))
    if not math.isfinite(norm):
        raise FedeveError(
            "the trained arrays are not finite",
            got=Words(f"an update of norm {norm}"),
            do="lower the learning rate; this client drops out of the round",
        )
    shrink = min(1.0, clip_norm / norm) if norm > 0 else 1.0
    square = np.array([(norm * shrink) ** 2 / clip_norm])
    return [*(part * shrink for part in update), square], 1, {}


class SecureStrategy(Strategy):
    """A method on sums alone, for `SecAggPlusWorkflow(..., max_weight=1.0, clipping_range=clip_norm)`.

    Clients return `secure_update(...)`. Weights are uniform, since a weight would have to be seen to be checked, and
    methods whose clients send or correct anything else are refused.
    """

    def __init__(
        self,
        method: Method,
        initial: Arrays,
        *,
        clip_norm: float,
        fraction_fit: float = 1.0,
        min_clients: int = 3,
        seed: int = 0,
        evaluate_fn: Evaluate | None = None,
    ) -> None:
        check_method(method)
        if method.replies or needs_correction(method):
            raise FedeveError(
                "this method cannot run on sums alone",
                got=method.name,
                do="use one whose clients only send updates: fedavg, fedavgm, fedeve, fedeveadam, fedadam, fedyogi, "
                "fedadagrad, fedeveparts",
            )
        if not clip_norm > 0:
            raise FedeveError("updates must be clipped to be summed securely", got=clip_norm, do="give a norm above 0")
        self.method, self.clip_norm, self.seed = method, float(clip_norm), seed
        self.fraction_fit, self.min_clients, self.evaluate_fn = fraction_fit, min_clients, evaluate_fn
        self.shapes = [array.shape for array in initial]
        self.dtypes = [array.dtype for array in initial]
        self.state: Any = method.init(_vector(initial))
        self.facts: dict[int, dict[str, float]] = {}
        self.lost: dict[int, str] = {}

    def arrays(self, vector: Tensor | None = None) -> Arrays:
        """The fused model, or another vector, as arrays."""
        flat = (self.state.params if vector is None else vector).numpy()
        pieces = np.split(flat, np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1])
        return [p.reshape(s).astype(d) for p, s, d in zip(pieces, self.shapes, self.dtypes, strict=True)]

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        return ndarrays_to_parameters(self.arrays())

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        client_manager.wait_for(self.min_clients, 86400)
        known = client_manager.all()
        size = max(int(len(known) * self.fraction_fit), self.min_clients)
        drawn = seeds.cohort(len(known), size, seed=self.seed, round=server_round - 1)
        names = sorted(known)
        sent = ndarrays_to_parameters(self.arrays(self.method.send(self.state).params))
        return [(known[names[place]], FitIns(sent, {"server-round": server_round})) for place in drawn.tolist()]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, Any]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Step on the sums. SecAgg+ hands every survivor's result the same arrays, the means over the survivors."""
        if not results:
            self.lost[server_round] = "nobody's masks could be taken off"
            return None, {}
        count = len(results)
        *mean, square = parameters_to_ndarrays(results[0][1].parameters)
        try:
            if [part.shape for part in mean] != self.shapes:
                raise FedeveError("the sums do not fit the model", got=Words("other shapes"), do="send secure_update()")
            center = _vector(mean).double()
            average = float(square.reshape(-1)[0]) * self.clip_norm
            _check_means(center, average, self.clip_norm)
            summary = Summary.from_sums(count, count * center, count * max(average, 0.0))
            state, facts = self.method.step(self.state, summary)
        except FedeveError as error:
            self.lost[server_round] = str(error)
            log.log(WARNING, "round %d is lost: %s", server_round, error)
            return None, {}
        self.state = state
        self.facts[server_round] = {name: float(value) for name, value in facts.items()}
        return ndarrays_to_parameters(self.arrays()), dict(self.facts[server_round])

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, Any]]:
        return []

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[ClientProxy, Any]], failures: list[Any]
    ) -> tuple[float | None, dict[str, Scalar]]:
        return None, {}

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        return None if self.evaluate_fn is None else self.evaluate_fn(server_round, parameters_to_ndarrays(parameters))


def _check_means(center: Tensor, square: float, clip: float) -> None:
    """Raise unless vectors no longer than `clip` can have this mean and this mean square, up to SecAgg+'s rounding."""
    step = 2 * clip / _LEVELS
    # Every number of a mean is off by less than a step; the square was divided by `clip` before it was rounded.
    norm, slack = float(center.norm()), step * math.sqrt(len(center))
    least = max(norm - slack, 0.0)  # |mean|^2 <= mean of |u_k|^2 <= clip^2
    if not (math.isfinite(norm) and least <= clip and least**2 - step * clip <= square <= clip**2 + step * clip):
        raise FedeveError(
            "no clipped updates have these means",
            got=Words(f"a mean of norm {norm:g} and a mean square of {square:g} with clip_norm {clip:g}"),
            do="look for a client that does not send secure_update() with this clip_norm",
        )


def _vector(arrays: Arrays) -> Tensor:
    parts = [torch.from_numpy(np.array(array)).reshape(-1) for array in arrays]
    wide = any(part.dtype == torch.float64 for part in parts)
    return torch.cat([part.to(torch.float64 if wide else torch.float32) for part in parts])
