"""What the simulator reads: step times, lengths, the log of a training run; and what it says of bad input."""

import json
import math
import random
import statistics

import pytest

from trl_april.errors import ConfigError
from trl_april.simulator.lengths import LOGGED, Histogram, Lognormal, Quantiles, draw, read_histogram, read_log
from trl_april.simulator.scenario import UNITS, Scenario
from trl_april.simulator.step_time import EXAMPLE, StepTime, parse_step_time, read_step_time


NORMAL = statistics.NormalDist()


# Step times


def test_step_times_are_linear_between_points_and_go_on_with_the_last_slope():
    step_time = StepTime(((2, 1.0), (4, 2.0), (8, 3.0)))
    found = [step_time.decode(sequences) for sequences in (1, 2, 3, 4, 6, 8, 12)]
    assert found == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]


def test_a_measured_curve_may_fall_but_does_not_go_on_falling():
    step_time = StepTime(((1, 3.8), (4, 1.7)))
    assert [step_time.decode(sequences) for sequences in (1, 4, 100)] == [3.8, 1.7, 1.7]


def test_one_point_is_constant():
    assert [StepTime(((4, 2.0),)).decode(sequences) for sequences in (1, 4, 9)] == [2.0, 2.0, 2.0]


def test_the_peak_is_at_the_best_number_of_sequences():
    assert StepTime(((1, 1.0), (4, 2.0), (5, 5.0))).peak(10) == 2.0
    assert StepTime(((1, 1.0), (4, 2.0), (5, 5.0))).peak(3) == pytest.approx(3 / (5 / 3))


def test_step_times_as_text():
    assert parse_step_time("1:0.0025,8:0.0032", 1e-5) == StepTime(((1, 0.0025), (8, 0.0032)), 1e-5)
    assert parse_step_time(EXAMPLE).decode(64) == 0.0058


def test_step_times_as_doctor_writes_them(tmp_path):
    """The prefill is what a further token adds: a prompt's first token takes a step, too."""
    report = {
        "findings": [],
        "decode": [
            {"sequences": 1, "seconds_per_step": 0.002, "tokens_per_second": 500.0},
            {"sequences": 8, "seconds_per_step": 0.004, "tokens_per_second": 2000.0},
        ],
        "prefill": [{"tokens": 128, "seconds": 0.01}, {"tokens": 1128, "seconds": 0.03}],
    }
    path = tmp_path / "server.json"
    path.write_text(json.dumps(report))
    assert read_step_time(path).points == ((1, 0.002), (8, 0.004))
    assert read_step_time(path).prefill_seconds == pytest.approx(2e-5)
    assert read_step_time(path, 0.5).prefill_seconds == 0.5
    path.write_text(json.dumps({**report, "prefill": [{"tokens": 100, "seconds": 0.01}]}))
    assert read_step_time(path).prefill_seconds == pytest.approx(1e-4)
    path.write_text(json.dumps({"decode": report["decode"]}))
    assert read_step_time(path).prefill_seconds == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is no step time"),
        ("1", "'1' is no step time; write SEQUENCES:SECONDS"),
        ("1:fast", "'1:fast'"),
        ("1.5:0.1", "'1.5:0.1'"),
        ("0:0.1", "0 sequences"),
        ("1:0", "is 0.0 s"),
        ("1:nan", "is nan s"),
        ("8:0.1,1:0.1", r"\[8, 1\].*ascending"),
        ("1:0.1,1:0.2", "each number once"),
    ],
)
def test_bad_step_times_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_step_time(text)


def test_the_context_of_a_measured_step_is_taken_off_it(tmp_path):
    """16 sequences: 2000 tokens of context more take 3.2 ms more, which is 1e-7 s for each of 32,000."""
    path = tmp_path / "server.json"
    decode = [
        {"sequences": 1, "seconds_per_step": 0.002, "context": 100},
        {"sequences": 16, "seconds_per_step": 0.004, "context": 100},
    ]
    in_context = [{"sequences": 16, "seconds_per_step": 0.0072, "context": 2100}]
    path.write_text(json.dumps({"decode": decode, "decode_in_context": in_context}))
    found = read_step_time(path)
    assert found.context_seconds == pytest.approx(1e-7)
    assert found.decode(1) == pytest.approx(0.002 - 1e-7 * 100)
    assert found.decode(16) == pytest.approx(0.004 - 1e-7 * 1600)
    assert read_step_time(path, context_seconds=0.0).decode(16) == 0.004
    # Noise may make it faster, or so slow that no step would be left: neither is believed.
    path.write_text(json.dumps({"decode": decode, "decode_in_context": [{**in_context[0], "seconds_per_step": 1e-3}]}))
    assert read_step_time(path).context_seconds == 0.0
    assert read_step_time(path, context_seconds=1.0).decode(16) == 0.002


