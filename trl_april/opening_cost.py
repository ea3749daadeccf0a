"""What it costs to open a round: so much for every request, and so much for every token that is to be prefilled.

Which of the two it is matters as soon as another factor is thought of. Under `resume_kv="reuse"` a larger factor has
more requests to resume and no more to prefill; under `"recompute"` it has more of both.

The invariant owned here: neither cost is negative, and together they explain what was measured. Standard library only.
"""

from __future__ import annotations


KEPT_PER_ROUND = 0.9  # the share of a round's weight that is left after the next: a server's speed may change
COLLINEAR = 1e-6  # of 1: rounds that differ by less from being alike do not tell the two costs apart


class OpeningCost:
    """Non-negative least squares over the rounds so far, the recent ones counting most."""

    def __init__(self) -> None:
        # Sums over rounds of products: requests², requests x tokens, tokens², requests x seconds, tokens x seconds.
        self._sums = [0.0] * 5

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
        terms = requests * requests, requests * tokens, tokens * tokens, requests * seconds, tokens * seconds
        self._sums = [KEPT_PER_ROUND * old + new for old, new in zip(self._sums, terms, strict=True)]

    @property
    def seconds_per_request(self) -> float:
        """What a request costs beside its prefill."""
        return self._rates()[0]

    @property
    def seconds_per_token(self) -> float:
        """What a token to prefill costs."""
        return self._rates()[1]

    def _rates(self) -> tuple[float, float]:
        rr, rt, tt, rs, ts = self._sums
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
