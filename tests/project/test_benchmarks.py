"""The benchmarks without a server: statistics, tables, pictures, and refused arguments."""

import importlib
import json
import math
import random
import sys
from array import array
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import countdown as task
import games
import kills
import learning
import peers
import pytest
import rollout
import stress
import tail
import torch
from countdown import build_tokenizer
from datasets import Dataset
from expected_reward import expected_reward
from gym_tasks import TASKS, answer, question
from gym_tasks import build_tokenizer as build_gym_tokenizer
from intervals import at, effective_share, first_reached, interval, lower_bound, smoothed
from learning_comparison import APRIL, SYNCHRONOUS, Run, compare, pairs_of, pooled_weights, tables
from report import read_json, write_json
from trl_async_on_cpu import Attention

from tests.project.test_docs import GivenCompletions
from trl_april import APRILGRPOConfig
from trl_april.config import AprilOptions
from trl_april.errors import ServerError
from trl_april.pool.budget import Budget
from trl_april.pool.samples import Group, Sample, Segment


ROOT = Path(__file__).parents[2]


class TestIntervals:
    def test_intervals_are_students(self):
        """For four degrees of freedom, t is 2.776 two-sided and 2.132 one-sided."""
        values = [1.0, 2.0, 3.0, 4.0, 5.0]  # standard deviation sqrt(2.5)
        mean, half = interval(values)
        assert mean == 3.0
        assert half == pytest.approx(2.776 * math.sqrt(2.5 / 5))
        assert lower_bound(values) == pytest.approx(3.0 - 2.132 * math.sqrt(2.5 / 5))
        assert math.isnan(interval([0.5])[1]) and math.isnan(lower_bound([0.5]))
        _, half = interval([float(i % 2) for i in range(100)])  # beyond the table
        assert half > 1.96 * 0.5025 / 10, "a little wider than normal"

    def test_curve_is_linear_between_points_and_constant_beyond(self):
        times, values = [0.0, 2.0, 4.0], [1.0, 3.0, 2.0]
        assert [at(times, values, t) for t in (-1, 0, 1, 2, 3, 4, 9)] == [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 2.0]

    def test_first_crossing_counts(self):
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
        assert effective_share(4, 1.0, 1.0) == 0.25  # a single weight counts
        assert math.isnan(effective_share(0, 0.0, 0.0))


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

    def test_twice_as_fast_run_is_compared_by_hand(self):
        found = compare(pairs_of(self.runs, "grpo"))
        assert found.faster == [2.0] * 5
        assert found.reached == pytest.approx([0.5] * 5)
        assert found.reached_itself == pytest.approx([1.0] * 5)
        assert found.differences == [0.0] * 5
        # When APRIL is at 40 steps, the synchronous curve is at 20; smoothing halves both.
        assert found.at_equal_time[0] == pytest.approx(0.4 + 0.005 * 20 - (0.4 + 0.005 * 10))

    def test_weights_are_pooled_by_age(self):
        assert pooled_weights(self.runs[:2]) == {0: (20, 20.0, 20.0), 1: (6, 8.0, 12.0)}
        assert f"| grpo | 1 | {3 / 13:.1%} | 1.333 | {16 / 18:.3f} |" in tables(self.runs)

    def test_plot_only_prints_and_draws_saved_runs(self, tmp_path, monkeypatch, capsys):
        path = tmp_path / "learning.json"
        write_json(path, {}, [asdict(run) for run in self.runs])
        assert [Run.from_dict(result) for result in read_json(path)[1]] == self.runs
        monkeypatch.setattr(sys, "argv", ["learning.py", "--plot-only", str(path)])
        learning.main()
        assert tables(self.runs) in capsys.readouterr().out
        assert (tmp_path / "learning.png").stat().st_size > 20_000


