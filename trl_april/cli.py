"""The command line: `trl-april serve` and `trl-april demo`.

What a command needs is imported when it runs, so that `--help` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .errors import AprilError


SERVE_DESCRIPTION = """\
Run a vLLM server with every flag that training needs, until Ctrl-C.

All flags but the ones below are passed on to vLLM and win over our defaults:
    trl-april serve Qwen/Qwen3-0.6B --max-model-len 8192 --tensor-parallel-size 2
    python -m vllm.entrypoints.openai.api_server --help=all        lists them
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line. What it does not know belongs to vLLM or to the demo."""
    parser = argparse.ArgumentParser(
        prog="trl-april",
        description="APRIL for TRL: GRPO training that does not wait for its longest completion.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve",
        help="run a vLLM server that APRILGRPOTrainer can train with",
        description=SERVE_DESCRIPTION,
        usage="trl-april serve MODEL [--host HOST] [--port PORT] [any flag of vLLM]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # `--max` must reach vLLM's parser as it is, and never be taken for a flag of ours.
        allow_abbrev=False,
    )
    serve.add_argument("model", metavar="MODEL", help="folder or model id to serve; comes first")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind to (default: %(default)s)")
    serve.add_argument("--port", default=8000, type=int, help="port to bind to (default: %(default)s)")

    # The demo has a parser of its own, and its own help.
    commands.add_parser(
        "demo",
        help="train a small model with and without APRIL on this machine, and compare",
        add_help=False,
        allow_abbrev=False,
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments, without the name of the program. Those of the process if left out.

    Returns:
        `int`: Exit code: that of the server or of the demo, 1 for an error of ours, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if arguments[:1] == ["serve"] and len(arguments) > 2 and arguments[1].startswith("-"):
        # Otherwise the value of a vLLM flag would be taken for the model.
        parser.error(f"serve: the model comes first: trl-april serve MODEL {arguments[1]} ...")
    options, rest = parser.parse_known_args(arguments)
    try:
        if options.command == "demo":
            from .demo import main as run_demo

            return run_demo(rest)

        from .server import serve

        return serve(options.model, host=options.host, port=options.port, vllm_args=rest)
    except AprilError as error:
        print(f"trl-april: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
