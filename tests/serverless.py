"""The trainer without a server: everything from the finished groups on is real."""

from __future__ import annotations

from collections.abc import Sequence

from trl_april.round import Round
from trl_april.trainer import APRILGRPOTrainer
from trl_april.types import Group


class ServerlessTrainer(APRILGRPOTrainer):
    """The trainer with APRIL on. In place of a server and its rounds are finished groups that the test hands over.

    Attributes:
        groups (`Sequence[Group]`):
            The next batch.
        version (`int`):
            Policy version that it is scored under.
    """

    groups: Sequence[Group] = ()
    version = 0

    def _attach_server(self) -> None:
        self.use_vllm = True
        self._last_loaded_step = self.state.global_step

    def _run_round(self) -> Round:
        self._last_loaded_step = self.state.global_step  # as after the sync before a round
        return Round(self.version, groups=list(self.groups))
