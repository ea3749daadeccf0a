"""The engine of a rollout, which requests its turns in sequence, from any thread or event loop.

Invariant: at most one request waits for its turn, and none waits once the sample has ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from ..errors import ConfigError


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
    """What a rollout function returned: columns of the sample's row for reward functions."""

    columns: dict[str, Any]


class Asked(NamedTuple):
    """A request for a turn after `token_ids`."""

    token_ids: list[int]
    limit: int | None = None  # maximum tokens of the turn
    may_branch: bool = False  # whether the tokens may differ from those of the sample
    difference: str = ""  # in words, if they differ


class NoRoom(Exception):
    """The tokens of a request leave no room for a turn."""


class Ended(Exception):
    """The sample of a request has ended."""


# Opens an address, with `base_url`, `api_key` and `close()`. Its requests call the given function for turns.
AddressOf = Callable[[Callable[[Asked], Awaitable[Turn]]], Any]


class TurnEngine:
    """Generates the turns of a sample, for its rollout function.

    Attributes:
        prompt_ids (`list[int]`):
            Token ids of the row's prompt as TRL renders it. The rollout may begin with other ids, unless the row has
            images.
    """

    def __init__(self, prompt_ids: list[int], address_of: AddressOf | None = None) -> None:
        self.prompt_ids = prompt_ids
        self._events: SimpleQueue[Asked | Returned | BaseException] = SimpleQueue()
        self._turn: asyncio.Future[Turn] | None = None
        self._lock, self._address_of, self._address = threading.Lock(), address_of, None
        self._is_closed = False
        self._at_close: list[Callable[[], None]] = []

    @property
    def base_url(self) -> str:
        """OpenAI-compatible address of this sample, such as `http://127.0.0.1:40001/8w3k/v1`, until it ends."""
        return str(self._opened().base_url)

    @property
    def api_key(self) -> str:
        """Key of requests to `base_url`."""
        return str(self._opened().api_key)

    async def generate(self, token_ids: Sequence[int]) -> Turn:
        """Generate a turn after `token_ids`, and return it when it is complete, possibly several rounds later.

        In the first call, `token_ids` is the prompt. Each further call continues the sample: all tokens so far, then
        at least one token that the model did not generate. The added tokens are masked in the loss. If they use up
        `max_completion_length`, they are dropped, and the turn is empty with the finish reason `"length"`.

        Args:
            token_ids (`Sequence[int]`):
                The prompt, the completion so far, and the added tokens.

        Raises:
            ConfigError: If another turn is being generated.
        """
        return await self._ask(Asked(list(token_ids)))

    async def _ask(self, asked: Asked) -> Turn:
        with self._lock:
            if self._is_closed:
                raise Ended("The sample has ended.")
            if self._turn is not None:
                raise ConfigError("generate was called during another call. Await the turns of a sample in sequence.")
            self._turn = asyncio.get_running_loop().create_future()
        try:
            self._events.put(asked)
            return await self._turn
        finally:
            self._turn = None

    @property
    def is_closed(self) -> bool:
        """Whether the sample has ended."""
        return self._is_closed

    def at_close(self, function: Callable[[], None]) -> None:
        """Call `function` when the sample ends."""
        with self._lock:
            if not self._is_closed:
                self._at_close.append(function)
                return
        function()

    def _answer(self, turn: Turn | Exception) -> None:
        """Return `turn` from the waiting request, or raise the error there. May be called from any thread."""
        waiting = self._turn

        def settle() -> None:
            assert waiting is not None
            if waiting.done():
                return
            if isinstance(turn, Exception):
                waiting.set_exception(turn)
            else:
                waiting.set_result(turn)

        if waiting is not None:
            with suppress(RuntimeError):  # its event loop is closed
                waiting.get_loop().call_soon_threadsafe(settle)

    def _opened(self) -> Any:
        with self._lock:
            if self._address is None:
                if self._address_of is None or self._is_closed:
                    raise Ended("The sample has ended, and with it its address.")
                self._address = self._address_of(self._ask)
            return self._address

    def _close(self) -> None:
        """Close the address, and call the `at_close` functions."""
        with self._lock:
            self._is_closed, at_close = True, [*self._at_close]
            if self._address is not None:
                at_close.append(self._address.close)
            self._at_close.clear()
        for close in at_close:
            close()
        self._answer(Ended("The sample has ended."))
