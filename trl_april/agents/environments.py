"""The environments of samples: each sample has an instance from its reset until its group is scored.

Invariant: an instance belongs to a single sample at a time, and is free again only after the rewards of that sample
were computed. An instance that took too long is never used again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..data.admission import check_prompt, prompt_name
from ..data.row_json import encode_messages
from ..data.source import copy_row
from ..distributed.processes import get_logger
from ..engine.images import prompt_of
from ..errors import ConfigError
from ..pool.samples import Conversation, Group, Sample
from ..rollout.acting import Full, Places, ResetResult
from ..rollout.user_code import DaemonThreads, UserCode
from .tools import Message, RunCalls, ToolCalls, Tools, complete_turns, is_json


logger = get_logger(__name__)

NO_PROMPT = [{"role": "user", "content": ""}]  # TRL's prompt for a row whose environment provides the prompt
NOT_TOOLS = ("reset", "get_reward")  # public methods that are not tools
MAX_RESETS = 3  # instances that are tried for a sample while each takes too long


@dataclass(eq=False, slots=True)
class Occupied:
    """An instance that belongs to a sample."""

    name: str | None  # of its factory, if there are several
    instance: Any
    tools: Tools = field(default_factory=lambda: Tools({}, {}))
    is_new: bool = False  # not yet reset
    is_late: bool = False  # a method took too long, and may still run

    def mark_late(self) -> None:
        self.is_late = True


class Restorable:
    """State of samples that checkpoints store partly or not at all, and that is rebuilt when training resumes."""

    lost_because = ""
    user_code: UserCode
    threads: DaemonThreads
    num_restored = num_restarted = 0  # samples with tokens, since the last `take_restored`

    def restore(self, groups: Sequence[Group]) -> list[Sample]:
        """Rebuild the state of unscored groups from a checkpoint. Returns samples that replace lost samples."""
        lacking = [
            (group, sample)
            for group in groups
            if group.score is None
            for sample in group.samples
            if sample.conversation is not None and not sample.conversation.awaits_reset
        ]
        restored = self.user_code.gather(self.threads.submit(self._try_to_restore, *pair) for pair in lacking)
        found = [(sample, new) for (_, sample), new in zip(lacking, restored, strict=True) if new is not sample]
        self.num_restarted = sum(len(sample) > 0 for sample, _ in found)
        self.num_restored = sum(
            new is sample and len(sample) > 0 and sample.finish_reason is None
            for (_, sample), new in zip(lacking, restored, strict=True)
        )
        if self.num_restarted:
            lost = sum(len(sample) - len(new) for sample, new in found)
            logger.warning(
                f"{self.num_restarted} samples start again, and lose {lost:,} tokens: {self.lost_because}. "
                "See docs/tools.md."
            )
        return [new for _, new in found]

    def take_restored(self) -> tuple[int, int]:
        """Return how many unfinished samples kept all tokens, and how many lost tokens, since the last call."""
        counts = self.num_restored, self.num_restarted
        self.num_restored = self.num_restarted = 0
        return counts

    def _try_to_restore(self, group: Group, sample: Sample) -> Sample:
        """Return the sample, or its replacement if its state is lost."""
        try:
            restored = self._restore(group, sample)
        except Exception as error:  # raised by user code
            logger.warning(f"{sample} could not be restored: {error!r}.")
            restored = None
        return Sample(*sample.key, conversation=Conversation(awaits_reset=True)) if restored is None else restored

    def _restore(self, group: Group, sample: Sample) -> Sample | None:
        """Rebuild the state of a sample, in a thread. Returns the sample, its replacement, or `None` to start over."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class Environments(Restorable):
    """Resets, restores and reuses the environment instances of a process. Its methods run in any thread."""

    lost_because = (
        "the checkpoint does not hold the states of their environments (`_april_state`, `replay_environments`)"
    )

    factories: dict[str | None, Callable[[], Any]]
    by_name: bool  # whether the column `environment` of a row names its factory
    places: dict[str | None, Places]  # the instances of each factory, which an evaluation shares with training
    evaluates: bool  # then no sample waits: samples of training may wait for instances that an evaluation holds
    tools: Sequence[Callable[..., Any]]  # of all samples, in addition to the methods of their environments
    calls: ToolCalls
    tokenize: Callable[[list[Message], str | None], list[int]]  # of a prompt, with the tools of an environment
    run_calls: RunCalls
    saves_states: bool
    replays: bool  # whether to repeat the recorded calls of instances without a saved state
    _occupied: dict[tuple[int, int], Occupied] = field(default_factory=dict)  # by sample

    def __post_init__(self) -> None:
        self.user_code, self.threads = self.calls.user_code, self.calls.threads

    def reset(self, group: Group, sample: Sample) -> ResetResult:
        """Reset an instance for a new sample with its dataset row, or another instance if that takes too long."""
        attempt = 0
        while True:
            try:
                occupied = self._occupy(group)
                prompt, prompt_ids = self._reset(occupied, group)
                break
            except Full as full:
                if self.evaluates:
                    raise ConfigError(
                        f"{full} An evaluation needs an environment for each row of its batch, in addition to those "
                        "that samples in flight use. Raise their limit, or lower per_device_eval_batch_size or "
                        "over_provisioning."
                    ) from full
            except TimeoutError as error:
                if not occupied.is_late:  # raised by the environment itself
                    raise
                self._put_back(occupied)
                attempt += 1
                if attempt == MAX_RESETS:
                    raise ConfigError(
                        f"{error} {MAX_RESETS} instances in a row took too long. Find out what they wait for, or "
                        "raise tool_timeout."
                    ) from None
        self._occupied[sample.key] = occupied
        return ResetResult(prompt, prompt_ids, self.state_of(sample))

    def tools_of(self, sample: Sample) -> Tools:
        """The tools that the sample may call."""
        return self._occupied[sample.key].tools

    def state_of(self, sample: Sample) -> Any:
        """The state of the sample's environment for checkpoints; `None` if it cannot be saved."""
        occupied = self._occupied[sample.key]
        if not self.saves_states or occupied.is_late or not hasattr(type(occupied.instance), "_april_state"):
            return None
        state = self.user_code.wrapped(occupied.instance._april_state, "_april_state", of=occupied.instance)()
        if not is_json(state):
            raise ConfigError(
                f"_april_state of {type(occupied.instance).__name__} returned {state!r:.200}, which JSON cannot hold. "
                "Return dicts with text as keys, lists, text, numbers, booleans or None."
            )
        return copy.deepcopy(state)

    def of(self, groups: Sequence[Group]) -> list[Any]:
        """The instances of finished groups, sample by sample, for reward functions."""
        return [self._occupied[sample.key].instance for group in groups for sample in group.samples]

    def release(self, groups: Sequence[Group]) -> None:
        """Release the instances of scored groups for other samples."""
        for group in groups:
            for sample in group.samples:
                self._put_back(self._occupied.pop(sample.key))
            self.places[self._name_of(group)].release(self._key(group))

    def close(self) -> None:
        """End the threads of instances in use. Idle instances keep their threads for later use."""
        self.user_code.release(occupied.instance for occupied in self._occupied.values())

    def _key(self, group: Group) -> tuple[bool, int]:
        return not self.evaluates, group.group_id  # evaluations first

    def _name_of(self, group: Group) -> str | None:
        return group.row.get("environment") if self.by_name else None

    def _occupy(self, group: Group, *, waits: bool = True) -> Occupied:
        name = self._name_of(group)
        if name not in self.factories:
            raise ConfigError(
                f"Row {group.row_index} of the training dataset has environment={name!r}, and environment_factory has "
                f"{', '.join(map(repr, self.factories))}. Correct the row, or add the factory."
            )
        instance = self.places[name].take(self._key(group), len(group.samples), waits=waits and not self.evaluates)
        occupied = Occupied(name, instance, is_new=instance is None)
        if instance is None:
            occupied.instance = self._open(occupied, self.factories[name])
        shared = self.calls.by_kind(self.tools)
        methods = self.calls.by_kind(tool_methods(occupied.instance), occupied.instance, occupied.mark_late)
        occupied.tools = Tools(shared[0] | methods[0], shared[1] | methods[1], name)
        return occupied

    def _open(self, occupied: Occupied, call: Callable[[], Any]) -> Any:
        """Call a new instance or its factory. Raises [`Full`] if it fails because no more instances can be open."""
        try:
            return call()
        except Exception as error:
            places, was_known = self.places[occupied.name], self.places[occupied.name].limit is not None
            if not occupied.is_new or occupied.is_late or not places.failed():
                raise
            if not was_known:
                logger.warning_once(
                    f"No more than {places.limit} environments (factory {occupied.name!r}) can be open at once: "
                    f"{error!r:.300}. Further samples wait for a free environment. To have enough for all samples in "
                    "flight, raise the limit (max_concurrent_envs of an OpenEnv server), or lower over_provisioning."
                )
            self.user_code.release([occupied.instance])
            raise Full(f"All {places.limit} environments are in use.") from error

    def _in_thread(self, occupied: Occupied, name: str) -> Callable[..., Any]:
        """Return a method that runs in the instance's thread and must return within `tool_timeout`."""
        of_instance = f"{name} of {type(occupied.instance).__name__}"
        method = getattr(occupied.instance, name)
        return self.calls.in_time(method, of_instance, occupied.instance, occupied.mark_late)

    def _put_back(self, occupied: Occupied) -> None:
        if occupied.is_late:
            self.user_code.release([occupied.instance])
            self.places[occupied.name].opened(0 if occupied.is_new else -1)
            return
        self._mark_open(occupied)
        self.places[occupied.name].put_back(occupied.instance)

    def _mark_open(self, occupied: Occupied) -> None:
        if occupied.is_new:
            self.places[occupied.name].opened()
            occupied.is_new = False

    def _reset(self, occupied: Occupied, group: Group) -> tuple[list[Message] | None, list[int]]:
        """Reset an instance. Returns the prompt, unless it is the dataset row's, and its token ids."""
        row = copy_row(group.row)
        arguments = {key: value for key, value in row.items() if key != "environment" or not self.by_name}
        observation = self._open(occupied, partial(self._in_thread(occupied, "reset"), **arguments))
        self._mark_open(occupied)
        prompt = with_observation(copy.deepcopy(group.row.get("prompt", NO_PROMPT)), observation)
        try:
            encoded = encode_messages(prompt)
        except TypeError as error:
            raise ConfigError(
                f"reset of {type(occupied.instance).__name__} returned {observation!r:.200}. A checkpoint cannot hold "
                f"{error}. Return text, or a list of blocks of text and images."
            ) from None
        prompt_ids = self.tokenize(prompt_of({**group.row, "prompt": prompt}), occupied.name)
        name = prompt_name({"prompt": prompt}, group.row_index)
        check_prompt(group.budget, len(prompt_ids), f"{name} after the reset of its environment")
        return None if observation is None and "prompt" in group.row else encoded, prompt_ids

    def _restore(self, group: Group, sample: Sample) -> Sample | None:
        conversation = sample.conversation
        assert conversation is not None
        occupied = self._occupy(group, waits=False)
        if conversation.environment is not None and hasattr(type(occupied.instance), "_april_restore"):
            state = copy.deepcopy(conversation.environment)
            self._open(occupied, partial(self._in_thread(occupied, "_april_restore"), state))
            self._mark_open(occupied)
        elif not self.replays or not self._replay(occupied, group, sample):
            self._put_back(occupied)
            return None
        self._occupied[sample.key] = occupied
        return sample

    def _replay(self, occupied: Occupied, group: Group, sample: Sample) -> bool:
        """Reset the instance and repeat the calls of complete turns. Returns whether all results are the same."""
        conversation, token_ids = sample.conversation, sample.token_ids.tolist()
        assert conversation is not None
        if self._reset(occupied, group) != (conversation.prompt, conversation.prompt_ids):
            return False
        turns: list[list[Message]] = []  # the assistant's message, then the results
        for message in conversation.messages:
            if message["role"] == "tool":
                turns[-1].append(message)
            else:
                turns.append([message])
        ends = [end for _, end, _ in complete_turns(sample)]
        ends += [len(token_ids)] * (conversation.iterations - len(ends))  # the last results may not have fit
        prompt_ids, budget = conversation.prompt_ids or [], group.budget_of(sample)
        for (message, *results), end in zip(turns, ends, strict=False):
            again = self.run_calls(prompt_ids, token_ids[:end], message, budget, occupied.tools)
            if again.messages[1:] != results:
                return False
        return not occupied.is_late


def with_observation(prompt: list[Message], observation: Any) -> list[Message]:
    """The prompt followed by the observation that `reset` returned, as TRL joins them."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def tool_methods(instance: Any) -> Iterable[Callable[..., Any]]:
    """The methods of an environment that the model may call, as TRL finds them."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if name not in NOT_TOOLS and not name.startswith("_")]
