"""The table of a report: the figures of a run in words and sensible units, and what a second run changes.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .summary import Summary


UNKNOWN = "–"


class Row(NamedTuple):
    """One line of the table.

    Args:
        name (`str`):
            What is shown.
        values (`list[str]`):
            One for each run.
        change (`str`):
            From the first run to the second; empty where there is none.
    """

    name: str
    values: list[str]
    change: str


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """The lines of one or two runs, but for those that none of them knows."""
    lines: list[tuple[str, Callable[[Summary], float | None], Callable[[float], str], Callable[..., str]]] = [
        ("trained tokens per second", lambda s: s.trained_per_second, rate, _ratio),
        ("generated tokens per second", lambda s: s.generated_per_second, rate, _ratio),
        ("wall-clock", lambda s: s.seconds, duration, _ratio),
        ("rounds", lambda s: s.rounds if s.has_log else None, count, _none),
        ("entries of the trainer's log", lambda s: None if s.has_log else s.rounds, count, _none),
        ("optimiser steps", lambda s: s.steps, count, _none),
        ("trained tokens", lambda s: s.trained_tokens, count, _ratio),
        ("reward, first and last fifth", lambda s: s.reward_last, lambda value: f"{value:.3g}", _plus),
        ("over_provisioning", lambda s: s.over_provisioning, lambda value: f"{value:g}", _none),
        ("requests in flight, mean", lambda s: s.in_flight_mean, lambda value: f"{value:.3g}", _ratio),
        ("engine without requests", lambda s: s.engine_idle, percent, _points),
        ("rounds less than half full", lambda s: s.half_empty, percent, _points),
        ("trained tokens carried over", lambda s: s.carried, percent, _points),
        ("staleness, mean", lambda s: s.staleness_mean, lambda value: f"{value:.2f} versions", _none),
        ("staleness, oldest", lambda s: s.staleness_max, lambda value: f"{value:.0f} versions", _none),
        ("length, median", lambda s: s.lengths.get(0.5), tokens, _ratio),
        ("length, 99th percentile", lambda s: s.lengths.get(0.99), tokens, _ratio),
        ("weight sync", lambda s: s.sync_seconds, duration, _ratio),
        ("server away", lambda s: s.outage_seconds or None, duration, _none),
        ("generated tokens rejected", lambda s: s.rejected or None, percent, _points),
    ]
    found = []
    for name, value_of, written, compared in lines:
        values = [value_of(summary) for summary in summaries]
        if all(value is None for value in values):
            continue
        shown = [UNKNOWN if value is None else written(value) for value in values]
        if name.startswith("reward"):
            shown = [
                UNKNOWN if s.reward_first is None else f"{s.reward_first:.3g} to {text}"
                for s, text in zip(summaries, shown, strict=True)
            ]
        both = len(values) == 2 and None not in values
        found.append(Row(name, shown, compared(*values) if both else ""))
    return found


def rate(value: float) -> str:
    """Tokens per second."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def count(value: float) -> str:
    return f"{value / 1e6:,.3g} million" if value >= 1e6 else f"{value:,.0f}"


def tokens(value: float) -> str:
    return f"{value:,.0f} tokens"


def percent(value: float) -> str:
    return f"{value:.0%}"


def duration(seconds: float) -> str:
    """A stretch of time, in the unit that it is read in."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _ratio(first: float, second: float) -> str:
    if not first or not second:
        return ""
    ratio = second / first
    return f"× {ratio:.2f}" if ratio < 100 else f"× {ratio:,.0f}"


def _plus(first: float, second: float) -> str:
    return f"{second - first:+.3f}"


def _points(first: float, second: float) -> str:
    return f"{100 * (second - first):+.0f} points"


def _none(first: float, second: float) -> str:
    return ""
