"""From the rows of TRL's trainer to requests: datasets, prompts, sampling options and limits.

Invariant: threads use their own tokenizer. If another thread changes a tokenizer's truncation or padding meanwhile, it
silently renders other tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import IntervalStrategy
from trl import GRPOTrainer

from ..agents.rollout_function import RolloutTurns
from ..agents.tools import ToolTurns
from ..config import AprilOptions
from ..data.admission import check_longest
from ..data.order import TrainingRows
from ..data.source import Row
from ..data.stream import SharedStream
from ..engine.images import SampleImages, prompt_of
from ..engine.sampling import SamplingOptions, sampling_of
from ..errors import ConfigError
from ..pool.budget import Budget
from . import compatibility
from .hand_over import replaced


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
    """Return TRL's tokenization of rows; it yields no ids if an environment or a rollout function makes the prompt."""
    if trainer.environment_factories is None and not isinstance(turns, RolloutTurns):
        return lambda rows: trainer._tokenize_prompts([prompt_of(row) for row in rows])[0]
    return lambda rows: [[] for _ in rows]


def begun(prompt_ids: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Add a first token to empty prompts, since a vLLM server refuses empty prompts.

    The token is BOS, as in transformers, or else EOS: a model without BOS was trained on texts that follow EOS.
    """
    first = next((id for id in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id is not None), None)
    if first is None and not all(prompt_ids):
        raise ConfigError(
            "A prompt has no tokens, and the tokenizer has no BOS or EOS token to begin with. Leave the row out "
            "(dataset.filter), or set the tokenizer's bos_token."
        )
    return [ids or [first] for ids in prompt_ids]


def sampling(trainer: GRPOTrainer) -> SamplingOptions:
    """Return the current sampling options.

    End tokens are read again, since the model or the tokenizer may have changed since the trainer was constructed.
    """
    trainer.eos_token_ids = compatibility.end_tokens(trainer)
    kwargs, tokenizer = trainer.args.generation_kwargs or {}, trainer._tokenizer
    if kwargs.get("stop"):
        tokenizer = copy.deepcopy(tokenizer)  # a copy for the event loop
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
    """Check, before training, the longest prompts of all datasets that will be evaluated during training."""
    if trainer.args.eval_strategy == IntervalStrategy.NO or trainer.args.process_index > 0:
        return
    given = trainer.eval_dataset
    for name, dataset in given.items() if isinstance(given, dict) else [("", given)]:
        if isinstance(dataset, (Dataset, IterableDataset)):
            rows = TrainingRows(dataset, lambda rows: rows, lambda: [])
            check_longest(budget, rows, tokenize_prompts(trainer, turns), f"evaluation {name}".rstrip())


def sample_images(trainer: GRPOTrainer, options: AprilOptions | None = None) -> SampleImages:
    """The images of samples, as the engine takes them. In training, `options` must allow images."""

    def check() -> None:
        if not trainer._is_vlm:
            raise ConfigError(
                "A prompt has images, and the model or its processing_class takes text only. Train a vision-language "
                "model with its processor."
            )
        if options is not None:
            compatibility.check_images(options)

    return SampleImages(trainer.vllm_generation._place_features, check)
