"""The options of the demo, apart from what it needs to run, so that `--help` and mistakes are answered at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigError
from .settings import STANDARD


DESCRIPTION = """\
Train a small model with and without APRIL on this machine, and compare.

Everything is made here: a model of 0.1 million parameters, its tokenizer, and a task that a rule can check (counting
down to zero, from numbers with a long tail). After a short supervised warm start, the model is trained with GRPO twice
from the same weights, for the same number of optimiser steps, against the same vLLM server: synchronously, and with
twice as many prompt groups in flight as a step needs.
"""


def build_parser() -> argparse.ArgumentParser:
    """The options of the demo."""
    parser = argparse.ArgumentParser(
        prog="trl-april demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("demo_output"), help="where the results go (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help=f"optimiser steps of each training (default: {STANDARD.steps})")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, prompts and training (default: 0)")
    parser.add_argument("--keep-server-log", action="store_true", help="keep the log of the vLLM server")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, only to see that it runs")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the options of a command line, checked."""
    options = build_parser().parse_args(argv)
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}, but there must be at least 1 step.")
    return options
