"""What sessions and evaluations take from TRL's trainer: rows, models, micro-batches, scoring, turns with tools.

Invariant: work in threads uses a tokenizer of its own. One that another thread truncates meanwhile renders other
tokens, without an error.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.extras.profiling import profiling_context

from .config import AprilOptions
from .data.admission import check_longest
from .data.order import TrainingRows
from .data.source import Row
from .engine.images import SampleImages, prompt_of
from .engine.sampling import SamplingOptions, sampling_of
from .errors import ConfigError
from .pool.budget import Budget
from .rollout.acting import Places
from .rollout.daemon_threads import DaemonThreads
from .training import compatibility
from .training.construction import rollout_engine
from .training.environments import NO_PROMPT, Environments
from .training.evaluation import Evaluation
from .training.forward_pass import attention_in_blocks, base_attention
from .training.micro_batches import MicroBatch, filled, regrouped
from .training.rewards import RewardScorer, checked, decode_completions, use_device
from .training.rollout_function import Rollout, RolloutTurns
from .training.tools import CallResults, Message, Tools, ToolTurns, check_message_images, encode_results, tools_by_kind
from .weights.canary import depends_on_width


def rows_in_blocks(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """Let the models of a trainer compute rows in [blocks](training/forward_pass.py) in training, if they can."""
    # Sharded models are not whole before training, and compiled ones would be compiled for each layout.
    cannot = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.torch_compile
    if cannot or trainer.aux_loss_enabled or depends_on_width(trainer.model.config):
        return nullcontext()
    return attention_in_blocks(model for model in (trainer.model, trainer.ref_model) if model is not None)


def micro_batches(trainer: GRPOTrainer, ours: type[GRPOTrainer]) -> list[MicroBatch]:
    """TRL's micro-batches of a generation batch, or others with the same gradients if the loss is that of `ours`."""
    made: list[MicroBatch] = trainer._buffered_inputs
    bonus, aux_loss = trainer._entropy_bonus_enabled, trainer.aux_loss_enabled
    if compatibility.sees_images(made[0]) or not compatibility.can_be_regrouped(
        type(trainer), ours, trainer.args, has_entropy_bonus=bonus, has_aux_loss=aux_loss
    ):
        return made
    regroup = regrouped
    if base_attention(trainer.model) is not None and "prompt_mask" in made[0]:  # unless a subclass makes its own
        regroup = partial(filled, processes=trainer._processes)
    return regroup(made, trainer.args.gradient_accumulation_steps, trainer.pad_to_multiple_of)


def training_rows(trainer: GRPOTrainer) -> TrainingRows:
    """The training dataset of a trainer, in TRL's order."""
    dataset, collate = trainer.train_dataset, trainer.data_collator
    if isinstance(dataset, IterableDataset):
        if trainer.shuffle_dataset:
            dataset = dataset.shuffle(seed=trainer.args.seed)
        collate = trainer._get_collator_with_removed_columns(collate, description="Rollout")
    else:
        dataset = trainer._remove_unused_columns(dataset, description="Rollout")
    return TrainingRows(dataset, collate, make_sampler=lambda: trainer._get_train_sampler(dataset))


def tokenize_prompts(
    trainer: GRPOTrainer, turns: ToolTurns | RolloutTurns | None
) -> Callable[[list[Row]], list[list[int]]]:
    """By TRL's method, or no ids where an environment or a rollout function makes the prompt."""
    if trainer.environment_factories is None and not isinstance(turns, RolloutTurns):
        return lambda rows: trainer._tokenize_prompts([prompt_of(row) for row in rows])[0]
    return lambda rows: [[] for _ in rows]


def sampling_and_budget(trainer: GRPOTrainer) -> tuple[SamplingOptions, Budget]:
    """How every sample of training and evaluation is sampled, and its limits."""
    sampling = sampling_of(trainer.args, trainer.eos_token_ids)
    context_length = trainer.vllm_generation.server_info.max_model_len
    return sampling, Budget(trainer.args.max_completion_length, context_length, sampling.min_tokens)


