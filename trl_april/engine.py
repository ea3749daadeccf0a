"""What a rollout engine is: it streams the tokens of a request and can be told to cut requests short.

A request id identifies one request for ever; ids are never reused. After [`RolloutEngine.abort`] the stream of an
aborted request still delivers the tokens generated so far, and then ends with `finish_reason="abort"`. A request that
finished in the same instant ends with its own reason instead.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request for one sample.

    Args:
        request_id (`str`):
            Unique id, chosen by the caller.
        token_ids (`list[int]`):
            The prompt, followed by what the sample already has.
        generated (`int`):
            How many of `token_ids` are the sample's own (0 for a fresh sample).
        max_tokens (`int`):
            Tokens that may still be generated, at least 1.
        cache_salt (`str`):
            Requests share KV blocks only with requests of the same salt.
        seed (`int`, *optional*):
            Seed of this request's sampling.
    """

    request_id: str
    token_ids: list[int]
    generated: int
    max_tokens: int
    cache_salt: str
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream.

    Args:
        token_ids (`list[int]`, shape `(n,)`):
            New tokens, possibly none.
        logprobs (`list[float]`, shape `(n,)`):
            Log-probability of each under the distribution that it was sampled from.
        finish_reason (`str`, *optional*):
            `"stop"`, `"length"` or `"abort"` in the last chunk, `None` before.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None


class RolloutEngine(Protocol):
    """The engine as the round driver sees it. All methods are called from one event loop."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the tokens of `request`; the last chunk carries a finish reason.

        Raises:
            ServerError: If the engine went away; asking again from the prefix that arrived may work.
            EngineError: If the engine refuses the request or its answer makes no sense; asking again is no use.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cut these requests short; unknown or finished ids are ignored. `request_ids` is never empty."""
        ...

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        """How many tokens each of these requests has generated, while the engine stands still for a weight sync.

        Tokens that have not been streamed yet are among them. Requests that it does not know, or that have ended, are
        left out.

        Raises:
            ServerError: If it does not say, or does not stand still.
        """
        ...

    async def holds(self, version: int) -> bool:
        """Whether the engine answers, and samples from the weights of this policy version. Raises nothing."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
