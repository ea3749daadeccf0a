"""APRILGRPOTrainer: TRL's GRPOTrainer, with one place overridden: where the completions of a training batch come from.

The way of the data in a training step:

1. TRL asks `_generate_and_score_completions` for a generation batch.
2. The weights go to the server, if they changed since the last time. What runs there is cut, or held, before it loads.
3. The pool enters the next round, is filled up to its target, and the driver runs until the quota is met.
4. The batch that the pool hands over goes into TRL's own slot for foreign rollouts (`rollout_func`), for the length of
   one `super()` call. Scoring, advantages, importance-sampling correction and loss are TRL's. Under dynamic sampling
   the groups have been scored in step 3, by TRL's code too, and TRL gets those rewards when it asks for them.

Everything else is inherited. Where APRIL does not apply, stock GRPO runs.
"""

from __future__ import annotations

import copy
import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import SaveStrategy
from trl import GRPOConfig, GRPOTrainer
from trl.extras.profiling import profiling_context
from trl.trainer.utils import get_config_model_id

from .applies import check_arguments, check_model, check_scoring, passed_over, why_stock, without_effect
from .attachment import api_key, attached, vllm_off
from .batch import batch_rows, completion_columns, evaluation_columns, rollout_output, round_metrics
from .checkpoint import FOLDER, remove_rollouts
from .config import APRILGRPOConfig, AprilOptions
from .correction import correction_metrics
from .dashboards import order_dashboards
from .errors import CheckpointError, ConfigError, PoolError, ServerError
from .gspo import known_to_trl
from .micro_batches import like_lengths_together, micro_batches_are_free, surely_in_one_step
from .padding import COLUMNS, PerToken, width_matters, without_padding
from .pool import Pool
from .processes import processes_of
from .recovery import Recovery
from .round import Round
from .run_log import RunLog, outline, run_options
from .session import RolloutSession
from .step_callback import StepCallback
from .stop import Stopped, StopRequest, leave
from .trainer_checkpoints import TrainerCheckpoints
from .types import Group


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig, PreTrainedModel

logger = get_logger(__name__)

# Rounds whose in-flight curve is kept for plots; the metrics of all rounds are in the log.
ROUNDS_KEPT = 256