def check_evaluation_rows(trainer: GRPOTrainer, turns: ToolTurns | RolloutTurns | None, budget: Budget) -> None:
    """Check the longest prompts of the datasets that will be evaluated during training, before it."""
    if trainer.args.eval_strategy == IntervalStrategy.NO or trainer.args.process_index > 0:
        return
    given = trainer.eval_dataset
    for name, dataset in given.items() if isinstance(given, dict) else [("", given)]:
        if isinstance(dataset, (Dataset, IterableDataset)):
            rows = TrainingRows(dataset, lambda rows: rows, lambda: [])
            check_longest(budget, rows, tokenize_prompts(trainer, turns), f"evaluation {name}".rstrip())


def groups_finish_beside_evaluations(trainer: GRPOTrainer) -> bool:
    """Whether groups of training finish and are scored, and so give their environments back, during an evaluation."""
    options, keeps = trainer._options, trainer.vllm_generation.servers.keeps_requests
    has_models = any(isinstance(function, torch.nn.Module) for function in trainer.reward_funcs)
    return bool(trainer._session and options.overlap_generation and keeps and not options.dynamic_sampling) and (
        not has_models
    )


def sample_images(trainer: GRPOTrainer, options: AprilOptions | None = None) -> SampleImages:
    """The images of samples, as the engine takes them. Those of training must suit its `options`."""

    def check() -> None:
        if not trainer._is_vlm:
            raise ConfigError(
                "A prompt has images, and the model or its processing_class takes text only. Train a vision-language "
                "model with its processor."
            )
        if options is not None:
            compatibility.check_images(options)

    return SampleImages(trainer.vllm_generation._place_features, check)


def reward_scorer(trainer: GRPOTrainer, turns: ToolTurns | RolloutTurns | None = None) -> RewardScorer:
    """Scores groups as the trainer would."""
    return RewardScorer(
        functions=checked(trainer.reward_funcs, trainer.reward_func_names, whole_batch=False),
        processing_classes=trainer.reward_processing_classes,
        names=trainer.reward_func_names,
        weights=trainer.reward_weights,
        normalize_first=trainer.multi_objective_aggregation == "normalize_then_sum",
        decode=partial(decode_completions, trainer._tokenizer, trainer.processing_class),
        state=lambda: trainer.state,
        timed=lambda name: profiling_context(trainer, name),
        async_loop=trainer.async_loop if trainer._has_async_funcs else None,
        chat_template_kwargs=trainer.chat_template_kwargs,
        device=trainer.accelerator.device,
        environments=turns.environments if isinstance(turns, ToolTurns) else None,
    )


