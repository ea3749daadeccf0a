"""The demo: GRPO with and without APRIL on this machine, side by side. `trl-april demo` runs it.

Nothing is downloaded, and all figures that it prints are measured.
"""

import os

from ..output_paths import make_folder
from .options import parse


def main(argv: list[str]) -> int:
    """
    Runs the demo.

    Args:
        argv (`list[str]`):
            Options, as on the command line behind `trl-april demo`.

    Returns:
        `int`: Exit code.
    """
    options = parse(argv)
    make_folder("--output-dir", options.output_dir)
    # Before the first import of a Hugging Face library, which reads it there and then.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from .run import run

    return run(options)
