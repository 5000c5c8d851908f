"""Objectives: what a client's loss and gradient are at some parameters, for a model on data and for quadratics.

`minimise` finds an optimum of one client or of several together. Everything is float64 unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .. import tasks
from ..data.federated import FederatedData
from ..errors import FedeveError, Words
from ..layout import Layout
from ..methods.fedavg import FedAvg
from ..run import DTYPES, Run, choose_device
from ..seeds import Indices

_BATCH = 250  # rows whose gradient is taken at once: few enough for a small network to stay in the cache


class Objective(Protocol):
    """The losses F_k of clients 0 .. N-1, all of whom have data."""

    start: Tensor
    """[D] where training would begin."""
    weights: NDArray[np.float64]
    """[N] examples of each client, n_k."""

    def loss_and_gradient(self, client: int, params: Tensor) -> tuple[Tensor, Tensor]:
        """F_k [] and its gradient [D] at params [D]."""
        ...


class ModelObjective:
    """The mean loss of a model on each client's rows; clients without data are left out.

    `clients` [N] are their numbers in the federation.
    """

    def __init__(
        self,
        data: FederatedData,
        model: Any = "lenet5",
        *,
        model_options: dict[str, Any] | None = None,
        seed: int = 0,
        dtype: str = "float64",
        device: str = "cpu",
    ) -> None:
        if not len(data.with_data):
            raise FedeveError("nobody has data", got=0, do="give a federation with at least one example")
        options = model_options or {}
        run = Run(method=FedAvg(), data=data, model=model, model_options=options, cohort=1, seed=seed, dtype=dtype)
        self.data, self.dtype, self.device = data, DTYPES[dtype], choose_device(device)
        self.model = run.build_model().to(self.device).eval()
        self.layout = Layout.of(self.model)
        self.start = self.layout.flatten(dict(self.model.named_parameters()))
        self.clients = data.with_data
        self.weights = data.sizes[self.clients].astype(np.float64)

    def loss_and_gradient(self, client: int, params: Tensor) -> tuple[Tensor, Tensor]:
        return self.on_rows(self.data.rows(int(self.clients[client])), params)

    def on_rows(self, rows: Indices, params: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss on some rows and its gradient."""
        loss, grad = params.new_zeros(()), torch.zeros_like(params)
        for first in range(0, len(rows), _BATCH):
            some = rows[first : first + _BATCH]
            x = self.data.inputs(self.data.x[some], self.dtype).to(self.device)
            y = torch.from_numpy(self.data.y[some]).to(self.device)
            point = params.detach().requires_grad_()
            outputs = torch.func.functional_call(self.model, self.layout.unflatten(point), (x,))
            part = tasks.losses(self.data.task, outputs, y).sum() / len(rows)
            grad = grad + torch.autograd.grad(part, point)[0]
            loss = loss + part.detach()
        return loss, grad


class Quadratics:
    """`F_k(w) = (w - a_k)' A_k (w - a_k) / 2`: everything about them is known.

    >>> quadratics = Quadratics(centres=[[0.0], [2.0]], curvatures=[[[1.0]], [[3.0]]])
    >>> quadratics.optimum([0, 1]).tolist()
    [1.5]
    """

    def __init__(
        self, *, centres: ArrayLike, curvatures: ArrayLike | None = None, weights: ArrayLike | None = None
    ) -> None:
        self.centres = torch.as_tensor(np.asarray(centres), dtype=torch.float64)
        count, dim = self.centres.shape
        given = np.eye(dim) if curvatures is None else np.asarray(curvatures)
        self.curvatures = torch.as_tensor(given, dtype=torch.float64).expand(count, dim, dim)
        self.weights = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
        self.start = torch.zeros(dim, dtype=torch.float64)

    def loss_and_gradient(self, client: int, params: Tensor) -> tuple[Tensor, Tensor]:
        gap = params - self.centres[client]
        grad = self.curvatures[client] @ gap
        return gap @ grad / 2, grad

    def optimum(self, clients: Sequence[int], shares: ArrayLike | None = None) -> Tensor:
        """Where the mean of these clients' losses is smallest, weighted by `shares` if given."""
        chosen = list(clients)
        share = torch.ones(len(chosen)) if shares is None else torch.as_tensor(np.asarray(shares))
        curvature = torch.einsum("k,kij->ij", share.double(), self.curvatures[chosen])
        pull = torch.einsum("k,kij,kj->i", share.double(), self.curvatures[chosen], self.centres[chosen])
        return torch.linalg.solve(curvature, pull)


class Optimum(NamedTuple):
    """Where a minimisation ended: `params` [D], the gradient's norm there and at the start, and what it took."""

    params: Tensor
    norm: float
    start_norm: float
    reached: bool
    """Whether the norm fell to the tolerance asked for."""
    num_gradients: int


def together(objective: Objective, clients: Sequence[int], shares: Sequence[float]) -> Callable[..., Any]:
    """The weighted mean of some clients' losses, with its gradient, as a function of the parameters."""
    total = float(sum(shares))

    def function(params: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = params.new_zeros(()), torch.zeros_like(params)
        for client, share in zip(clients, shares, strict=True):
            part, slope = objective.loss_and_gradient(client, params)
            loss, grad = loss + share / total * part, grad + share / total * slope
        return loss, grad

    return function


def minimise(
    objective: Objective,
    clients: Sequence[int],
    shares: Sequence[float],
    *,
    start: Tensor,
    tolerance: float,
    max_steps: int = 500,
) -> Optimum:
    """Train these clients' mean loss, on full batches by L-BFGS, until its gradient is `tolerance` of what it was."""
    if not 0 < tolerance < 1:
        raise FedeveError("a tolerance lies between 0 and 1", got=tolerance, do="write e.g. 1e-3")
    function = together(objective, clients, shares)
    params = start.detach().clone().requires_grad_()
    norms: list[float] = []

    def closure() -> Tensor:
        loss, grad = function(params.detach())
        params.grad = grad
        norms.append(float(grad.norm()))
        return loss

    first = function(start)[1].norm().item()
    # Its own stopping rules are off but for a step that no longer moves: ours is the norm of the gradient.
    optimiser = torch.optim.LBFGS(
        [params], max_iter=10, history_size=20, tolerance_grad=0.0, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )
    norm, best, stalled = first, (first, start.detach().clone()), 0
    for _ in range(-(-max_steps // 10)):
        if norm <= tolerance * first or stalled == 3:
            break
        optimiser.step(closure)
        closure()
        norm = norms[-1]
        if not np.isfinite(norm):
            raise FedeveError(
                "training to an optimum diverged", got=Words(f"a gradient of norm {norm}"), do="start elsewhere"
            )
        stalled = 0 if norm < best[0] else stalled + 1  # rounding leaves nothing to gain
        if norm < best[0]:
            best = (norm, params.detach().clone())
    return Optimum(best[1], best[0], first, best[0] <= tolerance * first, len(clients) * (len(norms) + 1))
