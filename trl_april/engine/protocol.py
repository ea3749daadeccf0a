"""The interface between a round and a rollout engine: requests, chunks of their streams, and the engine.

Request ids are never reused. The stream of an aborted request delivers the tokens generated so far and ends with
`finish_reason="abort"`; a request that finished in the same instant ends with its finish reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..errors import ServerError
from ..pool.samples import Group, Sample


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for the next tokens of a sample."""

    request_id: str  # unique, chosen by the caller
    token_ids: list[int]  # the prompt and the tokens of the sample so far
    generated: int  # tokens of the current turn among `token_ids`
    max_tokens: int  # at least 1
    cache_salt: str  # requests share KV blocks only with requests of the same salt
    min_tokens: int = 0  # minimum tokens before the turn may end
    seed: int | None = None
    sample: Sample | None = field(default=None, compare=False)  # its requests can share KV blocks
    version: int = 0  # policy version of the weights
    images: Sequence[Any] = ()  # of type `engine.images.PlacedImages`


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream."""

    token_ids: list[int]  # new tokens, possibly none
    logprobs: list[float]  # of each token, under the distribution it was sampled from
    finish_reason: str | None = None  # "stop", "length" or "abort" in the last chunk, `None` before


class ServerLoad(NamedTuple):
    """The load of a server from all its clients, as its gauges report it."""

    running: int = 0  # requests being decoded
    waiting: int = 0  # requests without a slot or space in the KV cache, including preempted requests
    kv_usage: float = 0.0  # share of the KV cache in use
    preemptions: int = 0  # since the server started


ImagesOf = Callable[[Group, Sample], Sequence[Any]]  # returns the images of a sample in the engine's form


def no_images(group: Group, sample: Sample) -> Sequence[Any]:
    """An `ImagesOf` for samples without images."""
    return ()


class ServerLost(ServerError):
    """The server of a request is lost. The sample can be resumed on another server at once."""


class RequestMaker:
    """Makes the requests of a process. Every request has a different id, and every segment a different seed.

    `run_id` is the prefix of request ids and cache salts. Under `resume_kv="recompute"` the salt is the current policy
    version, so KV blocks of other weights are never hit, even if a cache reset fails. Under `"reuse"` and `"keep"` a
    resumed sample keeps the salt of its first segment, and finds the blocks of all its segments if the engine still
    has them. `images_of` returns the images of a sample.
    """

    def __init__(
        self,
        run_id: str,
        seed: int | None = None,
        *,
        resume_kv: str = "recompute",
        images_of: ImagesOf = no_images,
    ) -> None:
        self._run_id = run_id
        self._seed = seed
        self._images_of = images_of
        self._reuses_kv = resume_kv != "recompute"
        self._count = 0

    def make(self, group: Group, sample: Sample, version: int) -> GenerationRequest:
        """Request the rest of `sample` under policy `version`."""
        self._count += 1
        salt = sample.segments[0].version if self._reuses_kv and len(sample) else version
        turn_length = len(sample) - (sample.conversation.turn_start if sample.conversation else 0)
        remaining = group.remaining_in_turn(sample)
        return GenerationRequest(
            # The counter makes the id unique: a sample has a request for each segment and each retry.
            request_id=f"{self._run_id}-{sample.group_id}-{sample.index}-{self._count}",
            token_ids=[*group.prompt_ids_of(sample), *sample.token_ids],
            generated=turn_length,
            max_tokens=remaining,
            min_tokens=group.budget.least(turn_length, remaining),
            cache_salt=f"{self._run_id}-{salt}",
            seed=None if self._seed is None else derive_seed(self._seed, sample),
            sample=sample,
            version=version,
            images=self._images_of(group, sample),
        )


def derive_seed(seed: int, sample: Sample) -> int:
    """Seed for the next segment of `sample`. Segments have different seeds, since equal seeds repeat completions."""
    key = f"{seed}/{sample.group_id}/{sample.index}/{len(sample)}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1  # vLLM takes signed 64-bit


class RolloutEngine(Protocol):
    """An engine that streams the tokens of requests and aborts them. All methods run on the same event loop."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the tokens of `request`; the last chunk has a finish reason.

        Raises:
            ServerLost: If another server can continue at once.
            ServerError: If the engine went away. A retry from the prefix that arrived may work.
            EngineError: If the engine refuses the request, or its answer is invalid.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests. Ids of unknown and finished requests are ignored; an empty list is an error."""

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Number of tokens that each request has generated, streamed or not, while the engine is paused.

        Unknown and finished requests are left out. Raises [`ServerError`] if the engine does not report it.
        """

    async def holds(self, version: int) -> bool:
        """Whether the engine answers and samples from the weights of this policy version. Never raises."""

    async def close(self) -> None:
        """Release connections. Running requests fail with [`ServerError`]."""
