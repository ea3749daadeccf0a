"""The branches of a sample, which begin where its agent rewrites the conversation.

Invariant: an abandoned branch is kept, turn by turn, until its sample is complete. So an agent that returns to it
finds its tokens, and an agent that starts over after a checkpoint gets every turn that was generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..pool.samples import Conversation, Group, Sample, Segment


@dataclass(frozen=True, slots=True)
class Branch:
    """Complete turns of the model after a prompt, and the tokens between them."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    segments: Sequence[Sequence[Any]]  # version and length
    shared: int = 0  # number of first completion tokens that an earlier branch has, too

    def turns(self) -> Iterator[tuple[int, int]]:
        """Start and end of each turn of the model, in completion tokens."""
        start = position = 0
        for version, length in self.segments:
            if version is None:
                yield start, position
                start = position + length
            position += length
        if position > start:
            yield start, position

    def shared_turns(self, asked: Sequence[int]) -> int:
        """Return the number of completion tokens in the turns that `asked` begins with; -1 if the prompt differs."""
        length = len(self.prompt_ids)
        if list(asked[:length]) != list(self.prompt_ids):
            return -1
        ends = [0]
        for _, end in self.turns():
            # A turn is compared together with the tokens before it.
            if list(asked[length + ends[-1] : length + end]) != list(self.token_ids[ends[-1] : end]):
                break
            ends.append(end)
        return ends[-1]


def branches_of(group: Group, sample: Sample) -> list[Branch]:
    """The branches of a sample in the order of their first requests, with the complete turns of the sample itself."""
    conversation = sample.conversation
    assert conversation is not None
    end = len(sample) if sample.pending_calls else conversation.turn_start
    left = conversation.environment or {"branches": [], "place": None, "shared": 0}
    branches, place = [Branch(*branch) for branch in left["branches"]], left["place"]
    own = _cut(group.prompt_ids_of(sample), sample, end, left["shared"])
    return [*branches, own] if place is None else [*branches[:place], own, *branches[place + 1 :]]


def branch_for(group: Group, sample: Sample, asked: list[int], limit: int | None) -> Sample | None:
    """Return the sample that continues after the tokens `asked`, or `None` if it is too long.

    It has as many turns of a branch as possible. The tokens that it adds to them have no policy version.
    """
    branches = branches_of(group, sample)
    shared = [branch.shared_turns(asked) for branch in branches]
    kept, number = max((kept, number) for number, kept in enumerate(shared))
    source = branches[number]
    if kept <= 0:
        source, kept = Branch(asked, [], [], []), 0
    start = len(source.prompt_ids) + kept
    new = _sample(sample, source, kept)
    new.append(asked[start:], [0.0] * (len(asked) - start), None)
    new.segment_open = False
    assert new.conversation is not None
    new.conversation.turn_start, new.conversation.turn_limit = len(new), limit
    # A branch that continues from its end keeps its place.
    is_whole = 0 < kept == len(source.token_ids)
    new.conversation.environment = {
        "branches": [_plain(branch) for branch in branches if branch.token_ids],
        "place": number if is_whole else None,
        "shared": source.shared if is_whole else kept,
    }
    return new if group.remaining(new) > 0 else None


def _cut(prompt_ids: Sequence[int], sample: Sample, end: int, shared: int) -> Branch:
    segments, position = [], 0
    for segment in sample.segments:
        if position < end:
            segments.append([segment.version, segment.length])
        position += segment.length
    if segments and segments[-1][0] is None:  # before a turn that has not ended
        end -= segments.pop()[1]
    return Branch(prompt_ids, sample.token_ids[:end], sample.logprobs[:end], segments, shared)


def _sample(sample: Sample, branch: Branch, end: int) -> Sample:
    """Return the first `end` tokens of a branch, as a sample that replaces `sample`."""
    conversation = Conversation(prompt_ids=[*branch.prompt_ids])
    new, position = Sample(*sample.key, conversation=conversation), 0
    for version, length in branch.segments:
        if position < end:
            run = slice(position, position + length)
            new.append(branch.token_ids[run], branch.logprobs[run], version)
            new.segments[-1] = Segment(version, length)
            new.segment_open = False
        position += length
    return new


def _plain(branch: Branch) -> list[Any]:
    """Return a branch as JSON holds it."""
    arrays = [[*branch.prompt_ids], [*branch.token_ids], [*branch.logprobs], [[*run] for run in branch.segments]]
    return [*arrays, branch.shared]
