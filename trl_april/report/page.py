"""The report as one HTML page, which needs nothing but itself.

The invariant owned here: whatever comes from a file is escaped, and the page asks for nothing from anywhere (its
Content-Security-Policy forbids it besides).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib import style

from .. import __version__
from .advice import advice
from .figures import Picture, pictures
from .layout import NARROW, WIDE
from .prediction import predict
from .run import Run
from .summary import summarise
from .svg import SETTINGS, to_svg
from .table import rows


SHOWN = (
    "over_provisioning",
    "max_staleness",
    "staleness_policy",
    "overlap_generation",
    "resume_kv",
    "dynamic_sampling",
)


def render(runs: Sequence[Run]) -> str:
    """
    Writes the page of one run, or of two side by side.

    Args:
        runs (`Sequence[Run]`):
            One or two, each with at least one round.

    Returns:
        `str`: HTML.
    """
    labels = names_of([run.path for run in runs])
    summaries = [summarise(run) for run in runs]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(resources.files(__package__).joinpath("page.html").read_text("utf-8"))
    return template.render(
        title="Training run: " + labels[0] if len(runs) == 1 else f"Training runs: {labels[0]} and {labels[1]}",
        runs=[
            {
                "label": label,
                "options": _options(run),
                "notes": [printable(note) for note in run.notes],
                "advice": advice(summary, predict(run, summary)),
            }
            for run, label, summary in zip(runs, labels, summaries, strict=True)
        ],
        comparison=_comparison(labels, [summary.trained_per_second for summary in summaries]),
        rows=rows(summaries),
        figures=[_both(picture, number) for number, picture in enumerate(pictures(runs, labels))],
        version=__version__,
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """What runs are called: the end of their paths, as much of it as tells them apart."""
    parts = [tuple(printable(part) for part in path.resolve().parts) for path in paths]
    length = 1
    while len({one[-length:] for one in parts}) < len(parts) and length < max(map(len, parts)):
        length += 1
    names = ["/".join(one[-length:]).replace("//", "/") for one in parts]
    return names if len(set(names)) == len(names) else [f"{name} ({number})" for number, name in enumerate(names, 1)]


def printable(text: str) -> str:
    """Without what has no place in XML, or in a file in UTF-8."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _options(run: Run) -> str:
    known = [f"{name}={run.options[name]}" for name in SHOWN if name in run.options]
    sizes = [
        f"{run.options[name]} {what}"
        for name, what in (
            ("quota", "groups per batch"),
            ("group_size", "samples per group"),
            ("processes", "processes"),
        )
        if run.options.get(name) not in (None, 1)
    ]
    return printable(", ".join([*known, *sizes]))


def _comparison(labels: Sequence[str], rates: Sequence[float | None]) -> str:
    """Which of two runs is the faster, in a sentence."""
    known = [(rate, label) for rate, label in zip(rates, labels, strict=True) if rate]
    if len(known) != 2:
        return ""
    (slow, slower), (fast, faster) = sorted(known)
    return f"{faster} trained {fast / slow:.2f} times as many tokens per second of wall-clock as {slower}."


def _both(picture: Picture, number: int) -> dict[str, Any]:
    """A figure for a wide and for a narrow place, of which the page shows the one that fits."""
    drawn: dict[str, Any] = {"title": picture.title, "caption": picture.caption}
    with style.context(SETTINGS, after_reset=True), warnings.catch_warnings():
        # A name may have letters that are not in the font; the browser has others.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        for name, shape in (("wide", WIDE), ("narrow", NARROW)):
            figure = picture.draw(shape)
            # What matplotlib writes is escaped by it.
            drawn[name] = Markup(to_svg(figure, name=f"{name}{number}", kind=name, label=picture.title))
    return drawn
