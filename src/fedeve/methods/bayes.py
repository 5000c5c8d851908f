"""The paper's general predict-observe filter, eqs. (9) and (10), in one dimension on a grid, for any noise density.

It exists to be compared with: on Gaussian noise it gives what `kalman.py` gives in closed form, and it shows what the
closed form leaves out when the noise is not Gaussian. No method uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import FedeveError, Words

Array = NDArray[np.float64]
Density = Callable[[Array], Array]


@dataclass(frozen=True)
class GridFilter:
    """A density `f` tabulated on equally spaced points `w`.

    >>> from scipy.stats import norm
    >>> belief = GridFilter.of(norm(0, 1).pdf, low=-10, high=10, num_points=2001)
    >>> belief = belief.predict(norm(0, 0.5).pdf, transition=lambda w: w + 1)      # g(w) = w + 1, period drift 0.5
    >>> belief = belief.observe(2.0, norm(0, 1).pdf)                               # saw 2, client drift 1
    >>> round(belief.mean, 6), round(belief.variance, 6)
    (1.555556, 0.555556)
    """

    points: Array
    density: Array

    @classmethod
    def of(cls, density: Density, *, low: float, high: float, num_points: int = 2001) -> GridFilter:
        """The grid from `low` to `high` that holds `density`, normalised."""
        if not low < high or num_points < 3:
            raise FedeveError(
                "a grid needs room",
                got=Words(f"low {low}, high {high}, {num_points} points"),
                do="give low < high and at least 3 points",
            )
        points = np.linspace(low, high, num_points)
        return cls(points, _normalised(points, np.asarray(density(points), dtype=np.float64)))

    def predict(self, noise: Density, *, transition: Callable[[Array], Array] = lambda w: w) -> GridFilter:
        """(9) `f-(w) = integral f_Q(w - g(v)) f+(v) dv`."""
        kernel = noise(self.points[:, None] - transition(self.points)[None, :])
        prior = np.asarray(np.trapezoid(kernel * self.density, self.points))
        return GridFilter(self.points, _normalised(self.points, prior))

    def observe(
        self, value: float, noise: Density, *, observation: Callable[[Array], Array] = lambda w: w
    ) -> GridFilter:
        """(9) `f+(w) = eta f_R(value - h(w)) f-(w)`, eta such that it integrates to one."""
        return GridFilter(self.points, _normalised(self.points, noise(value - observation(self.points)) * self.density))

    @property
    def mean(self) -> float:
        """(10) `integral w f(w) dw`."""
        return float(np.trapezoid(self.points * self.density, self.points))

    @property
    def variance(self) -> float:
        """`integral (w - mean)^2 f(w) dw`."""
        return float(np.trapezoid((self.points - self.mean) ** 2 * self.density, self.points))


def _normalised(points: Array, density: Array) -> Array:
    total = np.trapezoid(density, points)
    if not np.isfinite(total) or total <= 0:
        raise FedeveError(
            "the density vanishes on the grid",
            got=Words(f"a total of {total} on [{points[0]:g}, {points[-1]:g}]"),
            do="widen the grid so that it covers both the prediction and the observation",
        )
    return np.asarray(density / total, dtype=np.float64)