def test_the_peak_of_a_server_depends_on_the_context():
    step_time = StepTime(((1, 1.0), (4, 1.0)), context_seconds=0.01)
    assert step_time.peak(4) == 4.0
    assert step_time.peak(4, 100) == pytest.approx(4 / (1 + 4))


def test_bad_prefill_and_no_points_are_refused():
    with pytest.raises(ConfigError, match="-1 s"):
        parse_step_time("1:0.1", -1)
    with pytest.raises(ConfigError, match="no point"):
        StepTime(())


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"decode": [{"sequences": 1}]}', '{"decode": 3}', '{"decode": []}']
)
def test_a_file_without_a_curve_is_refused(tmp_path, content):
    path = tmp_path / "server.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="decode curve|no point"):
        read_step_time(path)


def test_files_that_are_not_there_are_named(tmp_path):
    for read in (read_step_time, read_histogram, read_log):
        with pytest.raises(ConfigError, match="missing.json cannot be read"):
            read(tmp_path / "missing.json")


# Lengths


def test_lognormal_lengths_are_those_of_the_benchmark():
    """Pinned: benchmarks/rollout.py forces these very lengths, so cells can be compared one by one."""
    for group, index in ((0, 0), (3, 1), (70, 3)):
        drawn = random.Random(f"5/{group}/{index}").lognormvariate(0.0, 1.0)
        expected = round(min(3500, max(8, 150 * drawn)))
        assert draw(Lognormal(150, 1.0, 8, 3500), group, index, seed=5) == expected


def test_lognormal_quantiles():
    lengths = Lognormal(100, 0.5, 50, 10**6)
    assert lengths.at(0.0) == 100
    assert lengths.at(1.0) == round(100 * math.exp(0.5))
    assert lengths.at(-9.0) == 50
    assert lengths.at(1e9) == lengths.longest == 10**6


def test_lengths_of_a_group_go_together_as_far_as_they_are_told_to():
    lengths = Lognormal(10_000, 1.0, 1, 10**9)

    def correlation(told):
        pairs = [[math.log(draw(lengths, g, i, seed=0, correlation=told)) for i in range(2)] for g in range(1500)]
        return statistics.correlation(*zip(*pairs, strict=True))

    assert correlation(0.0) == pytest.approx(0.0, abs=0.08)
    assert correlation(0.6) == pytest.approx(0.6, abs=0.08)
    assert correlation(1.0) == pytest.approx(1.0)
    spread = statistics.stdev(math.log(draw(lengths, g, 0, seed=0, correlation=0.6)) for g in range(1500))
    assert spread == pytest.approx(1.0, abs=0.06)


def test_a_histogram_gives_its_shares(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text('{"100": 3, "7": 1, "3500": 0}')
    lengths = read_histogram(path)
    assert lengths == Histogram((7, 100, 3500), (1.0, 3.0, 0.0))
    assert lengths.longest == 100
    drawn = [draw(lengths, group, 0, seed=0) for group in range(2000)]
    assert set(drawn) == {7, 100}
    assert drawn.count(7) / 2000 == pytest.approx(0.25, abs=0.03)
    assert lengths.at(-99.0) == 7
    assert lengths.at(99.0) == 100


def test_a_length_that_nobody_has_is_not_drawn():
    assert Histogram((1, 5, 9), (0.0, 1.0, 0.0)).at(-99.0) == 5


def test_a_histogram_in_lines(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("20,1\n10,2\n20,3\n")
    assert read_histogram(path) == Histogram((10, 20), (2.0, 4.0))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "at least one is needed"),
        ("{}", "at least one is needed"),
        ("length,count\n10,2", "is no histogram.*without a header"),
        ("10", "is no histogram"),
        ('{"10": "many"}', "is no histogram"),
        ('{"10": [1]}', "is no histogram"),
        ("0,1", "length 0 with count 1"),
        ("10,-1", "count -1"),
        ("10,nan", "count nan"),
        ("10,0", "counts no completion"),
    ],
)
def test_bad_histograms_are_refused(tmp_path, content, words):
    path = tmp_path / "lengths"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_histogram(path)


