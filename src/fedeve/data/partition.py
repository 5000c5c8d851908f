"""Ways to deal examples to clients: natural, iid, dirichlet, shards. Each returns one index array per client.

The sizes always add up to the number of examples, and the same seed gives the same split.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .. import seeds
from ..errors import FedeveError, Words
from ..seeds import Indices

Partition = list[Indices]


def natural(owners: ArrayLike) -> Partition:
    """By owner: `owners` [n] names the client of every example; clients in sorted order of their names."""
    values, inverse = np.unique(_one_each(owners, "owner"), return_inverse=True)
    if not len(values):
        return []
    order = np.argsort(inverse, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(inverse, minlength=len(values)))[:-1])


def iid(y: ArrayLike, *, num_clients: int, seed: int = 0) -> Partition:
    """Shuffled and dealt evenly: sizes differ by at most one."""
    _check_clients(num_clients)
    order = seeds.generator(seed, "partition", "iid").permutation(len(_one_each(y, "label")))
    return [part.astype(np.int64) for part in np.array_split(order, num_clients)]


def dirichlet(y: ArrayLike, *, num_clients: int, alpha: float, seed: int = 0) -> Partition:
    """Label skew (Hsu et al. 2019): each class is cut at proportions drawn from Dirichlet(alpha).

    The smaller `alpha`, the fewer classes a client has; sizes differ wildly, and at 0.01 many clients are empty.
    """
    _check_clients(num_clients)
    if not isinstance(alpha, int | float | np.number) or not (np.isfinite(alpha) and alpha > 0):
        raise FedeveError("alpha must be above 0", got=alpha, do="write e.g. 0.1 (label skew) or 100 (almost iid)")
    labels, rng = _one_each(y, "label"), seeds.generator(seed, "partition", "dirichlet")
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label)).astype(np.int64)
        cuts = (np.cumsum(_proportions(rng, num_clients, alpha))[:-1] * len(rows)).astype(np.int64)
        for part, mine in zip(parts, np.split(rows, cuts), strict=True):
            part.append(mine)
    return [np.concatenate(part) if part else np.empty(0, dtype=np.int64) for part in parts]


def shards(y: ArrayLike, *, num_clients: int, per_client: int = 2, seed: int = 0) -> Partition:
    """Pathological label skew (McMahan et al. 2017): sorted by label, cut into shards, `per_client` of them each."""
    _check_clients(num_clients)
    if not _is_count(per_client):
        raise FedeveError("a client needs at least one shard", got=per_client, do="write 1 or more")
    labels, rng = _one_each(y, "label"), seeds.generator(seed, "partition", "shards")
    shuffled = rng.permutation(len(labels))
    pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], num_clients * per_client)
    dealt = rng.permutation(len(pieces)).reshape(num_clients, per_client)
    return [np.concatenate([pieces[shard] for shard in row]).astype(np.int64) for row in dealt]


def _proportions(rng: np.random.Generator, num_clients: int, alpha: float) -> np.ndarray:
    shares = rng.dirichlet(np.full(num_clients, alpha))
    if np.isfinite(shares).all() and shares.sum() > 0:
        return shares
    # At a vanishing alpha all draws underflow; the limit is that one client gets the whole class.
    return np.eye(num_clients)[rng.integers(num_clients)]


def _check_clients(num_clients: int) -> None:
    if not _is_count(num_clients):
        raise FedeveError("a federation needs clients", got=num_clients, do="set num_clients to 1 or more")


def _is_count(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool) and int(number) >= 1


def _one_each(values: ArrayLike, what: str) -> np.ndarray:
    """Labels or owners as an array [n]; what is not equal to itself would be dealt to nobody."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind == "f" and np.isnan(array).any()):
        found = f"{array.dtype} of shape {array.shape}" if array.ndim != 1 else "NaN among them"
        raise FedeveError(f"every example needs one {what}", got=Words(found), do=f"give an array with a {what} each")
    return array
