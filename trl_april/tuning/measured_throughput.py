"""Measured throughput under each factor, which scales the predictions of [`~trl_april.tuning.throughput_model`].

With equal lengths, groups finish together, and a pool of factor 3 generates in every third round only. So a factor is
credited with whole patterns of that many rounds, and not with its first round, which starts from another factor's
requests.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np


ROUNDS_TO_BELIEVE = 10  # rounds after which the ratio of a factor counts as much as that of all factors
KEPT = 0.95  # share of a round's weight that is left one round later: speeds and lengths drift


class MeasuredThroughput:
    """Generated tokens per second of wall-clock, by factor."""

    def __init__(self) -> None:
        self._by_factor: dict[float, _Rounds] = {}
        self._ran_with = 0.0  # factor of the previous round
        self._pattern = _Rounds()  # its incomplete pattern

    def __getitem__(self, factor: float) -> float:
        """Throughput under this factor; 0 if unknown."""
        rounds = self._by_factor.get(factor)
        return rounds.tokens / rounds.seconds if rounds is not None and rounds.seconds else 0.0

    def add(self, factor: float, tokens: float, seconds: float, *, counts: bool = True) -> None:
        """Add a round; one that does not count, after an outage, breaks the pattern."""
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
        """Scale predictions by the ratio of measured to predicted throughput.

        The ratio of a factor with few rounds is drawn to that of all factors; untried factors are interpolated. Above
        the highest tried factor, only a ratio worse than that of all is extrapolated.
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
    """Rounds under one factor, recent ones with more weight."""

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
