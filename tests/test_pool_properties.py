"""The pool under arbitrary schedules: a state machine against an independent model, and the staleness guarantee."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.closing import may_close
from trl_april.errors import ConfigError, PoolError
from trl_april.pool import Pool
from trl_april.types import FinishReason, Group, Sample, SampleState


# The model


@dataclass
class ModelSample:
    """What a sample must hold, told by the events alone: `(token, log-probability, version)` each, and requests."""

    tokens: list[tuple[int, float, int]] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)  # tokens per request, those without one left out
    running: bool = False
    done: bool = False


@dataclass
class ModelGroup:
    born: int
    budget: int
    samples: list[ModelSample]

    @property
    def done(self) -> bool:
        return all(sample.done for sample in self.samples)


# Few and small, so that equal ones meet, and the largest that there is.
TOKEN_IDS = st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), max_size=3)


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool by every rule it has, in any order, and compares it with the model after each."""

    @initialize(
        quota=st.integers(1, 3),
        factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
        slack=st.sampled_from([None, 0, 1, 2]),
        versions_per_round=st.integers(1, 2),
        version=st.integers(0, 3),
        most_parked=st.sampled_from([None, 0, 3, 10]),
    )
    def open(self, quota, factor, slack, versions_per_round, version, most_parked):
        bound = None if slack is None else math.ceil(factor - 1) * versions_per_round + slack
        self.options = {
            "over_provisioning": factor,
            "max_staleness": bound,
            "versions_per_round": versions_per_round,
            "max_parked_tokens": most_parked,
        }
        self.most_parked = most_parked
        self.quota, self.bound, self.versions_per_round = quota, bound, versions_per_round
        self.target = math.ceil(quota * factor)
        self.pool = Pool(quota, **self.options)
        self.pool.begin_round(version)
        self.version = version
        self.groups: dict[int, ModelGroup] = {}
        self.taken: list[int] = []
        self.generated = 0
        self.trained = 0
        self.next_id = 0

    # Events

    def the_pools(self, group_id: int, index: int) -> tuple[Group, Sample]:
        (group,) = [group for group in self.pool if group.group_id == group_id]
        return group, group.samples[index]

    def running(self) -> list[tuple[int, int]]:
        return [(i, j) for i, group in self.groups.items() for j, s in enumerate(group.samples) if s.running]

    def startable(self) -> list[tuple[int, int]]:
        return [
            (i, j)
            for i, group in self.groups.items()
            for j, sample in enumerate(group.samples)
            if not sample.running and not sample.done
        ]

    def admit_one(self, skipped_ids, samples, budget):
        group_id = self.next_id + skipped_ids
        row = {"prompt": f"p{group_id}"}
        self.pool.admit(group_id, row, [1], num_generations=samples, max_completion_length=budget)
        self.groups[group_id] = ModelGroup(self.version, budget, [ModelSample() for _ in range(samples)])
        self.next_id = group_id + 1

    @precondition(lambda self: len(self.groups) < self.target)
    @rule(skipped_ids=st.integers(0, 2), samples=st.integers(1, 3), budget=st.integers(1, 8))
    def admit(self, skipped_ids, samples, budget):
        self.admit_one(skipped_ids, samples, budget)

    @rule(factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]))
    def aim_at(self, factor):
        if self.bound is not None and factor > self.bound // self.versions_per_round + 1:
            with pytest.raises(ConfigError, match=f"over_provisioning is {factor}"):
                self.pool.over_provisioning = factor
            return
        self.pool.over_provisioning = self.options["over_provisioning"] = factor
        self.target = math.ceil(self.quota * factor)

    @rule(samples=st.integers(1, 3), budget=st.integers(1, 8))
    def fill_up(self, samples, budget):
        while len(self.groups) < self.target:
            self.admit_one(0, samples, budget)
        assert self.pool.room == 0  # of the target, also where the pool is full and asks for less
        with pytest.raises(PoolError):
            self.admit_one(0, samples, budget)

    @precondition(lambda self: self.startable())
    @rule(data=st.data())
    def start(self, data):
        self.start_one(*data.draw(st.sampled_from(self.startable())))

    @precondition(lambda self: self.startable())
    @rule()
    def dispatch(self):
        """What a driver does: start all that can be started."""
        for i, j in self.startable():
            self.start_one(i, j)

    def start_one(self, i, j):
        self.pool.start(self.the_pools(i, j)[1])
        self.groups[i].samples[j].running = True
        self.groups[i].samples[j].requests.append(0)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), token_ids=TOKEN_IDS)
    def record(self, data, token_ids):
        self.record_one(*data.draw(st.sampled_from(self.running())), token_ids)

    @precondition(lambda self: self.running())
    @rule(token_ids=TOKEN_IDS)
    def record_everywhere(self, token_ids):
        for i, j in self.running():
            self.record_one(i, j, token_ids)

    def record_one(self, i, j, token_ids):
        sample, model = self.the_pools(i, j)[1], self.groups[i].samples[j]
        logprobs = [-((token_id % 64) / 8) for token_id in token_ids]  # exact in 32 bits
        if len(model.tokens) + len(token_ids) > self.groups[i].budget:
            with pytest.raises(PoolError):
                self.pool.record(sample, token_ids, logprobs)
            return
        self.pool.record(sample, token_ids, logprobs)
        model.tokens += [(t, p, self.version) for t, p in zip(token_ids, logprobs, strict=True)]
        model.requests[-1] += len(token_ids)
        self.generated += len(token_ids)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), reason=st.sampled_from(FinishReason))
    def finish(self, data, reason):
        self.finish_one(*data.draw(st.sampled_from(self.running())), reason)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish_group(self, data):
        """A whole group at once, which a random choice of samples seldom gets to."""
        group_id = data.draw(st.sampled_from(sorted({i for i, _ in self.running()})))
        for i, j in self.running():
            if i == group_id:
                self.finish_one(i, j, FinishReason.STOP)

    def finish_one(self, i, j, reason):
        sample, model = self.the_pools(i, j)[1], self.groups[i].samples[j]
        if not model.tokens:
            with pytest.raises(PoolError):
                self.pool.finish(sample, reason)
            return
        self.pool.finish(sample, reason)
        model.running, model.done = False, True
        assert sample.finish_reason is reason

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def park(self, data):
        i, j = data.draw(st.sampled_from(self.running()))
        self.park_one(i, j)

    @precondition(lambda self: self.running())
    @rule()
    def park_everything(self):
        for i, j in self.running():
            self.park_one(i, j)

    def park_one(self, i, j):
        model = self.groups[i].samples[j]
        self.pool.park(self.the_pools(i, j)[1])
        model.running = False
        model.done = len(model.tokens) == self.groups[i].budget

    @rule(jump=st.integers(0, 3), through_a_checkpoint=st.booleans())
    def close_round(self, jump, through_a_checkpoint):
        """What a driver does: abort, take, sync; all of it or, if the round has to stay open, nothing."""
        finished = [i for i, group in self.groups.items() if group.done]
        if not self.pool.quota_met:
            with pytest.raises(PoolError):
                self.pool.take()
            assert self.bound is not None or len(finished) < self.quota
            # Whatever the bound, a round can be closed once everything is finished.
            assert len(finished) < max(len(self.groups), self.quota)
            return
        for i, j in self.running():
            self.park_one(i, j)
        finished = [i for i, group in self.groups.items() if group.done]
        batch = self.pool.take()
        assert [group.group_id for group in batch] == finished[: self.quota]
        for group in batch:
            self.compare(group, self.groups.pop(group.group_id))
            assert group.group_id not in self.taken
            self.taken.append(group.group_id)
            self.trained += group.num_tokens
            if self.bound is not None:
                assert all(self.version - v <= self.bound for s in group.samples for v in s.versions)
        if through_a_checkpoint:
            self.through_a_checkpoint()
        version = self.version + min(jump, self.versions_per_round)
        self.pool.begin_round(version)
        self.version = version
        count = self.quota if self.pool.is_full else self.target
        assert self.pool.room == (0 if self.pool.quota_met else max(0, count - len(self.groups)))

    @rule()
    def sync_under_running_requests(self):
        """Rule 4: refused exactly while something runs."""
        if self.running():
            with pytest.raises(PoolError):
                self.pool.begin_round(self.version + 1)
        else:
            with pytest.raises(PoolError):
                self.pool.begin_round(self.version - 1)

    @rule()
    def through_a_checkpoint(self):
        """What runs is cut; everything else is as before."""
        restored = Pool(self.quota, **self.options)
        restored.load_state_dict(self.pool.state_dict())
        for i, j in self.running():
            model = self.groups[i].samples[j]
            model.running = False
            model.done = len(model.tokens) == self.groups[i].budget
        self.pool = restored

    # What must hold after each

    def compare(self, group: Group, model: ModelGroup) -> None:
        assert (group.born, group.max_completion_length) == (model.born, model.budget)
        assert group.row == {"prompt": f"p{group.group_id}"}
        for sample, expected in zip(group.samples, model.samples, strict=True):
            assert list(zip(sample.token_ids, sample.logprobs, sample.versions, strict=True)) == expected.tokens
            assert [segment.length for segment in sample.segments] == [n for n in expected.requests if n]
            assert len(sample) <= model.budget
            assert group.remaining(sample) == model.budget - len(expected.tokens)
            assert (sample.state is SampleState.RUNNING) == expected.running
            assert (sample.state is SampleState.FINISHED) == expected.done
            if not expected.running and not expected.done:
                assert (sample.state is SampleState.PARKED) == bool(expected.tokens)

    @invariant()
    def the_pool_agrees_with_itself(self):
        self.pool.check()

    @invariant()
    def the_pool_holds_what_the_model_holds(self):
        assert [group.group_id for group in self.pool] == list(self.groups)
        for group, model in zip(self.pool, self.groups.values(), strict=True):
            self.compare(group, model)
        assert self.pool.num_finished == sum(group.done for group in self.groups.values())

    @invariant()
    def nothing_is_lost_and_nothing_counted_twice(self):
        held = sum(len(sample.tokens) for group in self.groups.values() for sample in group.samples)
        assert self.generated == self.trained + held
        assert (self.pool.ledger.tokens_generated, self.pool.ledger.tokens_taken) == (self.generated, self.trained)
        assert self.pool.tokens_held == held
        assert self.pool.ledger.groups_taken == len(self.taken) == len(set(self.taken))
        assert self.pool.ledger.groups_admitted == len(self.taken) + len(self.groups)

    @invariant()
    def ready_lists_what_can_be_started(self):
        ready = [(group.group_id, sample.index) for group, sample in self.pool.ready()]
        tokens = {(i, j): bool(self.groups[i].samples[j].tokens) for i, j in self.startable()}
        if self.pool.is_full:
            needed = self.needed()
            tokens = {(i, j): begun for (i, j), begun in tokens.items() if i in needed}
        assert ready == [key for key in tokens if tokens[key]] + [key for key in tokens if not tokens[key]]

    def needed(self) -> list[int]:
        """The oldest unfinished groups, one more at a time until the round could close with them."""
        rules = {
            "quota": self.quota,
            "version": self.version,
            "bound": self.bound,
            "versions_per_round": self.versions_per_round,
        }
        born = {i: group.born for i, group in self.groups.items()}
        finished = {i for i, group in self.groups.items() if group.done}
        unfinished = [i for i in self.groups if i not in finished]
        for count in range(len(unfinished)):
            if may_close(born, finished | set(unfinished[:count]), **rules):
                return unfinished[:count]
        return unfinished

    @invariant()
    def a_full_pool_goes_on_with_what_the_round_needs_and_no_more(self):
        held = sum(len(sample.tokens) for group in self.groups.values() for sample in group.samples)
        assert self.pool.is_full == (self.most_parked is not None and held >= self.most_parked)
        needed = self.needed()
        assert self.pool.roster.needed() == needed
        assert [(sample.group_id, sample.index) for sample in self.pool.not_needed()] == [
            (i, j)
            for i, group in self.groups.items()
            for j, sample in enumerate(group.samples)
            if not sample.done and i not in needed
        ]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# Rule 7


