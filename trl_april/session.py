"""The rollouts of one training run: rows, pool, engine, driver, and the event loop that rounds run in.

The invariant owned here: as many rows are handed out as training needs, whatever is rejected on the way, and nothing
of a run outlives [`RolloutSession.close`] but its pool.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from trl import GRPOConfig

from .admission import Admission, GroupElsewhere, NewGroup
from .background import BackgroundLoop
from .config import AprilOptions
from .dynamic_sampling import DynamicSampling
from .pool import Pool
from .processes import Processes
from .progress import RoundProgress
from .quota import SharedQuota
from .rollout import RolloutDriver
from .round import Round
from .row_order import make_source, optimiser_steps_per_round
from .sampling import SamplingOptions, sampling_options
from .scoring import RewardScorer
from .vllm_engine import VLLMEngine


if TYPE_CHECKING:
    from .trainer import APRILGRPOTrainer

logger = get_logger(__name__)


class RolloutSession:
    """Delivers the batches of a training run, round by round.

    Args:
        trainer ([`APRILGRPOTrainer`]):
            Whose dataset, tokenizer, reward functions and server are used.
        options ([`AprilOptions`]):
            APRIL's own options.
        processes ([`OneProcess`] or [`ManyProcesses`]):
            Those that training runs in.
        api_key (`str`, *optional*):
            Key of the server.
    """

    def __init__(
        self,
        trainer: APRILGRPOTrainer,
        options: AprilOptions,
        *,
        processes: Processes,
        api_key: str | None = None,
    ) -> None:
        args = trainer.args
        if trainer.state.global_step > 0:
            logger.warning(
                f"Training resumes at step {trainer.state.global_step} with an empty pool: checkpoints do not hold "
                "partial samples yet. Rows that were in flight when the checkpoint was written are not trained, and "
                "as many that had overtaken them are trained again."
            )
        self._trainer = trainer
        self._processes = processes
        self.pool = make_pool(args, options)
        self.scorer = RewardScorer(trainer)
        self._source = make_source(trainer)
        self._admission = Admission(trainer, self._source, processes)
        self._engine = VLLMEngine(
            trainer.vllm_generation.base_url,
            trainer.vllm_generation.facts.model,
            sampling_of(args, stop_token_ids=trainer.eos_token_ids),
            stream_interval=options.stream_interval,
            api_key=api_key,
        )
        self._dynamic = None
        if options.dynamic_sampling:
            self._dynamic = DynamicSampling(
                self.scorer.score,
                self.scorer.has_signal,
                self._replace,
                max_rejected=options.max_rejected_groups_per_round or 10 * self.pool.quota,
            )
        self.quota = processes.quota(self.pool.roster, self._dynamic.max_rejected if self._dynamic else None)
        drawn = secrets.randbits(48) if processes.rank == 0 else 0
        run_id = f"{int(processes.total([drawn])[0]):012x}"
        self.driver = RolloutDriver(
            self.pool,
            self._engine,
            run_id=run_id,
            seed=sampling_of(args).seed,
            idle_timeout=args.vllm_server_timeout,
            dynamic_sampling=self._dynamic,
            quota=self.quota,
        )
        self._loop = BackgroundLoop("trl-april-rollouts")

    def run_round(self, version: int, *, silent: bool) -> Round:
        """Fill the pool, and run until the quota is met.

        Args:
            version (`int`):
                Policy version that the server has the weights of.
            silent (`bool`):
                Whether to show no progress bar.

        Raises:
            As [`RolloutDriver.run_round`], and `ConfigError` for a prompt that leaves no room for a completion.
        """
        self.pool.begin_round(version)
        for group in self._admission.next_groups(self.pool.room):
            group.admit_to(self.pool)
        with RoundProgress(self.pool, self.driver, self.quota, disable=silent) as progress:

            def poll() -> None:
                self._processes.check()
                progress.update()

            done = self._loop.run(self.driver.generate(), poll=poll)
        if self.quota is not None:
            self._agree(self.quota)
        self.driver.take()
        batch, row_of = self.pool.roster.delivered, self._admission.row_of
        done.groups = self._processes.deal(done.groups, batch, row_of, self._trainer.num_generations)
        self._admission.let_go([*batch, *self.pool.roster.rejected], done.groups)
        self._account_for_rejected()
        return done

    def _agree(self, quota: SharedQuota) -> None:
        """Let every process know what is finished in all of them, and so which groups the round delivers."""
        if self._dynamic is not None:
            quota.tell_rest()
            self._processes.barrier()
            quota.learn_rest()
            # When the round closed, some processes had admitted replacements that others had not heard of yet, and
            # perhaps rejected those, too.
            replaced = int(self._processes.most([self._dynamic.replaced])[0])
            while (missing := min(replaced, self.pool.num_rejected) - self._dynamic.replaced) > 0:
                self._dynamic.replaced += missing
                for group in self._replace(missing):
                    group.admit_to(self.pool)
                quota.learn_rest()
        self._processes.agree(self.pool)
        if self._processes.rank == 0:
            quota.end_round()  # no process looks at it any more

    def close(self) -> None:
        """Close connections, threads and loop."""
        if self._dynamic is not None:
            self._dynamic.close()
        self._loop.run(self._engine.close())
        self._loop.close()

    # Rows

    def _replace(self, rejected: int) -> Sequence[NewGroup | GroupElsewhere]:
        """As many groups as were rejected. Called in the middle of a round, in another thread."""
        self._source.replace(rejected)
        return self._admission.next_groups(rejected)

    def _account_for_rejected(self) -> None:
        """Let the source hand out as many rows more as groups were rejected, so that training ends as planned."""
        if self._dynamic is None:
            return
        unreplaced = self.pool.num_rejected - self._dynamic.replaced
        if unreplaced > 0:
            self._source.replace(unreplaced)
        elif unreplaced < 0:
            # A round that had to be filled with rejected groups trains some that have been replaced. Near the end of
            # training the replacements are on their way already, and nothing can use them any more.
            self.pool.withdraw(self._source.take_back(-unreplaced))


def make_pool(args: GRPOConfig, options: AprilOptions) -> Pool:
    """The pool that a training run with these arguments needs."""
    versions_per_round = optimiser_steps_per_round(args)
    over_provisioning = options.over_provisioning
    if options.staleness_policy == "wait" and options.max_staleness is not None:
        # A round of several optimiser steps ages what waits by as many versions.
        most = options.max_staleness // versions_per_round + 1
        if over_provisioning > most:
            logger.warning(
                f"over_provisioning is lowered from {over_provisioning} to {most}: a generation batch is trained "
                f"for {versions_per_round} optimiser steps, so with max_staleness={options.max_staleness} a group "
                f"can wait {most - 1} rounds. Set max_staleness to "
                f"{math.ceil(over_provisioning - 1) * versions_per_round} or more, or None, to keep it."
            )
            over_provisioning = most
    return Pool(
        args.generation_batch_size // args.num_generations,
        over_provisioning=over_provisioning,
        max_staleness=options.max_staleness,
        staleness_policy=options.staleness_policy,
        versions_per_round=versions_per_round,
        dynamic_sampling=options.dynamic_sampling,
    )


def sampling_of(args: GRPOConfig, stop_token_ids: Any = ()) -> SamplingOptions:
    """The sampling options of every request, checked; see [`sampling_options`]."""
    return sampling_options(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=stop_token_ids,
        generation_kwargs=args.generation_kwargs,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
    )