class APRILGRPOTrainer(GRPOTrainer):
    """
    Trainer for Group Relative Policy Optimization with Active Partial Rollouts (APRIL).

    APRIL (https://huggingface.co/papers/2509.18521) keeps more prompt groups in flight than a batch needs, closes the
    round when enough are complete, aborts the rest, keeps their partial completions, and resumes them first in the
    next round. No generated token is discarded, and a few long completions no longer stall the batch.

    The only change with respect to [`~trl.GRPOTrainer`] is where the completions of a *training* batch come from: a
    pool of groups on a vLLM server. Arguments, dataset order, evaluation, rewards, advantages, loss, callbacks and
    logs are inherited; the log gains keys with the prefix `april/`.

    APRIL is on when `args.use_vllm` is true and `args.vllm_mode` is `"server"`, without `tools`,
    `environment_factory`, `rollout_func` or images, and unless a subclass overrides `_generate`,
    `_generate_single_turn` or `get_train_dataloader`; several processes need a `torch.distributed` group. Otherwise
    the trainer runs stock GRPO and says so once.

    What each round took and came to is written into `april_rounds.jsonl` in `output_dir`; `trl-april report` shows it.

    Under `accelerate launch` each process generates its share of the groups, all fill one quota, and an error of one
    process is raised in all of them.

    Args:
        args ([`APRILGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. With a stock config, APRIL's own options have their defaults.
        model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes:
            As for [`~trl.GRPOTrainer`].
        callbacks, optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory:
            As for [`~trl.GRPOTrainer`].

    Attributes:
        april_enabled (`bool`):
            Whether rollouts go through the pool.
        pool (`Pool` or `None`):
            Groups in flight and partial samples of the current (or last) training run, those of this process.
        round_history (`deque[Round]`):
            The last rounds of this process, without their batches and single requests: durations, token counts and
            requests in flight over time.

    Raises:
        ConfigError: For options that contradict each other or cannot survive a cut, or a dataset that cannot be
            trained on. It is a `ValueError`.
        ServerError: If there is no server to train with. It is a `ConnectionError`.

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer

    # On one GPU the server leaves the trainer its part.
    with LocalServer("Qwen/Qwen3-0.6B", vllm_args=["--gpu-memory-utilization", "0.4"]) as server:
        trainer = APRILGRPOTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=accuracy_reward,
            args=APRILGRPOConfig("out", vllm_server_base_url=server.base_url),
            train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        )
        trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "april"]
    _name = "APRIL"
    _paper = {
        "title": "APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation",
        "id": "2509.18521",
        "citation": textwrap.dedent("""\
            @article{zhou2025april,
                title        = {{APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation}},
                author       = {Yuzhen Zhou and Jiajun Li and Yusheng Su and Gowtham Ramesh and Zilin Zhu and Xiang Long and Chenyang Zhao and Jin Pan and Xiaodong Yu and Ze Wang and Kangrui Du and Jialian Wu and Ximeng Sun and Jiang Liu and Qiaolin Yu and Hao Chen and Zicheng Liu and Emad Barsoum},
                year         = 2025,
                eprint       = {arXiv:2509.18521},
            }"""),  # noqa: E501
    }

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = APRILGRPOConfig(f"{name.split('/')[-1]}-APRIL")

        stock_because = why_stock(
            args, train_dataset, tools=tools, environment_factory=environment_factory, rollout_func=rollout_func,
            overridden=passed_over(type(self)),
        )  # fmt: skip
        self.april_enabled = stock_because is None
        self._warned_of_mask = self._warned_of_override = False
        self._asked_for: list[Any] | None = None  # of the generation batch that TRL asks for, see below
        self.pool: Pool | None = None
        self._session: RolloutSession | None = None
        self.groups_in_training: list[Group] | None = None  # while TRL makes a training batch of them
        self.round_history: deque[Round] = deque(maxlen=ROUNDS_KEPT)
        self._run_log = RunLog()  # nowhere yet
        self.trained_micro_steps = 0  # calls of `training_step` whose gradients are in the weights
        if self.april_enabled:
            self._options = AprilOptions.of(args)
            check_arguments(args, self._options, train_dataset)
        else:
            # First of all: the server that stock GRPO asks for may be missing, or one that it cannot use.
            logger.warning(f"APRIL is off: {stock_because}. Training runs as stock GRPO.{without_effect(args)}")
            # And the model card says so, unless it is that of a subclass.
            for name in ("_tag_names", "_name", "_paper"):
                if getattr(type(self), name) is getattr(APRILGRPOTrainer, name):
                    setattr(self, name, getattr(GRPOTrainer, name))

        with vllm_off(args) if self.april_enabled else nullcontext(), known_to_trl(args):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        if self.april_enabled:
            check_model(self.model)
            self._processes = processes_of(self.accelerator)
            if self._options.dynamic_sampling:
                overridden = type(self)._calculate_rewards is not APRILGRPOTrainer._calculate_rewards
                check_scoring(self, self._processes, overridden=overridden)
            with self._processes.watched():
                self._attach_server()
            self.add_callback(StepCallback(self))
            order_dashboards(self)

    # Overrides of TRL. There are seven; all hand over to `super()`.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See [`~transformers.Trainer.train`]. Connections and the event loop live as long as this call.

        Training resumes with the partial samples of the checkpoint; one of stock GRPO has none. With
        `resume_from_checkpoint=True`, a checkpoint whose writing was cut short is passed over.

        In several processes, an error of one is raised in all; see `trl_april.peers`.

        Raises:
            CheckpointError: If a checkpoint is not complete, or what it says of partial samples is damaged. It is a
                `ValueError`.
            ServerError: If the server stays away for `vllm_server_timeout` seconds. A checkpoint has been written
                then, unless `save_strategy` is `"no"`.
            KeyboardInterrupt, SystemExit: After Ctrl-C or SIGTERM. With `save_on_signal` a checkpoint has been
                written.
        """
        if not self.april_enabled:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self._last_loaded_step = -1  # the server may have served another run since
        self.pool = None
        # An earlier call may have ended in the middle of a generation batch.
        self._step, self.trained_micro_steps, self._buffered_inputs = 0, 0, None
        with self._listening_to_signals():
            try:
                with self._processes.watched():
                    output = self._train(resume_from_checkpoint, *args, **kwargs)
                    self._stop.agree(self._processes)  # of which only one process may have got the last
            except Stopped as stopped:
                leave(stopped.signal)
            finally:
                self._last_loaded_step = -1  # the best model may have been loaded, and is evaluated next
            if self._stop.signal:
                leave(self._stop.signal)
            return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See [`~transformers.Trainer.evaluation_loop`]; errors are shared as in `train`."""
        with self._processes.watched() if self.april_enabled else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # Evaluation is TRL's stock path. In training, `inputs` are the rows that stock GRPO would generate for now;
        # the pool has them too, from the same order, but trains them when they are done.
        if not self.april_enabled or not self.model.training:
            if self.april_enabled and self.state.global_step == self._last_loaded_step:
                if not self.vllm_generation.holds_weights():
                    self._last_loaded_step = -1  # TRL then syncs
            if self.april_enabled and self.log_completions:
                self._pending_extra_logs.update(evaluation_columns(len(inputs)))
            return super()._generate_and_score_completions(inputs)
        if self._asked_for == []:
            raise ConfigError(
                f"{type(self).__name__} asks twice for one generation batch, and the second one would be of rows that "
                "nobody has planned for. Use `dynamic_sampling=True` to replace groups that teach nothing."
            )
        if self._asked_for not in (None, _questions(inputs)):
            raise ConfigError(
                f"{type(self).__name__} changes the prompts or the columns of a generation batch, but those of "
                "partial rollouts are rows of the dataset, which they may have been for several batches. Change them "
                "there: train_dataset.map(...), or with_transform(...)."
            )
        self._asked_for = [] if self._asked_for else None  # it has its answer
        done = self._run_round()
        inputs[:] = batch_rows(done.groups)  # a subclass may go on with the rows of the batch
        if self.log_completions:
            self._pending_extra_logs.update(completion_columns(done.groups))
        self.groups_in_training = done.groups
        self.rollout_func = lambda prompts, trainer: rollout_output(done.groups, mask_below=self._oldest_trained(done))
        try:
            with self._run_log.timing("scoring"):
                batch = super()._generate_and_score_completions(inputs)
        finally:
            self.rollout_func = self.groups_in_training = None
        self._log_correction(batch, done)
        logged = self._metrics["train"].items()
        self._run_log.write_round(done, {name: values[-1] for name, values in logged if name.startswith("reward")})
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        if self.april_enabled:
            # A copy, since they may be changed in place.
            self._asked_for = copy.deepcopy(_questions(generation_batch)) if self.model.training else None
        inputs = super()._prepare_inputs(generation_batch)
        asked_for, self._asked_for = self._asked_for, None
        if not self.april_enabled or self._buffered_inputs is before:
            return inputs
        if asked_for and not self._warned_of_override:
            self._warned_of_override = True
            logger.warning(
                f"{type(self).__name__} generates training batches by itself: its _generate_and_score_completions "
                "does not call that of APRILGRPOTrainer. Training runs as stock GRPO, and the options of "
                "APRILGRPOConfig have no effect."
            )
        if not micro_batches_are_free(self):
            return inputs
        per_step = surely_in_one_step(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        self._buffered_inputs = like_lengths_together(self._buffered_inputs, per_step, multiple=self._column_multiple)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # First the rollouts, then everything else: what is written last is what makes a checkpoint complete.
        if self._session is not None:
            has_weights = self._checkpoints.has_weights(trial)
            self._checkpoints.save_rollouts(trial, beside_weights=has_weights)
            if has_weights:
                self._checkpoints.save_state(trial)
                return
        elif not self.april_enabled and self.is_world_process_zero():
            remove_rollouts(Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)
        if self._session is not None:
            self._checkpoints.is_saved()

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        # Under dynamic sampling the batch was scored group by group; scoring it again would cost the same again, and a
        # reward function that is not deterministic could take back what made a group worth training on.
        if self.groups_in_training is None or self._session is None or not self._options.dynamic_sampling:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._session.scorer.hand_over(self.groups_in_training)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> PerToken:
        # TRL pads every micro-batch to the longest completion of the whole batch, which with a long tail is most of
        # what it computes. With images, which evaluation may have, the columns are not all that there is to a row; and
        # some models depend on their number.
        score = super()._get_per_token_logps_and_entropies
        if not self.april_enabled or kwargs.get("num_images") is not None or width_matters(self.model.config):
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        return without_padding(
            score, model, input_ids, attention_mask, logits_to_keep, batch_size,
            multiple=self._column_multiple, **kwargs,
        )  # fmt: skip

    # Behind `train`

    def _train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        self._checkpoints = TrainerCheckpoints(self, self._processes)
        resume_from_checkpoint = self._checkpoints.open(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except _NothingToTrain:
            logger.warning(f"{resume_from_checkpoint} is of a training that is complete: nothing is left to train.")
            return self._finalize_training(None, 0, time.time())
        finally:
            session, self._session = self._session, None  # the pool stays, to be looked at
            if session is not None:
                with ExitStack() as rest:  # also if the first of it is interrupted
                    rest.callback(self._run_log.close)
                    rest.callback(session.close)
                    self.vllm_generation.before_sync = None
                    self.vllm_generation.give_up()

    def _listening_to_signals(self) -> Any:
        self._stop = StopRequest(self._processes.check)
        return self._stop.listening() if self._options.save_on_signal else nullcontext()

    # The round

    def _run_round(self) -> Round:
        """Sync, fill the pool, and run until the quota is met."""
        if self.state.global_step >= self.state.max_steps:
            raise _NothingToTrain  # `Trainer` would do one more step
        if self._session is None:
            self._open_session()
        assert self._session is not None
        try:
            with self._run_log.timing("sync"):
                sync_seconds = self._sync_weights(self._session.recovery)
            silent = self.args.disable_tqdm or not self.is_world_process_zero()
            with profiling_context(self, "vLLM.generate"):
                done = self._session.run_round(self.state.global_step, silent=silent)
        except Stopped:
            self._checkpoints.save_now()
            raise
        except ServerError:  # of all processes, after waiting for it
            if self.args.save_strategy != SaveStrategy.NO:
                self._checkpoints.save_now()
            raise
        metrics = round_metrics(
            done,
            self._session.pool,
            sync_seconds=sync_seconds,
            max_staleness=self._options.max_staleness,
            stream_interval=self._options.stream_interval,
            total=self._processes.total,
            most=self._processes.most,
        )
        self._log_metrics(metrics)
        self.round_history.append(outline(done))
        return done

    def _sync_weights(self, recovery: Recovery) -> float:
        """See to it that the server has the weights; returns the seconds that it took."""
        if self.state.global_step == self._last_loaded_step:
            # Unless it was started anew since, as it may be between the rounds of one step.
            return self.vllm_generation.sync_seconds if recovery.restore_weights() else 0.0
        with profiling_context(self, "sync_weights"):
            recovery.sync_weights()
        self._last_loaded_step = self.state.global_step
        return self.vllm_generation.sync_seconds

    def _open_session(self) -> None:
        saved = self._checkpoints.take_rollouts()
        try:
            self._session = RolloutSession(
                self,
                self._options,
                processes=self._processes,
                stop=self._stop,
                api_key=api_key(),
                saved=saved,
            )
        except PoolError as error:
            raise CheckpointError(
                f"The partial samples in {self._checkpoints.resumed_from} cannot be resumed. {error} Resume from "
                f"another checkpoint, or remove the folder `{FOLDER}` from this one to go on without them."
            ) from error
        self.pool = self._session.pool
        self.vllm_generation.before_sync = self._session.make_way
        self._run_log = RunLog(
            Path(self.args.output_dir) if self.is_world_process_zero() else None,
            {
                **run_options(self.args, self._options, self._session.pool),
                "max_sequences": self.vllm_generation.facts.max_sequences,
                "weight_sync": self.vllm_generation.weight_sync,  # what "auto" has come to
            },
            resumed_at_step=self.state.global_step if self._checkpoints.resumed_from else None,
            total=self._processes.total,
            processes=self._processes.count,
        )

    @property
    def _column_multiple(self) -> int:
        return self.pad_to_multiple_of or COLUMNS

    def _oldest_trained(self, done: Round) -> int | None:
        """The oldest policy version whose tokens stay in the loss; `None` if all do."""
        if self._options.staleness_policy != "mask" or self._options.max_staleness is None:
            return None
        return done.version - self._options.max_staleness

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][f"april/{name}"].append(value)
        self._run_log.note(metrics)

    def _log_correction(self, batch: dict[str, Any], done: Round) -> None:
        """What the importance-sampling correction made of the batch, by age and by length."""
        if "importance_sampling_ratio" not in batch:
            return
        metrics, masked_out = correction_metrics(batch, done.groups, done.version, processes=self._processes)
        self._log_metrics(metrics)
        if masked_out > 0.5 and not self._warned_of_mask:
            self._warned_of_mask = True
            logger.warning(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} has masked out "
                f"{masked_out:.0%} of the carried tokens of this batch ({metrics['correction/carried_tokens']:.0f} "
                "tokens): what APRIL saved of them trains nothing. 'token_truncate' keeps them."
            )

    def _attach_server(self) -> None:
        self.use_vllm = True
        self._last_loaded_step = -1
        self.vllm_generation = attached(self, self._options, self._processes)


def _questions(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """What rows ask, and with which columns."""
    return [(row["prompt"], sorted(row)) for row in rows]


class _NothingToTrain(Exception):
    """Training resumes where it is complete."""
