"""What it costs to open a round: so much for every request, and so much for every token that is to be prefilled.

Which of the two it is matters as soon as another factor is thought of. Under `resume_kv="reuse"` a larger factor has
more requests to resume and no more to prefill; under `"recompute"` it has more of both.

Now and then something else holds a server up, and one such round would make all requests look dear for many more. So
rounds that are far off count for less (Huber, 1964).

The invariant owned here: neither cost is negative, and together they explain what was measured. Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median


KEPT_PER_ROUND = 0.9  # the share of a round's weight that is left after the next: a server's speed may change
REMEMBERED = 30  # rounds: older ones would weigh less than a twentieth
COLLINEAR = 1e-6  # of 1: rounds that differ by less from being alike do not tell the two costs apart
FAR_OFF = 2.0  # times as far as half of the rounds are
REFINEMENTS = 6


class OpeningCost:
    """Non-negative least squares over the rounds so far, the recent ones counting most, and those far off less."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float, float]] = deque(maxlen=REMEMBERED)  # requests, tokens, seconds
        self._rates = 0.0, 0.0

    def observe(self, requests: float, tokens: float, seconds: float) -> None:
        """Learn from a round.

        Args:
            requests (`float`):
                That it opened with.
            tokens (`float`):
                That the server had to prefill for them.
            seconds (`float`):
                From the opening until all of them were decoded, but for the time of the decode steps until then.
        """
        self._rounds.append((requests, tokens, seconds))
        recent = [KEPT_PER_ROUND**age for age in reversed(range(len(self._rounds)))]
        self._rates = self._fitted(recent)
        for _ in range(REFINEMENTS):
            by_request, by_token = self._rates
            off = [abs(s - by_request * r - by_token * t) for r, t, s in self._rounds]
            far = FAR_OFF * median(off)
            weights = [one if x <= far else one * far / x for one, x in zip(recent, off, strict=True)]
            self._rates = self._fitted(weights)

    @property
    def seconds_per_request(self) -> float:
        """What a request costs beside its prefill."""
        return self._rates[0]

    @property
    def seconds_per_token(self) -> float:
        """What a token to prefill costs."""
        return self._rates[1]

    def _fitted(self, weights: Iterable[float]) -> tuple[float, float]:
        rr = rt = tt = rs = ts = 0.0
        for weight, (requests, tokens, seconds) in zip(weights, self._rounds, strict=True):
            rr += weight * requests * requests
            rt += weight * requests * tokens
            tt += weight * tokens * tokens
            rs += weight * requests * seconds
            ts += weight * tokens * seconds
        determinant = rr * tt - rt * rt
        if determinant > COLLINEAR * rr * tt:
            per_request, per_token = (tt * rs - rt * ts) / determinant, (rr * ts - rt * rs) / determinant
            if per_request >= 0 and per_token >= 0:
                return per_request, per_token
        # Otherwise only one of them costs anything, or they cannot be told apart: the one that explains more, and of
        # two that explain as much the tokens.
        by_requests, by_tokens = (one * one / square if square else 0.0 for one, square in ((rs, rr), (ts, tt)))
        if by_requests > (1 + COLLINEAR) * by_tokens:
            return rs / rr, 0.0
        return 0.0, ts / tt if tt else 0.0
