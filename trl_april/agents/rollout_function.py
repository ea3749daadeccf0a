"""User-defined rollouts: a coroutine or function per sample, which generates its turns in sequence.

Invariant: a rollout sees every token of its sample once and in order, however often requests are cut. A checkpoint
holds no rollout: on resume, it starts over and gets the recorded turns as long as it asks for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from inspect import iscoroutinefunction
from queue import Empty
from typing import Any

from ..data.admission import check_prompt, prompt_name
from ..data.source import copy_row
from ..distributed.processes import get_logger
from ..engine.images import images_in, prompt_of
from ..errors import ConfigError
from ..pool.samples import FinishReason, Group, Sample
from ..rollout.acting import ResetResult, TurnResult
from ..rollout.event_loop import BackgroundLoop
from ..rollout.user_code import UserCode
from .branches import branch_for, branches_of
from .environments import MAX_RESETS, Restorable
from .tools import is_json
from .turn_engine import AddressOf, Asked, NoRoom, Returned, Turn, TurnEngine


logger = get_logger(__name__)

CANCEL_SECONDS = 1.0  # for canceled coroutines to end
MAX_REFUSED = 32  # requests without room after which a sample ends
FILES_PER_SAMPLE = 5  # its request, and both ends of a connection to its address or the pipes of a program


Rollout = Callable[[Any, TurnEngine, dict[str, Any]], Awaitable[dict[str, Any] | None] | dict[str, Any] | None]
_Answer = tuple[Sequence[int], Sequence[float], FinishReason]


class _Late(Exception):
    """A rollout neither asked for a turn nor returned in time."""


class _Episode:
    """The rollout of a sample: a coroutine, or a function in a thread. Its methods are called in other threads."""

    def __init__(self, acts: RolloutTurns, row: dict[str, Any], engine: TurnEngine) -> None:
        self._timeout, self._loop, self.engine = acts.timeout, acts.loop, engine
        self._task: asyncio.Task[None] | None = None
        rollout = acts.rollout

        async def run() -> None:
            event: Returned | BaseException
            try:
                event = Returned(checked_columns(await rollout(row["prompt"], engine, row)))  # type: ignore[misc]
            except BaseException as error:  # including exits, which would end the event loop
                event = error
            engine._events.put(event)

        def call() -> None:
            event: Returned | BaseException
            try:
                event = Returned(checked_columns(rollout(row["prompt"], engine, row)))
            except BaseException as error:  # the training thread must learn of it
                event = error
            engine._events.put(event)

        def start() -> None:
            self._task = asyncio.get_running_loop().create_task(run())

        if iscoroutinefunction(rollout) or iscoroutinefunction(type(rollout).__call__):
            self._loop.call(start)
        else:
            acts.functions.submit(call)

    def next(self) -> Asked | Returned:
        """Wait for the rollout's next request or its end. Raises the rollout's errors, and `_Late`."""
        try:
            event = self.engine._events.get(timeout=self._timeout)
        except Empty:
            raise _Late from None
        if not isinstance(event, Asked):
            self.engine._close()
        if isinstance(event, BaseException):
            raise event
        return event

    def answer(self, token_ids: Sequence[int], logprobs: Sequence[float], reason: FinishReason) -> Asked | Returned:
        """Answer the waiting request with a turn, and wait for the next request."""
        self.engine._answer(Turn([*token_ids], [*logprobs], str(reason)))
        return self.next()

    def refuse(self, sentence: str) -> Asked | Returned:
        """Refuse the waiting request, and wait for the next request."""
        self.engine._answer(NoRoom(sentence))
        return self.next()

    def cancel(self) -> None:
        """Cancel the coroutine, or close the function's address."""
        self._loop.call(lambda: self._task and self._task.cancel())
        self.engine._close()


