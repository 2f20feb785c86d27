from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize  # type: ignore[import-untyped]
from scipy import stats as reference

from toolkit.stats import (
    POWER,
    Drift,
    Verdict,
    blocks_needed,
    chi2_cdf,
    chi2_quantile,
    detectable_effect,
    detection_power,
    drift,
    drift_bias,
    mean,
    mean_interval,
    outliers,
    paired_ratio,
    sample_sd,
    t_cdf,
    t_quantile,
    unpaired_ratio,
)


def by_block(values: list[float]) -> list[list[float]]:
    return [[v] for v in values]


def test_sample_sd_divides_by_n_minus_1() -> None:
    # (1.71^2 + 3.43^2 + 1.71^2) / 2 = 8.8065...; with n it would be 2.42.
    assert mean([7.91, 2.77, 7.91]) == pytest.approx(6.1967, abs=1e-4)
    assert sample_sd([7.91, 2.77, 7.91]) == pytest.approx(2.9676, abs=1e-4)
    assert sample_sd([7.91]) is None


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 6, 11, 30, 101])
def test_t_distribution_agrees_with_scipy(df: int) -> None:
    for t in (-40.0, -2.1, 0.0, 0.3, 2.0, 12.7):
        assert t_cdf(t, df) == pytest.approx(reference.t.cdf(t, df), abs=1e-12)
    for p in (0.0005, 0.025, 0.5, 0.9, 0.975):
        assert t_quantile(p, df) == pytest.approx(reference.t.ppf(p, df), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 9, 30, 101])
def test_chi_square_distribution_agrees_with_scipy(df: int) -> None:
    for x in (-1.0, 0.0, 0.01, 0.7, 3.0, 25.0, 140.0):
        assert chi2_cdf(x, df) == pytest.approx(reference.chi2.cdf(x, df), abs=1e-12)
    for p in (0.01, 0.2, 0.5, 0.975):
        assert chi2_quantile(p, df) == pytest.approx(reference.chi2.ppf(p, df), rel=1e-9)


def test_mean_interval_agrees_with_scipy() -> None:
    x = [5.1, 4.8, 5.6, 5.0]
    expected = reference.t.interval(0.95, 3, loc=np.mean(x), scale=reference.sem(x))
    assert mean_interval(x) == pytest.approx(expected)
    assert mean_interval([5.1]) is None


def test_outliers_are_flagged_by_index() -> None:
    # Median 10, median deviation 0.1: 8 is 2 / (1.4826 x 0.1) = 13.5 away, 10.3 only 2.0.
    assert outliers([10.0, 10.1, 8.0, 9.9, 10.1, 10.0, 10.3]) == (2,)
    # More than half equal: the mean deviation 0.4 gives 4 / (1.2533 x 0.4) = 8.0.
    assert outliers([5.0] * 9 + [9.0]) == (9,)
    # 5.14 / (1.2533 x 1.7133) = 2.4: three values cannot convict one of them.
    assert outliers([7.91, 2.77, 7.91]) == ()
    assert outliers([5.0, 5.0, 5.0]) == ()
    # The median deviation is tiny by chance; 4 % off is no outlier, 6 % is.
    assert outliers([10.0, 10.001, 9.999, 10.4]) == ()
    assert outliers([10.0, 10.001, 9.999, 10.6]) == (3,)


def test_small_n_interval_is_the_t_interval_of_the_ratio() -> None:
    b, c = np.array([2.0, 2.2, 2.1]), np.array([3.1, 3.5, 3.2])
    got = paired_ratio([[1.9, 2.1], [2.2, 2.2], [2.0, 2.2]], by_block(c.tolist()))
    ratio = c.sum() / b.sum()
    # The delta method by hand: variances and covariance of the two means, relative to them.
    cov = np.cov(b, c, ddof=1) / 3
    var = cov[0, 0] / b.mean() ** 2 + cov[1, 1] / c.mean() ** 2 - 2 * cov[0, 1] / (b.mean() * c.mean())
    half = reference.t.ppf(0.975, 2) * math.sqrt(var)
    assert got.ratio == pytest.approx(ratio)
    assert got.ci95 == pytest.approx((ratio * math.exp(-half), ratio * math.exp(half)))
    assert (got.n_blocks, got.verdict) == (3, Verdict.FASTER)
    assert got.method.startswith("t interval")


