"""A trainer without a server: everything after the rounds is real."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trl_april.distributed.processes import OneProcess
from trl_april.pool.samples import Group
from trl_april.rollout.record import Round
from trl_april.session import RolloutSession
from trl_april.trainer import APRILGRPOTrainer
from trl_april.training.correction import BatchCorrection
from trl_april.training.run_log import RunLog


class GivenBatches(RolloutSession):
    """A session without rollouts: it logs, and saves nothing."""

    def __init__(self, dppo_threshold: float | None = None) -> None:
        self.scorer, self.run_log, self._processes = None, RunLog(), OneProcess()
        self.correction = BatchCorrection(self._processes, self.run_log.note, dppo_threshold=dppo_threshold)
        self.steps = SimpleNamespace(release_trained=lambda micro_steps: None)

    def save(self, checkpoint: Path) -> None: ...

    def cut(self) -> None: ...

    def close(self) -> None: ...


class ServerlessTrainer(APRILGRPOTrainer):
    """A trainer with APRIL on whose next batch is `groups`, scored under the policy version `version`."""

    groups: Sequence[Group] = ()
    version = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = args[2] if len(args) > 2 else kwargs["args"]
        before = config.vllm_server_base_url
        config.vllm_server_base_url = before or "http://127.0.0.1:9"  # otherwise the trainer would start one
        try:
            super().__init__(*args, **kwargs)
        finally:
            config.vllm_server_base_url = before

    def _april_attach_server(self) -> None:
        self.use_vllm = True
        self._last_loaded_step = self.state.global_step

    def _april_run_round(self) -> Round:
        self._april_session = self._april_session or GivenBatches(self.args.dppo_threshold)
        self._last_loaded_step = self.state.global_step
        return Round(self.version, groups=list(self.groups))
