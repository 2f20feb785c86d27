"""Numbers in, numbers out: paired ratios with intervals, spread, outliers, and drift over the run order."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

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

# Chance that a planned comparison finds the effect it was planned for, and of the spread being below its limit.
POWER = 0.8
_MOST_BLOCKS = 1000


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
class BlocksNeeded:
    """How many blocks a comparison takes to find an effect; None: more than 1000."""

    effect: float  # as a fraction of the baseline's throughput
    power: float  # chance that the interval then excludes 1
    spread: float  # SD of one block's log ratio, as estimated
    n_blocks: int | None
    n_blocks_upper: int | None  # with the spread at its upper 80 % limit, since few blocks estimate it badly


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
    """Inverse of `t_cdf`; 0 < p < 1."""
    return _inverse(lambda t: t_cdf(t, df), p)


def chi2_cdf(x: float, df: int) -> float:
    """Chi-square distribution function for whole degrees of freedom (Abramowitz and Stegun 26.4.4, 26.4.5)."""
    if x <= 0:
        return 0.0
    odd = df % 2
    term = math.sqrt(2 * x / math.pi) * math.exp(-x / 2) if odd else math.exp(-x / 2)
    tail = math.erfc(math.sqrt(x / 2)) if odd else 0.0
    for k in range(2 + odd, df + 1, 2):
        tail += term
        term *= x / k
    return 1 - tail


def chi2_quantile(p: float, df: int) -> float:
    """Inverse of `chi2_cdf`; 0 < p < 1."""
    return _inverse(lambda x: chi2_cdf(x, df), p)


def _inverse(cdf: Callable[[float], float], p: float) -> float:
    low, high = -1.0, 1.0
    while cdf(low) > p:
        low *= 2
    while cdf(high) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle) < p else (low, middle)
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
    b, c = _block_means(baseline, candidate)
    n = len(b)
    ratio = float(c.mean() / b.mean())
    if n == 1:
        return Ratio(ratio=ratio, ci95=None, n_blocks=1, method="none (1 block)", verdict=Verdict.UNDECIDED)
    t = t_quantile((1 + CONFIDENCE) / 2, n - 1)
    if n < MIN_BOOTSTRAP_BLOCKS:
        method = "t interval of the log ratio"
        half = t * _spread(b, c) / math.sqrt(n)
        low, high = math.log(ratio) - half, math.log(ratio) + half
    else:
        method = f"paired bootstrap over blocks, {RESAMPLES} resamples, expanded percentiles"
        pick = np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n))
        logs = np.log(c[pick].mean(axis=1) / b[pick].mean(axis=1))
        tail = 0.5 * math.erfc(math.sqrt(n / (n - 1)) * t / math.sqrt(2))
        low, high = (float(q) for q in np.quantile(logs, [tail, 1 - tail]))
    verdict = _verdict(low - bias, high + bias, n)
    ci95 = (math.exp(low - bias), math.exp(high + bias))
    return Ratio(ratio=ratio, ci95=ci95, n_blocks=n, method=method, verdict=verdict)


def unpaired_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> Ratio:
    """Ratio of mean throughputs of two separate series, with Welch's 95 % interval of its logarithm.

    Standard error by the delta method; Satterthwaite's degrees of freedom rounded down, which widens the
    interval a little. Nothing cancels between the series, so what changed from one to the other is part of
    the ratio. `n_blocks` is 0.
    """
    b, c = np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)
    if min(b.min(), c.min()) <= 0:
        raise ValueError("throughput must be above 0")
    ratio = float(c.mean() / b.mean())
    n = min(len(b), len(c))
    if n < 2:
        method = "none (a single value has no spread)"
        return Ratio(ratio=ratio, ci95=None, n_blocks=0, method=method, verdict=Verdict.UNDECIDED)
    parts = [(float(np.std(x, ddof=1)) / float(x.mean())) ** 2 / len(x) for x in (b, c)]
    variance = sum(parts)
    df = n - 1
    if variance > 0:
        df = max(df, int(variance**2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (b, c), strict=True))))
    half = t_quantile((1 + CONFIDENCE) / 2, df) * math.sqrt(variance)
    low, high = math.log(ratio) - half, math.log(ratio) + half
    return Ratio(
        ratio=ratio,
        ci95=(math.exp(low), math.exp(high)),
        n_blocks=0,
        method="unpaired, Welch interval of the log ratio",
        verdict=_verdict(low, high, n),
    )


def blocks_needed(
    baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]], effect: float
) -> BlocksNeeded | None:
    """Blocks after which an effect of this size is found with 80 % power, judged by the spread of these blocks.

    `effect` is a fraction above 0, such as 0.05. Drift is not part of it. None for fewer than two blocks.
    """
    b, c = _block_means(baseline, candidate)
    n = len(b)
    if n < 2:
        return None
    spread = _spread(b, c)
    upper = spread * math.sqrt((n - 1) / chi2_quantile(1 - POWER, n - 1))
    return BlocksNeeded(
        effect=effect,
        power=POWER,
        spread=spread,
        n_blocks=_fewest_blocks(math.log1p(effect), spread),
        n_blocks_upper=_fewest_blocks(math.log1p(effect), upper),
    )


def detectable_effect(baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]) -> float | None:
    """Smallest effect, as a fraction, that as many blocks of this spread find with 80 % power (see `blocks_needed`).

    None for fewer blocks than can decide.
    """
    b, c = _block_means(baseline, candidate)
    n, spread = len(b), _spread(b, c) if len(b) > 1 else 0.0
    if n < MIN_VERDICT_BLOCKS:
        return None
    low, high = 0.0, spread
    while spread > 0 and detection_power(high, spread, n) < POWER:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if detection_power(middle, spread, n) < POWER else (low, middle)
    return math.expm1(high)


def detection_power(effect: float, spread: float, n: int) -> float:
    """Chance that the 95 % t interval of n differences with this SD lies above 0 when their mean is `effect`.

    The upper tail of the noncentral t distribution, as the mean of a normal tail over the sample SD's distribution.
    """
    df = n - 1
    limit = t_quantile((1 + CONFIDENCE) / 2, df)
    shift = effect * math.sqrt(n) / spread
    width = 8 / math.sqrt(2 * df)
    s = np.linspace(max(1 - width, 1e-9), 1 + width, 2001)  # sample SD over true SD
    log_density = (df - 1) * np.log(s) - df * s**2 / 2
    density = np.exp(log_density - log_density.max())
    tail = np.array([0.5 * math.erfc((limit * x - shift) / math.sqrt(2)) for x in s])
    return float((density * tail).sum() / density.sum())


def _fewest_blocks(effect: float, spread: float) -> int | None:
    low, high = MIN_VERDICT_BLOCKS - 1, MIN_VERDICT_BLOCKS
    while spread > 0 and detection_power(effect, spread, high) < POWER:
        if high > _MOST_BLOCKS:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if detection_power(effect, spread, middle) < POWER else (low, middle)
    return high if high <= _MOST_BLOCKS else None


def _block_means(baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    b = np.array([mean(block) for block in baseline])
    c = np.array([mean(block) for block in candidate])
    if len(b) != len(c) or not len(b):
        raise ValueError(f"need the same number of blocks, at least 1: {len(b)} and {len(c)}")
    if min(b.min(), c.min()) <= 0:
        raise ValueError("throughput must be above 0")
    return b, c


def _spread(b: Array, c: Array) -> float:
    """SD of one block's log ratio by the delta method."""
    return float(np.std(c / c.mean() - b / b.mean(), ddof=1))


def _verdict(low: float, high: float, n: int) -> Verdict:
    """What the interval of a log ratio from n values says."""
    if n < MIN_VERDICT_BLOCKS:
        return Verdict.UNDECIDED
    if low > _EPSILON:
        return Verdict.FASTER
    return Verdict.SLOWER if high < -_EPSILON else Verdict.UNDECIDED