def test_bootstrap_agrees_with_scipy_at_the_same_tails() -> None:
    rng = np.random.default_rng(5)
    b, c = 5 + 0.3 * rng.standard_normal(20), 6 + 0.3 * rng.standard_normal(20)
    got = paired_ratio(by_block(b.tolist()), by_block(c.tolist()))
    tail = reference.norm.cdf(-math.sqrt(20 / 19) * reference.t.ppf(0.975, 19))
    expected = reference.bootstrap(
        (b, c),
        lambda x, y, axis: np.mean(y, axis=axis) / np.mean(x, axis=axis),
        paired=True,
        confidence_level=1 - 2 * tail,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(6),
    ).confidence_interval
    assert got.ci95 == pytest.approx((expected.low, expected.high), abs=0.003)
    assert got.method.startswith("paired bootstrap")
    assert got == paired_ratio(by_block(b.tolist()), by_block(c.tolist()))


@pytest.mark.parametrize("n", [2, 3, 5, 6, 10])
def test_interval_covers_the_true_ratio_about_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(n)
    runs = 800
    hits = 0
    for _ in range(runs):
        block = rng.normal(1, 0.1, n)  # shared by both arms of a block, cancels
        b, c = block * np.exp(rng.normal(0, 0.05, n)), 1.3 * block * np.exp(rng.normal(0, 0.05, n))
        low, high = paired_ratio(by_block(b.tolist()), by_block(c.tolist())).ci95 or (0, 0)
        hits += low <= 1.3 <= high
    # Nominal 95 %; three binomial standard deviations of 800 trials are 2.3 points, and the expanded
    # percentiles at six blocks stay near 93 %.
    assert 0.90 <= hits / runs <= 0.98


def test_one_block_has_no_interval_and_decides_nothing() -> None:
    got = paired_ratio([[2.0]], [[4.0]])
    assert (got.ratio, got.ci95, got.verdict) == (2.0, None, Verdict.UNDECIDED)


def test_blocks_must_match_and_be_positive() -> None:
    with pytest.raises(ValueError, match="same number of blocks"):
        paired_ratio([[1.0]], [[1.0], [2.0]])
    with pytest.raises(ValueError, match="same number of blocks"):
        paired_ratio([], [])
    with pytest.raises(ValueError, match="above 0"):
        paired_ratio([[0.0]], [[1.0]])


def test_a_cold_first_repetition_makes_no_winner() -> None:
    got = paired_ratio(by_block([0.6, 1.9, 2.4, 2.6, 2.4]), by_block([2.5, 2.4, 2.6, 2.5, 2.4]))
    assert got.verdict is Verdict.UNDECIDED
    assert got.ci95 is not None and got.ci95[0] < 1 < got.ci95[1]


def test_equal_times_make_no_winner() -> None:
    same = by_block([84.2, 84.7, 84.5, 84.4, 84.6, 84.3, 84.4])
    assert paired_ratio(same, same).verdict is Verdict.UNDECIDED
    assert paired_ratio(same, same).ci95 == (1.0, 1.0)


