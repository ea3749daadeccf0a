"""Statistics of a comparison over seeds: intervals, curves, crossing times, effective sample sizes.

Intervals are Student's, because normal ones are too narrow for few seeds. Curves are piecewise linear.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence


# Student's t for 1 to 30 degrees of freedom. With more, the value for 30 is a little too wide, never too narrow.
# fmt: off
T_ONE_SIDED_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)
T_TWO_SIDED_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on


def _half_width(values: Sequence[float], quantiles: Sequence[float]) -> float:
    """Half the width of an interval around the mean; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    quantile = quantiles[min(len(values) - 1, len(quantiles)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its two-sided 95 % interval."""
    return statistics.fmean(values), _half_width(values, T_TWO_SIDED_95)


def lower_bound(values: Sequence[float]) -> float:
    """Lower end of the one-sided 95 % interval of the mean."""
    return statistics.fmean(values) - _half_width(values, T_ONE_SIDED_95)


def at(times: Sequence[float], values: Sequence[float], time: float) -> float:
    """The curve at a time; constant before its first and after its last point."""
    after = bisect_right(times, time)
    if after == 0:
        return values[0]
    if after == len(times):
        return values[-1]
    share = (time - times[after - 1]) / (times[after] - times[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def smoothed(values: Sequence[float], over: int) -> list[float]:
    """Trailing mean of up to `over` values at every point."""
    return [statistics.fmean(values[max(0, end - over) : end]) for end in range(1, len(values) + 1)]


def first_reached(times: Sequence[float], values: Sequence[float], target: float) -> float:
    """Time at which the curve first reaches `target`; infinity if it never does."""
    if values[0] >= target:
        return times[0]
    for i in range(1, len(values)):
        if values[i] >= target:
            share = (target - values[i - 1]) / (values[i] - values[i - 1])
            return times[i - 1] + share * (times[i] - times[i - 1])
    return math.inf


def effective_share(count: float, total: float, squares: float) -> float:
    """Effective sample size of `count` weights as a share of their number, from their sum and their sum of squares.

    `(sum w)^2 / (n sum w^2)` (Kish 1965): 1 for equal weights.
    """
    return total * total / (count * squares) if count and squares else math.nan