def tool_turns(
    trainer: GRPOTrainer, options: AprilOptions, rollout: Rollout | None = None, *, evaluates: bool = False
) -> ToolTurns | RolloutTurns | None:
    """What follows a turn of the model: `rollout`, or the trainer's own tool loop, or nothing if it has no tools."""
    if rollout is None and not trainer.tools and trainer.environment_factories is None:
        return None
    view = copy.copy(trainer)
    lock, view.processing_class = threading.Lock(), copy.deepcopy(trainer.processing_class)
    view._tokenizer = tokenizer = getattr(view.processing_class, "tokenizer", view.processing_class)
    view.vllm_mode, view.max_tool_calling_iterations = "server", 1
    render, threads = view._get_tool_suffix_ids, DaemonThreads("trl-april-tool")
    timeout, args = options.tool_timeout, trainer.args

    def parse(token_ids: list[int], prefix: list[int], environment: str | None) -> Message:
        with lock:
            if not view.tools:  # of an environment without methods; TRL then parses only what it has a format for
                return decode_completions(tokenizer, view.processing_class, [NO_PROMPT], [prefix], [token_ids])[0][0]
            # The trainer has no factories while TRL takes a batch.
            has_own = view.environment_factories is not None
            schemas = view._env_tools[environment] if has_own else trainer.tools
            return parse_response(tokenizer, token_ids, prefix=prefix, tools=schemas)

    def run_calls(
        prompt_ids: list[int], token_ids: list[int], message: Message, budget: int, tools: Tools
    ) -> CallResults:
        use_device(trainer.accelerator.device)
        step, prompts, encoded = copy.copy(view), [], []

        def render_results(messages: list[Message]) -> list[int]:
            encoded.extend(encode_results(messages, takes_images=trainer._is_vlm))
            with lock:
                return render(messages)

        def generate(prompts_with_results: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            prompts.extend(prompts_with_results)
            return [[]], [[]]

        step.max_completion_length, step._generate_single_turn = budget, generate
        step._get_tool_suffix_ids = render_results
        step.tools = []  # else TRL would process images for the forward pass of the next turn
        step._sync_tool_dicts, step._async_tool_dicts = [tools.functions], [tools.coroutines]
        step._batch_environments = [tools.environment]
        _, _, (results,), _, calls, failures, _ = step._tool_call_loop(
            [[]], [prompt_ids], [token_ids], [[message]], [[0.0] * len(token_ids)], None, {}
        )
        fit = bool(prompts)
        return CallResults(results[len(token_ids) :], encoded if fit else [], calls, failures, fit)

    def tokenize(prompt: list[Message], environment: str | None) -> list[int]:
        check_message_images(prompt, "a prompt with the observation of an environment", takes_images=trainer._is_vlm)
        step = copy.copy(view)
        step._batch_environments = [environment]
        with lock:
            (prompt_ids,), _, _ = step._tokenize_prompts([prompt])
        return list(prompt_ids)

    if rollout is not None:
        return RolloutTurns(rollout, lambda prompt: tokenize(prompt, None))
    environments = None
    if trainer.environment_factories is not None:
        if not evaluates or trainer._session is None:
            worth = max(args.num_generations, args.generation_batch_size // args.world_size)
            trainer._places = {
                name: Places(idle, worth, grows=args.world_size == 1)
                for name, idle in trainer._environment_pool.items()
            }
        environments = Environments(
            factories=trainer.environment_factories,
            by_name=trainer._multi_environment,
            places=trainer._places,
            evaluates=evaluates,
            waits=not evaluates or groups_finish_beside_evaluations(trainer),
            tools=trainer._standalone_tools,
            tool_timeout=timeout,
            tokenize=tokenize,
            run_calls=run_calls,
            saves_states=args.save_strategy != SaveStrategy.NO or bool(options.save_on_signal),
            replays=options.replay_environments,
            threads=threads,
        )
    tools = Tools(*tools_by_kind(trainer._standalone_tools, timeout, threads))
    return ToolTurns(
        parse, run_calls, tools, max_iterations=trainer.max_tool_calling_iterations, environments=environments
    )


@contextmanager
def evaluation(trainer: GRPOTrainer) -> Iterator[Evaluation]:
    """What generates the completions of an evaluation."""
    server, options, processes = trainer.vllm_generation, trainer._options, trainer._processes
    turns = tool_turns(trainer, options, trainer._rollout, evaluates=True)
    sampling, budget = sampling_and_budget(trainer)
    vocab_size = trainer.model.config.get_text_config().vocab_size
    found = Evaluation(
        trainer.args,
        turns,
        rollout_engine(options, sampling, server, vocab_size, processes.rank),
        sampling,
        budget=budget,
        tokenize=tokenize_prompts(trainer, turns),
        images_of=sample_images(trainer),
        has_tools=bool(trainer.tools),
        servers=server.servers,
        processes=processes,
        version=trainer.state.global_step,
    )
    try:
        yield found
    finally:
        found.close()
