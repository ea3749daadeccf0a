"""The pool under arbitrary schedules: a state machine against an independent model, and the staleness guarantee.

Rule numbers are those of DESIGN.md, "Rules that hold always".
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.closing import in_time, may_close
from tests.support.effort import cases
from tests.support.pools import Pools, ids, pool_in_round
from trl_april.distributed.scatter import owner_of
from trl_april.errors import ConfigError, PoolError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, Group, Sample, SampleState
from trl_april.pool.state import restore, state_dict


@dataclass
class ModelSample:
    """The expected content of a sample: `(token, log-probability, version)` each, and the tokens of every request.

    Results of tools are as a request without a version.
    """

    tokens: list[tuple[int, float, int | None]] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    state: SampleState = SampleState.WAITING
    pending: FinishReason | None = None  # why its turn ended whose calls have not run
    reason: FinishReason | None = None
    turn_start: int = 0
    calls: int = 0

    @property
    def generated(self) -> int:
        return sum(version is not None for _, _, version in self.tokens)


@dataclass
class ModelGroup:
    start_version: int
    budget: int
    samples: list[ModelSample]

    @property
    def done(self) -> bool:
        return all(sample.state is SampleState.FINISHED for sample in self.samples)


Key = tuple[int, int]
# Few and small, so that equal ones meet, and the largest that there is.
TOKEN_IDS = st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), max_size=3)
FACTORS = st.sampled_from([1.0, 1.5, 2.0, 3.0])


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool by its transitions in any order, and compares it with the model after each."""

    @initialize(
        quota=st.integers(1, 3),
        factor=FACTORS,
        slack=st.sampled_from([None, 0, 1, 2]),
        versions_per_round=st.integers(1, 2),
        version=st.integers(0, 3),
        has_tools=st.booleans(),
    )
    def open(self, quota, factor, slack, versions_per_round, version, has_tools):
        bound = None if slack is None else math.ceil(factor - 1) * versions_per_round + slack
        self.options = {
            "over_provisioning": factor,
            "max_staleness": bound,
            "versions_per_round": versions_per_round,
            "has_tools": has_tools,
        }
        self.has_tools = has_tools
        self.quota, self.bound, self.versions_per_round, self.version = quota, bound, versions_per_round, version
        self.target = math.ceil(quota * factor)
        self.pool = Pool(quota, **self.options)
        self.pool.begin_round(version)
        self.groups: dict[int, ModelGroup] = {}
        self.taken: list[int] = []
        self.generated = self.trained = self.next_id = 0

    def sample(self, key: Key) -> tuple[Sample, ModelSample]:
        group_id, index = key
        (group,) = [group for group in self.pool if group.group_id == group_id]
        return group.samples[index], self.groups[group_id].samples[index]

    def keys(self, *states: SampleState) -> list[Key]:
        """The samples in these states, by the model."""
        groups = self.groups.items()
        return [(i, j) for i, group in groups for j, sample in enumerate(group.samples) if sample.state in states]

    def running(self) -> list[Key]:
        return self.keys(SampleState.RUNNING)

    def acting(self) -> list[Key]:
        return self.keys(SampleState.ACTING)

    def startable(self) -> list[Key]:
        return self.keys(SampleState.WAITING, SampleState.PARKED)

    def draw(self, data: st.DataObject, keys: list[Key]) -> list[Key]:
        """One of the samples, or one of their groups, or all of them."""
        chosen = data.draw(st.sampled_from(keys))
        group_id = chosen[0]
        return data.draw(st.sampled_from([[chosen], [key for key in keys if key[0] == group_id], keys]))

    def admit_one(self, samples: int, budget: int, skipped_ids: int = 0) -> None:
        group_id = self.next_id + skipped_ids
        row = {"prompt": f"p{group_id}"}
        self.pool.admit(group_id, row, [1], num_generations=samples, max_completion_length=budget)
        self.groups[group_id] = ModelGroup(self.version, budget, [ModelSample() for _ in range(samples)])
        self.next_id = group_id + 1

    @precondition(lambda self: len(self.groups) < self.target)
    @rule(skipped_ids=st.integers(0, 2), samples=st.integers(1, 3), budget=st.integers(1, 8))
    def admit(self, skipped_ids, samples, budget):
        self.admit_one(samples, budget, skipped_ids)

    @rule(samples=st.integers(1, 3), budget=st.integers(1, 8))
    def fill_up(self, samples, budget):
        while len(self.groups) < self.target:
            self.admit_one(samples, budget)
        assert self.pool.schedule.room == 0
        with pytest.raises(PoolError):
            self.admit_one(samples, budget)

    @rule(factor=FACTORS)
    def change_the_target(self, factor):
        if self.bound is not None and factor > self.bound // self.versions_per_round + 1:
            with pytest.raises(ConfigError, match=f"over_provisioning is {factor}"):
                self.pool.schedule.set_target(factor)
            return
        self.pool.schedule.set_target(factor)
        self.options["over_provisioning"] = factor
        self.target = math.ceil(self.quota * factor)

    @precondition(startable)
    @rule(data=st.data())
    def start(self, data):
        for key in self.draw(data, self.startable()):
            sample, model = self.sample(key)
            self.pool.start(sample)
            model.state = SampleState.ACTING if model.pending else SampleState.RUNNING
            model.requests.append(0)

    @precondition(running)
    @rule(data=st.data(), token_ids=TOKEN_IDS)
    def record(self, data, token_ids):
        logprobs = [-((token_id % 64) / 8) for token_id in token_ids]  # exact in 32 bits
        for key in self.draw(data, self.running()):
            sample, model = self.sample(key)
            if len(model.tokens) + len(token_ids) > self.groups[key[0]].budget:
                with pytest.raises(PoolError):
                    self.pool.record(sample, token_ids, logprobs)
                continue
            self.pool.record(sample, token_ids, logprobs)
            model.tokens += [(t, p, self.version) for t, p in zip(token_ids, logprobs, strict=True)]
            model.requests[-1] += len(token_ids)
            self.generated += len(token_ids)

    @precondition(running)
    @rule(data=st.data(), reason=st.sampled_from(FinishReason))
    def finish(self, data, reason):
        for key in self.draw(data, self.running()):
            sample, model = self.sample(key)
            if not model.tokens:
                with pytest.raises(PoolError):
                    self.pool.finish(sample, reason)
                continue
            self.pool.finish(sample, reason)
            self.expect_finished(model, reason)

    def expect_finished(self, model: ModelSample, reason: FinishReason) -> None:
        if self.has_tools:
            model.state, model.pending = SampleState.ACTING, reason
        else:
            model.state, model.reason = SampleState.FINISHED, reason

    @precondition(acting)
    @rule(data=st.data(), token_ids=TOKEN_IDS, calls=st.integers(0, 2), is_complete=st.booleans())
    def act_ended(self, data, token_ids, calls, is_complete):
        for key in self.draw(data, self.acting()):
            sample, model = self.sample(key)
            budget = self.groups[key[0]].budget
            results = {"calls": calls, "is_complete": is_complete}
            if len(model.tokens) + len(token_ids) > budget:
                with pytest.raises(PoolError, match="The tools returned"):
                    self.pool.act_ended(sample, [{}], token_ids, **results)
                continue
            self.pool.act_ended(sample, [{}], token_ids, **results)
            model.tokens += [(token_id, 0.0, None) for token_id in token_ids]
            model.requests.append(len(token_ids))
            model.calls += calls
            model.turn_start = len(model.tokens)
            reason, model.pending = model.pending, None
            if is_complete or len(model.tokens) == budget:
                model.state, model.reason = SampleState.FINISHED, reason if is_complete else FinishReason.LENGTH
            else:
                model.state = SampleState.PARKED

    @precondition(acting)
    @rule(data=st.data())
    def act_failed(self, data):
        for key in self.draw(data, self.acting()):
            sample, model = self.sample(key)
            self.pool.park(sample)
            model.state = SampleState.PARKED

    @precondition(running)
    @rule(data=st.data())
    def park(self, data):
        self.park_all(self.draw(data, self.running()))

    def park_all(self, keys: list[Key]) -> None:
        for key in keys:
            self.pool.park(self.sample(key)[0])
        self.expect_parked(keys)

    def expect_parked(self, keys: list[Key]) -> None:
        for i, j in keys:
            model = self.groups[i].samples[j]
            model.state = SampleState.PARKED if model.tokens else SampleState.WAITING
            if len(model.tokens) == self.groups[i].budget:
                self.expect_finished(model, FinishReason.LENGTH)

    @rule(jump=st.integers(0, 3), through_a_checkpoint=st.booleans())
    def close_round(self, jump, through_a_checkpoint):
        """Abort, take, sync as a driver does; or nothing, if the round has to stay open."""
        finished = [i for i, group in self.groups.items() if group.done]
        if not self.pool.schedule.quota_met:
            with pytest.raises(PoolError):
                self.pool.take()
            assert self.bound is not None or len(finished) < self.quota
            # Whatever the bound, a round can be closed once everything is finished.
            assert len(finished) < max(len(self.groups), self.quota)
            return
        self.park_all(self.running())
        finished = [i for i, group in self.groups.items() if group.done]
        batch = self.pool.take()
        assert ids(batch) == finished[: self.quota]
        for group in batch:
            self.compare(group, self.groups.pop(group.group_id))
            self.taken.append(group.group_id)
            self.trained += group.num_generated
            if self.bound is not None:
                versions = [v for sample in group.samples for v in sample.versions if v is not None]
                assert all(self.version - v <= self.bound for v in versions)
        if through_a_checkpoint:
            self.through_a_checkpoint()
        self.version += min(jump, self.versions_per_round)
        self.pool.begin_round(self.version)
        expected = 0 if self.pool.schedule.quota_met else max(0, self.target - len(self.groups))
        assert self.pool.schedule.room == expected

    @rule()
    def sync_under_running_requests(self):
        with pytest.raises(PoolError):
            self.pool.begin_round(self.version + (1 if self.running() else -1))

    @rule()
    def through_a_checkpoint(self):
        """Running samples are parked, and acting ones with their calls pending; everything else is unchanged."""
        restored = Pool(self.quota, **self.options)
        restore(restored, [state_dict(self.pool)])
        self.expect_parked(self.running())
        for i, j in self.acting():
            self.groups[i].samples[j].state = SampleState.PARKED
        self.pool = restored

    def compare(self, group: Group, model: ModelGroup) -> None:
        assert (group.start_version, group.budget.max_completion_length) == (model.start_version, model.budget)
        assert group.row == {"prompt": f"p{group.group_id}"}
        for sample, expected in zip(group.samples, model.samples, strict=True):
            assert list(zip(sample.token_ids, sample.logprobs, sample.versions, strict=True)) == expected.tokens
            assert [segment.length for segment in sample.segments] == [n for n in expected.requests if n]
            assert group.remaining(sample) == model.budget - len(expected.tokens) >= 0
            assert (sample.state, sample.finish_reason) == (expected.state, expected.reason)
            if (turns := sample.conversation) is not None:
                assert (turns.turn_ended, turns.turn_start) == (expected.pending, expected.turn_start)
                assert turns.calls == expected.calls

    @invariant()
    def pool_holds_what_the_model_holds(self):
        self.pool.check()
        assert ids(self.pool) == list(self.groups)
        for group, model in zip(self.pool, self.groups.values(), strict=True):
            self.compare(group, model)
        assert self.pool.schedule.finished == [i for i, group in self.groups.items() if group.done]

    @invariant()
    def nothing_is_lost_or_counted_twice(self):
        counters = self.pool.counters
        samples = [sample for group in self.groups.values() for sample in group.samples]
        assert self.generated == self.trained + sum(sample.generated for sample in samples)
        assert (counters.tokens_generated, counters.tokens_taken) == (self.generated, self.trained)
        assert counters.tokens_held == sum(len(sample.tokens) for sample in samples)
        assert counters.groups_taken == len(self.taken) == len(set(self.taken))
        assert counters.groups_admitted == len(self.taken) + len(self.groups)

    @invariant()
    def ready_lists_startable_samples_and_needed_groups_are_known(self):
        assert self.pool.schedule.needed() == self.needed()
        keys = self.startable()
        keys.sort(key=lambda key: not self.groups[key[0]].samples[key[1]].tokens)
        assert [sample.key for _, sample in self.pool.ready()] == keys

    def needed(self) -> list[int]:
        """The oldest unfinished groups, one more at a time until the round could close with them."""
        rules = {"quota": self.quota, "version": self.version, "bound": self.bound}
        start_versions = {i: group.start_version for i, group in self.groups.items()}
        finished = {i for i, group in self.groups.items() if group.done}
        unfinished = [i for i in self.groups if i not in finished]
        for count in range(len(unfinished)):
            if may_close(
                start_versions,
                finished | set(unfinished[:count]),
                versions_per_round=self.versions_per_round,
                **rules,
            ):
                return unfinished[:count]
        return unfinished


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])


