"""TRL's tool loop, turn by turn and sample by sample.

Invariant: the loop runs in threads, on a view of the trainer with its own processing class.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

from transformers.trainer_utils import SaveStrategy
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from ..agents.address import AddressServer
from ..agents.command import CommandRollout
from ..agents.environments import NO_PROMPT, Environments
from ..agents.rollout_function import Rollout, RolloutTurns
from ..agents.tools import Message, ToolCalls, Tools, ToolTurns, check_message_images, encode_results
from ..config import AprilOptions
from ..engine.sampling import SAMPLING
from ..rollout.acting import Places, TurnResult
from ..training.rewards import decode_completions
from .chat_format import TrainersChatFormat
from .rewards import use_threads_of_environments


class ToolLoop:
    """Parses, calls, renders and tokenizes as a trainer does.

    Its view of the trainer is a shallow copy that makes a single iteration of the loop and generates nothing.
    """

    def __init__(self, trainer: GRPOTrainer, calls: ToolCalls) -> None:
        self._trainer, self._calls, self._lock = trainer, calls, threading.Lock()
        self._view = view = copy.copy(trainer)
        view.processing_class = copy.deepcopy(trainer.processing_class)
        view._tokenizer = getattr(view.processing_class, "tokenizer", view.processing_class)
        view.vllm_mode, view.max_tool_calling_iterations = "server", 1

    def parse(self, token_ids: list[int], prefix: list[int], environment: str | None) -> Message:
        """The message of a turn, with its tool calls."""
        view = self._view
        with self._lock:
            if not view.tools:  # of an environment without methods; TRL then parses only what it has a format for
                shown = decode_completions(view._tokenizer, view.processing_class, [NO_PROMPT], [prefix], [token_ids])
                return shown[0][0]
            # The trainer has no factories while TRL takes a batch.
            has_own = view.environment_factories is not None
            schemas = view._env_tools[environment] if has_own else self._trainer.tools
            return parse_response(view._tokenizer, token_ids, prefix=prefix, tools=schemas)

    def run_calls(
        self, prompt_ids: list[int], token_ids: list[int], message: Message, budget: int, tools: Tools
    ) -> TurnResult:
        """Run the calls of a message, and render their results as tokens if they fit into the budget."""
        step, prompts, encoded = copy.copy(self._view), [], []

        def render_results(messages: list[Message]) -> list[int]:
            encoded.extend(encode_results(messages, takes_images=self._trainer._is_vlm))
            with self._lock:
                return self._view._get_tool_suffix_ids(messages)

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
        self._calls.check()
        fit = bool(prompts)  # TRL generates after results that fit
        messages = [message, *encoded] if fit else [message]
        return TurnResult(messages, results[len(token_ids) :], calls, failures, is_complete=not fit)

    def tokenize(self, prompt: list[Message], environment: str | None = None) -> list[int]:
        """The ids of a prompt that an environment or a rollout function made."""
        takes_images = self._trainer._is_vlm
        check_message_images(prompt, "a prompt with the observation of an environment", takes_images=takes_images)
        step = copy.copy(self._view)
        step._batch_environments = [environment]
        with self._lock:
            (prompt_ids,), _, _ = step._tokenize_prompts([prompt])
        return list(prompt_ids)


def tool_turns(
    trainer: GRPOTrainer, options: AprilOptions, rollout: Rollout | str | None = None, *, evaluates: bool = False
) -> ToolTurns | RolloutTurns | None:
    """Return the step after each turn of the model: `rollout`, the trainer's tool loop, or `None` without tools."""
    if rollout is None and not trainer.tools and trainer.environment_factories is None:
        return None
    calls = ToolCalls(trainer._april_user_code, options.tool_timeout)
    loop = ToolLoop(trainer, calls)
    if rollout is not None:
        addresses = AddressServer(TrainersChatFormat(trainer), trainer.model.name_or_path, _sampling(trainer))
        return RolloutTurns(
            CommandRollout(rollout) if isinstance(rollout, str) else rollout,
            loop.tokenize,
            trainer._april_user_code,
            timeout=options.tool_timeout,
            address_of=addresses.open,
            close_addresses=addresses.close,
        )
    environments = None
    if trainer.environment_factories is not None:
        environments = _environments(trainer, options, loop, calls, evaluates=evaluates)
    tools, limit = Tools(*calls.by_kind(trainer._standalone_tools)), trainer.max_tool_calling_iterations
    return ToolTurns(loop.parse, loop.run_calls, tools, calls, max_iterations=limit, environments=environments)


def _sampling(trainer: GRPOTrainer) -> dict[str, Any]:
    """Return the sampling options that requests to an address may repeat."""
    server = trainer.vllm_generation  # its options may differ in an evaluation
    given = {name: getattr(server, name) for name in SAMPLING} | (trainer.args.generation_kwargs or {})
    stop = given.get("stop") or []
    return {**given, "stop": [stop] if isinstance(stop, str) else [*stop]}


def _environments(
    trainer: GRPOTrainer, options: AprilOptions, loop: ToolLoop, calls: ToolCalls, *, evaluates: bool
) -> Environments:
    """The environments of the trainer's factories. An evaluation during training shares the instances of training."""
    args = trainer.args
    use_threads_of_environments(trainer)
    if not evaluates or trainer._april_session is None:
        worth = max(args.num_generations, args.generation_batch_size // args.world_size)
        trainer._april_places = {
            name: Places(idle, worth, grows=args.world_size == 1) for name, idle in trainer._environment_pool.items()
        }
    return Environments(
        factories=trainer.environment_factories,
        by_name=trainer._multi_environment,
        places=trainer._april_places,
        evaluates=evaluates,
        tools=trainer._standalone_tools,
        calls=calls,
        tokenize=loop.tokenize,
        run_calls=loop.run_calls,
        saves_states=args.save_strategy != SaveStrategy.NO or bool(options.save_on_signal),
        replays=options.replay_environments,
    )