@pytest.mark.parametrize("blocks", [4, 8])
def test_three_percent_slower_is_said_when_the_noise_allows(blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    b = 5 * (1 + 0.005 * rng.standard_normal(blocks))
    c = 0.97 * 5 * (1 + 0.005 * rng.standard_normal(blocks))
    got = paired_ratio(by_block(b.tolist()), by_block(c.tolist()))
    assert got.verdict is Verdict.SLOWER
    assert got.ratio == pytest.approx(0.97, abs=0.01)


def simulate(
    order: str, repeats: int, per_run: float, noise: float, seed: int, gain: float = 1.0
) -> tuple[Drift | None, Verdict]:
    """One A/B measurement in which every later run is faster by `per_run`; B is `gain` times A.

    `order` lists blocks, such as `AB BA`.
    """
    rng = np.random.default_rng(seed)
    values: list[float] = []
    blocks = order.split() * repeats
    arms = "".join(blocks)
    for position, arm in enumerate(arms):
        level = 5 * (1 + per_run) ** position * (gain if arm == "B" else 1)
        values.append(level * math.exp(noise * rng.standard_normal()))
    trend = drift(values, range(len(values)), arms)
    rows = iter(zip(arms, values, range(len(values)), strict=True))
    pieces = [[next(rows) for _ in block] for block in blocks]

    def column(arm: str, field: int) -> list[list[float]]:
        return [[row[field] for row in piece if row[0] == arm] for piece in pieces]  # type: ignore[misc]

    bias = drift_bias(trend, column("A", 2), column("B", 2))
    return trend, paired_ratio(column("A", 1), column("B", 1), bias=bias).verdict


def test_slope_and_interval_agree_with_scipy_for_one_group() -> None:
    rng = np.random.default_rng(3)
    x = np.arange(12)
    y = np.exp(0.02 * x + 0.01 * rng.standard_normal(12))
    got = drift(y.tolist(), x.tolist(), ["A"] * 12)
    expected = reference.linregress(x, np.log(y))
    half = reference.t.ppf(0.975, 10) * expected.stderr
    assert got is not None
    assert got.slope == pytest.approx(expected.slope)
    assert got.ci95 == pytest.approx((expected.slope - half, expected.slope + half))


def test_drift_needs_more_runs_than_levels() -> None:
    assert drift([1.0, 2.0], [0, 1], ["A", "B"]) is None
    assert drift([1.0, 2.0, 3.0], [4, 4, 4], ["A", "A", "A"]) is None


@pytest.mark.parametrize("noise", [0.0, 0.002])
@pytest.mark.parametrize("order", ["ABBA", "AB", "AB BA"])
@pytest.mark.parametrize("per_run", [0.01, -0.003])
def test_a_trend_is_named_and_makes_no_winner(order: str, noise: float, per_run: float) -> None:
    trend, verdict = simulate(order, 6, per_run, noise, seed=1)
    assert verdict is Verdict.UNDECIDED
    assert trend is not None and trend.significant
    assert trend.ci95[0] - 1e-9 <= math.log1p(per_run) <= trend.ci95[1] + 1e-9


@pytest.mark.parametrize("order", ["ABBA", "AB BA"])
def test_a_mirrored_order_decides_in_spite_of_a_trend(order: str) -> None:
    trend, verdict = simulate(order, 3, 0.01, 0.002, seed=2, gain=1.1)
    assert trend is not None and trend.significant
    assert verdict is Verdict.FASTER


def test_a_against_a_rarely_makes_a_winner() -> None:
    wrong = sum(simulate("ABBA", 4, 0.0, 0.03, seed=s)[1] is not Verdict.UNDECIDED for s in range(300))
    # 5 % nominal: 15 expected, standard deviation 3.8.
    assert wrong <= 26


def test_two_blocks_never_decide() -> None:
    """Two equal block ratios leave no spread at all: an interval of no width is luck, not knowledge."""
    found = paired_ratio([[1.0], [1.0]], [[2.0], [2.0]])
    assert found.ratio == 2.0
    assert found.verdict is Verdict.UNDECIDED
    assert paired_ratio([[1.0]] * 3, [[2.0]] * 3).verdict is Verdict.FASTER


@pytest.mark.parametrize("n", [3, 4, 6, 20, 300])
@pytest.mark.parametrize("effect", [0.01, 0.03, 0.1])
def test_power_is_the_tail_of_the_noncentral_t_distribution(effect: float, n: int) -> None:
    shift = effect / 0.04 * math.sqrt(n)
    expected = reference.nct.sf(reference.t.ppf(0.975, n - 1), n - 1, shift)
    assert detection_power(effect, 0.04, n) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("effect", "sd"), [(0.05, 0.03), (0.05, 0.08), (0.01, 0.05), (0.3, 0.01)])
def test_blocks_needed_is_the_fewest_with_the_power(effect: float, sd: float) -> None:
    # Two blocks whose relative differences are +-sd / sqrt(2) around their mean have exactly this SD.
    half = sd / math.sqrt(2)
    needed = blocks_needed([[1.0], [1.0]], [[1 + half], [1 - half]], effect)
    assert needed is not None
    assert needed.spread == pytest.approx(sd)

    def power(n: int, spread: float) -> float:
        return float(reference.nct.sf(reference.t.ppf(0.975, n - 1), n - 1, math.log1p(effect) / spread * math.sqrt(n)))

    def fewest(spread: float) -> int | None:
        return next((n for n in range(3, 1001) if power(n, spread) >= POWER), None)

    assert needed.n_blocks == fewest(sd)
    # One degree of freedom: the 20 % point of chi-square is 0.0642, so the SD may be 3.95 times as large.
    upper = sd * math.sqrt(1 / reference.chi2.ppf(0.2, 1))
    assert needed.n_blocks_upper == fewest(upper)


