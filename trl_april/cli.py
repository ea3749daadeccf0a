"""The command line: `trl-april serve`, `doctor`, `simulate`, `report` and `demo`.

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


DOCTOR_DESCRIPTION = """\
Check whether training can work, one line for each thing: ok, warn, FAIL or skip, what was found, and the remedy.

Without --base-url this is about the environment only. With it, also about a server, which may be in use: it is then
not measured. Its API key is taken from VLLM_API_KEY. The exit code is 1 if something FAILs, and 0 otherwise.
    trl-april doctor
    trl-april doctor --base-url http://127.0.0.1:8000 --json server.json
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. What it does not know belongs to vLLM, or to a command with its own."""
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

    _add_doctor(commands)

    # These have parsers of their own, and their own help.
    commands.add_parser(
        "simulate",
        help="simulate rollouts, to learn whether APRIL pays for your lengths and with which settings",
        add_help=False,
        allow_abbrev=False,
    )
    commands.add_parser(
        "report",
        help="write a page about a training run, or two runs side by side, and what to change",
        add_help=False,
        allow_abbrev=False,
    )
    commands.add_parser(
        "demo",
        help="train a small model with and without APRIL on this machine, and compare",
        add_help=False,
        allow_abbrev=False,
    )
    return parser


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this environment and a vLLM server, and measure the server",
        description=DOCTOR_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    doctor.add_argument("--base-url", metavar="URL", help="server to check, such as http://127.0.0.1:8000")
    doctor.add_argument("--model", metavar="DIR", help="model that is to be trained (default: the one that is served)")
    doctor.add_argument("--json", dest="json_file", metavar="FILE", help="also write everything that was found there")
    doctor.add_argument(
        "--max-completion-length",
        type=int,
        default=512,
        metavar="N",
        help="tokens of the longest completion, for which the context needs room (default: %(default)s)",
    )
    doctor.add_argument(
        "--weight-sync-dir", metavar="DIR", help="where weights travel through files (default: shared memory)"
    )
    doctor.add_argument(
        "--max-sequences",
        type=int,
        default=64,
        metavar="N",
        help="sequences at once up to which decoding is measured (default: %(default)s)",
    )
    doctor.add_argument(
        "--decode-seconds",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="how long each of these measurements should take (default: %(default)s)",
    )
    doctor.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="silence after which an answer of the server is given up (default: %(default)s)",
    )
    doctor.add_argument(
        "--sync",
        action="store_true",
        help="send the server the weights of its model even if it holds those of a training run, or is in use: they "
        "are overwritten",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments, without the name of the program. Those of the process if left out.

    Returns:
        `int`: Exit code: that of the command, 1 for an error of ours, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if arguments[:1] == ["serve"] and len(arguments) > 2 and arguments[1].startswith("-"):
        # Otherwise the value of a vLLM flag would be taken for the model.
        parser.error(f"serve: the model comes first: trl-april serve MODEL {arguments[1]} ...")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "doctor" and rest:
        parser.error(f"doctor: unknown arguments: {' '.join(rest)}")
    try:
        if options.command == "doctor":
            from .doctor import DoctorOptions
            from .doctor import run as run_doctor

            given = vars(options)
            return run_doctor(DoctorOptions(**{name: value for name, value in given.items() if name != "command"}))

        if options.command == "simulate":
            from .simulator import main as run_simulator

            return run_simulator(rest)

        if options.command == "report":
            from .report import main as run_report

            return run_report(rest)

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