class RolloutTurns(Restorable):
    """Runs the rollout of each sample between its turns; an `Act` of the driver.

    `tokenize` returns the token ids of a prompt, in any thread. A rollout that takes more than `timeout` seconds
    between two turns is abandoned, and its sample is complete. `address_of` opens the addresses of samples.
    """

    lost_because = "given the recorded turns, their rollouts did not ask for the same turns"

    def __init__(
        self,
        rollout: Rollout,
        tokenize: Callable[[Any], list[int]],
        user_code: UserCode,
        *,
        timeout: float | None = None,
        address_of: AddressOf | None = None,
        close_addresses: Callable[[], None] = lambda: None,
    ) -> None:
        self.rollout, self._tokenize, self.timeout = rollout, tokenize, timeout
        self.user_code, self.threads = user_code, user_code.threads("rollout-function-steps")
        self.functions = user_code.threads("rollout-functions")
        self.loop = BackgroundLoop("trl-april-rollout-functions")
        self._address_of, self._close_addresses = address_of, close_addresses
        self._episodes: dict[tuple[int, int], _Episode] = {}
        self._columns: dict[str, None] = {}  # names that rollouts have returned
        self._warned: set[str] = set()

    def __call__(self, group: Group, sample: Sample) -> TurnResult | ResetResult:
        conversation = sample.conversation
        assert conversation is not None
        if conversation.awaits_reset:
            return self._reset(group, sample)
        assert conversation.turn_ended is not None
        episode, start, columns = self._episodes[sample.key], conversation.turn_start, None
        try:
            event = episode.answer(sample.token_ids[start:], sample.logprobs[start:], conversation.turn_ended)
            for _ in range(MAX_REFUSED):
                if isinstance(event, Returned):
                    columns = event.columns
                    break
                if (result := self._turn_after(group, sample, event)) is not None:
                    return result
                event = self._refuse(episode, group, sample, event)
        except _Late:
            self._warn_once(
                "late",
                f"The rollout of {sample} neither asked for a turn nor returned within {self.timeout:g} seconds "
                "(tool_timeout). Its sample ends there, and its columns for reward functions are None.",
            )
        del self._episodes[sample.key]
        if columns is None:
            episode.cancel()
            columns = dict(self._columns)
        self._columns |= dict.fromkeys(columns)
        return TurnResult([], [], columns=columns)

    def close(self) -> None:
        """Cancel the rollouts, without waiting for rollouts that block."""
        for episode in [*self._episodes.values()]:
            episode.cancel()
        self._close_addresses()
        self.loop.call(lambda: asyncio.get_running_loop().call_later(CANCEL_SECONDS, asyncio.get_running_loop().stop))
        self.functions.shutdown()
        self.threads.shutdown()

    def _begin(self, group: Group) -> _Episode:
        row = copy_row(group.row)
        return _Episode(self, row, TurnEngine(self._tokenize(prompt_of(group.row)), self._address_of))

    def _reset(self, group: Group, sample: Sample) -> ResetResult:
        for _ in range(MAX_RESETS):
            self._episodes[sample.key] = episode = self._begin(group)
            try:
                prompt_ids, limit = self._checked_prompt(group, sample, episode)
                return ResetResult(None, prompt_ids, turn_limit=limit)
            except _Late:
                episode.cancel()
        raise ConfigError(
            f"The rollout of {sample} asked for no turn within {self.timeout:g} seconds (tool_timeout), {MAX_RESETS} "
            "times in a row. Find out what it waits for, or raise tool_timeout."
        )

    def _turn_after(self, group: Group, sample: Sample, asked: Asked) -> TurnResult | None:
        """Return the tokens that lead to the next turn, or `None` if there is no room for it."""
        known = [*group.prompt_ids_of(sample), *sample.token_ids]
        if asked.may_branch and (len(asked.token_ids) <= len(known) or asked.token_ids[: len(known)] != known):
            branch = branch_for(group, sample, asked.token_ids, asked.limit)
            if branch is not None:
                self._warn_once(
                    "branch",
                    f"The rollout of {sample} rewrote its conversation: {asked.difference}. The sample continues from "
                    "the last turn that both have in common, and april/branched_tokens counts the tokens left out.",
                )
            return None if branch is None else TurnResult([], [], branch=branch)
        added = _added(sample, known, asked.token_ids)
        if len(added) >= group.remaining(sample):
            return None
        environment = sample.conversation and sample.conversation.environment
        return TurnResult([], added, is_complete=False, turn_limit=asked.limit, environment=environment)

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(f"{message} Further cases are not reported.")

    def _refuse(self, episode: _Episode, group: Group, sample: Sample, asked: Asked) -> Asked | Returned:
        """Tell the rollout that there is no room for its turn."""
        budget = group.budget_of(sample)
        if asked.may_branch:
            return episode.refuse(
                f"The conversation has {len(asked.token_ids)} tokens. They leave no room for a turn within "
                f"max_completion_length ({group.budget.max_completion_length}) and the server's context."
            )
        event = episode.answer([], [], FinishReason.LENGTH)
        if not isinstance(event, Returned):
            raise ConfigError(
                f"The rollout of {sample} asked for a turn with its {budget} tokens used up (max_completion_length). "
                "Return when finish_reason is 'length'."
            )
        return event

    def _checked_prompt(self, group: Group, sample: Sample, episode: _Episode) -> tuple[list[int], int | None]:
        event = episode.next()
        for _ in range(MAX_REFUSED):
            if isinstance(event, Returned) or not event.may_branch or group.budget.after(len(event.token_ids)) > 0:
                break
            event = self._refuse(episode, group, sample, event)
        if isinstance(event, Returned) or not event.token_ids:
            raise ConfigError(
                f"The rollout of group {group.group_id} did not begin with a turn after its prompt. Await "
                "engine.generate(engine.prompt_ids) at least once, or send a request to engine.base_url."
            )
        if event.token_ids != episode.engine.prompt_ids and images_in(prompt_of(group.row)):
            raise ConfigError(
                f"The rollout of group {group.group_id} began with other token ids than engine.prompt_ids, but its "
                "row has images, and only engine.prompt_ids has their places. Begin with "
                "engine.generate(engine.prompt_ids)."
            )
        what = "first request of the rollout" if event.may_branch else "prompt"
        check_prompt(group.budget, len(event.token_ids), prompt_name(group.row, group.row_index, what))
        return event.token_ids, event.limit

    def _restore(self, group: Group, sample: Sample) -> Sample | None:
        """Replay the recorded turns to a new rollout, as long as it asks for them.

        If an agent asks for a different turn, its sample branches at that point.
        """
        if sample.finish_reason is not None:
            return sample
        assert sample.conversation is not None
        current = [*group.prompt_ids_of(sample), *sample.token_ids[: sample.conversation.turn_start]]
        recorded = _recorded(group, sample)
        episode = self._begin(group)
        refused, restored = 0, None
        try:
            event = episode.next()
            while isinstance(event, Asked) and restored is None and refused < MAX_REFUSED:
                if answers := recorded.get(tuple(event.token_ids)):
                    event = episode.answer(*answers.pop(0))
                elif event.token_ids == current:
                    restored = sample
                elif not event.may_branch:
                    break
                elif (restored := branch_for(group, sample, event.token_ids, event.limit)) is None:
                    event, refused = self._refuse(episode, group, sample, event), refused + 1
        except BaseException:
            episode.cancel()  # its sample starts over with another rollout
            raise
        if restored is None:
            episode.cancel()
        else:
            self._episodes[sample.key] = episode
        return restored


