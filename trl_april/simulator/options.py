"""The options of `trl-april simulate`, and the scenario that they describe."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ..errors import ConfigError
from .grid import FACTORS, MODES
from .lengths import Lengths, Lognormal, read_histogram, read_log
from .result import Mode
from .scenario import Scenario
from .step_time import EXAMPLE, StepTime, parse_step_time, read_max_sequences, read_step_time


DESCRIPTION = """\
Simulate rollouts before spending GPU hours on them: does over-provisioning pay for your lengths, and how much?

The pool and the round driver are those of training; only the server and the clock are simulated. Prints throughput,
bubble, staleness and carried share for a grid of factors and modes, and recommends settings.
    trl-april simulate --median 2000 --sigma 1.0 --max-length 16384
    trl-april doctor --base-url http://127.0.0.1:8000 --json server.json
    trl-april simulate --doctor server.json --log out/checkpoint-20/trainer_state.json --quota 64 --group-size 8
    trl-april simulate --histogram lengths.json --train-seconds 30 --sync-seconds 2 --max-staleness 3 --plot curve.png
    trl-april simulate --factors 1.5 2 3 4 auto --modes both keep --train-seconds 2

Modes: synchronous (always, the reference); abort and resume; reuse (the same, keys and values stay on the server);
overlap (requests go on while the trainer trains); both; keep (the same, and requests live through the weight sync);
discard (what is not finished is thrown away: for comparison); uninterrupted (never cut, training takes no time: the
limit).
"""

# Fields of Scenario by the group of options that they are shown in: name, type, help.
WORKLOAD = (
    ("quota", int, "groups of a batch"),
    ("group_size", int, "samples of a group"),
    ("prompt_tokens", int, "tokens of a prompt"),
    ("group_correlation", float, "correlation of the lengths in a group, from 0 to 1"),
    ("seed", int, "seed of the lengths"),
)
SERVERS = (
    ("servers", int, "inference servers: copies of the model"),
    ("max_batched_tokens", int, "tokens of one step of a server"),
    ("kv_block", int, "tokens of a block of the prefix cache"),
    ("request_stall_seconds", float, "what a request takes from the server's steps beside its prefill"),
)
TRAINER = (
    ("processes", int, "trainer processes, each of which sends its share of the requests"),
    ("request_seconds", float, "what a process takes to send one request"),
    ("abort_seconds", float, "from the abort until the last stream has ended; generation goes on for half of it"),
    ("train_seconds", float, "training on a batch"),
    ("updates_per_batch", int, "optimiser steps of it, each of which makes what waits a policy version older"),
    ("sync_seconds", float, "weight sync after it"),
)
# Rounds before those that are measured, and those. Of large batches fewer will do, and more would take minutes.
ROUNDS, LARGE_ROUNDS = (4, 8), (3, 2)
LARGE = 16384  # samples of a batch


def build_parser() -> argparse.ArgumentParser:
    """The options of the simulator."""
    parser = argparse.ArgumentParser(
        prog="trl-april simulate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    grid = parser.add_argument_group("what is compared")
    grid.add_argument(
        "--factors", nargs="+", default=list(FACTORS), metavar="F",
        help="over-provisioning factors, or `auto` to have it chosen as in training, with 10 rounds to do so",
    )  # fmt: skip
    grid.add_argument(
        "--modes",
        nargs="+",
        choices=[mode.value for mode in Mode],
        default=[mode.value for mode in MODES],
        metavar="MODE",
        help=f"modes beside the synchronous one (default: {' '.join(MODES)})",
    )
    grid.add_argument(
        "--max-staleness",
        type=_bound,
        default=5,
        metavar="N",
        help="bound in policy versions that the pool keeps, or `none` (default: 5)",
    )
    grid.add_argument(
        "--max-staleness-mean", type=_mean, metavar="X", help="bound on the mean staleness of what is recommended"
    )
    grid.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help=f"rounds that are not measured, but for the synchronous mode (default: {ROUNDS[0]}, or {LARGE_ROUNDS[0]} "
        f"for batches of more than {LARGE} samples)",
    )
    grid.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"rounds that are measured (default: {ROUNDS[1]}, or {LARGE_ROUNDS[1]})",
    )

    lengths = parser.add_argument_group("how long completions are (one of: lognormal, --histogram, --log)")
    lengths.add_argument("--median", type=float, default=150.0, metavar="N", help="median length (default: 150)")
    lengths.add_argument(
        "--sigma", type=float, default=1.0, metavar="X", help="spread of the natural logarithm (default: 1.0)"
    )
    lengths.add_argument("--min-length", type=int, default=8, metavar="N", help="shortest (default: 8)")
    lengths.add_argument("--max-length", type=int, default=3500, metavar="N", help="longest (default: 3500)")
    lengths.add_argument("--histogram", type=Path, metavar="FILE", help='JSON {"length": count} or lines length,count')
    lengths.add_argument("--log", type=Path, metavar="FILE", help="trainer_state.json of a training run with APRIL")
    _add(parser.add_argument_group("the workload"), WORKLOAD)

    servers = parser.add_argument_group("the servers")
    servers.add_argument("--doctor", type=Path, metavar="FILE", help="step times that `trl-april doctor` measured")
    servers.add_argument(
        "--steps",
        metavar="N:SECONDS,...",
        help=f"step times by sequences at once (default: those of a small model on two CPU cores, {EXAMPLE})",
    )
    servers.add_argument(
        "--prefill-seconds", type=float, metavar="S", help="seconds per token of prefill (default: doctor's, or 2e-5)"
    )
    servers.add_argument(
        "--context-seconds", type=float, metavar="S",
        help="seconds per step and token of context, summed over all sequences (default: doctor's, or 0)",
    )  # fmt: skip
    default = Scenario.__dataclass_fields__["max_sequences"].default
    servers.add_argument(
        "--max-sequences", type=int, metavar="N",
        help=f"sequences that a server decodes at once (default: doctor's, or {default})",
    )  # fmt: skip
    _add(servers, SERVERS)
    _add(parser.add_argument_group("the trainer"), TRAINER)

    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    output.add_argument("--plot", type=Path, metavar="FILE", help="also draw the curves there (needs matplotlib)")
    return parser


def scenario_of(options: argparse.Namespace) -> Scenario:
    """The scenario that the options describe.

    Raises:
        ConfigError: If they contradict each other, or one is out of range.
    """
    names = [name for name, _, _ in (*WORKLOAD, *SERVERS, *TRAINER)]
    warmup, rounds = LARGE_ROUNDS if options.quota * options.group_size > LARGE else ROUNDS
    return Scenario(
        step_time=_step_time(options),
        lengths=_lengths(options),
        max_staleness=options.max_staleness,
        warmup=warmup if options.warmup is None else options.warmup,
        rounds=rounds if options.rounds is None else options.rounds,
        **_max_sequences(options),
        **{name: getattr(options, name) for name in names},
    )


def _add(group: argparse._ArgumentGroup, settings: tuple[tuple[str, type, str], ...]) -> None:
    for name, kind, text in settings:
        default = Scenario.__dataclass_fields__[name].default
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=default,
            metavar="N" if kind is int else "X",
            help=f"{text} (default: {default})",
        )


def _bound(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0, nor `none`")
    return int(text)


def _mean(text: str) -> float:
    try:
        mean = float(text)
    except ValueError:
        mean = math.nan
    if not mean >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return mean


def _lengths(options: argparse.Namespace) -> Lengths:
    if options.histogram is not None and options.log is not None:
        raise ConfigError(
            f"Lengths are given twice, by --histogram {options.histogram} and by --log {options.log}; leave one out."
        )
    if options.histogram is not None:
        return read_histogram(options.histogram)
    if options.log is not None:
        return read_log(options.log)
    return Lognormal(options.median, options.sigma, options.min_length, options.max_length)


def _max_sequences(options: argparse.Namespace) -> dict[str, int]:
    found = options.max_sequences
    if found is None and options.doctor is not None:
        found = read_max_sequences(options.doctor)
    return {} if found is None else {"max_sequences": found}


def _step_time(options: argparse.Namespace) -> StepTime:
    if options.doctor is not None and options.steps is not None:
        raise ConfigError(
            f"Step times are given twice, by --doctor {options.doctor} and by --steps {options.steps}; leave one out."
        )
    if options.doctor is not None:
        return read_step_time(options.doctor, options.prefill_seconds, options.context_seconds)
    seconds = 2e-5 if options.prefill_seconds is None else options.prefill_seconds
    return parse_step_time(options.steps or EXAMPLE, seconds, options.context_seconds or 0.0)
