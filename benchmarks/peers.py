"""Training with our trainer and with TRL's AsyncGRPOTrainer, on the same server and task, over several seeds.

    python benchmarks/peers.py                                      # all contestants, 5 seeds, 40 steps: hours
    python benchmarks/peers.py --contestants synchronous default trl-4-96 --seeds 1
    python benchmarks/peers.py --contestants default scored trl-8-96 --reward-milliseconds 10
    python benchmarks/peers.py --split --contestants synchronous default ours-8-4 trl-8-96 trl-8-own
    python benchmarks/peers.py --quick                              # a few steps, as a smoke test

`default` has our default options (bound 8, factor 3), `scored` those and `score_during_generation`, `ours-B-F` a
staleness bound B and a factor F, and `trl-B-R` is TRL's trainer with a bound B and R requests in flight. `trl-B-own`
has its own number in flight and its own token budget, with which its steps are larger; `ours-B-F-own` has batches of
about as many tokens. All start from the same warm start and use the same vLLM server one after the other, in an order
that changes with the seed. All others take batches of 8 groups of 6 samples of the demo's task, and all the same
learning rate and objective, the mean over all tokens without a reference model. Results are written after every run,
so a stopped benchmark resumes. Expected rewards are as in learning.py. With `--split`, the server's processes share
the first core and everything else the second, as an engine and a trainer have their own devices. The steady pace
leaves out the first four steps and the last four, in which our rounds run empty, since every row is trained.

What is not equal: TRL's trainer drops samples beyond its bound and takes groups as they finish; ours trains every row.
TRL's generates in a process of its own, ours in a thread; seconds are without the start of this process.
`trl_async_on_cpu.py` lists what TRL's is given here.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import countdown as task
import psutil
import torch
import transformers
from countdown import build_tokenizer
from demo import STANDARD
from intervals import at, first_reached, lower_bound, smoothed
from learning import (
    LEARNING_RATE,
    MAX_COMPLETION_LENGTH,
    OBJECTIVE,
    RecipeBench,
    Recorder,
    Sizes,
    _Copies,
    prepare,
    slow,
    training_parser,
    warm_started,
)
from learning_comparison import SMOOTHED_STEPS
from report import earlier_results, markdown, write_json
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_async_on_cpu import (
    NotingQueue,
    WeightFiles,
    as_conversation,
    converses,
    countdown_reward,
    supply,
    timed_start,
)

from trl_april.config import AprilOptions


SYNCHRONOUS, DEFAULT, SCORED = "synchronous", "default", "scored"
CONTESTANTS = [
    SYNCHRONOUS, DEFAULT, *(f"{who}-{bound}-{amount}" for bound in (4, 8, 16) for who, amount in (
        ("ours", 2), ("ours", 4), ("ours", "4-own"), ("trl", 48), ("trl", 96), ("trl", 192), ("trl", "own")
    )),
]  # fmt: skip
SAMPLES = STANDARD.groups * STANDARD.num_generations
LARGE = 84  # samples with about as many tokens as a step of TRL's trainer with its own budget
ENDS = 4  # steps at the start and at the end that the steady pace leaves out


@dataclass(frozen=True, slots=True)
class Run:
    """A training: its sizes, trained tokens by step, and expected rewards as `(step, seconds, reward)`."""

    contestant: str
    seed: int
    seconds: float
    trained_tokens: int
    dropped_tokens: int
    mean_length: float
    oldest: int
    curve: list[tuple[int, float, float]]
    tokens: list[int] = field(default_factory=list)  # older files have none
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # of vLLM's engine, its API server, and all else


def contestant(text: str) -> str:
    """A name of the form that the module's docstring describes."""
    names = SYNCHRONOUS, DEFAULT, SCORED
    if text not in names and not re.fullmatch(r"(ours|trl)-\d+-\d+|(ours-\d+|trl)-\d+-own", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {', '.join(names)}, ours-BOUND-FACTOR[-own], trl-BOUND-N, trl-BOUND-own"
        )
    return text