def _recorded(group: Group, sample: Sample) -> dict[tuple[int, ...], list[_Answer]]:
    """Return the turns of all branches in the order of their requests, except a turn not yet delivered."""
    recorded: dict[tuple[int, ...], list[_Answer]] = {}
    for branch in branches_of(group, sample):
        budget = group.budget.after(len(branch.prompt_ids))
        for start, end in branch.turns():
            if end > branch.shared:
                answers = recorded.setdefault((*branch.prompt_ids, *branch.token_ids[:start]), [])
                reason = FinishReason.STOP if end < budget else FinishReason.LENGTH
                answers.append((branch.token_ids[start:end], branch.logprobs[start:end], reason))
    if sample.pending_calls:
        assert sample.conversation is not None
        recorded[(*group.prompt_ids_of(sample), *sample.token_ids[: sample.conversation.turn_start])].pop()
    return recorded


def _added(sample: Sample, known: list[int], asked: list[int]) -> list[int]:
    """Return the tokens that a rollout adds to its sample."""
    if len(asked) <= len(known) or asked[: len(known)] != known:
        raise ConfigError(
            f"The rollout of {sample} asked for a turn after {len(asked)} tokens, which do not continue its "
            f"{len(known)} tokens. Pass the prompt, every token of the turns so far, and at least a token more."
        )
    return asked[len(known) :]


def checked_columns(returned: Any) -> dict[str, Any]:
    """Check and return the columns for reward functions that a rollout returned."""
    columns = {} if returned is None else returned
    if not isinstance(columns, dict) or "prompt" in columns or not is_json(columns):
        raise ConfigError(
            f"A rollout returned {returned!r:.200}. Return None, or a dict of columns for the reward functions, with "
            "values that JSON can hold and without 'prompt'."
        )
    return columns
