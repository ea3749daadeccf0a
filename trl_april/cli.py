"""The command line, `trl-april COMMAND`. A command's modules are imported only when it runs."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .errors import AprilError


# Each command is a module of `trl_april.commands` whose `main(argv)` parses the options and returns the exit code.
COMMANDS = {
    "grpo": "train a model, with the arguments of TRL's own `trl grpo`",
    "serve": "run a vLLM server that APRILGRPOTrainer can train with",
    "doctor": "check this environment and a vLLM server",
    "simulate": "simulate rollouts, to learn whether APRIL pays for your lengths and with which settings",
    "report": "write a page about a training run, or two runs side by side, and what to change",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's name and `--version`."""
    parser = argparse.ArgumentParser(
        prog="trl-april",
        description="APRIL for TRL: GRPO training that does not wait for its longest completion.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code, 1 after an [`AprilError`], or 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = build_parser().parse_args(arguments[:1]).command, arguments[1:]
    try:
        return import_module(f".commands.{name}", __package__).main(rest)
    except AprilError as error:
        print(f"trl-april: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
