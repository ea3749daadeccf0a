"""Several processes on the real server, by `accelerate launch`: what is trained does not depend on how many."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tests.launch import launch


pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

NUMS_PROCESSES = (1, 2, 4)
RUNS = [
    # 24 rows in batches of 4 groups of 4 samples, two epochs.
    {"name": "plain", "kind": "train", "options": {"num_train_epochs": 2, "max_steps": -1}},
    # 3 groups of 4 samples, which do not divide into 2 or 4 processes, each batch trained twice.
    {"name": "straddling", "kind": "train", "batch": 12, "options": {"num_train_epochs": 1, "num_iterations": 2}},
    # Each batch in 4 parts and 2 optimiser steps.
    {
        "name": "accumulated",
        "kind": "train",
        "options": {"num_train_epochs": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
    },
    # Synchronous, and sampled with seeds, so that the completions do not depend on chance.
    {
        "name": "seeded",
        "kind": "train_and_replay",
        "batch": 16,
        "options": {
            "max_steps": 4,
            "over_provisioning": 1.0,
            "max_completion_length": 16,
            "learning_rate": 1e-3,
            "generation_kwargs": {"seed": 5},
        },
    },
]


@pytest.fixture(scope="module")
def launched(server, tiny_model_dir, tmp_path_factory):
    """The runs above, in 1, 2 and 4 processes."""
    folder = tmp_path_factory.mktemp("many")
    done = {}
    for count in NUMS_PROCESSES:
        done[count] = launch(count, RUNS, folder / str(count), model=tiny_model_dir, url=server.base_url)
        assert done[count].code == 0, done[count].output[-6000:]
    return done


def trained(results: list[dict], step: int | None = None) -> list[tuple[int, int, int]]:
    """Id, row and sample of everything trained, over all processes and in their order."""
    rounds = range(len(results[0]["rounds"])) if step is None else [step]
    return [
        (group["id"], group["number"], index)
        for number in rounds
        for result in results
        for group in result["rounds"][number]
        for index in group["samples"]
    ]


@pytest.mark.parametrize("count", NUMS_PROCESSES)
@pytest.mark.parametrize(("name", "epochs"), [("plain", 2), ("straddling", 1), ("accumulated", 1)])
class TestRows:
    def test_every_row_is_trained_once_per_epoch_with_all_its_samples(self, launched, count, name, epochs):
        results = launched[count].results(name, count)
        samples = Counter((number, index) for _, number, index in trained(results))
        assert samples == {(number, index): epochs for number in range(24) for index in range(4)}
        assert len(set(trained(results))) == len(trained(results))  # each group once

    def test_the_rows_are_those_of_one_process(self, launched, count, name, epochs):
        rows_of_groups = [
            {(group, number) for group, number, _ in trained(launched[c].results(name, c))} for c in (1, count)
        ]
        assert rows_of_groups[0] == rows_of_groups[1]

    def test_a_batch_is_dealt_out_in_order_and_in_equal_parts(self, launched, count, name, epochs):
        results = launched[count].results(name, count)
        for step in range(len(results[0]["rounds"])):
            samples = trained(results, step)
            assert samples == sorted(samples)
            assert {len(trained([result], step)) for result in results} == {len(samples) // count}

    def test_the_pools_are_empty_at_the_end_and_nothing_was_taken_twice(self, launched, count, name, epochs):
        results = launched[count].results(name, count)
        assert [result["left"] for result in results] == [0] * count
        assert sum(result["taken"] for result in results) == 24 * epochs
        # Each process has generated its share, whoever trained it.
        assert {result["taken"] for result in results} == {24 * epochs // count}

    def test_the_log_counts_over_all_processes(self, launched, count, name, epochs):
        results = launched[count].results(name, count)
        lines = [entry for entry in results[0]["log"] if "april/trained_tokens" in entry]
        tokens = [
            sum(len(ids) for result in results for group in result["rounds"][step] for ids in group["tokens"])
            for step in range(len(results[0]["rounds"]))
        ]
        assert [entry["april/trained_tokens"] for entry in lines] == tokens
        generated = sum(sum(result["generated_here"]) for result in results)
        assert sum(entry["april/generated_tokens"] for entry in lines) == generated == sum(tokens)
        carried = [sum(result["carried_here"][step] for result in results) for step in range(len(tokens))]
        assert [entry["april/carried_fraction"] * n for entry, n in zip(lines, tokens, strict=True)] == pytest.approx(
            carried
        )
        ages = [
            max(max(v for g in r["rounds"][step] for s in g["versions"] for v in s) for r in results)
            - min(min(v for g in r["rounds"][step] for s in g["versions"] for v in s) for r in results)
            for step in range(len(tokens))
        ]
        assert all(entry["april/staleness_max"] >= age for entry, age in zip(lines, ages, strict=True))


def test_partial_samples_are_resumed_in_every_process(launched):
    """Or the tests above would say nothing on what is carried over."""
    for count in NUMS_PROCESSES:
        for result in launched[count].results("plain", count):
            assert sum(result["carried_here"]) > 0


class TestLosses:
    def values(self, launched, count: int, log: str, name: str) -> list[float]:
        return [entry[name] for entry in launched[count].result("seeded", 0)[log] if name in entry]

    @pytest.mark.parametrize("count", NUMS_PROCESSES[1:])
    @pytest.mark.parametrize("name", ["loss", "grad_norm", "reward", "entropy", "completions/mean_length"])
    def test_several_processes_learn_as_one_does(self, launched, count, name):
        alone = self.values(launched, 1, "log", name)
        assert len(alone) == 4 and all(a != b for a, b in pairwise(alone))
        assert self.values(launched, count, "log", name) == pytest.approx(alone, abs=1e-4)

    @pytest.mark.parametrize("count", NUMS_PROCESSES)
    @pytest.mark.parametrize("name", ["loss", "grad_norm", "reward", "entropy", "completions/mean_length"])
    def test_trls_own_trainer_does_the_same_with_the_same_completions(self, launched, count, name):
        found = self.values(launched, count, "log", name)
        assert found == pytest.approx(self.values(launched, count, "stock_log", name), abs=1e-4)

    def test_the_same_completions_were_sampled(self, launched):
        def completions(count):
            results = launched[count].results("seeded", count)
            return [ids for step in range(4) for r in results for g in r["rounds"][step] for ids in g["tokens"]]

        for count in NUMS_PROCESSES[1:]:
            assert completions(count) == completions(1)


def test_a_hundred_rounds_with_random_delays_and_speeds(server, tiny_model_dir, tmp_path):
    run = {
        "name": "slow",
        "kind": "train_with_delays",
        "seed": 3,
        "mean_delay": 0.01,
        "batch": 12,
        "rows": 60,
        "options": {"max_steps": 100, "max_completion_length": 12, "num_generations": 2, "learning_rate": 1e-5},
    }
    done = launch(3, [run], tmp_path, model=tiny_model_dir, url=server.base_url)
    assert done.code == 0, done.output[-6000:]
    results = done.results("slow", 3)
    assert len(results[0]["rounds"]) == 100
    # 600 groups from 60 rows: each row 10 times, each group once, with both samples.
    samples = trained(results)
    assert Counter(number for _, number, _ in samples) == dict.fromkeys(range(60), 20)
    assert sorted((group, index) for group, _, index in samples) == [(g, i) for g in range(600) for i in range(2)]
    assert [result["left"] for result in results] == [0] * 3
    assert sum(sum(result["carried_here"]) for result in results) > 0
