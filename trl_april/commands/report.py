"""`trl-april report`: write a page about one training run, or two side by side.

Reading a run imports neither torch nor trl; jinja2 and matplotlib are imported only to write the page.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from . import check_file, check_plots
from .report_run import PHASES, Run, RunRound, Step, read_run


if TYPE_CHECKING:
    from .report_summary import Summary


__all__ = ["Run", "RunRound", "Step", "main", "read_run", "render"]

DESCRIPTION = """\
Write a page about a training run: throughput, time by phase, requests in flight, lengths, staleness, rewards, and
advice. The page is one HTML file that needs only a browser.

RUN_DIR is the trainer's output_dir, during or after training, or one of its checkpoints. A second run is shown next to
the first, on the same scales.
    trl-april report out
    trl-april report out-synchronous out-april --output comparison.html
"""
SHOWN = (
    "over_provisioning max_staleness staleness_policy overlap_generation resume_kv dynamic_sampling quota group_size "
    "processes"
).split()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-april report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("other", metavar="OTHER_RUN_DIR", nargs="?", help="folder of another run, for comparison")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="page to write (default: %(default)s)"
    )
    return parser


def main(argv: list[str]) -> int:
    """Write a report, with the options after `trl-april report`. Returns the exit code."""
    options = build_parser().parse_args(argv)
    check_plots("The report")
    check_file("--output", options.output)
    runs = [read_run(path) for path in (options.run, options.other) if path is not None]
    options.output.write_text(render(runs), encoding="utf-8")
    for run in runs:
        for note in run.notes:
            print(printable(f"{run.path}: {note}"))
    print(printable(f"Written to {options.output}. Open it with a browser."))
    return 0


def render(runs: Sequence[Run]) -> str:
    """The HTML page of one run, or of two side by side."""
    import jinja2
    from markupsafe import Markup

    from .report_figures import figures
    from .report_summary import advice, summarize

    names = names_of([run.path for run in runs])
    summaries = [summarize(run) for run in runs]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(resources.files(__package__).joinpath("report.html").read_text("utf-8"))
    return template.render(
        title=f"Training run{'s' if len(runs) > 1 else ''}: {' and '.join(names)}",
        runs=[
            {
                "name": name,
                "options": printable(
                    ", ".join(f"{name}={run.options[name]}" for name in SHOWN if name in run.options)
                ),
                "notes": [printable(note) for note in run.notes],
                "advice": advice(summary),
            }
            for run, name, summary in zip(runs, names, summaries, strict=True)
        ],
        rows=rows(summaries),
        # matplotlib escapes the text of its figures.
        figures={name: Markup(svg) for name, svg in figures(runs, names).items()},
        version=__version__,
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names of runs: their paths below the folder that they have in common."""
    whole = [path.resolve() for path in paths]
    common = os.path.commonpath([path.parent for path in whole])
    return [printable(str(path.relative_to(common))) for path in whole]


def printable(text: str) -> str:
    """Replace characters that XML or UTF-8 cannot hold."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def rows(summaries: Sequence[Summary]) -> list[tuple[str, list[str], str]]:
    """The table of one or two runs: what is known, a value per run, and the change from the first to the second."""
    lines: list[tuple[str, Callable[[Summary], float | None], Callable[[float], str], str]] = [
        ("trained tokens per second", lambda s: s.trained_per_second, number, "ratio"),
        ("generated tokens per second", lambda s: s.generated_per_second, number, "ratio"),
        ("wall-clock", lambda s: s.seconds, duration, "ratio"),
        ("rounds, or entries of the trainer's log", lambda s: s.rounds, number, ""),
        ("optimizer steps", lambda s: s.steps, number, ""),
        ("trained tokens", lambda s: s.trained_tokens, number, "ratio"),
        ("reward, first fifth of the rounds", lambda s: s.reward_first, "{:.3g}".format, ""),
        ("reward, last fifth of the rounds", lambda s: s.reward_last, "{:.3g}".format, ""),
        ("over_provisioning", lambda s: s.over_provisioning, "{:g}".format, ""),
        ("groups withheld, mean", lambda s: s.withheld or None, "{:.3g}".format, ""),
        ("requests in flight, mean", lambda s: s.in_flight_mean, "{:.3g}".format, "ratio"),
        ("engine idle", lambda s: s.engine_idle, "{:.0%}".format, "points"),
        *(
            (f"time in {phase}", lambda s, phase=phase: s.shares.get(phase), "{:.0%}".format, "points")
            for phase in PHASES
        ),
        ("rounds less than half full", lambda s: s.half_empty, "{:.0%}".format, "points"),
        ("trained tokens carried over", lambda s: s.carried, "{:.0%}".format, "points"),
        ("staleness, mean", lambda s: s.staleness_mean, "{:.2f} versions".format, ""),
        ("staleness, maximum", lambda s: s.staleness_max, "{:.0f} versions".format, ""),
        (
            "effective sample size, second lowest",
            lambda s: min(s.sample_sizes.values(), default=None),
            "{:.2f}".format,
            "",
        ),
        ("length, median", lambda s: s.lengths.get(0.5), "{:,.0f} tokens".format, "ratio"),
        ("length, 99th percentile", lambda s: s.lengths.get(0.99), "{:,.0f} tokens".format, "ratio"),
        ("weight sync", lambda s: s.sync_seconds, duration, "ratio"),
        ("tools between two turns, longest", lambda s: s.tool_seconds, duration, "ratio"),
        ("server unavailable", lambda s: s.outage_seconds or None, duration, ""),
        ("generated tokens rejected", lambda s: s.rejected or None, "{:.0%}".format, "points"),
    ]
    found = []
    for name, value_of, written, compared in lines:
        values = [value_of(summary) for summary in summaries]
        known = [value for value in values if value is not None]
        if known:
            shown = ["–" if value is None else written(value) for value in values]
            found.append((name, shown, _change(compared, *known) if len(known) == 2 else ""))
    return found


def number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.3g} million"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _change(compared: str, first: float, second: float) -> str:
    if compared == "points":
        return f"{100 * (second - first):+.0f} points"
    if compared == "ratio" and first and second:
        return f"× {second / first:.2f}" if second < 100 * first else f"× {second / first:,.0f}"
    return ""