@given(data=st.data(), quota=st.integers(1, 4), spare=st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_the_batch_is_the_same_for_every_order_of_arrival(data, quota, spare):
    count = quota + spare
    finished = data.draw(st.sets(st.integers(0, count - 1), min_size=quota))
    batches = []
    for order in (data.draw(st.permutations(sorted(finished))), sorted(finished)):
        pool = Pool(quota, over_provisioning=count / quota, max_staleness=None)
        pool.begin_round(0)
        groups = [pool.admit(i, {}, [1], num_generations=1, max_completion_length=9) for i in range(count)]
        for group in groups:
            pool.start(group.samples[0])
        for group_id in order:
            pool.record(groups[group_id].samples[0], [group_id], [-1.0])
            pool.finish(groups[group_id].samples[0], FinishReason.STOP)
        batches.append([(group.group_id, group.samples[0].token_ids.tolist()) for group in pool.take()])
    assert batches[0] == batches[1] == [(i, [i]) for i in sorted(finished)[:quota]]


# Rule 8: the guarantee

SCHEDULES = 10_000
# Which unfinished group completes next. The youngest first is the adversary: it starves the oldest for ever.
ORDERS = {
    "youngest": lambda rng, groups: -1,
    "oldest": lambda rng, groups: 0,
    "random": lambda rng, groups: rng.randrange(len(groups)),
    "all but the oldest": lambda rng, groups: rng.randrange(1, len(groups)) if len(groups) > 1 else 0,
    "second youngest": lambda rng, groups: max(0, len(groups) - 2),
}


def run_schedule(seed: int, rounds: int = 7, *, changes_factor: bool = False) -> int:
    """Runs a random schedule, asserts the bound for every token, and returns how far from it the oldest one was."""
    rng = random.Random(seed)
    quota, bound, versions_per_round = rng.randint(1, 3), rng.randint(0, 5), rng.randint(1, 3)
    limit = bound // versions_per_round + 1
    factor = rng.choice([1.0, limit, rng.uniform(1.0, limit)])
    what = f"seed {seed}: quota {quota}, S {bound}, factor {factor}, {versions_per_round} versions per round"
    pick = ORDERS[rng.choice(list(ORDERS))]
    always_jump = rng.random() < 0.5
    pool = Pool(quota, over_provisioning=factor, max_staleness=bound, versions_per_round=versions_per_round)
    version = next_id = oldest = 0
    for _ in range(rounds):
        if changes_factor:
            factor = pool.over_provisioning = rng.choice([1.0, limit, rng.uniform(1.0, limit)])
        pool.begin_round(version)
        for _ in range(pool.room):
            pool.admit(next_id, {}, [1], num_generations=rng.randint(1, 2), max_completion_length=50)
            next_id += 1
        running = [pair for pair in pool.ready() if rng.random() < 0.95]
        for _, sample in running:
            pool.start(sample)
            if rng.random() < 0.7:
                pool.record(sample, [1], [-1.0])
        unfinished = [group for group in pool if any(s.finish_reason is None for s in group.samples)]
        while not pool.quota_met:
            assert unfinished, f"{what}: everything is finished and the round still cannot be closed"
            group = unfinished.pop(pick(rng, unfinished))
            for sample in group.samples:
                if sample.finish_reason is None:
                    if sample.state is not SampleState.RUNNING:
                        pool.start(sample)
                    pool.record(sample, [2], [-1.0])
                    pool.finish(sample, FinishReason.STOP)
        while unfinished and rng.random() < 0.3:  # completions that race with the abort
            for sample in unfinished.pop(rng.randrange(len(unfinished))).samples:
                if sample.state is SampleState.RUNNING:
                    pool.record(sample, [3], [-1.0])
                    pool.finish(sample, FinishReason.STOP)
        for _, sample in running:
            if sample.state is SampleState.RUNNING:
                pool.park(sample)
        for group in pool:
            for sample in group.samples:
                assert sample.state is not SampleState.RUNNING
        for group in pool.take():
            for sample in group.samples:
                age = version - sample.segments[0].version
                assert age <= bound, f"{what}: group {group.group_id} was trained {age} versions old"
                oldest = max(oldest, age)
        if rng.random() < 0.1:
            restored = Pool(
                quota, over_provisioning=factor, max_staleness=bound, versions_per_round=versions_per_round
            )
            restored.load_state_dict(pool.state_dict())
            pool = restored
        version += versions_per_round if always_jump else rng.randint(0, versions_per_round)
    pool.check()
    return bound - oldest


def test_no_trained_token_is_older_than_the_bound_in_10000_schedules():
    """Rule 8. That the bound is also reached shows that the schedules press against it."""
    reached = sum(run_schedule(seed) == 0 for seed in range(SCHEDULES))
    assert reached > SCHEDULES // 5


def test_no_trained_token_is_older_than_the_bound_however_the_factor_changes():
    """Rule 8 again, with another target in every round."""
    reached = sum(run_schedule(seed, rounds=10, changes_factor=True) == 0 for seed in range(3000))
    assert reached > 3000 // 5