class TestExpectedReward:
    def test_expected_reward_is_the_mean_of_sampled_answers(self):
        """The model is mostly right for number 3, with probabilities that depend on the position."""
        tokenizer = build_tokenizer()
        right = tokenizer("003 002 001 000<eos>")["input_ids"]
        logits = torch.rand(len(right), len(tokenizer), generator=torch.Generator().manual_seed(0))
        for place, token in enumerate(right[1:]):
            logits[place, token] += 5.5
            logits[place, tokenizer.eos_token_id] += 2.0
        logits[:, [tokenizer.pad_token_id, tokenizer.unk_token_id]] = -math.inf  # no text
        found = expected_reward(lambda **inputs: SimpleNamespace(logits=logits[None]), tokenizer, [3, 3])
        # Tokens after the first mistake do not matter.
        count, generator = 30_000, torch.Generator().manual_seed(7)
        shares = logits[len(task.prompt(3)) - 1 : -1].softmax(dim=-1)
        drawn = torch.multinomial(shares, count, True, generator=generator).T.tolist()
        texts = ["".join(tokenizer.convert_ids_to_tokens(tokens)) for tokens in drawn]
        rewards = [task.score(3, text.split("<eos>")[0]) for text in texts]
        assert 0.1 < found.solved < 0.9
        assert found.reward == pytest.approx(sum(rewards) / count, abs=0.01)
        assert found.solved == pytest.approx(sum(reward == 1.0 for reward in rewards) / count, abs=0.01)


class TestRecorder:
    def test_weights_by_age_and_lengths_by_hand(self):
        """Two samples under version 3: tokens of ages 2, 0 and 0, and of age 0; the last one is not in the loss."""
        first = Sample(0, 0, array("i", [5, 6, 7]), array("f", [0, 0, 0]), [Segment(1, 1), Segment(3, 2)])
        second = Sample(0, 1, array("i", [5]), array("f", [0]), [Segment(3, 1)])
        batch = {
            "old_per_token_logps": torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.4, 1.0, 1.0]])),
            "sampling_per_token_logps": torch.log(torch.tensor([[0.25, 0.3, 0.1], [0.4, 1.0, 1.0]])),
            "completion_mask": torch.tensor([[1, 1, 1], [0, 0, 0]]),
        }
        recorder = learning.Recorder(every=5)
        recorder.add_batch(batch, [Group(0, {}, [1], Budget(10), 1, [first, second])], version=3)
        assert recorder.lengths == [(3, 2.0)]
        assert recorder.weights[2] == pytest.approx([1, 2.0, 4.0])
        assert recorder.weights[0] == pytest.approx([2, 1.0 + 2.0, 1.0 + 4.0])

    def test_recorder_sees_the_batches_of_a_trainer(self, tiny_model_dir, tmp_path, one_thread):
        class Trainer(learning.RecordingTrainer, GivenCompletions):
            pass

        recorder = learning.Recorder(every=1)
        args = APRILGRPOConfig(
            str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_steps=1, use_cpu=True, bf16=False,
            report_to=[], disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(
            model=tiny_model_dir,
            reward_funcs=lambda completions, **kwargs: [float(len(text)) for text in completions],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "1"}] * 8),
            recorder=recorder,
        )
        trainer.train()
        assert recorder.lengths == [(0, 2.0)]
        assert {age: sums[0] for age, sums in recorder.weights.items()} == {0: 2 * args.generation_batch_size}
        assert list(recorder.snapshots) == [1]