@given(data=st.data(), quota=st.integers(1, 4), spare=st.integers(0, 4))
def test_batch_does_not_depend_on_the_order_of_arrival(data, quota, spare):
    """Rule 7."""
    count = quota + spare
    finished = data.draw(st.sets(st.integers(0, count - 1), min_size=quota))
    for order in (data.draw(st.permutations(sorted(finished))), sorted(finished)):
        pool = pool_in_round(quota, groups=count, over_provisioning=count / quota, max_staleness=None)
        samples = [group.samples[0] for group in pool]
        for sample in samples:
            pool.start(sample)
        for group_id in order:
            pool.record(samples[group_id], [group_id], [-1.0])
            pool.finish(samples[group_id], FinishReason.STOP)
        batch = [(group.group_id, group.samples[0].token_ids.tolist()) for group in pool.take()]
        assert batch == [(i, [i]) for i in sorted(finished)[:quota]]


# Which unfinished group completes next. The youngest first is the adversary: it starves the oldest for ever.
ORDERS = {
    "youngest": lambda rng, unfinished: -1,
    "oldest": lambda rng, unfinished: 0,
    "random": lambda rng, unfinished: rng.randrange(len(unfinished)),
    "all but the oldest": lambda rng, unfinished: rng.randrange(1, len(unfinished)) if len(unfinished) > 1 else 0,
    "second youngest": lambda rng, unfinished: max(0, len(unfinished) - 2),
    "one process is slow": lambda rng, unfinished: next((k for k, i in enumerate(unfinished) if i % 2), 0),
}


