"""What sessions and evaluations take from TRL's trainer: rows, models, micro-batches, scoring, turns with tools.

Invariant: work in threads uses a tokenizer of its own. One that another thread truncates or pads meanwhile renders
other tokens, without an error.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import iscoroutinefunction, isfunction
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.extras.profiling import profiling_context

from .agents.environments import NO_PROMPT, Environments
from .agents.rollout_function import Rollout, RolloutTurns
from .agents.tools import CallResults, Message, ToolCalls, Tools, ToolTurns, check_message_images, encode_results
from .config import AprilOptions
from .data.admission import check_longest
from .data.order import TrainingRows
from .data.source import Row
from .data.stream import SharedStream
from .engine.images import SampleImages, prompt_of
from .engine.sampling import SamplingOptions, sampling_of
from .errors import ConfigError
from .pool.budget import Budget
from .rollout.acting import Places
from .training import compatibility
from .training.construction import replaced, rollout_engine
from .training.evaluation import Evaluation
from .training.forward_pass import PerToken, attention_in_blocks, base_attention, with_positions, without_padding
from .training.micro_batches import MicroBatch, filled, regrouped
from .training.rewards import RewardScorer, checked, decode_completions
from .weights.canary import depends_on_width


def rows_in_blocks(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """Let the models of a trainer compute rows in [blocks](training/forward_pass.py) in training, if they can."""
    # Sharded models are not whole before training, and compiled ones would be compiled for each layout.
    cannot = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.torch_compile
    if cannot or trainer.aux_loss_enabled or depends_on_width(trainer.model.config):
        return nullcontext()
    models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
    return attention_in_blocks(models, trainer._processes.any)


def forward_pass(
    trainer: GRPOTrainer, per_token: Callable[..., PerToken], inputs: Mapping[str, Any]
) -> Callable[..., PerToken]:
    """TRL's `per_token` with each row as if it were alone and without padding, as images and the model allow."""
    if not trainer.april_enabled or depends_on_width(trainer.model.config):
        return per_token
    per_token = with_positions(per_token)
    if compatibility.sees_images(inputs):
        return per_token
    return partial(without_padding, per_token, multiple=trainer.pad_to_multiple_of)


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


