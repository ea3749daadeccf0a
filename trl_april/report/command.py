"""`trl-april report`: reads one run or two, and writes the page."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from ..errors import ConfigError
from .run import read_run


DESCRIPTION = """\
Write a page about a training run: throughput, where the time went, requests in flight, lengths, staleness, rewards,
and what to change. One HTML file that needs nothing but a browser.

RUN_DIR is the trainer's output_dir, while it trains or afterwards, or one of its checkpoints. A second one is shown
beside the first, on the same scales.
    trl-april report out
    trl-april report out-synchronous out-april --output comparison.html
"""


def build_parser() -> argparse.ArgumentParser:
    """The options of the report."""
    parser = argparse.ArgumentParser(
        prog="trl-april report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("other", metavar="OTHER_RUN_DIR", nargs="?", help="folder of another run, to compare with")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="page to write (default: %(default)s)"
    )
    return parser


def run(argv: list[str]) -> int:
    """
    Writes the report that the options ask for.

    Args:
        argv (`list[str]`):
            Options.

    Returns:
        `int`: Exit code.
    """
    options = build_parser().parse_args(argv)
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The report needs {' and '.join(missing)}, which is not installed. Install it with "
            "`pip install 'trl-april[plots]'`."
        )
    output = options.output.absolute()
    if not output.parent.is_dir():
        raise ConfigError(f"{options.output} cannot be written: there is no folder {output.parent}. Make it first.")
    runs = [read_run(path) for path in (options.run, options.other) if path is not None]
    from .page import printable, render  # here, because it needs matplotlib

    page = render(runs)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.output} cannot be written: {error}. Give another --output.") from error
    for one in runs:
        for note in one.notes:
            print(printable(f"{one.path}: {note}"))
    print(printable(f"Written to {options.output}. Open it with a browser."))
    return 0
