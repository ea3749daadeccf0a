"""What another over-provisioning factor would have come to, by the model that `over_provisioning="auto"` chooses with.

The log has lengths by completion and not by group, so completions are drawn into groups as if those of a prompt were
no more alike than others. Where they are alike, groups differ more, and the gain is larger than predicted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..auto.factor_chooser import factors
from ..auto.server_speed import StepTimeCurve
from ..auto.throughput_model import Workload, predicted_throughput
from ..run_log import BINS_PER_DOUBLING
from .run import Run
from .summary import Summary, phases, sum_counts


GROUPS, SAMPLES = 256, 16_384  # that are looked at, at most
# Of factors that come that close to the best, the lowest is named: every step up makes the batch older.
AS_GOOD_AS_BEST = 0.1


class Prediction(NamedTuple):
    """The best factor, and the trained tokens per second of wall-clock that it promises, the present factor's being
    1."""

    factor: float
    gain: float


def predict(run: Run, summary: Summary) -> Prediction | None:
    """The best factor within the staleness bound, or `None` where too little is known: without lengths, or without the
    server's speed."""
    last = next((one for one in reversed(run.rounds) if one.step_times), None)
    if last is None:
        return None
    lengths, curve = _groups(run), _curve(last.step_times)
    present, share = summary.over_provisioning, sum(summary.shares.get(name, 0.0) for name in ("generation", "abort"))
    quota, bound = run.options.get("quota"), run.options.get("max_staleness")
    per_round = run.options.get("versions_per_round", 1)
    if not lengths or curve is None or present is None or not share or type(quota) is not int or quota < 1:
        return None
    if bound is not None and (type(bound) is not int or bound < 0):
        return None
    places = run.options.get("max_sequences")
    is_guarantee = run.options.get("staleness_policy", "wait") == "wait"
    overlaps, of_rounds = run.options.get("overlap_generation") is True, phases(run)
    between = [sum(one[phase] for one in of_rounds) / len(of_rounds) for phase in ("scoring", "training", "other")]
    sync_seconds = sum(one["sync"] for one in of_rounds) / len(of_rounds)
    workload = Workload(
        quota,
        lengths,
        curve,
        places if type(places) is int and places > 0 else math.inf,
        seconds_per_prefilled_token=max(0.0, last.seconds_per_prefilled_token),
        seconds_per_request=max(0.0, last.seconds_per_request),
        prompt_tokens=max(0.0, last.prompt_tokens),
        overhead_seconds=summary.abort_seconds or 0.0,
        # Only as a guarantee does the bound hold rounds open.
        rounds_to_wait=bound // per_round if bound is not None and is_guarantee else None,
        reuses_kv=run.options.get("resume_kv") in ("reuse", "keep"),
        keeps=run.options.get("resume_kv") == "keep",
        overlaps=overlaps,
        train_seconds=sum(between) if overlaps else 0.0,
        sync_seconds=sync_seconds if overlaps else 0.0,
    )
    candidates = factors(quota, bound, per_round)
    rates = {factor: predicted_throughput(workload, factor) for factor in sorted({*candidates, present})}
    # Without overlap only the rounds get faster; what the trainer does takes as long as before. With it, the rates are
    # those of all of the time.
    fixed = 0.0 if overlaps else 1 - share
    gains = {factor: 1 / (fixed + (1 - fixed) * rates[present] / rates[factor]) for factor in candidates}
    enough = (1 - AS_GOOD_AS_BEST) * max(gains.values())
    best = next(factor for factor in candidates if gains[factor] >= enough)
    return Prediction(best, gains[best])


def _groups(run: Run) -> list[list[int]]:
    size = run.options.get("group_size")
    if type(size) is not int or size < 1:
        return []
    bins = sum_counts(one.trained_lengths for one in run.rounds)
    total, wanted = sum(bins.values()), size * min(GROUPS, SAMPLES // size, sum(bins.values()) // size)
    # As many as are wanted, evenly spread over all.
    lengths: list[int] = []
    counted = 0
    for number, count in bins.items():
        counted += count
        due = round(counted * wanted / total) - len(lengths)
        lengths += [max(1, round(2 ** (number / BINS_PER_DOUBLING)))] * due
    random.Random(0).shuffle(lengths)
    return [lengths[start : start + size] for start in range(0, wanted, size)]


def _curve(points: Sequence[tuple[float, float]]) -> StepTimeCurve | None:
    # They come from a file.
    rises = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
    if not rises or points[0][0] <= 0 or points[0][1] <= 0:
        return None
    return StepTimeCurve.through(points)
