"""The answer to one streamed completion, read: bytes in, chunks out.

The invariant owned here: every token that is yielded stood in a sound event of this request, with its
log-probability, and no event before it was passed over. Anything else is an error that quotes what was received. No
more of an answer is held than one line, whose length is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from .engine import Chunk, GenerationRequest
from .errors import EngineError, ServerError


# The longest line is one event with the echo of the whole prompt, or with every token that was asked for. A token
# takes 7 bytes in an echo and about 100 with its log-probability, plus its text. So no sound line comes near this,
# however long the prompt is, and a server that never ends its line cannot fill the memory.
BYTES_PER_TOKEN = 512
BYTES_PER_LINE = 2**16
FINISH_REASONS = (None, "stop", "length", "abort")
_QUOTED = 200  # bytes of a malformed line in an error


class EventStream:
    """Reads the server-sent events of one request, as far as they have arrived.

    Args:
        request (`GenerationRequest`):
            What was asked for.
        vocab_size (`int`, *optional*):
            Token ids are smaller than that. By default anything that fits a sample is taken.

    Attributes:
        ended (`bool`):
            Whether the last event has been read: a finish reason, or `[DONE]`. Nothing counts that comes after it.
    """

    def __init__(self, request: GenerationRequest, vocab_size: int | None = None) -> None:
        self.ended = False
        self._request = request
        self._vocab_size = vocab_size
        self._longest = BYTES_PER_LINE + BYTES_PER_TOKEN * (len(request.token_ids) + request.max_tokens)
        self._pending = bytearray()
        self._events = 0
        self._tokens = 0

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Read on.

        Args:
            data (`bytes`):
                The next bytes, cut anywhere.

        Yields:
            `Chunk`: What the lines that are complete now say, up to the end of the stream.

        Raises:
            ServerError: If the server reports that it failed, or has computed a log-probability that is no number.
            EngineError: If a line is none of an event stream, too long, or no piece of a completion of this request,
                or it ends for its length before that.
        """
        if b"\n" in data:
            *lines, rest = (bytes(self._pending) + data).split(b"\n")
            self._pending = bytearray(rest)
            for line in lines:
                self._check_length(line)
                chunk = self._read_line(line.strip())
                if chunk is not None:
                    if None in chunk.logprobs and len(chunk.logprobs) == len(chunk.token_ids):
                        sound = chunk.logprobs.index(None)
                        yield Chunk(chunk.token_ids[:sound], chunk.logprobs[:sound])
                        raise self._not_a_number()
                    self._tokens += len(chunk.token_ids)
                    if chunk.finish_reason == "length" and 0 < self._tokens < self._request.max_tokens:
                        yield Chunk(chunk.token_ids, chunk.logprobs)
                        raise self._too_short()
                    self.ended = chunk.finish_reason is not None
                    yield chunk
                if self.ended:
                    return
        else:
            self._pending += data  # in place: a long line is not copied once for every piece of it
        self._check_length(self._pending)

    def _check_length(self, line: bytes | bytearray) -> None:
        if len(line) > self._longest:
            raise self._error(
                f"got a line of over {self._longest} bytes, more than {len(self._request.token_ids)} prompt tokens "
                f"and {self._request.max_tokens} new ones can take",
                line,
            )

    def _read_line(self, line: bytes) -> Chunk | None:
        """One line as a chunk; `None` for lines that carry no choice."""
        if not line.startswith(b"data:"):
            # A line that is passed over may have been an event with tokens.
            if line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise self._error("got a line that is none of an event stream", line)
            return None
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            self.ended = True
            # Of a request that was aborted before its first token vLLM says nothing else.
            return None if self._events else Chunk([], [], "abort")
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise self._error("got a line that is not JSON", data) from error
        if isinstance(event, dict) and event.get("error") is not None:
            raise ServerError(
                f"The vLLM server failed in the middle of request {self._request.request_id}: "
                f"{str(event['error'])[:500]}. Its log says more."
            )
        try:
            if event["choices"] == []:
                return None  # figures about the request
            [choice] = event["choices"]
            if choice["index"] != 0:
                raise ValueError("one completion was asked for")
            self._check_echo(choice.get("prompt_token_ids"))
            logprobs = choice.get("logprobs")
            chunk = Chunk(
                choice["token_ids"],
                [] if logprobs is None else logprobs["token_logprobs"],
                choice.get("finish_reason"),
            )
            if type(chunk.token_ids) is not list or type(chunk.logprobs) is not list:
                raise TypeError("tokens and log-probabilities are lists")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error("got a malformed event", data) from error
        self._check(chunk)
        self._events += 1
        return chunk

    def _check_echo(self, echoed: Any) -> None:
        if echoed is not None and echoed != self._request.token_ids:
            raise EngineError(
                f"The server generated for other token ids than those of request {self._request.request_id}: it "
                f"received {len(echoed)} of {len(self._request.token_ids)}. If a proxy stands before it, let it pass "
                "requests on as they are."
            )

    def _check(self, chunk: Chunk) -> None:
        self._check_types("token id", chunk.token_ids, {int})
        self._check_types("log-probability", chunk.logprobs, {float, int, type(None)})
        if self._vocab_size is not None and chunk.token_ids and max(chunk.token_ids) >= self._vocab_size:
            raise EngineError(
                f"Request {self._request.request_id} got token id {max(chunk.token_ids)}, but the trainer's model has "
                f"a vocabulary of {self._vocab_size}. Start the server with the model that is trained."
            )
        if chunk.finish_reason not in FINISH_REASONS:
            reason = repr(chunk.finish_reason).encode()
            raise self._error("ended with a finish reason that is none of stop, length and abort", reason)

    def _check_types(self, what: str, values: list[Any], types: set[type]) -> None:
        if not types.issuperset(map(type, values)):
            # Not by isinstance: JSON's true would be a number.
            wrong = next(value for value in values if type(value) not in types)
            raise self._error(f"got a {what} that is not a number of its kind", repr(wrong).encode())

    def _not_a_number(self) -> ServerError:
        # JSON has no NaN. One token of it may be an accident, and is asked for again; more are not passed over.
        return ServerError(
            f"The vLLM server has no log-probability for a token of request {self._request.request_id}: its model "
            "computes what is not a number (NaN). If that goes on, the weights have diverged."
        )

    def _too_short(self) -> EngineError:
        # A limit of the server's own would begin anew behind every cut.
        return EngineError(
            f"The server ended request {self._request.request_id} for its length after {self._tokens} tokens, and "
            f"{self._request.max_tokens} were asked for. Start it without a limit of its own (max_new_tokens in "
            "--override-generation-config), and set max_completion_length."
        )

    def _error(self, what: str, received: bytes | bytearray) -> EngineError:
        return EngineError(
            f"Request {self._request.request_id} {what}: {bytes(received[:_QUOTED])!r}. If a proxy stands before the "
            "vLLM server, let it pass answers on as they are."
        )
