"""`trl-april report`: write a page about training runs.

Reading a run imports neither torch nor trl. Only writing the page imports jinja2 and matplotlib.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from .. import __version__
from . import check_file, check_plots, command_parser
from .report_run import Run, read_run


DESCRIPTION = """\
Write a page about a training run: throughput, time by phase, requests in flight, lengths, staleness, rewards, and
advice. The page is a single HTML file that needs only a browser.

RUN_DIR is the trainer's output_dir, during or after training, or a checkpoint in it. Several runs are shown next to
each other, on the same scales.
    trl-april report out
    trl-april report out-synchronous out-april --output comparison.html
"""
SHOWN = (
    "over_provisioning max_staleness staleness_policy overlap_generation resume_kv dynamic_sampling quota group_size "
    "processes"
).split()


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("report", "[options] RUN_DIR [RUN_DIR ...]", DESCRIPTION)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="folder of a run")
    text = "page to write (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help=text)
    return parser


def main(argv: list[str]) -> int:
    """Write a report, with the options after `trl-april report`. Returns the exit code."""
    options = build_parser().parse_args(argv)
    check_plots("The report")
    check_file("--output", options.output)
    runs = [read_run(path) for path in options.runs]
    options.output.write_text(render(runs), encoding="utf-8")
    for note in [f"{run.path}: {note}" for run in runs for note in run.notes]:
        print(printable(note))
    print(printable(f"Written to {options.output}. Open it with a browser."))
    return 0


def render(runs: Sequence[Run]) -> str:
    """The HTML page of training runs."""
    import jinja2
    from markupsafe import Markup

    from .report_figures import figures
    from .report_summary import advice, rows, summarize

    names = names_of([run.path for run in runs])
    summaries = [summarize(run) for run in runs]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(resources.files(__package__).joinpath("report.html").read_text("utf-8"))
    options = [", ".join(f"{name}={run.options[name]}" for name in SHOWN if name in run.options) for run in runs]
    return template.render(
        title=f"Training run{'s' if len(runs) > 1 else ''}: {' and '.join(names)}",
        runs=[
            {
                "name": name,
                "options": printable(shown),
                "notes": list(map(printable, run.notes)),
                "advice": advice(summary, run.options),
            }
            for run, name, shown, summary in zip(runs, names, options, summaries, strict=True)
        ],
        rows=rows(summaries),
        # matplotlib escapes the text of its figures.
        figures={name: Markup(svg) for name, svg in figures(runs, names).items()},
        version=__version__,
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the names of runs: their paths below their common folder."""
    whole = [path.resolve() for path in paths]
    common = os.path.commonpath([path.parent for path in whole])
    return [printable(str(path.relative_to(common))) for path in whole]


def printable(text: str) -> str:
    """Replace characters that XML or UTF-8 cannot hold."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