def run_schedule(seed: int, rounds: int = 7) -> int:
    """Run a random schedule to its end, and return by how many versions the oldest token missed the bound."""
    rng = random.Random(seed)
    quota, bound, versions_per_round = rng.randint(1, 4), rng.randint(0, 5), rng.randint(1, 3)
    count = rng.choice([1, 1, 2, 3, 5])
    limit = bound // versions_per_round + 1
    factor = rng.choice([1.0, limit, rng.uniform(1.0, limit)])
    what = f"seed {seed}: {count} pools, quota {quota}, S {bound}, factor {factor}, {versions_per_round} per round"
    pick = ORDERS[rng.choice(list(ORDERS))]
    always_jump, changes_factor = rng.random() < 0.5, rng.random() < 0.3
    options = {"max_staleness": bound, "versions_per_round": versions_per_round}
    pools = Pools(count, quota, over_provisioning=factor, **options)
    version = oldest = 0
    trained: list[int] = []
    for _ in range(rounds):
        if changes_factor:
            factor = rng.choice([1.0, limit, rng.uniform(1.0, limit)])
            for pool in pools:
                pool.schedule.set_target(factor)
        pools.begin_round(version)
        pools.admit(rounds * quota - pools.next_id, samples=rng.randint(1, 2))
        for pool in pools:
            for _, sample in pool.ready():
                if rng.random() < 0.9:
                    pool.start(sample)
                    if rng.random() < 0.7:
                        pool.record(sample, [1], [-1.0])
        start_versions = {group.group_id: group.start_version for pool in pools for group in pool}
        rules = {"quota": quota, "version": version, "bound": bound, "versions_per_round": versions_per_round}
        assert in_time(start_versions.values(), rounds=1, **rules), what
        unfinished = [group_id for group_id in sorted(start_versions) if group_id not in pools.finished]
        while not may_close(start_versions, pools.finished, **rules):
            assert unfinished, f"{what}: everything is finished and the round still cannot be closed"
            pools.complete(unfinished.pop(pick(rng, unfinished)))
        while unfinished and rng.random() < 0.3:  # completions that race with the abort
            pools.complete(unfinished.pop(rng.randrange(len(unfinished))))
        park_everything(pools)
        pools.agree()
        expected = pools.finished[:quota]
        taken = pools.take()
        assert sorted(group_id for groups in taken for group_id in ids(groups)) == expected, what
        assert all(owner_of(i, count) == rank for rank, groups in enumerate(taken) for i in ids(groups)), what
        trained += expected
        ages = [version - sample.versions[0] for groups in taken for group in groups for sample in group.samples]
        assert max(ages) <= bound, f"{what}: a token was trained {max(ages)} versions old"
        oldest = max(oldest, *ages)
        if count == 1 and rng.random() < 0.1:
            restored = Pool(quota, over_provisioning=factor, **options)
            restore(restored, [state_dict(pools.pools[0])])
            pools.pools = [restored]
        version += versions_per_round if always_jump else rng.randint(0, versions_per_round)
    assert sorted(trained) == list(range(rounds * quota)), what
    assert not any(len(pool) for pool in pools), what
    admitted = sum(pool.counters.groups_admitted for pool in pools)
    assert admitted == sum(pool.counters.groups_taken for pool in pools) == rounds * quota, what
    return bound - oldest


def park_everything(pools: Iterable[Pool]) -> None:
    for pool in pools:
        for group in pool:
            for sample in group.samples:
                if sample.state is SampleState.RUNNING:
                    pool.park(sample)


def test_no_trained_token_is_older_than_the_bound():
    """Rules 8 and 9, in one pool and in several, with a fixed and a changing factor.

    Every row is trained exactly once and the run ends with empty pools. That the bound is also reached shows that the
    schedules press against it.
    """
    count = cases(500, 4_000)
    reached = sum(run_schedule(seed) == 0 for seed in range(count))
    assert reached > count // 5
