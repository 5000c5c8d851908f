"""Digits: the 1,797 real handwritten digits that scikit-learn ships, 8x8, the smallest real set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import seeds
from ..errors import FedeveError, Words
from ..settings import setting
from .datasets import Arrays, Dataset


@dataclass(frozen=True, kw_only=True)
class Digits(Dataset):
    """1,797 real handwritten digits, 8x8, from scikit-learn; a fifth of them is the test set."""

    partition: str = setting(
        "dirichlet", help="how examples are dealt to clients", choices=("iid", "dirichlet", "shards")
    )

    source: ClassVar[str] = "in scikit-learn"
    licence: ClassVar[str] = "CC BY 4.0 (UCI machine learning repository)"
    citation: ClassVar[str] = "Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998"

    def arrays(self) -> Arrays:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise FedeveError(
                "the data set digits lives in scikit-learn", got=Words("no scikit-learn"), do="pip install scikit-learn"
            ) from None
        bunch = load_digits()
        images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
        order = seeds.generator("digits", "test").permutation(len(labels))  # one test set, whatever the seed
        test, train = order[: len(order) // 5], np.sort(order[len(order) // 5 :])
        return Arrays(images[train], labels[train], None, images[test], labels[test], 10, 0.0, 1 / 16)
