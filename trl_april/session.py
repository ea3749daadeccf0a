"""The rollouts of one training run: rows, pool, engine, driver, and the event loop that rounds run in.

The invariant owned here: as many rows are handed out as training needs, whatever is rejected on the way, and nothing
of a run outlives [`RolloutSession.close`] but its pool.
"""

from __future__ import annotations

import copy
import math
import uuid
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from trl import GRPOConfig

from .background import BackgroundLoop
from .config import AprilOptions
from .dynamic_sampling import DynamicSampling, NewGroup
from .errors import ConfigError
from .pool import Pool
from .progress import RoundProgress
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
        api_key (`str`, *optional*):
            Key of the server.
    """

    def __init__(self, trainer: APRILGRPOTrainer, options: AprilOptions, *, api_key: str | None = None) -> None:
        args = trainer.args
        if trainer.state.global_step > 0:
            logger.warning(
                f"Training resumes at step {trainer.state.global_step} with an empty pool: checkpoints do not hold "
                "partial samples yet. Rows that were in flight when the checkpoint was written are not trained, and "
                "as many that had overtaken them are trained again."
            )
        self._trainer = trainer
        self.pool = make_pool(args, options)
        self.scorer = RewardScorer(trainer)
        self._source = make_source(trainer)
        self._engine = VLLMEngine(
            trainer.vllm_generation.base_url,
            trainer.vllm_generation.facts.model,
            sampling_of(args, stop_token_ids=trainer.eos_token_ids),
            stream_interval=options.stream_interval,
            api_key=api_key,
        )
        self._replaced = 0  # rejected groups of this round for which the source has handed out others
        self._dynamic = None
        if options.dynamic_sampling:
            self._dynamic = DynamicSampling(
                self.scorer.score,
                self.scorer.has_signal,
                self._replace,
                max_rejected=options.max_rejected_groups_per_round or 10 * self.pool.quota,
            )
        self.driver = RolloutDriver(
            self.pool,
            self._engine,
            run_id=uuid.uuid4().hex[:12],
            seed=sampling_of(args).seed,
            idle_timeout=args.vllm_server_timeout,
            dynamic_sampling=self._dynamic,
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
        for group in self._next_groups(self.pool.room):
            group.admit_to(self.pool)
        with RoundProgress(self.pool, self.driver, disable=silent) as progress:
            done = self._loop.run(self.driver.run_round(), poll=progress.update)
        self._account_for_rejected(done)
        return done

    def close(self) -> None:
        """Close connections, threads and loop."""
        if self._dynamic is not None:
            self._dynamic.close()
        self._loop.run(self._engine.close())
        self._loop.close()

    # Rows

    def _replace(self, rejected: int, room: int) -> list[NewGroup]:
        """The groups that follow, after so many were rejected. Called in the middle of a round, in another thread."""
        self._source.replace(rejected)
        self._replaced += rejected
        return self._next_groups(room)

    def _account_for_rejected(self, done: Round) -> None:
        """Let the source hand out as many rows more as groups were rejected, so that training ends as planned."""
        unreplaced = done.rejected_groups - self._replaced
        self._replaced = 0
        if unreplaced > 0:
            self._source.replace(unreplaced)
        elif unreplaced < 0:
            # A round that had to be filled with rejected groups trains some that have been replaced. Near the end of
            # training the replacements are on their way already, and nothing can use them any more.
            self.pool.withdraw(self._source.take_back(-unreplaced))

    def _next_groups(self, count: int) -> list[NewGroup]:
        """The next dataset rows, at most `count`, tokenized."""
        rows = self._source.next_rows(count)
        if not rows:
            return []
        trainer = self._trainer
        # TRL's own tokenization, so that a prompt has the same tokens as in stock GRPO and in evaluation.
        prompt_ids, images, _ = trainer._tokenize_prompts(copy.deepcopy([row["prompt"] for _, row in rows]))
        if images is not None:
            raise ConfigError(
                "A prompt holds an image, which partial rollouts do not support. Use GRPOTrainer, or a dataset with "
                "an `images` column, for which this trainer runs stock GRPO."
            )
        context = trainer.vllm_generation.facts.max_model_len
        budgets = [trainer.max_completion_length or context - len(ids) for ids in prompt_ids]
        for (group_id, row), ids, budget in zip(rows, prompt_ids, budgets, strict=True):
            if budget < 1 or len(ids) + budget > context:
                raise ConfigError(
                    f"The prompt of group {group_id} has {len(ids)} tokens, but with max_completion_length="
                    f"{trainer.max_completion_length} the server's context of {context} tokens leaves "
                    f"{max(0, context - (trainer.max_completion_length or 1))} for it: {str(row['prompt'])[:200]!r}. "
                    "Shorten or filter the prompts, lower max_completion_length, or restart the server with a larger "
                    "--max-model-len."
                )
        return [
            NewGroup(group_id, row, list(ids), trainer.num_generations, budget)
            for (group_id, row), ids, budget in zip(rows, prompt_ids, budgets, strict=True)
        ]


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
