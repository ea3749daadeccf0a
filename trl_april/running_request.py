"""A request while it runs: how much of it has arrived, when, and under which policy versions it was sampled.

The invariant owned here: a token belongs to the version whose weights sampled it, whenever it arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from .engine import Chunk, GenerationRequest
from .errors import EngineError
from .round import Span
from .types import Sample


class RunningRequest:
    """What is noted of a request.

    Args:
        request (`GenerationRequest`):
            As it is sent.
        sample (`Sample`):
            What it is for.
        version (`int`):
            Policy version that the engine has the weights of.
        asked (`float`):
            When it was asked for, on the event loop's clock. Requests that are asked for together are sent one after
            the other.
    """

    __slots__ = ("sample", "_request", "_version", "_changes", "_received", "_began", "_before", "_first", "_head")

    def __init__(self, request: GenerationRequest, sample: Sample, version: int, asked: float) -> None:
        self.sample = sample
        self._request = request
        self._version = version  # of the next token to arrive
        self._changes: list[tuple[int, int]] = []  # behind so many tokens of the request, another version
        self._received = 0
        self._began = asked
        self._before = 0  # tokens of the request that are of earlier rounds
        self._first: float | None = None
        self._head = 0

    def version_changes(self, after: int, version: int) -> None:
        """What the engine generates behind `after` tokens of this request is of another version.

        Args:
            after (`int`):
                Tokens that it had generated when its weights changed, those among them that have not arrived yet.
            version (`int`):
                The new one.

        Raises:
            EngineError: If more have arrived than it is said to have generated.
        """
        if after < max(self._received, self._changes[-1][0] if self._changes else 0):
            raise EngineError(
                f"The engine says of request {self._request.request_id} that it has generated {after} tokens, and "
                f"{self._received} have arrived."
            )
        self._changes.append((after, version))

    def arrived(self, chunk: Chunk) -> Iterator[tuple[Chunk, int]]:
        """The chunk in pieces of one policy version each."""
        if self._first is None and chunk.token_ids:
            self._first, self._head = _now(), len(chunk.token_ids)
        start = 0
        while self._changes and self._changes[0][0] <= self._received + len(chunk.token_ids):
            after, version = self._changes.pop(0)
            stop = after - self._received
            if stop > start:
                yield Chunk(chunk.token_ids[start:stop], chunk.logprobs[start:stop]), self._version
            start, self._version = stop, version
        self._received += len(chunk.token_ids)
        yield Chunk(chunk.token_ids[start:], chunk.logprobs[start:], chunk.finish_reason), self._version

    @property
    def has_begun(self) -> bool:
        """Whether a token has arrived."""
        return self._received > 0

    def enter_round(self, now: float) -> None:
        """It runs when a round is opened: what it generates from here on is of this round."""
        self._began = now
        # How far it was when it was held the engine has said; otherwise what has arrived is all that is known.
        self._before = max(self._received, self._changes[-1][0] if self._changes else 0)
        if self._before:
            self._first, self._head = now, 0

    def span(self) -> Span:
        """What is of this round, if it were to end now."""
        ended, held = _now(), self._request.generated + self._before
        return Span(
            self.sample.group_id, self.sample.index, self._began, ended if self._first is None else self._first,
            self._head, ended,
            tokens=max(0, len(self.sample) - held),  # some of before may still be on their way
            prompt=len(self._request.token_ids) + self._before,
            held=held,
            finished=self.sample.finish_reason is not None,
        )  # fmt: skip


def _now() -> float:
    return asyncio.get_running_loop().time()
