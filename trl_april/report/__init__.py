"""What a run has done, read back from its folder, as data and as pictures.

The invariant owned here: a folder is only read, whoever wrote it; what is missing or damaged in it is said, and never
guessed. Neither torch nor trl is imported.
"""

from __future__ import annotations

from .run import Run, RunRound, Step, read_run


__all__ = ["Run", "RunRound", "Step", "read_run"]