@pytest.mark.parametrize("n", [3, 6, 40])
def test_the_detectable_effect_is_that_of_a_noncentral_t_test_with_the_power(n: int) -> None:
    c = 1 + 0.05 * np.random.default_rng(n).standard_normal(n)
    found = detectable_effect([[1.0]] * n, by_block(c.tolist()))
    assert found is not None
    spread = np.std(c / c.mean(), ddof=1)
    limit = reference.t.ppf(0.975, n - 1)
    shift = optimize.brentq(lambda x: reference.nct.sf(limit, n - 1, x) - POWER, 0.1, 50)
    assert math.log1p(found) == pytest.approx(shift * spread / math.sqrt(n), rel=1e-3)
    needed = blocks_needed([[1.0]] * n, by_block(c.tolist()), 1.001 * found)
    assert needed is not None and needed.n_blocks is not None and needed.n_blocks <= n


def test_the_detectable_effect_at_the_ends() -> None:
    assert detectable_effect([[1.0]] * 3, [[2.0]] * 3) == 0  # no spread
    assert detectable_effect([[1.0]] * 2, [[2.0], [2.1]]) is None  # two blocks never decide


def test_blocks_needed_at_the_ends() -> None:
    same = blocks_needed([[1.0]] * 4, [[2.0]] * 4, 0.05)
    assert same is not None
    assert (same.n_blocks, same.n_blocks_upper) == (3, 3)  # no spread: only the fewest that can decide
    noisy = blocks_needed([[1.0], [1.0]], [[0.5], [1.5]], 0.001)
    assert noisy is not None
    assert (noisy.n_blocks, noisy.n_blocks_upper) == (None, None)
    assert blocks_needed([[1.0]], [[2.0]], 0.05) is None


def test_blocks_needed_finds_the_effect_that_often() -> None:
    rng = np.random.default_rng(8)
    pilot = 1 + 0.04 * rng.standard_normal(200)
    needed = blocks_needed([[1.0]] * 200, by_block(pilot.tolist()), 0.05)
    assert needed is not None and needed.n_blocks is not None
    n, runs = needed.n_blocks, 600
    found = sum(
        paired_ratio([[1.0]] * n, by_block((1.05 * np.exp(0.04 * rng.standard_normal(n))).tolist())).verdict
        is Verdict.FASTER
        for _ in range(runs)
    )
    # Three binomial standard deviations are 5 points; the bootstrap is a little bolder than the t interval.
    assert 0.74 <= found / runs <= 0.9


def test_a_one_percent_gain_stays_undecided_where_ten_percent_is_found() -> None:
    verdicts = {}
    for gain in (1.01, 1.10):
        rng = np.random.default_rng(4)
        b = 5 * np.exp(0.02 * rng.standard_normal(4))
        c = gain * 5 * np.exp(0.02 * rng.standard_normal(4))
        verdicts[gain] = paired_ratio(by_block(b.tolist()), by_block(c.tolist())).verdict
    assert verdicts == {1.01: Verdict.UNDECIDED, 1.10: Verdict.FASTER}


def test_unpaired_interval_is_welchs() -> None:
    b, c = [10.0, 10.4, 9.8, 10.1, 10.2], [11.9, 12.4, 12.1]
    got = unpaired_ratio(b, c)
    # Welch on values divided by their own means: the delta method's variances, and scipy's degrees of freedom.
    test = reference.ttest_ind(np.array(c) / np.mean(c), np.array(b) / np.mean(b), equal_var=False)
    se = math.sqrt(np.var(b, ddof=1) / 5 / np.mean(b) ** 2 + np.var(c, ddof=1) / 3 / np.mean(c) ** 2)
    half = reference.t.ppf(0.975, math.floor(test.df)) * se
    ratio = np.mean(c) / np.mean(b)
    assert got.ratio == pytest.approx(ratio)
    assert got.ci95 == pytest.approx((ratio * math.exp(-half), ratio * math.exp(half)))
    assert (got.n_blocks, got.verdict) == (0, Verdict.FASTER)


def test_unpaired_series_decide_only_with_three_values_each() -> None:
    assert unpaired_ratio([1.0], [2.0, 2.1, 2.2]).ci95 is None
    assert unpaired_ratio([1.0, 1.0], [2.0, 2.0]).verdict is Verdict.UNDECIDED
    assert unpaired_ratio([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]).verdict is Verdict.FASTER
    assert unpaired_ratio([1.0, 1.1, 0.9], [1.0, 1.05, 0.97]).verdict is Verdict.UNDECIDED
    with pytest.raises(ValueError, match="above 0"):
        unpaired_ratio([0.0], [1.0])
