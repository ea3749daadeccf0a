"""Stop strings, found in the text of a turn even across the cuts between its requests.

Invariant: a turn ends with the same token as in vLLM with a single request. vLLM searches the text of each request
alone, so a string that straddles two requests is found only here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .protocol import Chunk, GenerationRequest


Decode = Callable[[list[int]], str]  # the text of token ids, as vLLM writes it
INCOMPLETE = "\ufffd"  # at the end of a text whose last character lacks bytes
CONTEXT = 8  # characters before the searched text, since tokens can decode differently at the start of a text


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Strings that end a turn after its first `min_tokens` tokens, and the text of tokens."""

    strings: Sequence[str]
    decode: Decode
    min_tokens: int = 0

    def is_safe_on_server(self, token_ids: list[int]) -> bool:
        """Whether the server may also search the text after these tokens.

        After an incomplete character, vLLM treats the whole prompt as generated text, and would find strings there.
        """
        return not self.decode(token_ids[-CONTEXT:]).endswith(INCOMPLETE)


class StopSearch:
    """Searches the text of `request` and of the turn that it continues. Pass all its chunks to `cut`, in order."""

    def __init__(self, stop: StopStrings, request: GenerationRequest) -> None:
        self._stop, self._longest = stop, max(map(len, stop.strings))
        self._ids = list(request.token_ids)
        self._turn = len(self._ids) - request.generated  # index of the first token of the turn
        self._advance()

    def cut(self, chunk: Chunk) -> Chunk:
        """Cut a chunk after the token that completes a stop string, if any."""
        held = len(self._ids)
        self._ids += chunk.token_ids
        if self._find(self._text(len(self._ids))):
            for end in range(held + 1, len(self._ids) + 1):
                text = self._text(end)
                if text.endswith(INCOMPLETE):
                    continue  # like vLLM, wait for the rest of the character
                if end - self._turn > self._stop.min_tokens and self._find(text):
                    return Chunk(chunk.token_ids[: end - held], chunk.logprobs[: end - held], "stop")
                self._searched = len(text)
        self._advance()
        return chunk

    def _find(self, text: str) -> bool:
        """Whether a stop string ends after the searched part of the text, and begins in the turn."""
        return any(
            text.find(string, max(self._before, self._searched - len(string) + 1)) >= 0
            for string in self._stop.strings
        )

    def _text(self, end: int) -> str:
        return self._stop.decode(self._ids[self._window : end])

    def _advance(self) -> None:
        """Mark all text as searched, and keep only the text in which a stop string can begin."""
        end = len(self._ids)
        while end and self._stop.decode(self._ids[max(0, end - CONTEXT) : end]).endswith(INCOMPLETE):
            end -= 1  # the token with the rest of the character is not here yet
        size = self._longest + CONTEXT
        while True:
            self._window = max(0, end - size)
            text = self._text(end)
            if not self._window or len(text) >= self._longest + CONTEXT:
                break
            size *= 2
        self._searched = len(text)
        self._before = len(self._text(self._turn).rstrip(INCOMPLETE)) if self._window < self._turn else 0
