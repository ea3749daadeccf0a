"""The one account of a sample's tokens: what its prompt, the context, the limit and `min_tokens` let it have."""

import pytest

from tests.support.pools import generate
from trl_april.engine.protocol import RequestMaker
from trl_april.errors import PoolError
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason
from trl_april.pool.state import restore, state_dict


def pool_of(context_length: int, limit: int | None = None, *, min_tokens: int = 0, **options: bool) -> Pool:
    return Pool(1, budget=Budget(limit, context_length, min_tokens), **options)


def begun(pool: Pool, prompt_ids: list[int]):
    """The sample of a new group, and a function that makes its next request, as `(max_tokens, min_tokens)`."""
    pool.begin_round(0)
    group = pool.admit(0, {"prompt": "p"}, [] if pool.has_environments else prompt_ids, num_generations=1)
    (sample,) = group.samples
    if pool.has_environments:
        pool.start(sample)
        pool.reset_ended(sample, None, prompt_ids, None)

    def request() -> tuple[int, int]:
        made = RequestMaker("run").make(group, sample, 0)
        return made.max_tokens, made.min_tokens

    return sample, request


@pytest.mark.parametrize("has_environments", [False, True], ids=["prompt of the row", "prompt of the sample"])
@pytest.mark.parametrize(("limit", "most"), [(None, 27), (10, 10), (100, 27)])
def test_prompt_and_completion_fit_into_the_context(has_environments, limit, most):
    """With environments and rollout functions, the prompt is known only after the group was admitted."""
    sample, request = begun(pool_of(30, limit, has_environments=has_environments), [1, 2, 3])
    assert request() == (most, 0)


def test_min_tokens_is_of_each_turn_and_never_more_than_what_is_left():
    """A server refuses a request with more."""
    pool = pool_of(30, 10, min_tokens=8, has_tools=True)
    sample, request = begun(pool, [1, 2, 3])
    assert request() == (10, 8)
    generate(pool, sample, 5, 5)
    pool.park(sample)
    assert request() == (8, 6)
    generate(pool, sample, 5)
    pool.finish(sample, FinishReason.STOP)
    pool.act_ended(sample, [], [6, 6], is_complete=False)
    assert request() == (5, 5)


def test_a_resumed_sample_has_what_the_context_of_this_server_leaves():
    """The limit is that of the run that admitted it."""
    pool = pool_of(30, 20)
    sample, _ = begun(pool, [1, 2, 3])
    generate(pool, sample, *range(6))
    pool.park(sample)
    state = state_dict(pool)
    for context_length, left in ((60, 14), (12, 3)):
        resumed = pool_of(context_length, 40)
        restore(resumed, [state])
        (group,) = resumed
        assert group.remaining(group.samples[0]) == left
    with pytest.raises(PoolError, match="6 tokens with a budget of 5, after a prompt of 3.*context is 8.*larger"):
        restore(pool_of(8), [state])
