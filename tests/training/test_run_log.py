"""The run log: what is written, resuming, damaged files, and write errors."""

import json
import math
import time
from pathlib import Path

import pytest

from tests.support.written_run import WrittenRun
from tests.training.test_correction import group, sample
from trl_april.commands.report import read_run
from trl_april.errors import ConfigError
from trl_april.rollout.record import Round
from trl_april.training.run_log import AGES, BINS, FILE, POINTS, POINTS_KEPT, RunLog, outline, thinned


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_bytes().splitlines() if line]


def written_rounds(log: RunLog, folder: Path, done: Round, rewards: dict | None = None) -> list:
    """Write a round, and read all rounds of the run."""
    with log.timing("sync"), log.timing("scoring"):
        pass
    log.add_round(done, rewards or {})
    log.step_ended(done.version + 1)
    return read_run(folder).rounds


class TestContents:
    def test_the_log_holds_what_happened(self, tmp_path):
        written = WrittenRun(tmp_path, 2.0)
        done = [written.step() for _ in range(6)]
        run = read_run(tmp_path)
        assert lines_of(tmp_path)[0]["time"] == pytest.approx(time.time(), abs=100)
        assert [one.version for one in run.rounds] == [0, 1, 2, 3, 4, 5]
        assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
        assert run.options["quota"] == 8 and run.options["over_provisioning"] == 2.0
        assert run.notes == []
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
        # The trainer works on a step whenever it does not sync, generate or score.
        assert run.seconds == pytest.approx(run.steps[-1].training[-1][1])
        worked = sum(end - begin for step in run.steps for begin, end in step.training)
        assert worked == pytest.approx(6 * 0.3, abs=1e-4)
        assert run.rewards[2] == (pytest.approx(run.rounds[2].scoring[1]), run.rounds[2].reward)

    def test_the_last_bins_hold_everything_beyond_and_no_text_is_written(self, tmp_path):
        secret = group(sample(0, (0, 3), (1, 4)))
        secret.row = {"prompt": "a secret"}
        done = Round(AGES + 9, groups=[secret], launched_lengths=[1 << 40, 0, 1])
        (read,) = written_rounds(RunLog(tmp_path), tmp_path, done)
        assert read.ages == {AGES - 1: 7}
        assert read.launched_lengths == {0: 1, BINS - 1: 1}  # a sample without tokens has no length
        assert "secret" not in (tmp_path / FILE).read_text()

    def test_nan_and_infinity_are_null_and_times_of_a_long_run_exact(self, tmp_path):
        log = RunLog(tmp_path)
        log.note({"broken": math.nan, "fine": 1e6 + 0.3})
        (one,) = written_rounds(log, tmp_path, Round(0), {"reward": math.inf})
        assert "NaN" not in (tmp_path / FILE).read_text() and "Infinity" not in (tmp_path / FILE).read_text()
        assert one.metrics == {"fine": 1e6 + 0.3} and one.reward is None

    def test_counts_are_summed_over_processes(self, tmp_path):
        log = RunLog(tmp_path, reduce_sum=lambda values: [2 * value for value in values], processes=2)
        done = Round(1, groups=[group(sample(0, (0, 2), (1, 3)))], launched_lengths=[5])
        (one,) = written_rounds(log, tmp_path, done)
        assert one.ages == {0: 6, 1: 4}
        assert sum(one.trained_lengths.values()) == sum(one.launched_lengths.values()) == 2
        assert read_run(tmp_path).options["processes"] == 2

    def test_without_a_folder_a_process_writes_nothing_but_takes_part_in_the_sum(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        asked = []
        RunLog(reduce_sum=lambda values: asked.append(len(values)) or list(values)).add_round(Round(0), {})
        assert asked == [2 * BINS + AGES]
        assert list(tmp_path.iterdir()) == []


def test_a_thinned_curve_keeps_its_area_and_last_value():
    series = [(0.01 * k * k, (7 * k) % 50) for k in range(200)]
    assert thinned(series, 420.0, points=200) == series
    short = thinned(series, 420.0, points=60)
    assert len(short) == 60 and short[-1] == (420.0, series[-1][1])

    def area(points):
        ends = [time for time, _ in points[1:]] + [420.0]
        return sum((end - time) * value for (time, value), end in zip(points, ends, strict=True))

    assert area(short) == pytest.approx(area(series))
    assert thinned([(1.0, k) for k in range(100)], 1.0, points=5) == [(1.0, 99)]


class TestResuming:
    def test_a_resumed_run_continues_the_file_and_counts_repeated_rounds_once(self, tmp_path):
        WrittenRun(tmp_path, reward=lambda step: 0.1).go(7)
        WrittenRun(tmp_path, resumed_at=5, reward=lambda step: 0.2).go(3)
        run = read_run(tmp_path)
        assert [one.version for one in run.rounds] == list(range(8))
        assert [step.step for step in run.steps] == list(range(1, 9))
        assert [one.reward for one in run.rounds] == [0.1] * 5 + [0.2] * 3
        assert sum(line["kind"] == "round" for line in lines_of(tmp_path)) == 10  # the file keeps all
        assert any("2 rounds are left out" in note for note in run.notes)
        ends = [one.generation[1] for one in run.rounds]
        begins = [one.sync[0] for one in run.rounds]
        assert all(begin >= end for end, begin in zip(ends, begins[1:], strict=False))  # one after the other
        # The time of the repeated rounds is left out.
        assert run.rounds[5].sync[0] == pytest.approx(run.steps[4].training[-1][1])

    def test_a_new_run_replaces_the_file(self, tmp_path):
        WrittenRun(tmp_path).go(4)
        WrittenRun(tmp_path).go(2)
        assert len(read_run(tmp_path).rounds) == 2

    def test_an_incomplete_line_is_skipped(self, tmp_path):
        WrittenRun(tmp_path).go(3)
        content = (tmp_path / FILE).read_bytes()
        last_round = content.rindex(b'{"kind": "round"')
        (tmp_path / FILE).write_bytes(content[: last_round + 40])
        run = read_run(tmp_path)
        assert [one.version for one in run.rounds] == [0, 1]
        assert "1 of the lines" in run.notes[0]
        WrittenRun(tmp_path, resumed_at=2, quota=9).go(2)
        run = read_run(tmp_path)
        assert [one.version for one in run.rounds] == [0, 1, 2, 3]
        assert run.options["quota"] == 9  # the next line was not lost with it
        assert run.rounds[2].sync[0] >= run.rounds[1].scoring[1]

    def test_a_checkpoint_shows_the_run_up_to_its_step(self, tmp_path):
        WrittenRun(tmp_path).go(6)
        (tmp_path / "checkpoint-4").mkdir()
        run = read_run(tmp_path / "checkpoint-4")
        assert [one.version for one in run.rounds] == [0, 1, 2, 3]
        assert run.steps[-1].step == 4


@pytest.mark.parametrize("obstacle", ["full", "file"])
def test_a_write_error_is_logged_once_and_training_continues(tmp_path, caplog, obstacle):
    folder = tmp_path / "out"
    if obstacle == "full":
        folder.mkdir()
        (folder / FILE).symlink_to("/dev/full")
    else:
        folder.write_text("a file")
    WrittenRun(folder).go(3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Training continues" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no folder .*out.*output_dir"),
        ("", f"no {FILE}"),
        ('{"kind": "run", "format": 99, "resumed_at_step": null, "options": {}}\n', "format '99'"),
    ],
)
def test_a_folder_without_a_readable_log_is_refused(tmp_path, content, words):
    folder = tmp_path / "out"
    if content is not None:
        folder.mkdir()
    if content:
        (folder / FILE).write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_run(folder)


def test_the_outline_of_a_round_has_a_bounded_size():
    curve = [(place / 100, place % 7) for place in range(50_000)]
    done = Round(
        3, seconds=500.0, requests=25_000, launched_lengths=[1] * 25_000, in_flight=curve,
        overlap_in_flight=[(time - 500.0, count) for time, count in curve],
    )  # fmt: skip
    kept = outline(done)
    assert len(kept.in_flight) == len(kept.overlap_in_flight) == POINTS_KEPT
    assert kept.launched_lengths == kept.groups == []
    assert (kept.version, kept.requests, kept.seconds) == (3, 25_000, 500.0)
    assert kept.in_flight_mean == pytest.approx(done.in_flight_mean, rel=0.01)
