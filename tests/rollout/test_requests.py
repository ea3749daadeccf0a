"""The requests that the driver sends: ids, cache salts and seeds."""

from tests.rollout.arena import admit, make_pool
from trl_april.engine.protocol import RequestMaker, derive_seed
from trl_april.pool.samples import Sample


def two_versions(run_id: str, seed: int | None = None):
    """Requests of a resumed group under versions 0 and 1, and again after a broken stream."""
    (group,) = admit(make_pool(), 3, samples=2)
    maker = RequestMaker(run_id, seed)
    requests = []
    for version in range(2):
        requests.append([maker.make(group, sample, version) for sample in (*group.samples, group.samples[0])])
        for sample in group.samples:
            sample.append([7], [-1.0], version)
    return requests


def test_a_request_has_the_prompt_and_every_token_so_far():
    (group,) = admit(make_pool(), 0)
    (sample,) = group.samples
    maker, budget = RequestMaker("run"), group.budget.max_completion_length
    for tokens in ([], [7, 8], [9]):
        sample.append(tokens, [-1.0] * len(tokens), 0)
        request = maker.make(group, sample, 1)
        assert request.token_ids == [*group.prompt_ids, *sample.token_ids]
        assert (request.generated, request.max_tokens) == (len(sample), budget - len(sample))
        assert request.version == 1, "by which engines find the adapter"
    assert list(sample.token_ids) == [7, 8, 9]


def test_request_ids_are_never_used_twice():
    """Not for a resumed sample, not after a broken stream, and not in another run on the same server."""
    seen = [one.request_id for run_id in ("first", "second") for part in two_versions(run_id) for one in part]
    assert len(set(seen)) == len(seen) == 12


def test_cache_salt_separates_policy_versions_and_runs():
    """KV blocks of other weights are never hit. Requests of one version share theirs."""
    salts = [{one.cache_salt for one in part} for run_id in ("first", "second") for part in two_versions(run_id)]
    assert all(len(of_one_version) == 1 for of_one_version in salts)
    assert len(set().union(*salts)) == 4


def test_reused_kv_blocks_belong_to_the_sample_itself():
    """A resumed sample keeps the salt of its first segment. A fresh one never has an old salt, nor its sibling's."""
    pool = make_pool(1)
    (group,) = admit(pool, 0, samples=2)
    first, second = group.samples
    for resume_kv, expected in (("recompute", ["run-2", "run-3", "run-3"]), ("reuse", ["run-2", "run-2", "run-3"])):
        requests = RequestMaker("run", resume_kv=resume_kv)
        before = requests.make(group, Sample(0, 0), 2).cache_salt
        if not len(first):
            first.append([1], [-1.0], 2)
        assert [before, *(requests.make(group, sample, 3).cache_salt for sample in (first, second))] == expected


def test_seeds_are_distinct_and_reproducible():
    """Equal seeds give equal completions, so no two segments share one. A segment that is repeated has its own."""

    def seeds(seed: int | None, run_id: str = "run") -> list[list[int | None]]:
        return [[one.seed for one in part] for part in two_versions(run_id, seed)]

    (a, b, again), (c, d, _) = seeds(1)
    assert a == again and len({a, b, c, d}) == 4
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in (a, b, c, d))
    assert seeds(1, "other") == seeds(1)
    assert not {a, b, c, d} & {seed for part in seeds(2) for seed in part}
    assert seeds(None) == [[None] * 3] * 2
    # Digits are separated: group 1, sample 11 is not group 11, sample 1.
    assert derive_seed(0, Sample(1, 11)) != derive_seed(0, Sample(11, 1))
