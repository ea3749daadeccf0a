"""The event stream of a completion: bytes in, chunks out.

Invariant: every yielded token comes from a valid event of this request, with its log-probability, and no earlier event
was skipped. Anything else raises an error that quotes the received bytes. The buffer is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import orjson

from ..errors import EngineError, ServerError
from .protocol import Chunk, GenerationRequest


# The longest line is an event with the echo of the whole prompt (7 bytes a token), or with all generated tokens (some
# 100 bytes each, and their text). No valid line comes near this bound, and an endless line cannot fill the memory.
BYTES_PER_TOKEN = 512
BYTES_PER_LINE = 2**16


class EventStream:
    """Reads the server-sent events of `request`. Token ids must be below `vocab_size`, if it is given."""

    def __init__(self, request: GenerationRequest, vocab_size: int | None = None) -> None:
        self.ended = False  # whether a finish reason or `[DONE]` was read; everything after it is ignored
        self._request = request
        self._vocab_size = math.inf if vocab_size is None else vocab_size
        self._max_line = BYTES_PER_LINE + BYTES_PER_TOKEN * (len(request.token_ids) + request.max_tokens)
        self._pending = b""
        self._tokens = 0

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Read the next bytes, split anywhere, and yield the chunks of the lines that are now complete.

        Raises [`ServerError`] if the server reports a failure or NaN, which a retry may cure, else [`EngineError`].
        """
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            chunk = self._read_line(line)
            if chunk is None:
                continue
            self._tokens += len(chunk.token_ids)
            if chunk.finish_reason == "length" and self._tokens < self._request.max_tokens:
                # The server's limit would restart after every abort.
                raise EngineError(
                    f"The server ended request {self._request.request_id} for its length after {self._tokens} tokens, "
                    f"but {self._request.max_tokens} were requested. Remove the server's limit (max_new_tokens in "
                    "--override-generation-config), and set max_completion_length instead."
                )
            self.ended = chunk.finish_reason is not None
            yield chunk
            if self.ended:
                return
        self._check_length(self._pending)

    def _check_length(self, line: bytes) -> None:
        if len(line) > self._max_line:
            raise self._error(f"got a line of over {self._max_line} bytes, longer than any of its events", line)

    def _read_line(self, line: bytes) -> Chunk | None:
        """The chunk in a line, `None` for a line without a choice."""
        self._check_length(line)
        line = line.strip()
        if not line.startswith(b"data:"):
            # Any other line may be a damaged event with tokens, so it cannot be skipped.
            if line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise self._error("got a line that does not belong to an event stream", line)
            return None
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            # vLLM sends nothing else for a request that was aborted before its first token.
            return Chunk([], [], "abort")
        try:
            event = orjson.loads(data)
            if isinstance(event, dict) and event.get("error") is not None:
                raise ServerError(
                    f"The vLLM server failed during request {self._request.request_id}: {str(event['error'])[:500]}. "
                    "See its log."
                )
            return self._read_choices(event["choices"], event.get("prompt_token_ids"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error(f"got a malformed event ({error!r:.200})", data) from error

    def _read_choices(self, choices: Any, echo: Any) -> Chunk | None:
        if choices == []:
            return None  # usage statistics
        [choice] = choices
        if choice["index"] != 0:
            raise ValueError("a single completion was requested")
        echo = choice.get("prompt_token_ids", echo)  # outside the choice if there are images
        if echo is not None and echo != self._request.token_ids:
            raise EngineError(
                f"The server generated for other token ids than request {self._request.request_id} has: it received "
                f"{len(echo)} of {len(self._request.token_ids)}. If there is a proxy, let it forward bodies unchanged."
            )
        token_ids = choice["token_ids"]
        logprobs = choice.get("logprobs")
        if logprobs is None:
            logprobs = []
        elif "content" in logprobs:
            logprobs = [token["logprob"] for token in logprobs["content"]]
        else:
            logprobs = logprobs["token_logprobs"]
        if type(token_ids) is not list or not {int}.issuperset(map(type, token_ids)):  # JSON's true is no number
            raise TypeError("token ids are a list of integers")
        types = set(map(type, logprobs))
        if type(logprobs) is not list or not types <= {float, int, type(None)}:
            raise TypeError("log-probabilities are a list of numbers")
        if type(None) in types:
            # vLLM writes NaN as null. The driver retries.
            raise ServerError(
                f"The vLLM server computed NaN as the log-probability of a token of request "
                f"{self._request.request_id}. If that happens again, the weights have diverged."
            )
        if token_ids and max(token_ids) >= self._vocab_size:
            raise EngineError(
                f"Request {self._request.request_id} got token id {max(token_ids)}, but the trainer's model has a "
                f"vocabulary of {self._vocab_size}. Start the server with the model that is trained."
            )
        return Chunk(token_ids, logprobs, choice.get("finish_reason"))

    def _error(self, problem: str, received: bytes) -> EngineError:
        return EngineError(
            f"Request {self._request.request_id} {problem}: {received[:200]!r}. If there is a proxy, let it forward "
            "answers unchanged."
        )
