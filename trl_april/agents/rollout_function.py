"""User-defined rollouts: a coroutine per sample, which generates its turns in sequence.

Invariant: a coroutine sees every token of its sample once and in order, however often requests are cut. A checkpoint
holds no coroutine; on resume it starts anew and is given the recorded turns, as long as it asks for the same turns.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from ..data.admission import check_prompt, prompt_name
from ..engine.images import images_in, prompt_of
from ..errors import ConfigError
from ..pool.samples import FinishReason, Group, Sample
from ..rollout.acting import ResetResult, TurnResult
from ..rollout.event_loop import BackgroundLoop
from ..rollout.user_code import UserCode
from .environments import Restorable
from .tools import complete_turns, is_json


CANCEL_SECONDS = 1.0  # for coroutines to end


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that the model generated.

    Attributes:
        token_ids (`list[int]`):
            The new tokens, including the end token of the turn.
        logprobs (`list[float]`):
            Their log-probabilities in nats, each under the policy version that sampled it.
        finish_reason (`str`):
            `"stop"`, or `"length"` if `max_completion_length` or the server's context is used up. Then the sample has
            no further turn.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Returned:
    """What a coroutine returned: columns of the sample's row for reward functions."""

    columns: dict[str, Any]


class TurnEngine:
    """Generates the turns of a sample, for its rollout coroutine.

    Attributes:
        prompt_ids (`list[int]`):
            Token ids of the row's prompt as TRL renders it. The coroutine may begin with others, unless the row has
            images.
    """

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self._events: SimpleQueue[list[int] | Returned | BaseException] = SimpleQueue()
        self._turn: asyncio.Future[Turn] | None = None

    async def generate(self, token_ids: Sequence[int]) -> Turn:
        """Generates a turn after `token_ids`, and returns it when it is complete, possibly several rounds later.

        In the first call, `token_ids` is the prompt. Each further call continues the sample: everything so far, and
        then at least a token that the model did not generate, which is masked in the loss. If these tokens use up
        `max_completion_length`, they are dropped, and the turn is empty with the finish reason `"length"`.

        Args:
            token_ids (`Sequence[int]`):
                The prompt, the completion so far, and what follows it.

        Raises:
            ConfigError: If another turn is being generated.
        """
        if self._turn is not None:
            raise ConfigError("generate was called during another call. Await the turns of a sample in sequence.")
        self._turn = asyncio.get_running_loop().create_future()
        try:
            self._events.put(list(token_ids))
            return await self._turn
        finally:
            self._turn = None

    def _answer(self, turn: Turn) -> None:
        """Return `turn` from the call of `generate` that waits. On its event loop."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(turn)


Rollout = Callable[[Any, TurnEngine, dict[str, Any]], Awaitable[dict[str, Any] | None]]


class _Episode:
    """The coroutine of a sample. Its methods are called outside of the event loop's thread."""

    def __init__(self, rollout: Rollout, row: dict[str, Any], engine: TurnEngine, loop: BackgroundLoop) -> None:
        self._loop, self.engine = loop, engine

        async def run() -> None:
            event: Returned | BaseException
            try:
                event = Returned(checked_columns(await rollout(row["prompt"], self.engine, row)))
            except BaseException as error:  # including exits, which would end the event loop
                event = error
            self.engine._events.put(event)

        def start() -> None:
            self._task = asyncio.get_running_loop().create_task(run())

        loop.call(start)

    def next(self) -> list[int] | Returned:
        """Wait for its next request, the ids before a turn, or for its end. Raises its errors."""
        event = self.engine._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def answer(
        self, token_ids: Sequence[int], logprobs: Sequence[float], reason: FinishReason
    ) -> list[int] | Returned:
        """Return a turn from `generate`, and wait for its next request."""
        turn = Turn([*token_ids], [*logprobs], str(reason))
        self._loop.call(lambda: self.engine._answer(turn))
        return self.next()

    def cancel(self) -> None:
        """Cancel the coroutine."""
        self._loop.call(lambda: self._task.cancel())