class TestPeers:
    def test_table_compares_with_the_synchronous_training_of_the_seed(self):
        def run(name: str, seed: int, *rewards: float) -> peers.Run:
            curve = [(2 * step, 10.0 * step, reward) for step, reward in enumerate(rewards)]
            return peers.Run(name, seed, 20.0, 1000, 0, 5.0, 3, curve)

        runs = [
            run(peers.SYNCHRONOUS, 0, 0.1, 0.2, 0.4), run("trl-4-96", 0, 0.1, 0.3, 0.5), run("trl-4-96", 1, 0.1, 0.2)
        ]  # fmt: skip
        rows = peers.table(runs).splitlines()
        assert rows[2].endswith("|  |  |  |  |") and "67% (1 of 1)" in rows[3] and "50 (50 to 50)" in rows[3]

    def test_attention_is_that_of_each_segment_alone(self):
        """The second segment has more keys than queries: those at its end."""
        q, k, v = torch.randn(5, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
        starts_q, starts_k = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 6])
        found = Attention.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 3, 3)
        for number, (row, first, last) in enumerate([(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 3, 4), (4, 3, 5)]):
            for head in range(4):
                keys, values = k[first : last + 1, head // 2], v[first : last + 1, head // 2]
                expected = (keys @ q[row, head] / 8**0.5).softmax(0) @ values
                torch.testing.assert_close(found[number, head], expected)


class TestTail:
    def test_table_and_picture(self, tmp_path):
        runs = {"x2, no bound": (10.0, 12.0), "synchronous": (60.0, 60.0)}
        results = [
            tail.Measurement(name, turn, 6, seconds, 48, 24_000, 24_000, 6_000, 36_000, 5, 100.0)
            for name, turns in runs.items()
            for turn, seconds in enumerate(turns)
        ]
        lines = tail.table(results).splitlines()
        assert lines[2].startswith("| synchronous | 400 | 1.00 (1.00 to 1.00) |")
        assert lines[3].startswith("| x2, no bound | 2,200 | 5.50 (5.00 to 6.00) | 4.40 | 5.50 |")
        tail.draw(results, tmp_path / "tail.png")
        assert (tmp_path / "tail.png").stat().st_size > 10_000


class TestMicroBatches:
    def test_ours_computes_fewer_positions_than_trls_order(self, tmp_path, monkeypatch, capsys, one_thread):
        micro_batches = importlib.import_module("micro_batches")
        path = tmp_path / "found.json"
        arguments = "--sigma 1.0 --sizes 4 --prompts 40 --samples 16 --turns 2 --median 80 --json"
        monkeypatch.setattr(sys, "argv", ["micro_batches.py", *arguments.split(), str(path)])
        micro_batches.main()
        settings, (result,) = read_json(path)
        assert settings["samples"] == 16 and len(result["ours"]) == len(result["of_trl"]) == 2
        for ours, of_trl in zip(result["ours_positions"], result["of_trl_positions"], strict=True):
            assert 0 < ours < 1 < of_trl  # prompts once, and padding
        assert capsys.readouterr().out.splitlines()[-1].startswith("| 40 | 1 | 4 |")


class TestGpu:
    def test_failed_parts_and_parts_without_time_are_recorded(self, tmp_path, monkeypatch, capsys):
        gpu, path = importlib.import_module("gpu"), tmp_path / "gpu.json"
        parts = {name: gpu.Part({}, 0) for name in ("crashes", "hangs")}
        parts |= {"lacks": gpu.Part({}, 0, module="no_such_module"), "late": gpu.Part({}, 1e6)}
        programs = {"model": "", "crashes": "raise ValueError('no weights')", "hangs": "import time; time.sleep(60)"}
        monkeypatch.setattr(gpu, "PARTS", parts)
        monkeypatch.setattr(gpu, "PART_SECONDS", 1.0)
        monkeypatch.setattr(gpu, "command_of", lambda options, name, *rest: [sys.executable, "-c", programs[name]])
        earlier = [{"part": name, "item": "", "found": {}} for name in ("hangs", "sync")]
        write_json(path, {"rehearse": True}, earlier)
        gpu.main(["--rehearse", "--results", str(path)])
        settings, results = read_json(path)
        found = {one["part"]: next(iter(one["found"].items()), None) for one in results}
        assert settings == {"rehearse": True} and len(results) == len(found)
        assert found.pop("late")[1].endswith("s are left, and it needs 1e+06 s")
        assert found == {
            "sync": None,  # it was not run again
            "crashes": ("error", "ended with exit code 1: ValueError: no weights"),
            "hangs": ("error", "not finished after 1 s"),
            "lacks": ("left out", "no_such_module is not installed"),
        }
        assert "hangs: error not finished after 1 s" in capsys.readouterr().out
        with pytest.raises(SystemExit, match="was measured with"):
            gpu.main(["--results", str(path)])

    def test_measurement_that_fails_does_not_end_its_part(self, tmp_path):
        gpu = importlib.import_module("gpu")

        def fails(work):
            raise ServerError("The server exited.\nRoot cause: OutOfMemoryError: CUDA\nIts log") from ValueError("1")

        noted = {}
        part = gpu.Part({"fails": fails, "works": lambda work: {"s": 1.0}, "two": lambda work: {"left out": "one"}}, 0)
        gpu.measure(part, gpu.Work(tmp_path, "", rehearse=True), noted.__setitem__)
        assert noted["fails"]["error"] == "OutOfMemoryError: CUDA" and noted["works"]["s"] == 1.0
        assert noted["two"] == {"left out": "one"}

    def test_default_schedule_is_that_of_the_config(self):
        schedule = AprilOptions().with_schedule()
        mode = importlib.import_module("gpu_parts").DEFAULT_MODE
        assert schedule.overlap_generation and schedule.resume_kv == rollout.RESUME_KV[mode] == "keep"


class TestModels:
    def test_it_continues_from_its_file_and_writes_the_table(self, tmp_path, monkeypatch, capsys):
        models, path, page = importlib.import_module("models"), tmp_path / "models.json", tmp_path / "models.md"
        exact = {"tokens": 9, "continued": 1, "alone": 1e-6, "blocks": 1e-6, "side by side": 2e-6, "warnings": []}
        failed = "ServerError: The server exited.\nRoot cause: ModuleNotFoundError: No module named 'torchvision'\nLog"
        answers = {
            "Llama": dict.fromkeys(models.TRAININGS, exact),
            "GPT-2": {"cut": exact, "kept": {**exact, "side by side": 0.09, "warnings": ["Step 1: far.", "After 9"]}},
            "Qwen 3.5": {"cut": {"error": failed, "warnings": []}},
        }
        measured = []

        def run(name, time_limit):
            measured.append(name)
            return {"name": name, "found": answers[name]}

        monkeypatch.setattr(models, "run", run)
        for names in (["GPT-2"], list(answers)):
            monkeypatch.setattr(sys, "argv", ["models.py", *names, "--results", str(path), "--write", str(page)])
            models.main()
        assert measured == ["GPT-2", "Llama", "Qwen 3.5"]
        rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
        assert rows == [
            "| Llama | yes | exact | exact | yes | exact | exact |  |",
            "| Qwen 3.5 | no |  |  |  |  |  | cut: ModuleNotFoundError: No module named 'torchvision' |",
            "| GPT-2 | yes | exact | 9e-02 | yes |  |  | kept: After 9 |",
        ]


@pytest.mark.parametrize("gym", TASKS.values(), ids=list(TASKS))
def test_worked_solutions_are_right_unless_given_up_and_fit(gym):
    entries = list(gym.entries(40, seed=1))
    assert entries == list(gym.entries(40, seed=1)) != list(gym.entries(40, seed=2))
    tokenizer = build_gym_tokenizer(TASKS.values())

    def scores(gives_up):
        texts = [gym.solve(entry, random.Random(0), gives_up) for entry in entries]
        ids = [tokenizer(question(entry) + text)["input_ids"] for entry, text in zip(entries, texts, strict=True)]
        assert tokenizer.unk_token_id not in {one for row in ids for one in row}
        assert tokenizer.batch_decode(ids) == [question(one) + text for one, text in zip(entries, texts, strict=True)]
        assert max(len(tokenizer(text)["input_ids"]) for text in texts) < gym.max_completion_length
        return gym.reward()(texts, entries)

    assert scores(0.0) == [1.0] * 40
    assert sum(scores(0.3)) < 36


def test_games_of_the_warm_start_end_and_can_be_written():
    tokenizer, endings = games.build_tokenizer(), []
    for seed in range(40):
        assert games.played(seed) == games.played(seed)
        prompt, turns = games.played(seed)
        endings += [turn["content"] for turn in turns if turn["role"] == "tool"][-1:]
        ids = tokenizer.apply_chat_template([*prompt, *turns], tools=[games.GAMES["Game"](games.NAME).play])[
            "input_ids"
        ]
        assert tokenizer.unk_token_id not in ids and len(ids) < 1000
    assert {"The game is over.", "The target number is higher."} <= set(endings)  # some give up


def test_a_slow_game_continues_from_its_state(monkeypatch):
    monkeypatch.setattr(kills.time, "sleep", lambda seconds: None)
    before, after = kills.SlowGame(games.NAME), kills.SlowGame(games.NAME)
    before.reset(seed=3)
    said = [before.play(f"[{guess}]") for guess in (1, 20, 4)]
    after._april_restore(json.loads(json.dumps(before._april_state())))
    assert after._april_state() == before._april_state() == {"seed": 3, "moves": ["[1]", "[20]", "[4]"]}
    assert [after.play(f"[{guess}]") for guess in (9, 12)] == [before.play(f"[{guess}]") for guess in (9, 12)]
    assert len(set(said)) > 1 and kills.SlowGame.play.__doc__ == games.GAMES["Game"].play.__doc__


def test_masks_by_hand():
    """Of sequences with geometric means of 1 and 1.04, and of tokens that moved by 0.2 with and against it."""
    batch = {
        "completion_mask": torch.tensor([[1, 1], [1, 1]]),
        "advantages": torch.tensor([1.0, -1.0]),
        "sampling_per_token_logps": torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(),
    }
    args = APRILGRPOConfig("unused", use_cpu=True, bf16=False)
    ratio = torch.tensor([[1.25, 0.8], [1.4, 0.6]])
    (first, second) = stress.GeometricMask(args, batch)._weights(batch, torch.tensor([[1.25, 0.8], [1.3, 0.83]]).log())
    assert first.tolist() == pytest.approx([1.25, 0.8]) and second.tolist() == [0.0, 0.0]
    weights = stress.DivergenceMask(args, batch)._weights(batch, ratio.log())
    assert weights.flatten().tolist() == pytest.approx([1.25, 0.8, 1.4, 0.0])
    ratio[0, 0] = 1.4
    weights = stress.DivergenceMask(args, batch)._weights(batch, ratio.log())
    assert weights.flatten().tolist() == pytest.approx([0.0, 0.8, 1.4, 0.0])


def test_an_answer_that_is_no_expression_is_not_evaluated():
    assert answer("1+2=3\n(1+2)*3") == "(1+2)*3"
    assert answer("exit()") == answer("1+2=") == answer("") == answer("9**9**9") == ""


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("learning", ["--set", "batch=3"], "'batch=3' is not NAME=VALUE with a field of APRILGRPOConfig"),
        ("tail", ["--contestants", "2:5"], "the first contestant is compared with, so it must be 1"),
        ("tail", ["--every", "3"], "--every is 3, but --quota, 8, must be a multiple of it"),
        ("micro_batches", ["--samples", "30", "--sizes", "5"], "--samples is 30, but it must be a multiple of 4"),
        ("models", ["GPT-9"], "GPT-9: no such family. There are Llama, "),
        ("overhead", ["--plot-only", "/nowhere.json"], "/nowhere.json cannot be read as the results of a benchmark"),
    ],
)
def test_wrong_arguments_are_refused_at_once(name, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(name).main()
    assert left.value.code
    assert message in f"{capsys.readouterr().err}{left.value.code}"
