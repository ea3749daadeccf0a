"""What rounds came to under each over-provisioning factor, and predictions on that scale.

What [`~trl_april.auto.throughput_model`] does not know of may slow all factors down alike. And what it believes of the
server at more or fewer requests in flight may be wrong: that shows under a factor which has been tried.

Where lengths are even, groups end together, and a pool of factor 3 generates in every third round only. So rounds
count by as many as such a pattern has.

The invariant owned here: a factor is credited only with rounds that follow another one under it, and only with whole
patterns.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np


# Rounds that give what was measured under a factor half of its weight: speeds drift, and so do lengths.
ROUNDS_TO_BELIEVE = 10
KEPT = 0.95  # the share of its weight that is left to a round after another one


class MeasuredThroughput:
    """Generated tokens per second of all time (rounds, training and weight syncs), by factor."""

    def __init__(self) -> None:
        self._by_factor: dict[float, _Rounds] = {}
        self._ran_with = 0.0  # the factor of the round before
        self._pattern = _Rounds()  # under it, until it is whole

    def __getitem__(self, factor: float) -> float:
        """What rounds under this factor came to; 0 where there were none."""
        rounds = self._by_factor.get(factor)
        return rounds.tokens / rounds.seconds if rounds is not None and rounds.seconds else 0.0

    def add(self, factor: float, tokens: float, seconds: float, *, counts: bool = True) -> None:
        """Note what a round came to. The first under a factor does not count, since it still has the requests in
        flight of the one before.
        """
        for rounds in self._by_factor.values():
            rounds.fade()
        if not counts or factor != self._ran_with:
            self._pattern = _Rounds()
        else:
            self._pattern.add(tokens, seconds, 1.0)
            if self._pattern.number >= math.ceil(factor):
                self._by_factor.setdefault(factor, _Rounds()).add(*astuple(self._pattern))
                self._pattern = _Rounds()
        self._ran_with = factor

    def scale(self, predicted: dict[float, float]) -> dict[float, float]:
        """Predictions, by factor, on the scale of what was measured.

        Every factor that has been tried has its own ratio of what was measured to what is predicted, the nearer to
        that of all the fewer its rounds; others are between the nearest two. Above all that were tried, only bad news
        counts: that a factor came to more than was predicted says nothing of higher ones.
        """
        tried = [factor for factor in predicted if self[factor] and 0 < predicted[factor] < math.inf]
        if not tried:
            return predicted
        rounds = np.array([self._by_factor[factor].number for factor in tried])
        ratios = np.log([self[factor] / predicted[factor] for factor in tried])
        of_all = rounds @ ratios / rounds.sum()
        ratios = of_all + (ratios - of_all) * rounds / (rounds + ROUNDS_TO_BELIEVE)
        beyond = min(ratios[-1], of_all)
        scales = np.exp(np.interp(np.log(list(predicted)), np.log(tried), ratios, right=beyond))
        return {factor: float(scale) * predicted[factor] for factor, scale in zip(predicted, scales, strict=True)}


@dataclass(slots=True)
class _Rounds:
    """Those under one factor; later ones count for more."""

    tokens: float = 0.0
    seconds: float = 0.0
    number: float = 0.0

    def add(self, tokens: float, seconds: float, number: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.number += number

    def fade(self) -> None:
        self.tokens *= KEPT
        self.seconds *= KEPT
        self.number *= KEPT
