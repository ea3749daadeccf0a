"""APRILGRPOTrainer: TRL's GRPOTrainer with another source of training completions.

When TRL asks for a generation batch, new weights are sent to the server, the pool is filled to its target, and the
round runs until the quota is met. TRL takes the batch during a `super()` call through its hook for external rollouts,
`rollout_func`: scoring, advantages, importance-sampling correction and loss are TRL's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from trl import GRPOConfig, GRPOTrainer
from trl.extras.profiling import profiling_context

from .agents.rollout_function import Rollout
from .bridge import compatibility, construction, rows, training_pass
from .bridge.evaluation import evaluation
from .bridge.hand_over import HandOver, replaced
from .bridge.rewards import reward_scorer
from .bridge.tool_loop import tool_turns
from .checkpoint.resume import RunCheckpoints
from .checkpoint.rollouts import remove_rollouts
from .config import AprilOptions
from .distributed.processes import get_logger, processes_of
from .distributed.signals import Stopped, StopRequest, leave
from .errors import NothingToTrain, ServerError
from .pool.pool import Pool
from .rollout.record import Round
from .rollout.user_code import UserCode, result_of
from .session import RolloutSession
from .training.batch import batch_rows, completion_columns
from .training.callbacks import StepCallback, StockNotice, add_round_lines
from .training.micro_batches import weight_of_loss
from .training.rewards import checked, extra_columns, use_device
from .training.run_log import outline
from .weights.recovery import Recovery


logger = get_logger(__name__)


class APRILGRPOTrainer(GRPOTrainer):
    """
    Trainer for Group Relative Policy Optimization with Active Partial Rollouts (APRIL).

    APRIL (https://huggingface.co/papers/2509.18521) keeps more prompt groups in flight than a batch needs, closes the
    round when enough are complete, aborts the rest, keeps their partial completions, and resumes them first in the
    next round. No generated token is discarded, and a few long completions no longer stall the batch.

    Only the source of *training* completions differs from [`~trl.GRPOTrainer`]: a pool of groups on a vLLM server.
    Everything else is inherited. The log gains keys with the prefix `april/`, and `output_dir` a file
    `april_rounds.jsonl` for `trl-april report`.

    If no server is given, the trainer starts a server that ends with it: on GPUs that the trainer does not use, or
    else on its GPU with `vllm_gpu_memory_utilization` of the memory. The next such trainer takes the server over.

    APRIL is on unless `args.use_vllm` is false, `rollout_func` is given, or a subclass overrides `_generate`,
    `_generate_single_turn`, `_tool_call_loop` or `get_train_dataloader`. Otherwise stock GRPO runs, with a warning.

    Args:
        args ([`APRILGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. With a stock config, APRIL's own options have their defaults.
        rollout (`Callable` or `str`, *optional*):
            Agent that makes the turns of a sample (docs/tools.md). A function or coroutine function
            `rollout(prompt, engine, row)` sends chat completions to `engine.base_url`, or awaits
            [`TurnEngine.generate`], and returns columns for reward functions, or `None`. A string is the command line
            of a program that gets the same address in `OPENAI_BASE_URL` and `OPENAI_API_KEY`.
        All others: as for [`~trl.GRPOTrainer`].

    Attributes:
        april_enabled (`bool`):
            Whether rollouts go through the pool.
        pool (`Pool` or `None`):
            Groups in flight and partial samples of this process, in the current (or last) training run.
        round_history (`deque[Round]`):
            The last rounds of this process, without batches: durations, token counts, requests in flight over time.

    Example:

    ```python
    dataset = datasets.load_dataset("trl-lib/DeepMath-103K", split="train")
    trainer = APRILGRPOTrainer("Qwen/Qwen3-0.6B", trl.rewards.accuracy_reward, train_dataset=dataset)
    trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "april"]
    _name = "APRIL"
    _paper = construction.PAPER
    _april_evaluation: Any = None  # the running evaluation
    _april_hand_over: HandOver | None = None  # the batch that TRL is taking

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        rollout: Rollout | str | None = None,
    ) -> None:
        model, args = construction.model_and_arguments(model, args)
        overridden = compatibility.ignored_overrides(type(self), APRILGRPOTrainer)
        stock_because = compatibility.why_stock(args, rollout_func, overridden)
        compatibility.check_rollout(rollout, stock_because, tools or environment_factory)
        self.april_enabled, self._april_rollout = stock_because is None, rollout
        self.pool: Pool | None = None
        self.round_history: deque[Round] = deque(maxlen=256)  # for plots; the log has the metrics of all rounds
        self._april_session: RolloutSession | None = None
        self._april_requested, self._april_server = compatibility.RequestedBatch(type(self).__name__), None
        if self.april_enabled:
            has_images = compatibility.has_images(train_dataset)
            acts = bool(tools or environment_factory or rollout)
            # Groups are scored by the process that has their environments.
            resolve = partial(AprilOptions.resolved, args, acts=acts, scores=environment_factory is not None)
            options = resolve(keeps=not has_images)
            compatibility.check_arguments(args, options, train_dataset, tools, environment_factory)
            processes = self._april_processes = processes_of(args.distributed_state)
            with processes.watched():
                self._april_server = construction.start_server(
                    self, args, model, processing_class, peft_config, processes
                )
            self._april_user_code = UserCode(lambda: use_device(args.device))
            environment_factory = self._april_user_code.factories(environment_factory)
        else:
            no_effect = compatibility.without_effect(args)
            logger.warning(f"APRIL is off: {stock_because}. Training runs as stock GRPO.{no_effect}")
        vars(self).update(construction.model_card(type(self), APRILGRPOTrainer, april_enabled=self.april_enabled))
        with construction.arguments_for_trl(args, model, april_enabled=self.april_enabled, server=self._april_server):
            super().__init__(
                model=model, reward_funcs=reward_funcs, args=args, train_dataset=train_dataset,
                eval_dataset=eval_dataset, processing_class=processing_class,
                reward_processing_classes=reward_processing_classes, callbacks=callbacks, optimizers=optimizers,
                quantization_config=quantization_config, peft_config=peft_config, tools=tools,
                rollout_func=rollout_func, environment_factory=environment_factory,
            )  # fmt: skip
            if self.april_enabled:
                compatibility.check_model(self.model)
                compatibility.compare_with_server(self.model, disable_dropout=args.disable_dropout)
        if stock_because:
            self.add_callback(StockNotice(stock_because))
            return
        may_return_images = self._is_vlm and (tools or environment_factory or has_images is None)
        self._april_options = resolve(keeps=False) if may_return_images else options
        self._april_stop = StopRequest(processes.check)
        if self._april_options.scores_groups:
            sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
            compatibility.check_scoring(self.reward_funcs, processes.count, sharded=sharded)
        with processes.watched():
            self._april_attach_server()
        add_round_lines(self.callback_handler.callbacks, given=callbacks or ())
        run = lambda: self._april_session, lambda: self._april_stop, lambda: self._step
        self.add_callback(StepCallback(*run, processes, saves_on_signal=self._april_options.save_on_signal))

    # Overrides of TRL. All call `super()`.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See [`~transformers.Trainer.train`]. Connections and the event loop exist only during this call.

        Overridden to resume with partial samples, and to skip incomplete checkpoints before the training loop.

        Raises:
            CheckpointError: If a checkpoint is incomplete, or its partial samples are damaged. It is a `ValueError`.
            ServerError: If the server is unreachable for `vllm_server_timeout` seconds, or the trainer's own server
                cannot be restarted. A checkpoint was written by then.
            KeyboardInterrupt, SystemExit: After Ctrl-C or SIGTERM. With `save_on_signal` a checkpoint was written.
        """
        if not self.april_enabled:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self.pool, self._last_loaded_step = None, -1  # the server may have served another run since
        self._step, self._buffered_inputs = 0, None  # an earlier call may have ended inside a generation batch
        self._april_stop = StopRequest(self._april_processes.check)
        with self._april_stop.listening() if self._april_options.save_on_signal else nullcontext():
            try:
                with self._april_processes.watched():
                    output = self._april_train(resume_from_checkpoint, *args, **kwargs)
                    self._april_stop.agree(self._april_processes)  # the last signal may have reached one process only
            except Stopped as stopped:
                leave(stopped.signal)
            finally:
                self._last_loaded_step = -1  # the best model may have been loaded, and is evaluated next
            if self._april_stop.signal:
                leave(self._april_stop.signal)
            return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See [`~transformers.Trainer.evaluation_loop`]. Overridden to raise an error of one process in all."""
        if not self.april_enabled:
            return super().evaluation_loop(*args, **kwargs)
        with self._april_processes.watched(), evaluation(self):
            return super().evaluation_loop(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # In training, `inputs` are the rows of stock GRPO's next batch; the pool delivers groups that are finished.
        if not self.april_enabled:
            return super()._generate_and_score_completions(inputs)
        if not self.model.training:
            alone = nullcontext() if self._april_session is None else self._april_session.scoring_suspended()
            with self._april_evaluate(inputs).given_to(self), alone:
                return super()._generate_and_score_completions(inputs)
        self._april_requested.answer(inputs)
        done = self._april_run_round()
        session, groups = self._april_session, done.groups
        inputs[:] = batch_rows(groups)  # a subclass may continue with the rows of the batch
        if self.log_completions:
            self._pending_extra_logs.update(completion_columns(groups))
        if session.scorer is not None:
            self._pending_extra_logs.update(extra_columns(groups))
            self._pending_metrics.update(session.scorer.take_metrics())
        corrects = self.vllm_importance_sampling_correction
        in_training = corrects and training_pass.can_correct(type(self), APRILGRPOTrainer, self.args)
        oldest = self._april_options.oldest_trained(done.version)
        hand_over = HandOver(groups, factories=self.environment_factories, mask_below=oldest)
        # TRL's own correction needs another forward pass.
        given = hand_over.given_to(self, vllm_importance_sampling_correction=corrects and not in_training)
        with given, session.run_log.timing("scoring"):
            batch = super()._generate_and_score_completions(inputs)
        if in_training:
            session.correction.defer(self.args, batch, done)
        else:
            self._april_log_metrics(session.correction.metrics(batch, done))
        rewards = {name: values[-1] for name, values in self._metrics["train"].items() if name.startswith("reward")}
        session.run_log.add_round(done, rewards)
        return batch

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._april_hand_over is None:
            return super()._generate(prompts)
        return self._april_hand_over.generate(super()._generate, prompts)

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if self._april_hand_over is None:
            return super()._tool_call_loop(*args, **kwargs)
        return self._april_hand_over.tool_results()

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        prompt_ids, *rest = super()._tokenize_prompts(prompts)
        return rows.begun(prompt_ids, self._tokenizer) if self.april_enabled else prompt_ids, *rest

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Overridden to time and check reward functions, and to skip them for groups that are already scored.
        if self._april_session is None or not self.model.training:
            return result_of(partial(super()._calculate_rewards, *args, **kwargs))
        with self._april_session.run_log.timing("reward_calls"):
            if self._april_hand_over is not None and (rewards := self._april_hand_over.rewards()) is not None:
                return self.accelerator.gather(torch.tensor(rewards, device=self.accelerator.device))
            with replaced(self, reward_funcs=checked(self.reward_funcs, self.reward_func_names)):
                return result_of(partial(super()._calculate_rewards, *args, **kwargs))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        # Overridden to choose the samples of micro-batches, and to notice a subclass that generates by itself.
        self._april_requested.request(generation_batch if self.april_enabled and self.model.training else None)
        before, inputs = self._buffered_inputs, super()._prepare_inputs(generation_batch)
        if not self.april_enabled or self._buffered_inputs is before:
            return inputs
        self._april_requested.warn_if_unanswered()
        self._buffered_inputs = training_pass.micro_batches(self, APRILGRPOTrainer)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        # Overridden because micro-batches may have more samples than TRL's, or none.
        weight = weight_of_loss(inputs, self.loss_type)
        if not weight:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        return super()._compute_loss(model, inputs) * weight

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # Overridden to compute each row as if it were alone, each prompt once, and to leave out padding. It also
        # corrects a micro-batch by its training pass, the only pass for which TRL requests entropies.
        score = training_pass.forward_pass(self, super()._get_per_token_logps_and_entropies, kwargs)
        results = score(*args, **kwargs)
        if self._april_session is not None and self.model.training and kwargs.get("compute_entropy"):
            micro_batch = self._buffered_inputs[self._step % self.args.steps_per_generation]
            self._april_log_metrics(self._april_session.correction.correct(micro_batch, results[0]), prefix="")
        return results

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Overridden to save partial samples, unless the optimizer is not saved and training cannot resume.
        if self._april_session:
            self._april_checkpoints.save(
                self.state.global_step,
                trial,
                rollouts=None if self.args.save_only_model else self._april_session.save,
                everything=partial(super()._save_checkpoint, model, trial),
            )
            return
        if not self.april_enabled and self.is_world_process_zero():
            remove_rollouts(Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"))
        super()._save_checkpoint(model, trial)

    def _april_train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        folder, processes = self.args.output_dir, self._april_processes
        self._april_checkpoints = RunCheckpoints(folder, self._get_output_dir, processes, resume_from_checkpoint)
        checkpoint = self._april_checkpoints.resumed_from
        try:
            with training_pass.rows_in_blocks(self), rows.read_once(self):
                return super().train(checkpoint, *args, **kwargs)
        except NothingToTrain:
            logger.warning(f"{checkpoint} is the end of its training: nothing is left to train.")
            return self._finalize_training(None, 0, time.time())
        finally:
            session, self._april_session = self._april_session, None  # the pool is kept for inspection
            if session is not None:
                session.close()

    def _april_attach_server(self) -> None:
        construction.attach_server(self)
        construction.check_memory(self)
        self._april_fixed = compatibility.fixed_options(self)

    def _april_open_session(self) -> RolloutSession:
        sampling, turns = rows.sampling(self), tool_turns(self, self._april_options, self._april_rollout)
        budget = rows.budget_of(self, sampling)
        rows.check_evaluation_rows(self, turns, budget)
        return RolloutSession(
            self.args,
            self._april_options,
            rows=rows.training_rows(self),
            tokenize=rows.tokenize_prompts(self, turns),
            images_of=rows.sample_images(self, self._april_options),
            vocab_size=self.model.config.get_text_config().vocab_size,
            budget=budget,
            sampling=sampling,
            server=self.vllm_generation,
            scorer=reward_scorer(self, turns) if self._april_options.scores_groups else None,
            act=turns,
            user_code=self._april_user_code,
            state=self.state,
            processes=self._april_processes,
            stop=self._april_stop,
            checkpoints=self._april_checkpoints,
        )

    def _april_evaluate(self, inputs: list[dict[str, Any]]) -> HandOver:
        """Generate the completions of an evaluation for these rows, with the current weights."""
        if self.log_completions:
            self._pending_extra_logs["versions"] = [""] * len(inputs)  # keeps the columns of the table aligned
        recovery = self._april_session and self._april_session.recovery  # stops requests before a sync
        recovery = recovery or Recovery(self.vllm_generation, self._april_processes, self._april_stop)
        with self._april_saved_if_stopped():
            if self.state.global_step != self._last_loaded_step:  # TRL's own sync would not survive an outage
                with profiling_context(self, "sync_weights"):
                    recovery.sync_weights()
                self._last_loaded_step = self.state.global_step
            return self._april_evaluation.generate(inputs, recovery)

    def _april_run_round(self) -> Round:
        """Sync the weights, fill the pool, and run until the quota is met."""
        step = self.state.global_step
        if self._april_session is None:
            if step >= self.state.max_steps:
                raise NothingToTrain  # `Trainer` would take another step
            self._april_session = self._april_open_session()
            self.pool, self._april_fixed["trainer.eos_token_ids"] = self._april_session.pool, [*self.eos_token_ids]
        compatibility.check_fixed(self._april_fixed, compatibility.fixed_options(self))
        is_synced, profiled = step == self._last_loaded_step, partial(profiling_context, self)
        with self._april_saved_if_stopped():
            done, metrics = self._april_session.run_round(self._step, is_synced=is_synced, profiled=profiled)
        self._last_loaded_step = step
        self._april_log_metrics(metrics)
        self.round_history.append(outline(done))
        return done

    @contextmanager
    def _april_saved_if_stopped(self) -> Iterator[None]:
        """Write a checkpoint if training ends in the block because of a signal or a lost server."""
        try:
            yield
        except (Stopped, ServerError) as error:  # raised in all processes
            if self._april_session and (isinstance(error, Stopped) or self.args.save_strategy != SaveStrategy.NO):
                step, checkpoints = self.state.global_step, self._april_checkpoints
                is_new = not checkpoints.has_weights(step)
                self._save_checkpoint(self.model, trial=None)
                if is_new:
                    self.control = self.callback_handler.on_save(self.args, self.state, self.control)
                logger.warning(f"Training can be resumed from {checkpoints.folder(step)}.")
            raise

    def _april_log_metrics(self, metrics: dict[str, float], prefix: str = "april/") -> None:
        for name, value in metrics.items():
            self._metrics["train"][prefix + name].append(value)