def read_once(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """Let TRL's data loader and the pool read a stream together, in TRL's order."""
    dataset, args = trainer.train_dataset, trainer.args
    if not isinstance(dataset, IterableDataset):
        return nullcontext()
    if trainer.shuffle_dataset:
        dataset = dataset.shuffle(seed=args.seed)
    quota, uses = args.generation_batch_size // args.num_generations, args.num_iterations * args.steps_per_generation

    def skipped() -> int:
        micro_steps = trainer.state.global_step * args.gradient_accumulation_steps
        return 0 if args.ignore_data_skip else micro_steps // uses * quota

    is_loaded = trainer.accelerator.is_main_process or trainer.accelerator.dispatch_batches is False
    stream = SharedStream(dataset, quota, args.num_generations, uses, skipped, is_loaded=is_loaded)
    return replaced(trainer, train_dataset=stream)


def training_rows(trainer: GRPOTrainer) -> TrainingRows:
    """The training dataset of a trainer in training, in TRL's order."""
    dataset, collate = trainer.train_dataset, trainer.data_collator
    if isinstance(dataset, SharedStream):
        collate = trainer._get_collator_with_removed_columns(collate, description="Rollout")
        makes_prompts = trainer.environment_factories is not None
        acts = bool(trainer._standalone_tools) or makes_prompts
        compatibility.check_row(dataset.first_row(), needs_prompt=not makes_prompts, acts=acts)
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


def begun(prompt_ids: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Prompts with a first token where they are empty, since a vLLM server refuses no tokens.

    As in transformers it is BOS. A model without one was trained on texts that follow EOS.
    """
    first = next((id for id in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id is not None), None)
    if first is None and not all(prompt_ids):
        raise ConfigError(
            "A prompt has no tokens, and the tokenizer has no BOS or EOS token to begin with. Leave the row out "
            "(dataset.filter), or set the tokenizer's bos_token."
        )
    return [ids or [first] for ids in prompt_ids]


def sampling(trainer: GRPOTrainer) -> SamplingOptions:
    """The options of completions from now on.

    They end with the end tokens of now, which the model or the tokenizer may have got since the trainer was made.
    """
    trainer.eos_token_ids = compatibility.end_tokens(trainer)
    kwargs, tokenizer = trainer.args.generation_kwargs or {}, trainer._tokenizer
    if kwargs.get("stop"):
        tokenizer = copy.deepcopy(tokenizer)  # the event loop's own
    skips = kwargs.get("skip_special_tokens", True)
    decode = partial(tokenizer.decode, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
    server = trainer.vllm_generation  # its options may differ in an evaluation
    return sampling_of(server, kwargs, trainer.eos_token_ids, decode)


def budget_of(trainer: GRPOTrainer, sampling: SamplingOptions) -> Budget:
    """The limits of every sample of training and evaluation."""
    server = trainer.vllm_generation
    context_length = server.server_info.max_model_len
    return Budget(trainer.args.max_completion_length, context_length, sampling.min_tokens, server.larger_context)


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
    """Whether groups of training finish and give their environments back during an evaluation. A collective call."""
    options, servers = trainer._options, trainer.vllm_generation.servers
    keeps = trainer._processes.decide(lambda: servers.keeps_requests)  # known to the first process alone
    has_models = any(isinstance(function, torch.nn.Module) for function in trainer.reward_funcs)
    overlaps = bool(trainer._session and options.overlap_generation)
    return overlaps and keeps and not options.dynamic_sampling and not has_models


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
    """Scores groups as the trainer would, in a thread; a reward model may share the trainer's tokenizer."""
    processing_class, of_rewards = copy.deepcopy((trainer.processing_class, trainer.reward_processing_classes))
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return RewardScorer(
        functions=checked(trainer.reward_funcs, trainer.reward_func_names, whole_batch=False),
        processing_classes=of_rewards,
        names=trainer.reward_func_names,
        weights=trainer.reward_weights,
        normalize_first=trainer.multi_objective_aggregation == "normalize_then_sum",
        decode=partial(decode_completions, tokenizer, processing_class),
        state=lambda: trainer.state,
        timed=lambda name: profiling_context(trainer, name),
        async_loop=trainer.async_loop if trainer._has_async_funcs else None,
        chat_template_kwargs=trainer.chat_template_kwargs,
        device=trainer.accelerator.device,
        user_code=trainer._user_code,
        environments=turns.environments if isinstance(turns, ToolTurns) else None,
    )


def _use_threads_of_environments(trainer: GRPOTrainer) -> None:
    """Let the rewards that environments own be computed in the threads of their instances."""

    def in_threads(kind: type) -> Callable[..., list[Any]]:
        call = partial(trainer._user_code.wrapped, name=f"get_reward of {kind.__name__}")
        # As TRL's function, whose default is the class.
        return lambda environments, **kwargs: [
            call(one.get_reward, of=one)() if type(one) is kind else None for one in environments
        ]

    for place, function in enumerate(trainer.reward_funcs):
        is_trls = getattr(function, "__module__", None) == GRPOTrainer.__module__ and isfunction(function)
        if is_trls and not iscoroutinefunction(function):
            trainer.reward_funcs[place] = in_threads(*function.__defaults__)


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
    render, tool_calls = view._get_tool_suffix_ids, ToolCalls(trainer._user_code, options.tool_timeout)
    args = trainer.args

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
        tool_calls.check()
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
        return RolloutTurns(rollout, lambda prompt: tokenize(prompt, None), trainer._user_code)
    environments = None
    if trainer.environment_factories is not None:
        _use_threads_of_environments(trainer)
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
            calls=tool_calls,
            tokenize=tokenize,
            run_calls=run_calls,
            saves_states=args.save_strategy != SaveStrategy.NO or bool(options.save_on_signal),
            replays=options.replay_environments,
        )
    tools, limit = Tools(*tool_calls.by_kind(trainer._standalone_tools)), trainer.max_tool_calling_iterations
    return ToolTurns(parse, run_calls, tools, tool_calls, max_iterations=limit, environments=environments)


@contextmanager
def evaluation(trainer: GRPOTrainer) -> Iterator[None]:
    """Let the completions of an evaluation be generated by the driver of training."""
    server, options, processes = trainer.vllm_generation, trainer._options, trainer._processes
    turns = tool_turns(trainer, options, trainer._rollout, evaluates=True)
    sampled = sampling(trainer)
    vocab_size = trainer.model.config.get_text_config().vocab_size
    found = Evaluation(
        trainer.args,
        turns,
        rollout_engine(options, sampled, server, vocab_size, processes.rank),
        sampled,
        budget=budget_of(trainer, sampled),
        tokenize=tokenize_prompts(trainer, turns),
        images_of=sample_images(trainer),
        has_tools=bool(trainer.tools),
        servers=server.servers,
        processes=processes,
        version=trainer.state.global_step,
    )
    try:
        with replaced(trainer, _evaluation=found):
            yield
    finally:
        found.close()
        if turns is not None:
            turns.close()
        if trainer._session is None:  # outside of training
            server.servers.give_up()
