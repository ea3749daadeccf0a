"""The benchmarks without a server: their statistics by hand, their tables and pictures, and what they refuse."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import math
import os
import random
import subprocess
import sys
from array import array
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import learning_comparison
import overhead
import pytest
import tail
from intervals import at, effective_share, first_reached, interval, lower_bound, smoothed
from learning_comparison import APRIL, SYNCHRONOUS, Run, compare, length_by_third, pairs_of, pooled_weights, tables
from report import markdown, read_json, write_json

from tests.scripted_engine import simulate
from trl_april.engine import Chunk, GenerationRequest


ROOT = Path(__file__).parent.parent
WITH_ARGUMENTS = ("learning", "overhead", "tail")


class TestIntervals:
    def test_intervals_are_students(self):
        """Five values, so four degrees of freedom: t is 2.776 on two sides, and 2.132 on one."""
        values = [1.0, 2.0, 3.0, 4.0, 5.0]  # standard deviation sqrt(2.5)
        mean, half = interval(values)
        assert mean == 3.0
        assert half == pytest.approx(2.776 * math.sqrt(2.5 / 5))
        assert lower_bound(values) == pytest.approx(3.0 - 2.132 * math.sqrt(2.5 / 5))

    def test_one_value_has_no_interval(self):
        mean, half = interval([0.5])
        assert mean == 0.5 and math.isnan(half) and math.isnan(lower_bound([0.5]))

    def test_more_values_than_the_table_has_are_taken_for_fewer(self):
        values = [float(i % 2) for i in range(100)]
        _, half = interval(values)
        assert half > 1.96 * 0.5025 / 10  # the normal one

    def test_nineteen_in_twenty_intervals_hold_the_mean(self):
        rng = random.Random(0)
        drawn = [interval([rng.gauss(7, 2) for _ in range(5)]) for _ in range(2000)]
        assert sum(abs(mean - 7) <= half for mean, half in drawn) / 2000 == pytest.approx(0.95, abs=0.015)

    def test_a_curve_is_straight_between_its_points_and_level_beyond(self):
        times, values = [0.0, 2.0, 4.0], [1.0, 3.0, 2.0]
        assert [at(times, values, t) for t in (-1, 0, 1, 2, 3, 4, 9)] == [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 2.0]

    def test_the_crossing_is_the_first(self):
        times, values = [0.0, 10.0, 20.0, 30.0], [0.0, 0.4, 0.2, 0.8]
        assert first_reached(times, values, 0.3) == pytest.approx(7.5)
        assert first_reached(times, values, 0.5) == pytest.approx(25.0)
        assert first_reached(times, values, 0.0) == 0.0
        assert first_reached(times, values, 0.9) == math.inf

    def test_smoothing_looks_back_only(self):
        assert smoothed([1.0, 2.0, 6.0, 4.0], 3) == [1.0, 1.5, 3.0, 4.0]

    def test_effective_share_by_hand(self):
        weights = [1.0, 1.0, 2.0]  # (1 + 1 + 2)^2 / (3 * 6)
        assert effective_share(3, sum(weights), sum(w * w for w in weights)) == pytest.approx(16 / 18)
        assert effective_share(4, 4.0, 4.0) == 1.0
        assert effective_share(4, 1.0, 1.0) == 0.25  # one alone counts
        assert math.isnan(effective_share(0, 0.0, 0.0))


class TestReport:
    def test_json_comes_back(self, tmp_path):
        path = tmp_path / "new" / "results.json"
        write_json(path, {"steps": 3}, [{"a": 1.5}])
        write_json(path, {"steps": 3}, [{"a": 1.5}, {"a": 2.5}])
        assert read_json(path) == ({"steps": 3}, [{"a": 1.5}, {"a": 2.5}])
        assert [found.name for found in path.parent.iterdir()] == ["results.json"]
        assert json.loads(path.read_text())["machine"]["cores"] == os.cpu_count()

    @pytest.mark.parametrize("text", ["", "[]", '{"results": []}'])
    def test_other_files_are_refused(self, tmp_path, text):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(SystemExit, match="cannot be read as the results of a benchmark"):
            read_json(tmp_path / "other.json")

    def test_a_table_has_as_many_cells_everywhere(self):
        assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
        with pytest.raises(ValueError, match="2 columns, and this row 1"):
            markdown(("a", "b"), [("1",)])


def make_run(seed: int, mode: str, pace: float, gain: float) -> Run:
    curve = [(step, step * pace, 0.4 + gain * step) for step in range(0, 41, 10)]
    return Run(
        recipe="grpo", seed=seed, mode=mode, seconds=40 * pace, rollout_seconds=20 * pace, trained_tokens=1000,
        carried_tokens=0, staleness_mean=0.0, staleness_max=0, reward_after=curve[-1][2], solved_after=0.5,
        curve=curve, lengths=[(step, 100.0 + step) for step in range(40)],
        weights=[(0, 10, 10.0, 10.0), (1, 3, 4.0, 6.0)],
    )  # fmt: skip


class TestLearning:
    runs = [
        make_run(seed, mode, pace, gain + 0.0001 * seed)
        for seed in range(5)
        for mode, pace, gain in ((SYNCHRONOUS, 2.0, 0.005), (APRIL, 1.0, 0.005))
    ]

    def test_the_same_curve_twice_as_fast(self):
        found = compare(pairs_of(self.runs, "grpo"))
        assert found.faster == [2.0] * 5
        assert found.reached == pytest.approx([0.5] * 5)
        assert found.reached_itself == pytest.approx([1.0] * 5)
        assert found.differences == [0.0] * 5
        # The synchronous curve is at 20 steps when the other is at 40; smoothed, they are at half of that.
        assert found.at_equal_time[0] == pytest.approx(0.4 + 0.005 * 20 - (0.4 + 0.005 * 10))

    def test_one_that_trains_on_is_compared_after_as_many_steps(self):
        longer = [
            replace(run, seconds=80.0, curve=[(step, float(step), 0.4 + 0.005 * step) for step in range(0, 81, 10)])
            if run.mode == APRIL
            else run
            for run in self.runs
        ]
        found = compare(pairs_of(longer, "grpo"))
        assert found.faster == pytest.approx([2.0] * 5)
        assert found.differences == pytest.approx([-0.0001 * seed * 20 for seed in range(5)])
        assert found.at_equal_time[0] == pytest.approx(0.005 * 40)

    def test_a_result_that_is_never_reached(self):
        worse = [
            replace(run, curve=[(0, 0.0, 0.4), (40, 40.0, 0.41)]) if run.mode == APRIL else run for run in self.runs
        ]
        assert compare(pairs_of(worse, "grpo")).reached == [math.inf] * 5
        assert "| never |" in tables(worse)

    def test_a_seed_without_its_other_run_waits(self):
        assert len(pairs_of(self.runs[:5], "grpo")) == 2
        assert tables(self.runs[:1]) == "No seed has both runs yet."

    def test_a_loss_of_more_than_the_margin_is_marked(self):
        worse = [
            replace(run, curve=[(step, time, reward - 0.03 * (run.mode == APRIL)) for step, time, reward in run.curve])
            for run in self.runs
        ]
        assert "not shown" in tables(worse) and "not shown" not in tables(self.runs)

    def test_weights_are_pooled_by_age(self):
        assert pooled_weights(self.runs[:2]) == {0: (20, 20.0, 20.0), 1: (6, 8.0, 12.0)}
        assert f"| grpo | 1 | {3 / 13:.1%} | 1.333 | {16 / 18:.3f} |" in tables(self.runs)

    def test_lengths_by_third(self):
        run = replace(self.runs[0], lengths=[(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0), (4, 9.0), (5, 11.0)])
        assert length_by_third(run) == [2.0, 6.0, 10.0]
        assert length_by_third(run, 3) == [1.0, 3.0, 5.0]

    def test_a_run_survives_json(self):
        assert Run.from_dict(json.loads(json.dumps(asdict(self.runs[1])))) == self.runs[1]

    def test_the_picture(self, tmp_path):
        for runs in (self.runs, self.runs[:2]):  # one seed has no band
            learning_comparison.draw(runs, tmp_path / "learning.png")
            assert (tmp_path / "learning.png").stat().st_size > 20_000

    def test_plot_only_needs_no_server(self, tmp_path, monkeypatch, capsys):
        path = tmp_path / "learning.json"
        write_json(path, {}, [asdict(run) for run in self.runs])
        monkeypatch.setattr(sys, "argv", ["learning.py", "--plot-only", str(path)])
        importlib.import_module("learning").main()
        assert tables(self.runs) in capsys.readouterr().out
        assert (tmp_path / "learning.png").exists()


class TestExpectedReward:
    class Model:
        """Mostly right about number 3, with probabilities that depend on the place."""

        def __init__(self, tokenizer):
            torch = pytest.importorskip("torch")
            self.right = tokenizer("003 002 001 000<eos>")["input_ids"]
            generator = torch.Generator().manual_seed(0)
            logits = torch.rand(len(self.right), len(tokenizer), generator=generator)
            for place, token in enumerate(self.right[1:]):
                logits[place, token] += 5.5
                logits[place, tokenizer.eos_token_id] += 2.0
            logits[:, [tokenizer.pad_token_id, tokenizer.unk_token_id]] = -math.inf  # they are no text
            self.logits = logits

        def __call__(self, input_ids, attention_mask):
            assert input_ids.tolist() == [self.right] and attention_mask.all()
            return SimpleNamespace(logits=self.logits[None])

    def test_it_is_the_mean_of_sampled_answers(self):
        torch = pytest.importorskip("torch")
        from expected_reward import expected_reward

        from trl_april.demo import task
        from trl_april.demo.model import build_tokenizer

        tokenizer = build_tokenizer()
        model = self.Model(tokenizer)
        found = expected_reward(model, tokenizer, [3, 3])
        # What is sampled after the answer has left the right one does not matter.
        count, generator = 30_000, torch.Generator().manual_seed(7)
        begin = len(task.prompt(3))
        drawn = [
            torch.multinomial(row.softmax(dim=-1), count, True, generator=generator)
            for row in model.logits[begin - 1 : -1]
        ]
        texts = map("".join, zip(*map(tokenizer.convert_ids_to_tokens, drawn), strict=True))
        rewards = [task.score(3, text.split("<eos>")[0]) for text in texts]
        assert 0.1 < found.solved < 0.9
        assert found.reward == pytest.approx(sum(rewards) / count, abs=0.01)
        assert found.solved == pytest.approx(sum(reward == 1.0 for reward in rewards) / count, abs=0.01)

    def test_every_prompt_counts_as_often_as_it_occurs(self):
        pytest.importorskip("torch")
        from expected_reward import expected_reward

        from trl_april.demo.model import build_model, build_tokenizer

        tokenizer = build_tokenizer()
        model = build_model(tokenizer).eval()
        few, many = expected_reward(model, tokenizer, [2]), expected_reward(model, tokenizer, [40])
        both = expected_reward(model, tokenizer, [2, 40, 40])
        assert both.reward == pytest.approx((few.reward + 2 * many.reward) / 3)


class TestRecorder:
    def test_weights_by_age_and_lengths_by_hand(self):
        """Two samples under version 3: tokens of ages 2, 0 and 0, and of age 0; the last one is not in the loss."""
        torch = pytest.importorskip("torch")
        import learning

        from trl_april.types import Group, Sample, Segment

        first = Sample(0, 0, array("i", [5, 6, 7]), array("f", [0, 0, 0]), [Segment(1, 1), Segment(3, 2)])
        second = Sample(0, 1, array("i", [5]), array("f", [0]), [Segment(3, 1)])
        batch = {
            "old_per_token_logps": torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.4, 1.0, 1.0]])),
            "sampling_per_token_logps": torch.log(torch.tensor([[0.25, 0.3, 0.1], [0.4, 1.0, 1.0]])),
            "completion_mask": torch.tensor([[1, 1, 1], [0, 0, 0]]),
        }
        recorder = learning.Recorder(every=5)
        recorder.add_batch(batch, [Group(0, {}, [1], 10, 1, [first, second])], version=3)
        assert recorder.lengths == [(3, 2.0)]
        assert recorder.weights[2] == pytest.approx([1, 2.0, 4.0])
        assert recorder.weights[0] == pytest.approx([2, 1.0 + 2.0, 1.0 + 4.0])

    def test_it_sees_the_batches_of_a_trainer(self, tiny_model_dir, tmp_path, one_thread):
        """Two groups of two samples: the first two tokens of each under version 0, the rest under version 1."""
        import learning
        from datasets import Dataset

        from tests.serverless import ServerlessTrainer
        from trl_april import APRILGRPOConfig
        from trl_april.pool import Pool

        class Trainer(learning.RecordingTrainer, ServerlessTrainer):
            version = 1

        pool = Pool(2, over_provisioning=1.0)
        for version in range(2):
            pool.begin_round(version)
            for group_id in () if version else range(2):
                pool.admit(group_id, {"prompt": "1"}, [5, 6], num_generations=2, max_completion_length=9)
            for group, sample in pool.ready():
                pool.start(sample)
                count = 2 + group.group_id * 3 * version
                pool.record(sample, [7] * count, [-1.0] * count)
                pool.finish(sample, "stop") if version else pool.park(sample)
        recorder = learning.Recorder(every=1)
        args = APRILGRPOConfig(
            str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=9, use_cpu=True,
            bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
            gradient_accumulation_steps=1, mask_truncated_completions=False,
        )  # fmt: skip
        trainer = Trainer(
            model=tiny_model_dir,
            reward_funcs=lambda completions, **kwargs: [float(len(text)) for text in completions],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "1"}] * 4),
            recorder=recorder,
        )
        trainer.state.global_step = trainer._last_loaded_step = 1
        trainer.groups = pool.take()
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer._prepare_inputs([{"prompt": ""}] * 4)
        assert recorder.lengths == [(1, (4 + 4 + 7 + 7) / 4)]
        assert {age: sums[0] for age, sums in recorder.weights.items()} == {0: 2 * 2 + 2 * 5, 1: 4 * 2}

    def test_the_last_weights_are_always_kept(self):
        torch = pytest.importorskip("torch")
        import learning

        recorder, model = learning.Recorder(every=5), torch.nn.Linear(1, 1)
        for step in range(1, 13):
            with torch.no_grad():
                model.bias.fill_(step)
            recorder.copy_weights(model, step, is_last=step == 12)
        biases = {step: weights["bias"].item() for step, (_, weights) in recorder.snapshots.items()}
        assert biases == {5: 5, 10: 10, 12: 12}

    def test_the_overrides_are_aprils_alone(self):
        import learning

        overrides = dict([learning.setting("over_provisioning=1.5"), learning.setting("max_staleness=null")])
        assert overrides == {"over_provisioning": 1.5, "max_staleness": None}
        assert learning.options_of("grpo", APRIL, overrides)[0]["over_provisioning"] == 1.5
        synchronous = learning.options_of("grpo", SYNCHRONOUS, overrides)[0]
        assert (synchronous["over_provisioning"], synchronous["max_staleness"]) == (1.0, 5)
        for wrong in ("over_provisioning", "overprovisioning=2"):
            with pytest.raises(argparse.ArgumentTypeError, match="field of APRILGRPOConfig"):
                learning.setting(wrong)

    def test_who_comes_first_alternates(self):
        import learning

        assert learning.schedule(["grpo"], 2) == [
            ("grpo", 0, SYNCHRONOUS), ("grpo", 0, APRIL), ("grpo", 1, APRIL), ("grpo", 1, SYNCHRONOUS),
        ]  # fmt: skip


class EvenEngine:
    """Every decode step takes a second, whatever is in it: what the benchmark of the tail should then find."""

    def __init__(self, long: int, every: int) -> None:
        self._long, self._every = long, every
        self._aborted: dict[str, asyncio.Event] = {}

    def length(self, group_id: int, index: int) -> int:
        return self._long if index == 0 and group_id % self._every == 0 else 100

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        _, group_id, index, _ = request.request_id.split("-")
        left = self.length(int(group_id), int(index)) - request.generated
        aborted = self._aborted[request.request_id] = asyncio.Event()
        while left:
            count = min(50, left)
            try:
                async with asyncio.timeout(count):
                    await aborted.wait()
                yield Chunk([], [], "abort")
                return
            except TimeoutError:
                left -= count
                yield Chunk([5] * count, [-1.0] * count, None if left else "length")

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._aborted[request_id].set()

    async def holds(self, version: int) -> bool:
        return True

    async def close(self) -> None:
        pass


class TestTail:
    @pytest.mark.parametrize(
        ("text", "every", "rounds", "oldest"),
        [("1", 8, 1, 0), ("2:5", 8, 6, 5), ("2:none", 8, 9, 8), ("3:11", 8, 12, 11), ("2:5", 4, 5, 4)],
    )
    def test_so_many_batches_pass_in_the_time_of_a_long_completion(self, text, every, rounds, oldest):
        """And again in the same time, so one cycle is enough to measure."""
        contestant = tail.Contestant.parse(text)
        options = argparse.Namespace(quota=8, every=every, group_size=4, long=5000, seed=0)
        assert contestant.cycle(options.quota, every) == rounds

        async def cycles() -> list[tail.Measurement]:
            playing = tail.Rounds(contestant, options, EvenEngine(options.long, every))
            measured = [tail.Measurement(contestant.name, turn) for turn in range(3)]
            for measurement in measured:
                for _ in range(rounds):
                    await playing.run(measurement)
            return measured

        for measured in simulate(cycles()):
            assert measured.seconds == pytest.approx(options.long, rel=0.03)
            assert measured.groups == rounds * options.quota
            assert measured.staleness_max <= oldest
        assert measured.staleness_max == oldest

    def test_a_bound_that_cannot_be_kept_is_refused(self):
        for wrong, why in (("3:1", "at most 2"), ("0.5", "at least 1.0"), ("2:x", "invalid literal"), ("", "float")):
            with pytest.raises(argparse.ArgumentTypeError, match=why):
                tail.Contestant.parse(wrong)

    def test_table_and_picture(self, tmp_path):
        def measured(name: str, turn: int, seconds: float) -> tail.Measurement:
            return tail.Measurement(name, turn, 6, seconds, 48, 24_000, 24_000, 6_000, 36_000, 5, 100.0)

        results = [measured("x2, no bound", 0, 10.0), measured("x2, no bound", 1, 12.0)]
        results += [measured("synchronous", 0, 60.0), measured("synchronous", 1, 60.0)]
        lines = tail.table(results).splitlines()
        assert lines[2].startswith("| synchronous | 400 | 1.00 (1.00 to 1.00) |")
        assert lines[3].startswith("| x2, no bound | 2,200 | 5.50 (5.00 to 6.00) | 4.40 | 5.50 |")
        tail.draw(results, tmp_path / "tail.png")
        assert (tmp_path / "tail.png").stat().st_size > 10_000


class TestOverhead:
    def test_everything_is_measured_at_every_size(self, tmp_path):
        measurements = overhead.measure([8, 16], repeats=1, chunk=4, with_gc=False)
        assert gc.isenabled()
        found = overhead.medians(measurements)
        assert {part for part, _ in found} == set(overhead.COLORS)
        assert all(list(by_samples) == [8, 16] for by_samples in found.values())
        assert overhead.table(measurements).count("\n") == len(found) + 1
        overhead.draw(measurements, tmp_path / "overhead.png")
        assert (tmp_path / "overhead.png").stat().st_size > 20_000

    def test_growth_is_that_of_the_cost_per_sample(self):
        def measured(samples: int, seconds: float) -> overhead.Measurement:
            return overhead.Measurement("pool", "admit", samples, 0, seconds)

        repeats = [measured(10, 1.0), measured(10, 9.0), measured(10, 2.0), measured(100, 40.0)]
        by_samples = overhead.medians(repeats)["pool", "admit"]
        assert by_samples[10].seconds == 2.0
        assert overhead.growth(by_samples) == pytest.approx(2.0)


class TestMicroBatches:
    def test_both_orders_take_their_turn_and_one_has_less_padding(self, tmp_path, monkeypatch, capsys, one_thread):
        micro_batches = importlib.import_module("micro_batches")
        path = tmp_path / "found.json"
        arguments = "--sigma 1.0 --sizes 4 --samples 16 --turns 2 --median 80 --json"
        monkeypatch.setattr(sys, "argv", ["micro_batches.py", *arguments.split(), str(path)])
        micro_batches.main()
        settings, (result,) = read_json(path)
        assert settings["samples"] == 16 and len(result["ours"]) == len(result["of_trl"]) == 2
        for ours, of_trl in zip(result["ours_padding"], result["of_trl_padding"], strict=True):
            assert 0 < ours < of_trl < 1
        assert capsys.readouterr().out.splitlines()[-1].startswith("| 1 | 4 |")


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(name).main()
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "--plot-only" in shown and "--output-dir" in shown


def test_a_benchmark_runs_as_a_script():
    """Its own folder is then where it looks for modules, and the package is where it is installed, or here."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("learning", ["--set", "batch=3"], "'batch=3' is not NAME=VALUE with a field of APRILGRPOConfig"),
        ("learning", ["--seeds", "0"], "--seeds is 0, but it must be at least 1"),
        ("tail", ["--contestants", "2:5"], "the first contestant is compared with, so it must be 1"),
        ("tail", ["--every", "3"], "--every is 3, but --quota, 8, must be a multiple of it"),
        ("tail", ["--long", "50"], "--long is 50, but it must be more than --short, 100"),
        ("micro_batches", ["--samples", "30", "--sizes", "5"], "--samples is 30, but it must be a multiple of 4"),
        ("overhead", ["--samples", "12"], "--samples has [12], but they must be multiples of 8"),
        ("overhead", ["--plot-only", "/nowhere.json"], "/nowhere.json cannot be read as the results of a benchmark"),
    ],
)
def test_wrong_arguments_are_said_at_once(name, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(name).main()
    assert left.value.code
    assert message in f"{capsys.readouterr().err}{left.value.code}"