class RolloutTurns(Restorable):
    """Runs the coroutine of each sample between its turns; an `Act` of the driver.

    `tokenize` returns the token ids of a prompt, in any thread.
    """

    lost_because = "given the recorded turns, their rollouts did not ask for the same turns"

    def __init__(self, rollout: Rollout, tokenize: Callable[[Any], list[int]], user_code: UserCode) -> None:
        self._rollout, self._tokenize = rollout, tokenize
        self.user_code, self.threads = user_code, user_code.threads("rollout-function-steps")
        self._loop = BackgroundLoop("trl-april-rollout-functions")
        self._episodes: dict[tuple[int, int], _Episode] = {}

    def __call__(self, group: Group, sample: Sample) -> TurnResult | ResetResult:
        conversation = sample.conversation
        assert conversation is not None
        if conversation.awaits_reset:
            self._episodes[sample.key] = episode = self._begin(group)
            return ResetResult(None, self._checked_prompt(group, episode))
        assert conversation.turn_ended is not None
        episode, start = self._episodes[sample.key], conversation.turn_start
        event = episode.answer(sample.token_ids[start:], sample.logprobs[start:], conversation.turn_ended)
        if not isinstance(event, Returned):
            added = _added(sample, [*group.prompt_ids_of(sample), *sample.token_ids], event)
            if len(added) < group.remaining(sample):
                return TurnResult([], added, is_complete=False)
            event = episode.answer([], [], FinishReason.LENGTH)
            if not isinstance(event, Returned):
                raise ConfigError(
                    f"The rollout of {sample} asked for a turn with its {group.budget_of(sample)} tokens used up "
                    "(max_completion_length). Return when finish_reason is 'length'."
                )
        del self._episodes[sample.key]
        return TurnResult([], [], columns=event.columns)

    def close(self) -> None:
        """Cancel the coroutines, without waiting for those that block."""
        for episode in self._episodes.values():
            episode.cancel()
        self._loop.call(lambda: asyncio.get_running_loop().call_later(CANCEL_SECONDS, asyncio.get_running_loop().stop))
        self.threads.shutdown()

    def _begin(self, group: Group) -> _Episode:
        row = copy.deepcopy(group.row)
        return _Episode(self._rollout, row, TurnEngine(self._tokenize(prompt_of(group.row))), self._loop)

    def _checked_prompt(self, group: Group, episode: _Episode) -> list[int]:
        event = episode.next()
        if isinstance(event, Returned) or not event:
            raise ConfigError(
                f"The rollout of group {group.group_id} did not begin with a turn after its prompt. Await "
                "engine.generate(engine.prompt_ids) at least once."
            )
        if event != episode.engine.prompt_ids and images_in(prompt_of(group.row)):
            raise ConfigError(
                f"The rollout of group {group.group_id} began with other token ids than engine.prompt_ids, but its "
                "row has images, and only engine.prompt_ids has their places. Begin with "
                "engine.generate(engine.prompt_ids)."
            )
        check_prompt(group.budget, len(event), prompt_name(group.row, group.row_index))
        return event

    def _restore(self, group: Group, sample: Sample) -> bool:
        """Give a new coroutine the recorded turns. Returns whether it asked for the same turns."""
        if sample.finish_reason is not None:
            return True
        prompt_ids, token_ids, logprobs = group.prompt_ids_of(sample), sample.token_ids, sample.logprobs
        episode = self._begin(group)
        is_same = episode.next() == prompt_ids
        for start, end, next_start in complete_turns(sample):
            if is_same:
                asked = episode.answer(token_ids[start:end], logprobs[start:end], FinishReason.STOP)
                is_same = asked == [*prompt_ids, *token_ids[:next_start]]
        if is_same:
            self._episodes[sample.key] = episode
        else:
            episode.cancel()
        return is_same


def _added(sample: Sample, known: list[int], asked: list[int]) -> list[int]:
    """The tokens that a rollout adds to its sample."""
    if len(asked) <= len(known) or asked[: len(known)] != known:
        raise ConfigError(
            f"The rollout of {sample} asked for a turn after {len(asked)} tokens, which do not continue its "
            f"{len(known)} tokens. Pass the prompt, every token of the turns so far, and at least a token more."
        )
    return asked[len(known) :]


def checked_columns(returned: Any) -> dict[str, Any]:
    """The columns for reward functions that a rollout returned."""
    columns = {} if returned is None else returned
    if not isinstance(columns, dict) or "prompt" in columns or not is_json(columns):
        raise ConfigError(
            f"A rollout returned {returned!r:.200}. Return None, or a dict of columns for the reward functions, with "
            "values that JSON can hold and without 'prompt'."
        )
    return columns
