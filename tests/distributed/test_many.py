"""Several processes on the real server: training does not depend on their number."""

from collections import Counter
from itertools import pairwise

import pytest

from tests.support.preloaded import launch_preloaded
from trl_april.commands.report import read_run


pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

NUMS_PROCESSES = (1, 2)
TABLE = {"log_completions": True, "num_completions_to_print": 0}
RUNS = [
    # 24 rows in batches of 4 groups of 4 samples, two epochs.
    {"name": "plain", "kind": "train", "options": {"num_train_epochs": 2, "max_steps": -1, **TABLE}},
    # 3 groups of 4 samples, which do not divide into 2 processes; each batch is trained twice, in a trust region.
    {
        "name": "straddling", "kind": "train", "batch": 12,
        "options": {"num_train_epochs": 1, "num_iterations": 2, "dppo_threshold": 1e-3},
    },
    # Synchronous, and sampled with seeds, so the completions do not depend on chance.
    {
        "name": "seeded", "kind": "train_and_replay", "batch": 16,
        "options": {
            "max_steps": 4, "over_provisioning": 1.0, "max_completion_length": 16, "learning_rate": 1e-3,
            "generation_kwargs": {"seed": 5},
        },
    },
    # The same in several micro-batches, of which the first ones of a process stay empty, and lengths that differ.
    {
        "name": "filled", "kind": "train_and_replay", "batch": 64, "rows": 32,
        "options": {
            "max_steps": 2, "over_provisioning": 1.0, "learning_rate": 1e-3, "generation_kwargs": {"seed": 5},
            "steps_per_generation": 4, "gradient_accumulation_steps": 4, "max_completion_length": 96,
            "num_generations": 2,  # more than one group in a micro-batch
        },
    },
    # Two of three rows have no learning signal; groups straddle processes.
    {
        "name": "dynamic", "kind": "train_dynamically", "batch": 12, "every": 3, "rows": 90,
        "options": {"max_steps": 6, "dynamic_sampling": True, "max_completion_length": 24, **TABLE},
    },
    # No row has a learning signal, and some of the groups that replace rejected ones fall due in this round.
    {
        "name": "hopeless", "kind": "train_dynamically", "batch": 16, "every": 1000, "rows": 90,
        "options": {
            "max_steps": 2, "dynamic_sampling": True, "max_rejected_groups_per_round": 8, "max_completion_length": 8,
            "max_staleness": 1,
        },
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def launched(server, forker, tiny_model_dir, tmp_path_factory):
    """The runs above in 2 processes, and those that are compared in 1."""
    folder = tmp_path_factory.mktemp("many")
    done = {}
    for count in NUMS_PROCESSES:
        runs = [run for run in RUNS if count > 1 or run["name"] in ("plain", "seeded")]
        done[count] = launch_preloaded(
            forker, count, runs, folder / str(count), model=tiny_model_dir, url=server.base_url
        )
        assert done[count].code == 0, done[count].output[-6000:]
    return done


def trained(results: list[dict], step: int | None = None) -> list[tuple[int, int, int]]:
    """Id, row and sample of all trained samples, over all processes and in their order."""
    rounds = range(len(results[0]["rounds"])) if step is None else [step]
    return [
        (group["id"], group["number"], index)
        for number in rounds
        for result in results
        for group in result["rounds"][number]
        for index in group["samples"]
    ]


@pytest.mark.parametrize(("count", "name", "epochs"), [(1, "plain", 2), (2, "plain", 2), (2, "straddling", 1)])
class TestRows:
    def test_every_row_is_trained_once_per_epoch_in_equal_parts_of_batches(self, launched, count, name, epochs):
        results = launched[count].results(name, count)
        samples = Counter((number, index) for _, number, index in trained(results))
        assert samples == {(number, index): epochs for number in range(24) for index in range(4)}
        assert len(set(trained(results))) == len(trained(results))  # each group once
        assert [result["left"] for result in results] == [0] * count
        # Each process has generated an equal part, whoever trained it.
        assert [result["taken"] for result in results] == [24 * epochs // count] * count
        for step in range(len(results[0]["rounds"])):
            batch = trained(results, step)
            assert batch == sorted(batch)
            assert {len(trained([result], step)) for result in results} == {len(batch) // count}
        if name == "plain":
            rows = {(group, number) for group, number, _ in trained(results)}
            assert rows == {(group, number) for group, number, _ in trained(launched[1].results(name, 1))}
            # Otherwise samples that are carried over would not be covered.
            assert all(sum(result["carried_here"]) > 0 for result in results)

    def test_log_counts_over_all_processes(self, launched, count, name, epochs):
        results = launched[count].results(name, count)
        lines = [entry for entry in results[0]["log"] if "april/trained_tokens" in entry]
        tokens = [
            sum(len(ids) for result in results for group in result["rounds"][step] for ids in group["tokens"])
            for step in range(len(results[0]["rounds"]))
        ]
        assert [entry["april/trained_tokens"] for entry in lines] == tokens
        # The run log of the main process counts over all, too.
        rounds = read_run(launched[count].folder / f"{name}-out").rounds
        assert [sum(one.ages.values()) for one in rounds] == tokens
        assert [sum(one.trained_lengths.values()) for one in rounds] == [
            len(trained(results, k)) for k in range(len(tokens))
        ]
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


def test_tokens_out_of_the_trust_region_are_counted(launched):
    log = launched[2].results("straddling", 2)[0]["log"]
    fractions = [entry["april/correction/dppo_masked_fraction"] for entry in log if "loss" in entry]
    assert fractions[0] == 0 < max(fractions) < 1


def test_table_of_completions_has_the_samples_of_all_processes_in_their_order(launched):
    for count, name in ((1, "plain"), (2, "plain"), (2, "dynamic")):
        results = launched[count].results(name, count)
        assert len(results[0]["completions"]) == len(results[0]["rounds"])
        for step, shown in enumerate(results[0]["completions"]):
            groups = [group for result in results for group in result["rounds"][step]]
            versions = [of_sample for group in groups for of_sample in group["versions"]]
            resumed = [times for group in groups for times in group["resumed"]]
            of_segments = [[int(version) for version in text.split(",")] for text in shown]
            assert [sorted(set(segments)) for segments in of_segments] == versions
            assert [len(segments) - 1 for segments in of_segments] == resumed


class TestLosses:
    def values(self, launched, count: int, log: str, name: str, run: str = "seeded") -> list[float]:
        return [entry[name] for entry in launched[count].result(run, 0)[log] if name in entry]

    @pytest.mark.parametrize(
        "name",
        [
            *("loss", "grad_norm", "reward", "entropy", "completions/mean_length"),
            *("april/correction/length_q1/tokens_fraction", "april/correction/length_q4/tokens_fraction"),
        ],
    )
    def test_processes_learn_like_one_and_like_trls_own_trainer_with_the_same_completions(self, launched, name):
        alone, together = (self.values(launched, count, "log", name) for count in NUMS_PROCESSES)
        assert len(alone) == 4 and all(a != b for a, b in pairwise(alone))
        assert together == pytest.approx(alone, abs=1e-4)
        for count in NUMS_PROCESSES if "april" not in name else ():
            assert self.values(launched, count, "stock_log", name) == pytest.approx(alone, abs=1e-4)

    def test_processes_fill_the_same_micro_batches_and_learn_like_trls_own_trainer(self, launched):
        passes = [result["training_passes"] for result in launched[2].results("filled", 2)]
        assert len(set(passes)) == 1 and 2 <= passes[0] < 2 * 4
        for name in ("loss", "grad_norm"):
            found = self.values(launched, 2, "log", name, "filled")
            assert found == pytest.approx(self.values(launched, 2, "stock_log", name, "filled"), abs=1e-4)


def test_dynamic_sampling_loses_no_row_and_logs_what_is_trained(launched):
    results = launched[2].results("dynamic", 2)
    assert all(number % 3 == 0 for _, number, _ in trained(results)), "rewards differ"
    for step in range(6):
        samples = trained(results, step)
        assert samples == sorted(samples) and len(set(samples)) == 12, "a batch is full"
    for result in results:
        assert result["left"] == 0
        assert result["admitted"] == result["taken"] + result["rejected"]
        generated, taken, rejected = result["tokens"]
        assert generated == taken + rejected
        scored = Counter(number for call in result["scored"] for number in call)
        assert set(scored.values()) == {4} and len(scored) == result["admitted"], "its own groups, once"
    assert sum(result["taken"] for result in results) == 6 * 3
    assert sum(result["rejected"] for result in results) >= 6 * 3
    log = results[0]["log"]
    assert log[-2]["frac_reward_zero_std"] == 0
    assert results[0]["logged_rows"][-12:] == [number for _, number, _ in trained(results, 5)]
    assert results[0]["logged_rewards"][-12:] == [float(index) for *_, index in trained(results, 5)]
    lines = [entry for entry in log if "april/rejected_groups" in entry]
    assert sum(entry["april/rejected_groups"] for entry in lines) == sum(r["rejected"] for r in results)
    assert all(entry["calls"] == 1.0 for entry in lines)


def test_hopeless_round_is_filled_with_rejected_groups_of_any_process(launched):
    results = launched[2].results("hopeless", 2)
    for step in range(2):
        samples = trained(results, step)
        assert samples == sorted(samples) and len(set(samples)) == 16
    assert sum(sum(result["filled"]) for result in results) == 8
    assert [result["left"] for result in results] == [0, 0]