def test_quantiles_are_met_and_joined_by_their_logarithm():
    lengths = Quantiles((0.0, 0.5, 1.0), (10, 40, 640))
    assert lengths.at(0.0) == 40
    assert lengths.at(NORMAL.inv_cdf(0.25)) == 20
    assert lengths.at(NORMAL.inv_cdf(0.75)) == 160
    assert lengths.at(-99.0) == 10
    assert lengths.at(99.0) == lengths.longest == 640


def logged(*columns):
    """Entries of a log, one per round, among those that an evaluation and the end of training leave."""
    rounds = [
        {"loss": 0.1, "step": step, **dict(zip(LOGGED, column, strict=True))} for step, column in enumerate(columns)
    ]
    return json.dumps({"global_step": 2, "log_history": [*rounds, {"eval_loss": 1.0}, {"train_runtime": 3.0}]})


def test_the_log_of_a_training_run_is_averaged_over_its_rounds(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(logged((2, 10, 20, 30, 40, 50, 60, 70), (4, 20, 40, 60, 80, 100, 120, 140)))
    lengths = read_log(path)
    assert lengths.levels == (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
    assert lengths.lengths == (3, 15, 30, 45, 60, 75, 90, 105)
    assert lengths.longest == 105


def test_binned_quantiles_that_pass_the_extremes_are_brought_back(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(logged((100, 99, 100, 100, 100, 100, 101, 100)))
    assert read_log(path).lengths == (100,) * 8
    assert read_log(path).at(0.3) == 100


def test_what_the_trainer_logs_is_what_is_read():
    from trl_april.batch import QUANTILES

    ours = {key: share for key, share in LOGGED.items() if key.startswith("april/")}
    assert ours == {f"april/length_{name}": share for name, share in QUANTILES.items()}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is no log of a training run"),
        ("[]", "is no log"),
        ("{}", "is no log"),
        ('{"log_history": [3]}', "is no log"),
        ('{"log_history": []}', "no entry with completions/min_length, april/length_p10"),
        ('{"log_history": [{"loss": 1, "completions/min_length": 3}]}', "stock GRPO does not"),
    ],
)
def test_bad_logs_are_refused(tmp_path, content, words):
    path = tmp_path / "trainer_state.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_log(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((150, 1.0, 0, 10), "from 0 to 10"),
        ((150, 1.0, 10, 9), "from 10 to 9"),
        ((0, 1.0, 1, 10), "median of 0"),
        ((150, -1.0, 1, 10), "spread of -1.0"),
        ((math.nan, 1.0, 1, 10), "median of nan"),
    ],
)
def test_bad_lognormals_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        Lognormal(*arguments)


@pytest.mark.parametrize(("levels", "lengths"), [((0.1, 1), (1, 2)), ((0, 1), (2, 1)), ((0, 1), (0, 1))])
def test_bad_quantiles_are_refused(levels, lengths):
    with pytest.raises(ConfigError, match="quantiles are"):
        Quantiles(levels, lengths)


# The scenario


def make(**settings):
    return Scenario(StepTime(((1, 1.0),)), Lognormal(150, 1.0, 8, 3500), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"quota": 0}, {"group_size": 0}, {"servers": 0}, {"processes": 0}, {"rounds": 0}, {"warmup": -1},
        {"prompt_tokens": 0}, {"kv_block": 0}, {"max_sequences": 0}, {"max_batched_tokens": 0},
        {"train_seconds": -1.0}, {"sync_seconds": math.nan}, {"abort_seconds": math.inf}, {"request_seconds": -0.1},
        {"group_correlation": 1.5}, {"max_staleness": -1}, {"quantum": -1},
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}.*(must be|negative)"):
        make(**settings)


@pytest.mark.parametrize(("longest", "quantum"), [(8, 1), (UNITS, 1), (UNITS + 1, 2), (32_768, 32)])
def test_the_quantum_follows_from_the_longest_completion(longest, quantum):
    scenario = Scenario(StepTime(((1, 1.0),)), Lognormal(8, 1.0, 8, longest))
    assert scenario.quantum == quantum
    assert scenario.units(longest) <= UNITS
    assert scenario.units(1) == 1


def test_a_given_quantum_is_kept():
    assert make(quantum=7).quantum == 7
