"""The simulator: pool and round driver against simulated servers and a simulated clock. `trl-april simulate` runs it.

The invariant owned here: what decides in training decides here too. Only servers, clock and lengths are not real, and
neither torch nor HTTP is imported.
"""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """
    Runs the simulator.

    Args:
        argv (`list[str]`):
            Options, as on the command line behind `trl-april simulate`.

    Returns:
        `int`: Exit code.
    """
    from .command import run  # here, so that the clock alone is light

    return run(argv)
