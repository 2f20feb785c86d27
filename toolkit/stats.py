"""Numbers in, numbers out: paired ratios with intervals, spread, outliers, and drift over the run order."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 1

# With five blocks the tails of the expanded percentile interval are as rare as the rarest resample,
# so the bootstrap cannot form them; below six the interval comes from the t distribution.
MIN_BOOTSTRAP_BLOCKS = 6

# The spread of two blocks is a single difference: its interval covers on average, but can be tiny by chance.
MIN_VERDICT_BLOCKS = 3

OUTLIER_SCORE = 3.5  # Iglewicz and Hoaglin (1993), How to Detect and Handle Outliers
# A handful of values can lie close together by chance; what is this near to the median stays unflagged.
OUTLIER_FRACTION = 0.05

# Room for rounding: arms with the same values must not differ in the last bit.
_EPSILON = 1e-9


class Verdict(str, Enum):
    FASTER = "faster"
    SLOWER = "slower"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Candidate over baseline throughput; above 1 the candidate is faster."""

    ratio: float
    ci95: tuple[float, float] | None  # None: a single block has no spread to judge by
    n_blocks: int
    method: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Trend of log throughput over the run order, as a fraction per run."""

    slope: float
    ci95: tuple[float, float]

    @property
    def significant(self) -> bool:
        return self.ci95[0] > _EPSILON or self.ci95[1] < -_EPSILON

    @property
    def bound(self) -> float:
        """Largest size of the trend that the interval allows."""
        return max(abs(self.ci95[0]), abs(self.ci95[1]))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def sample_sd(values: Sequence[float]) -> float | None:
    """Standard deviation with n - 1; None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def t_cdf(t: float, df: int) -> float:
    """Student's distribution function for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    cos2 = math.cos(theta) ** 2
    odd = df % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= cos2 * k / (k + 1)
    area = 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total
    return 0.5 + math.copysign(area / 2, t)


def t_quantile(p: float, df: int) -> float:
    """Inverse of `t_cdf` by bisection; 0 < p < 1."""
    low, high = -1.0, 1.0
    while t_cdf(low, df) > p:
        low *= 2
    while t_cdf(high, df) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % t interval of the mean; None for fewer than two values."""
    sd = sample_sd(values)
    if sd is None:
        return None
    half = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * sd / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def outliers(values: Sequence[float]) -> tuple[int, ...]:
    """Indices whose modified z-score exceeds 3.5 and that are more than 5 % off the median.

    They are for flagging, never for dropping. When more than half of the values are equal the median
    deviation is 0 and the mean one stands in.
    """
    x = np.asarray(values, dtype=float)
    if len(x) < 3:
        return ()
    middle = float(np.median(x))
    deviation = np.abs(x - middle)
    scale = 1.482602 * float(np.median(deviation)) or 1.253314 * float(np.mean(deviation))
    limit = max(OUTLIER_SCORE * scale, OUTLIER_FRACTION * abs(middle))
    return tuple(int(i) for i in np.flatnonzero(deviation > limit))


def drift(values: Sequence[float], positions: Sequence[float], groups: Sequence[Hashable]) -> Drift | None:
    """Slope of log(value) over position with a level of its own for each group (arm), by least squares.

    None when there are too few values to tell a trend from the groups' levels.
    """
    y = np.log(np.asarray(values, dtype=float))
    x = np.asarray(positions, dtype=float)
    for group in set(groups):
        members = np.asarray([g == group for g in groups])
        y[members] -= y[members].mean()
        x[members] -= x[members].mean()
    df = len(y) - len(set(groups)) - 1
    spread = float(x @ x)
    if df < 1 or spread == 0:
        return None
    slope = float(x @ y) / spread
    residual = y - slope * x
    half = t_quantile((1 + CONFIDENCE) / 2, df) * math.sqrt(float(residual @ residual) / df / spread)
    return Drift(slope=slope, ci95=(slope - half, slope + half))


def drift_bias(trend: Drift | None, baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]) -> float:
    """How far a significant trend can move a log ratio, given each block's run positions of both arms.

    First term: the distance of the arms' mean positions (0 for A B B A). Second: the mean of a curve over
    a block's outer and inner runs differs by at most cosh(slope x half the block's length) - 1.
    """
    if trend is None or not trend.significant:
        return 0.0
    distance = mean([mean(c) - mean(b) for b, c in zip(baseline, candidate, strict=True)])
    half = max((max(*b, *c) - min(*b, *c)) / 2 for b, c in zip(baseline, candidate, strict=True))
    return trend.bound * abs(distance) + math.cosh(trend.bound * half) - 1


def paired_ratio(
    baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]], *, bias: float = 0.0
) -> Ratio:
    """Ratio of mean throughputs, candidate over baseline, with its 95 % interval; both lists are by block.

    An arm's value in a block is the mean of its samples there, and the ratio divides the mean of these
    values over all blocks. Blocks are resampled whole, so what both arms of a block share cancels.
    From six blocks on: bootstrap percentiles of 10,000 resamples, their tails expanded to the t
    distribution's (Hesterberg 2015, doi:10.1080/00031305.2015.1089789), since plain percentiles are too
    narrow for few blocks. Below six: t interval of the log ratio, n - 1 degrees of freedom, standard
    error by the delta method. `bias` widens the log interval on both sides (see `drift_bias`).
    """
    b = np.array([mean(block) for block in baseline])
    c = np.array([mean(block) for block in candidate])
    if len(b) != len(c) or not len(b):
        raise ValueError(f"need the same number of blocks, at least 1: {len(b)} and {len(c)}")
    if min(b.min(), c.min()) <= 0:
        raise ValueError("throughput must be above 0")
    n = len(b)
    ratio = float(c.mean() / b.mean())
    if n == 1:
        return Ratio(ratio=ratio, ci95=None, n_blocks=1, method="none (1 block)", verdict=Verdict.UNDECIDED)
    t = t_quantile((1 + CONFIDENCE) / 2, n - 1)
    if n < MIN_BOOTSTRAP_BLOCKS:
        method = "t interval of the log ratio"
        half = t * float(np.std(c / c.mean() - b / b.mean(), ddof=1)) / math.sqrt(n)
        low, high = math.log(ratio) - half, math.log(ratio) + half
    else:
        method = f"paired bootstrap over blocks, {RESAMPLES} resamples, expanded percentiles"
        pick = np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n))
        logs = np.log(c[pick].mean(axis=1) / b[pick].mean(axis=1))
        tail = 0.5 * math.erfc(math.sqrt(n / (n - 1)) * t / math.sqrt(2))
        low, high = (float(q) for q in np.quantile(logs, [tail, 1 - tail]))
    low, high = low - bias, high + bias
    if n < MIN_VERDICT_BLOCKS:
        verdict = Verdict.UNDECIDED
    elif low > _EPSILON:
        verdict = Verdict.FASTER
    elif high < -_EPSILON:
        verdict = Verdict.SLOWER
    else:
        verdict = Verdict.UNDECIDED
    return Ratio(ratio=ratio, ci95=(math.exp(low), math.exp(high)), n_blocks=n, method=method, verdict=verdict)
