"""The log of a run's rounds: what is in it, what becomes of it at a crash, and that it never ends a training."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.test_correction import group, sample
from tests.test_package import fresh_interpreter
from tests.written_run import WrittenRun
from trl_april.errors import ConfigError
from trl_april.report import read_run
from trl_april.report.advice import advice
from trl_april.report.prediction import predict
from trl_april.report.summary import summarise
from trl_april.report.table import rows
from trl_april.round import Round
from trl_april.run_log import AGES, BINS, FILE, POINTS, POINTS_KEPT, RunLog, _plain, bin_edges, outline, thinned


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_bytes().splitlines() if line]


class TestWhatIsWritten:
    def test_what_is_read_is_what_happened(self, tmp_path):
        written = WrittenRun(tmp_path, 2.0)
        done = [written.step() for _ in range(6)]
        run = read_run(tmp_path)
        assert [one.version for one in run.rounds] == [0, 1, 2, 3, 4, 5]
        assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
        assert run.options["quota"] == 8 and run.options["over_provisioning"] == 2.0
        assert run.has_log and run.notes == []
        for read, had in zip(run.rounds, done, strict=True):
            samples = [one for group in had.groups for one in group.samples]
            assert read.generation[1] - read.generation[0] == pytest.approx(had.seconds, abs=1e-5)
            assert read.generation[0] == pytest.approx(had.started - 1000, abs=1e-5)
            assert read.sync[1] - read.sync[0] == pytest.approx(0.05, abs=1e-5)
            assert read.sync[1] == pytest.approx(read.generation[0], abs=1e-5)
            assert read.scoring[0] == pytest.approx(read.generation[1], abs=1e-5)
            assert sum(read.ages.values()) == read.metrics["trained_tokens"] == sum(map(len, samples))
            assert sum(age * n for age, n in read.ages.items()) / sum(read.ages.values()) == pytest.approx(
                read.metrics["staleness_mean"], rel=1e-6
            )
            assert sum(read.trained_lengths.values()) == len(samples)
            assert sum(read.launched_lengths.values()) == had.requests
            assert read.metrics["generated_tokens"] == had.generated_tokens
            assert read.rewards.keys() == {"reward", "reward_std", "rewards/right/mean"}
            assert len(read.in_flight) <= POINTS
        # The trainer's own time is what is neither sync, nor round, nor scoring.
        assert run.seconds == pytest.approx(run.steps[-1].training[-1][1])
        worked = sum(end - begin for step in run.steps for begin, end in step.training)
        assert worked == pytest.approx(6 * 0.3, abs=1e-4)
        assert run.rewards[2] == (pytest.approx(run.rounds[2].scoring[1]), run.rounds[2].reward)

    def test_times_of_a_long_run_are_exact(self, tmp_path):
        before = time.time()
        WrittenRun(tmp_path, 2.0)
        assert before - 1 <= lines_of(tmp_path)[0]["time"] <= time.time() + 1
        assert _plain(1e6 + 0.3) == 1e6 + 0.3  # seconds since the beginning, after eleven days

    def test_lengths_fall_into_their_bins(self, tmp_path):
        written = WrittenRun(tmp_path, 1.0)
        lengths = sorted(len(one) for group in written.step().groups for one in group.samples)
        bins = read_run(tmp_path).rounds[0].trained_lengths
        for number, count in bins.items():
            shortest, longest = bin_edges(number)
            assert count == sum(shortest <= length < longest for length in lengths)

    def test_the_longest_and_the_oldest_share_the_last_place(self, tmp_path):
        log = RunLog(tmp_path)
        done = Round(AGES + 9, groups=[group(sample(0, (0, 3), (1, 4)))], launched_lengths=[1 << 40, 0, 1])
        with log.timing("sync"), log.timing("scoring"):
            pass
        log.write_round(done, {})
        read = read_run(tmp_path).rounds[0]
        assert read.ages == {AGES - 1: 7}
        assert read.launched_lengths == {0: 1, BINS - 1: 1}  # what has no token yet has no length

    def test_no_text_of_a_prompt_or_a_completion(self, tmp_path):
        secret = group(sample(0, (0, 3)))
        secret.row = {"prompt": "a secret"}
        log = RunLog(tmp_path, {"over_provisioning": 2.0})
        log.write_round(Round(0, groups=[secret]), {"reward": 1.0})
        assert "secret" not in (tmp_path / FILE).read_text()

    def test_there_is_no_nan_in_it(self, tmp_path):
        log = RunLog(tmp_path)
        log.note({"broken": math.nan, "fine": 1.0})
        with log.timing("sync"), log.timing("scoring"):
            pass
        log.write_round(Round(0), {"reward": math.inf})
        assert "NaN" not in (tmp_path / FILE).read_text() and "Infinity" not in (tmp_path / FILE).read_text()
        (one,) = read_run(tmp_path).rounds
        assert one.metrics == {"fine": 1.0} and one.reward is None

    def test_a_round_takes_some_kilobytes(self, tmp_path):
        WrittenRun(tmp_path, 3.0, quota=64).go(4)
        assert (tmp_path / FILE).stat().st_size < 4 * 5000

    def test_counts_are_added_up_over_processes(self, tmp_path):
        log = RunLog(tmp_path, total=lambda values: [2 * value for value in values], processes=2)
        with log.timing("sync"), log.timing("scoring"):
            pass
        log.write_round(Round(1, groups=[group(sample(0, (0, 2), (1, 3)))], launched_lengths=[5]), {})
        (one,) = read_run(tmp_path).rounds
        assert one.ages == {0: 6, 1: 4}
        assert sum(one.trained_lengths.values()) == sum(one.launched_lengths.values()) == 2
        assert read_run(tmp_path).options["processes"] == 2

    def test_without_a_folder_nothing_is_written_but_all_processes_are_heard(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        asked = []
        RunLog(total=lambda values: asked.append(len(values)) or list(values)).write_round(Round(0), {})
        assert asked == [2 * BINS + AGES]
        assert list(tmp_path.iterdir()) == []


class TestThinned:
    def test_a_short_series_stays(self):
        series = [(0.0, 3), (0.5, 2), (4.0, 0)]
        assert thinned(series, 5.0, most=3) == series

    def test_the_area_stays(self):
        series = [(0.01 * k * k, (7 * k) % 50) for k in range(200)]
        short = thinned(series, 420.0, most=60)
        assert len(short) == 60
        assert short[-1] == (420.0, series[-1][1])

        def area(points):
            ends = [time for time, _ in points[1:]] + [420.0]
            return sum((end - time) * value for (time, value), end in zip(points, ends, strict=True))

        assert area(short) == pytest.approx(area(series))

    def test_all_at_once(self):
        assert thinned([(1.0, k) for k in range(100)], 1.0, most=5) == [(1.0, 99)]


class TestResuming:
    def test_a_resumed_run_goes_on_and_what_is_done_again_counts_once(self, tmp_path):
        WrittenRun(tmp_path, reward=lambda step: 0.1).go(7)
        WrittenRun(tmp_path, resumed_at=5, reward=lambda step: 0.2).go(3)
        run = read_run(tmp_path)
        assert [one.version for one in run.rounds] == list(range(8))
        assert [step.step for step in run.steps] == list(range(1, 9))
        assert [one.reward for one in run.rounds] == [0.1] * 5 + [0.2] * 3
        assert sum(line["kind"] == "round" for line in lines_of(tmp_path)) == 10  # all are kept on the disk
        assert any("2 rounds are left out" in note for note in run.notes)
        ends = [one.generation[1] for one in run.rounds]
        begins = [one.sync[0] for one in run.rounds]
        assert all(begin >= end for end, begin in zip(ends, begins[1:], strict=False))  # one after the other
        # The time of what was done again is not in it.
        assert run.rounds[5].sync[0] == pytest.approx(run.steps[4].training[-1][1])

    def test_a_batch_that_was_trained_in_part_is_begun_anew(self, tmp_path):
        log = RunLog(tmp_path, {"versions_per_round": 4})
        for version in (0, 4):
            with log.timing("sync"), log.timing("scoring"):
                pass
            log.write_round(Round(version), {})
        RunLog(tmp_path, {"versions_per_round": 4}, resumed_at_step=6)
        assert [one.version for one in read_run(tmp_path).rounds] == [0]

    def test_a_new_run_takes_the_place_of_the_old_one(self, tmp_path):
        WrittenRun(tmp_path).go(4)
        WrittenRun(tmp_path).go(2)
        assert len(read_run(tmp_path).rounds) == 2

    @pytest.mark.parametrize("cut", [1, 40, 500])
    def test_a_line_that_was_cut_is_passed_over(self, tmp_path, cut):
        WrittenRun(tmp_path).go(3)
        content = (tmp_path / FILE).read_bytes()
        last_round = content.rindex(b'{"kind": "round"')
        (tmp_path / FILE).write_bytes(content[: last_round + cut])
        run = read_run(tmp_path)
        assert [one.version for one in run.rounds] == [0, 1]
        assert "1 of the lines" in run.notes[0]
        WrittenRun(tmp_path, resumed_at=2, quota=9).go(2)
        run = read_run(tmp_path)
        assert [one.version for one in run.rounds] == [0, 1, 2, 3]
        assert run.options["quota"] == 9  # the line that came next was not lost with it
        assert run.rounds[2].sync[0] >= run.rounds[1].scoring[1]

    def test_a_checkpoint_is_the_run_up_to_there(self, tmp_path):
        WrittenRun(tmp_path).go(6)
        (tmp_path / "checkpoint-4").mkdir()
        run = read_run(tmp_path / "checkpoint-4")
        assert [one.version for one in run.rounds] == [0, 1, 2, 3]
        assert run.steps[-1].step == 4


class TestADiskThatDoesNotTakeIt:
    def test_a_full_disk_is_said_once_and_training_goes_on(self, tmp_path, caplog):
        """/dev/full takes nothing, whatever is written."""
        (tmp_path / FILE).symlink_to("/dev/full")
        WrittenRun(tmp_path).go(3)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "Training goes on" in caplog.text and "No space left" in caplog.text

    def test_so_is_a_folder_that_cannot_be(self, tmp_path, caplog):
        (tmp_path / "out").write_text("a file")
        WrittenRun(tmp_path / "out").go(2)
        assert len(caplog.records) == 1


class TestReading:
    def test_a_missing_folder_is_said_with_the_remedy(self, tmp_path):
        with pytest.raises(ConfigError, match="no folder .*nowhere.*output_dir"):
            read_run(tmp_path / "nowhere")

    def test_an_empty_folder_too(self, tmp_path):
        with pytest.raises(ConfigError, match=f"neither {FILE}"):
            read_run(tmp_path)

    def test_a_log_of_another_format(self, tmp_path):
        (tmp_path / FILE).write_text('{"kind": "run", "format": 99, "resumed_at_step": null, "options": {}}\n')
        with pytest.raises(ConfigError, match="format '99'"):
            read_run(tmp_path)

    def test_without_the_log_the_trainer_state_is_read_and_said(self, tmp_path):
        entries = [
            {"step": 2, "loss": 0.1, "reward": 0.5, "april/round_seconds": 3.0, "april/trained_tokens": 70.0},
            {"step": 2, "eval_reward": 0.7},
            {
                "step": 4,
                "loss": 0.1,
                "reward": 0.6,
                "april/round_seconds": 4.0,
                "odd": None,
                "grad_norm": float("nan"),
            },
        ]
        for name in ("checkpoint-2", "checkpoint-10"):
            (tmp_path / name).mkdir()
        (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": entries[:2]}))
        (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
        for folder in (tmp_path, tmp_path / "checkpoint-10"):
            run = read_run(folder)
            assert not run.has_log and run.seconds == 0
            assert [one.reward for one in run.rounds] == [0.5, 0.6]
            assert run.rounds[0].metrics == {"round_seconds": 3.0, "trained_tokens": 70.0}
            assert FILE in run.notes[0] and "trainer_state.json" in run.notes[1]
        assert len(read_run(tmp_path / "checkpoint-2").rounds) == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"generation": [2.0, 1.0]},
            {"generation": [0.0, "later"]},
            {"generation": None},
            {"in_flight": [[0.0, 1, 2]]},
            {"ages": {"-1": 3}},
            {"ages": {"a": 3}},
            {"trained_lengths": {str(BINS): 1}},
            {"trained_lengths": {"3": 10**400}},
            {"version": True},
            {"metrics": 3},
            {"abort_seconds": 10**400},
        ],
    )
    def test_what_cannot_be_is_passed_over(self, tmp_path, change):
        """A file may come from anywhere."""
        WrittenRun(tmp_path).go(2)
        with (tmp_path / FILE).open("a") as file:
            file.write(json.dumps({**lines_of(tmp_path)[1], "version": 2, **change}) + "\n")
        run = read_run(tmp_path)
        assert len(run.rounds) == 2
        assert "could not be read" in run.notes[0]

    @pytest.mark.parametrize("line", ["[1]", "null", "3", "{}", "[" * 100_000, "\x00", '{"kind": "run"}'])
    def test_neither_does_a_strange_line_matter(self, tmp_path, line):
        WrittenRun(tmp_path).go(1)
        with (tmp_path / FILE).open("a") as file:
            file.write(line + "\n")
        assert len(read_run(tmp_path).rounds) == 1

    def test_whatever_a_file_holds_it_is_read_or_refused_in_a_sentence(self, tmp_path):
        """Values of the wrong kind and size in every place, and what is made of them."""
        WrittenRun(tmp_path).go(3)
        lines = lines_of(tmp_path)
        rng = random.Random(0)
        odd = [
            None,
            True,
            -1,
            0,
            1e308,
            -0.5,
            10**400,
            1 << 61,
            "1",
            "",
            [],
            {},
            [[1, 2]],
            [[0.0, 0.0]],
            {"0": 0},
            {"3": 7},
        ]
        shown = 0
        for _ in range(150):
            changed = copy.deepcopy(lines)
            place = rng.choice(changed)
            while True:
                key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
                if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.3:
                    break
                place = place[key]
            place[key] = rng.choice(odd)
            (tmp_path / FILE).write_text("".join(f"{json.dumps(line)}\n" for line in changed))
            try:
                run = read_run(tmp_path)
            except ConfigError:
                continue
            summary = summarise(run)
            assert rows([summary]) and advice(summary)
            # It takes a moment, and looks at few of the values.
            if lines[0]["options"] != run.options or changed[5] != lines[5]:
                predict(run, summary)
            shown += 1
        assert shown > 100

    def test_it_can_be_moved(self, tmp_path):
        WrittenRun(tmp_path / "a").go(1)
        shutil.move(tmp_path / "a", tmp_path / "b")
        assert len(read_run(tmp_path / "b").rounds) == 1


def test_the_reader_loads_nothing_heavy():
    program = "import sys, trl_april.report; print([m for m in ('torch', 'trl', 'matplotlib') if m in sys.modules])"
    assert fresh_interpreter(program) == "[]"


def test_what_stays_in_memory_of_a_round_does_not_grow_with_its_requests():
    curve = [(place / 100, place % 7) for place in range(50_000)]
    before = [(time - 500.0, count) for time, count in curve]
    done = Round(
        3, seconds=500.0, requests=25_000, launched_lengths=[1] * 25_000, in_flight=curve, overlap_in_flight=before
    )
    kept = outline(done)
    assert len(kept.in_flight) == len(kept.overlap_in_flight) == POINTS_KEPT
    assert kept.launched_lengths == kept.spans == kept.groups == []
    assert (kept.version, kept.requests, kept.seconds) == (3, 25_000, 500.0)
    assert kept.in_flight_mean == pytest.approx(done.in_flight_mean, rel=0.01)
    small = Round(0, seconds=2.0, in_flight=[(0.0, 4), (1.0, 0)])
    assert outline(small).in_flight == small.in_flight