def pin(process: int, cores: set[int]) -> None:
    """Let all present threads of a process, and so those to come, run on these cores."""
    for thread in os.listdir(f"/proc/{process}/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def pin_server(server: int) -> None:
    """Let vLLM's processes run on the first core."""
    for process in (psutil.Process(server), *psutil.Process(server).children(recursive=True)):
        pin(process.pid, {0})


def cpu_seconds(server: int) -> dict[str, float]:
    """CPU time so far of vLLM's engine, of its API server, and of this process and the children that have ended."""
    api, own = psutil.Process(server), psutil.Process().cpu_times()
    times = [process.cpu_times() for process in api.children(recursive=True)]
    return {
        "engine": sum(one.user + one.system for one in times),
        "api_server": api.cpu_times().user + api.cpu_times().system,
        "trainer": own.user + own.system + own.children_user + own.children_system,
    }


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run this process on one core."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    pin(os.getpid(), {core})
    try:
        yield
    finally:
        pin(os.getpid(), cores)
        torch.set_num_threads(threads)


class Comparison(RecipeBench):
    """The trainings of all contestants from one warm start; each on the second core if they are `split`."""

    split = False
    server = 0  # process

    def compare(self, name: str, seed: int) -> Run:
        """Train once, and evaluate the copies of the weights."""
        recorder, before = Recorder(self.sizes.every), cpu_seconds(self.server)
        with on_core(1) if self.split else nullcontext():
            run, model = (self._theirs if name.startswith("trl") else self._ours)(name, seed, recorder)
        run["cpu_seconds"] = {part: seconds - before[part] for part, seconds in cpu_seconds(self.server).items()}
        curve = [(0, 0.0, self.before.reward)]
        for step, (seconds, weights) in recorder.snapshots.items():
            model.load_state_dict(weights)
            curve.append((step, seconds, self.evaluate(model).reward))
        return Run(contestant=name, seed=seed, curve=curve, **run)

    def _ours(self, name: str, seed: int, recorder: Recorder) -> tuple[dict[str, Any], Any]:
        defaults, samples = AprilOptions().with_schedule(), SAMPLES
        self.overrides = {"max_staleness": defaults.max_staleness, "over_provisioning": defaults.over_provisioning}
        if name.startswith("ours"):
            _, bound, factor, *is_own = name.split("-")
            self.overrides = {"max_staleness": int(bound), "over_provisioning": float(factor)}
            if is_own:
                samples = LARGE
                self.overrides |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": LARGE // 4}
        self.overrides["score_during_generation"] = name == SCORED
        mode = "synchronous" if name == SYNCHRONOUS else "APRIL"
        recording, model = self.train("grpo", seed, mode, self.sizes.steps, recorder)
        run = {
            "seconds": recording.seconds,
            "trained_tokens": recording.trained_tokens,
            "dropped_tokens": 0,
            "mean_length": recording.trained_tokens / (recording.steps * samples),
            "oldest": recording.staleness_max,
            "tokens": [round(mean * samples) for _, mean in recorder.lengths],
        }
        return run, model

    def _theirs(self, name: str, seed: int, recorder: Recorder) -> tuple[dict[str, Any], Any]:
        _, bound, in_flight = name.split("-")
        sizes = {} if in_flight == "own" else {"max_inflight_tasks": int(in_flight), "token_budget": 0}
        args = AsyncGRPOConfig(
            str(self.model_dir.parent / "trl"), max_steps=self.sizes.steps, seed=seed, learning_rate=LEARNING_RATE,
            per_device_train_batch_size=STANDARD.micro_batch_size, logging_steps=1,
            gradient_accumulation_steps=SAMPLES // STANDARD.micro_batch_size, num_generations=STANDARD.num_generations,
            max_completion_length=MAX_COMPLETION_LENGTH, max_staleness=int(bound), **sizes,
            vllm_server_base_url=self.base_url, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows = task.training_dataset(4 * self.sizes.steps * STANDARD.groups, seed + 1)
        trainer = AsyncGRPOTrainer(
            model=str(self.model_dir),
            reward_funcs=slow(countdown_reward, self.reward_seconds),
            args=args,
            train_dataset=rows.map(as_conversation),
            processing_class=converses(build_tokenizer()),
            callbacks=[_Copies(recorder)],
            weight_transfer=WeightFiles(self.base_url),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        notes = NotingQueue(trainer.rollout_queue, lambda: trainer.model_version, int(bound))
        trainer.rollout_queue = notes
        started = timed_start(trainer.rollout_worker)
        seconds = trainer.train().metrics["train_runtime"] - sum(started)
        recorder.snapshots = {
            step: (time - sum(started), weights) for step, (time, weights) in recorder.snapshots.items()
        }
        steps = [logs for logs in trainer.state.log_history if "batch/samples_per_step" in logs]
        tokens = [round(logs["batch/trained_tokens_per_step"]) for logs in steps]
        run = {
            "seconds": seconds,
            "trained_tokens": sum(tokens),
            "dropped_tokens": sum(one.tokens for one in notes.taken if one.is_dropped),
            "mean_length": sum(tokens) / sum(logs["batch/samples_per_step"] for logs in steps),
            "oldest": max(one.age for one in notes.taken if not one.is_dropped),
            "tokens": tokens,
        }
        # TRL's own has an attention for packed rows only.
        return run, transformers.AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)


def measure(
    sizes: Sizes,
    names: Sequence[str],
    seeds: int,
    path: Path,
    *,
    reward_milliseconds: float = 0.0,
    split: bool = False,
) -> list[Run]:
    """All runs. Runs that `path` already holds are not repeated."""
    settings = asdict(sizes) | ({"reward_milliseconds": reward_milliseconds} if reward_milliseconds else {})
    settings |= {"split": True} if split else {}
    runs = [Run(**result) for result in earlier_results(path, settings)]
    done = {(run.contestant, run.seed) for run in runs}
    left = [
        (name, seed)
        for seed in range(seeds)
        for name in [*names[seed % len(names) :], *names[: seed % len(names)]]
        if (name, seed) not in done
    ]
    if not left:
        return runs
    supply()
    with warm_started(sizes) as (model, folder, server):
        bench = Comparison(sizes, {}, OBJECTIVE, model, folder, server.base_url)
        bench.reward_seconds, bench.split, bench.server = reward_milliseconds / 1000, split, server.pid
        if split:
            pin_server(server.pid)
        for name, seed in left:
            run = bench.compare(name, seed)
            runs.append(run)
            write_json(path, settings, [asdict(one) for one in runs])
            print(
                f"{name}, seed {seed}: {run.seconds:.0f} s, {run.trained_tokens / run.seconds:.0f} tok/s, "
                f"reward {run.curve[0][2]:.3f} -> {run.curve[-1][2]:.3f}",
                flush=True,
            )
    return runs


def smooth(run: Run) -> tuple[list[int], list[float], list[float]]:
    """Steps, seconds and rewards, each reward the mean of the last ten steps."""
    steps, seconds, rewards = zip(*run.curve, strict=True)
    return list(steps), list(seconds), smoothed(rewards, SMOOTHED_STEPS // (steps[1] - steps[0]))


def steady(run: Run) -> tuple[float, float] | None:
    """Seconds per step and trained tokens per second without the ends of a run, if its file has the tokens."""
    last = len(run.tokens) - ENDS
    seconds = {step: time for step, time, _ in run.curve}
    if last <= ENDS or ENDS not in seconds or last not in seconds:
        return None
    elapsed = seconds[last] - seconds[ENDS]
    return elapsed / (last - ENDS), sum(run.tokens[ENDS:last]) / elapsed


def trained_by(run: Run, steps: Sequence[int]) -> list[int]:
    """Tokens trained after each of these steps."""
    sums = [0, *accumulate(run.tokens or [run.trained_tokens // steps[-1]] * steps[-1])]
    return [sums[step] for step in steps]


def table(runs: Sequence[Run]) -> str:
    """Against the synchronous training of the same seed; times and rates are medians."""
    synchronous = {run.seed: run for run in runs if run.contestant == SYNCHRONOUS}
    rows = []
    for name in dict.fromkeys(run.contestant for run in runs):
        mine = [run for run in runs if run.contestant == name]
        times, ratios, early, in_time, in_tokens, gains = [], [], [], [], [], []
        for run in mine:
            steps, seconds, rewards = smooth(run)
            if other := synchronous.get(run.seed):
                their_steps, their_seconds, theirs = smooth(other)
                a_third = steps[-1] / 3, their_seconds[-1] / 3
                early.append(at(steps, rewards, a_third[0]) - at(their_steps, theirs, a_third[0]))
                in_time.append(at(seconds, rewards, a_third[1]) - at(their_seconds, theirs, a_third[1]))
                tokens, their_tokens = trained_by(run, steps), trained_by(other, their_steps)
                third = their_tokens[-1] / 3
                in_tokens.append(at(tokens, rewards, third) - at(their_tokens, theirs, third))
                gains.append(rewards[-1] - theirs[-1])
                times.append(first_reached(seconds, rewards, theirs[-1]) / other.seconds)
                ratios.append(run.trained_tokens / run.seconds / (other.trained_tokens / other.seconds))
        reached = sum(time < math.inf for time in times)
        middle = statistics.median(times) if times else math.inf
        rates = [run.trained_tokens / run.seconds for run in mine]
        paces = [pace for run in mine if (pace := steady(run)) is not None]
        compared = name != SYNCHRONOUS and bool(times)
        rows.append(
            [
                name,
                str(len(mine)),
                f"{statistics.median(run.seconds for run in mine):.0f}",
                f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                "{:.2f}, {:,.0f}".format(*map(statistics.median, zip(*paces, strict=True))) if paces else "",
                f"{statistics.median(run.dropped_tokens for run in mine):,.0f}",
                f"{statistics.fmean(run.mean_length for run in mine):.0f}",
                str(max(run.oldest for run in mine)),
                f"{statistics.fmean(smooth(run)[2][-1] for run in mine):.3f}",
                *(
                    f"{statistics.fmean(found):+.3f} ({lower_bound(found):+.3f})" if compared else ""
                    for found in (early, in_time, in_tokens, gains)
                ),
                (f"{middle:.0%} " if middle < math.inf else "") + f"({reached} of {len(times)})" if compared else "",
            ]
        )
    header = (
        "contestant", "seeds", "seconds", "trained tok/s (range)", "of synchronous",
        "steady: s/step, trained tok/s", "dropped tokens", "mean length",
        "oldest", "reward after", "minus synchronous after a third of the steps (at least, 95 %)",
        "after a third of its time (at least)", "after a third of its tokens (at least)", "at the end (at least)",
        "synchronous reward reached after (runs)",
    )  # fmt: skip
    return markdown(header, rows)


def main() -> None:
    parser = training_parser(__doc__)
    parser.add_argument("--contestants", nargs="+", type=contestant, default=CONTESTANTS, metavar="NAME")
    parser.add_argument(
        "--reward-milliseconds", type=float, default=0.0, metavar="MS",
        help="time that the reward function takes for each completion, as if it asked another server (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--split", action="store_true", help="give the engine the first core, and the trainer the second"
    )
    options = parser.parse_args()
    steps = 4 if options.quick else options.steps
    prepare()
    sizes = Sizes(steps=steps, april_steps=steps)
    milliseconds, split = options.reward_milliseconds, options.split
    path = options.output_dir / f"peers{'_split' * split}{'_slow_rewards' * (milliseconds > 0)}.json"
    runs = measure(sizes, options.contestants, options.seeds, path, reward_milliseconds=milliseconds, split=split)
    print(f"\n{table(runs)}")


if __name__ == "__main__":
    main()
