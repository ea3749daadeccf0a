"""A scripted `act`, and the rounds that its tests begin with."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tests.rollout.arena import SlowThread, assert_tokens, setup
from tests.support.scripted_engine import ScriptedEngine, natural, prompt_ids, token_ids
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, Sample
from trl_april.rollout.acting import ResetResult, TurnResult
from trl_april.rollout.driver import RolloutDriver


class Tools:
    """A scripted `act`: results of `size` tokens after each turn but the last of `turns`; none for `answering` groups.

    `log` has the sample, the number and the tokens of each turn that it was called for, and `resets` the samples whose
    environments were reset.
    """

    def __init__(self, turns: int = 3, size: int = 2, *, answering: tuple[int, ...] = ()) -> None:
        self.turns, self.size, self.answering = turns, size, answering
        self.log: list[tuple[tuple[int, int], int, list[int]]] = []
        self.resets: list[tuple[int, int]] = []
        self.error: BaseException | None = None

    def __call__(self, group: Group, sample: Sample) -> TurnResult:
        turns, length = sample.conversation, len(sample)
        if turns.awaits_reset:
            self.resets.append(sample.key)
            if self.error is not None:
                raise self.error
            return ResetResult(None, prompt_ids(group.group_id))
        turn = list(sample.token_ids[turns.turn_start :])
        self.log.append((sample.key, turns.iterations, turn))
        if self.error is not None:
            raise self.error
        answer = {"role": "assistant", "content": f"{turn}"}
        size = min(self.size, group.remaining(sample))
        if turns.iterations + 1 >= self.turns or group.group_id in self.answering:
            return TurnResult([answer], [])
        result = {"role": "tool", "content": f"{length}"}
        return TurnResult(
            [answer, result], token_ids(sample.key, length, length + size), calls=2, failures=1, is_complete=False
        )


class Waits(SlowThread):
    """Runs a call after some seconds of the simulated clock, by group; 2 s by default."""

    def __init__(self, seconds: dict[int, float] | Callable[[int], float] | None = None) -> None:
        super().__init__(2.0, at_once=True)
        self._seconds_of = seconds if callable(seconds) else lambda group_id: (seconds or {}).get(group_id, 2.0)

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future:
        group, _ = args
        self.seconds = self._seconds_of(group.group_id)
        return super().submit(function, *args, **kwargs)


def with_tools(
    script: dict | None = None, *, groups: int = 1, threads: Executor | None = None, tools: Tools | None = None,
    has_environments: bool = False, **options: Any,
) -> tuple[Pool, ScriptedEngine, RolloutDriver, Tools]:  # fmt: skip
    """A round of quota 1 with so many groups, whose turns have 3 tokens, one a second."""
    tools = tools or Tools()
    pool_options = {"has_tools": True, "has_environments": has_environments}
    made = setup(
        script, groups=groups, default=natural(3), pool_options=pool_options, act=tools, threads=threads or Waits(),
        **options,
    )  # fmt: skip
    return *made, tools


def assert_complete(group: Group, *, turns: int = 3) -> None:
    """A sample without a loss: every turn and result at its place, once in the messages."""
    assert_tokens(group)
    (sample,) = group.samples
    assert [version is None for version in sample.versions] == [
        *[False, False, False, True, True] * (turns - 1), False, False, False,
    ]  # fmt: skip
    expected = []
    for start in range(0, 5 * turns, 5):
        expected.append({"role": "assistant", "content": f"{token_ids(sample.key, start, start + 3)}"})
        expected.append({"role": "tool", "content": f"{start + 3}"})
    conversation = sample.conversation
    assert conversation.messages == expected[:-1]
    counts = conversation.iterations, conversation.calls, conversation.failures
    assert counts == (turns - 1, 2 * turns - 2, turns - 1)
    assert (conversation.turn_start, conversation.turn_ended) == (len(sample), None)
