"""What a run has done, read back from its folder: as data, as pictures, and as a page by `trl-april report`.

The invariant owned here: a folder is only read, whoever wrote it; what is missing or damaged in it is said, and never
guessed. Neither torch nor trl is imported.
"""

from __future__ import annotations

from .run import Run, RunRound, Step, read_run


__all__ = ["Run", "RunRound", "Step", "main", "read_run"]


def main(argv: list[str]) -> int:
    """
    Writes a report.

    Args:
        argv (`list[str]`):
            Options, as on the command line behind `trl-april report`.

    Returns:
        `int`: Exit code.
    """
    from .command import run  # here, so that reading a run alone is light

    return run(argv)
