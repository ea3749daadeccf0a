"""Train a small model with and without APRIL on this machine, and compare. `make demo` runs it.

Everything is made here: a model of 0.1 million parameters, its tokenizer, and a task that a rule can check (counting
down to zero, from numbers with a long tail). After a short supervised warm start, the model is trained with GRPO twice
from the same weights, for the same number of optimizer steps, with the same vLLM server: synchronously, and with the
default schedule, under which more prompt groups are in flight than a step needs and generation continues during
training.

    python benchmarks/demo.py --output-dir demo_output
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import countdown as task
import torch
import transformers
from countdown import Recording
from report import require_matplotlib

from trl_april import LocalServer
from trl_april.commands.report import read_run, render


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the demo. The defaults take four to five minutes on two cores."""

    steps: int = 25  # optimizer steps of each training
    groups: int = 8  # prompts per step
    num_generations: int = 6
    micro_batch_size: int = 8  # smaller ones have less padding
    max_completion_length: int = 1100  # the longest right answer has 1000 tokens
    learning_rate: float = 3e-4  # with 1e-3, the model forgets to end an answer
    warm_start_steps: int = 200
    held_out: int = 128  # prompts of the evaluation


STANDARD = Settings()
QUICK = Settings(steps=3, groups=2, num_generations=4, max_completion_length=100, warm_start_steps=10, held_out=16)
REHEARSAL_STEPS = 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output-dir", type=Path, default=Path("demo_output"), help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help=f"optimizer steps of each training (default: {STANDARD.steps})")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, prompts and training (default: 0)")
    parser.add_argument("--keep-server-log", action="store_true", help="keep the log of the vLLM server")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, as a test")
    return parser


def main(argv: list[str] | None = None) -> None:
    options = build_parser().parse_args(argv)
    settings = QUICK if options.quick else STANDARD
    if options.steps is not None:
        if options.steps < 1:
            raise SystemExit(f"--steps is {options.steps}, but there must be at least 1 step.")
        settings = replace(settings, steps=options.steps)
    run_demo(settings, output_dir=options.output_dir, seed=options.seed, keep_server_log=options.keep_server_log)


def run_demo(settings: Settings, *, output_dir: Path, seed: int, keep_server_log: bool) -> tuple[Recording, Recording]:
    """Run the demo, print its results, and return the recordings of the synchronous run and the run with APRIL."""
    require_matplotlib()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)

    # The server decodes on the other cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    output_dir.mkdir(parents=True, exist_ok=True)
    model_dir, log_path = output_dir / "warm_start", output_dir / "server.log"
    log_path.unlink(missing_ok=True)
    vllm_args = ["--dtype", "float32", "--max-model-len", str(task.MAX_LENGTH), "--enforce-eager"]
    # Before the warm start, because it fails without vLLM.
    server = LocalServer(model_dir.resolve(), vllm_args=vllm_args, log_file=log_path, quiet=True)

    say(f"task: count down, {task.prompt(5)!r} asks for {task.solution(5)!r}")
    torch.manual_seed(seed)
    tokenizer = task.build_tokenizer()
    model = task.build_model(tokenizer)
    say(f"warm start: {settings.warm_start_steps} supervised steps for {model.num_parameters():,} parameters ...")
    losses = task.warm_start(model, tokenizer, settings.warm_start_steps, seed)
    task.save(model, tokenizer, model_dir)
    before = task.evaluate(model, tokenizer, settings.held_out, settings.max_completion_length, seed)
    say(f"after the warm start: loss {losses[-1]:.3f}, {before}")

    def train_from_warm_start(name: str, steps: int, **schedule: Any) -> Recording:
        say(f"{name}: {steps} optimizer steps ...")
        recording, trained = task.train(
            name,
            model_dir=model_dir,
            dataset=task.training_dataset(steps * settings.groups, seed + 1),
            base_url=server.base_url,
            output_dir=output_dir / name,
            max_steps=steps,
            num_generations=settings.num_generations,
            per_device_train_batch_size=settings.micro_batch_size,
            gradient_accumulation_steps=settings.groups * settings.num_generations // settings.micro_batch_size,
            max_completion_length=settings.max_completion_length,
            learning_rate=settings.learning_rate,
            seed=seed,
            **schedule,
        )
        if name == "rehearsal":
            return recording
        after = task.evaluate(trained, tokenizer, settings.held_out, settings.max_completion_length, seed)
        recording.reward_before, recording.reward_after = before.reward, after.reward
        recording.solved_before, recording.solved_after = before.solved, after.solved
        say(f"{recording.seconds:.0f} s for {recording.steps} steps; {after}")
        return recording

    say("starting the vLLM server ...")
    with server:
        train_from_warm_start("rehearsal", REHEARSAL_STEPS)  # compiles everything, so that it is not measured
        synchronous = train_from_warm_start("synchronous", settings.steps, over_provisioning=1.0)
        april = train_from_warm_start("APRIL", settings.steps)
    if not keep_server_log:
        log_path.unlink()

    (output_dir / "recordings.json").write_text(json.dumps([asdict(synchronous), asdict(april)]))
    report = output_dir / "report.html"
    runs = [read_run(recording.output_dir) for recording in (synchronous, april)]
    report.write_text(render(runs), encoding="utf-8")
    print(f"\n{comparison(synchronous, april)}\n")
    say(f"report of both runs: {report.resolve()}")
    return synchronous, april


def comparison(synchronous: Recording, april: Recording) -> str:
    """The table of the demo, of whole steps first. Its last column is how many times better the second run is."""
    lines: list[tuple[str, Callable[[Recording], float], str, int]] = [
        ("wall-clock per optimizer step", lambda r: r.seconds / r.steps, "{:.2f} s", -1),
        ("    of which waiting for the rollout", lambda r: r.rollout_seconds / r.steps, "{:.2f} s", -1),
        ("    of which scoring and training", lambda r: (r.seconds - r.rollout_seconds) / r.steps, "{:.2f} s", -1),
        ("wall-clock in total", lambda r: r.seconds, "{:.0f} s", -1),
        ("trained tokens per second", lambda r: r.trained_tokens / r.seconds, "{:,.0f}", 1),
        ("optimizer steps", lambda r: r.steps, "{}", 0),
        ("groups in flight / groups needed", lambda r: r.over_provisioning, "{:g}", 0),
        ("reward on held-out prompts, before", lambda r: r.reward_before, "{:.3f}", 0),
        ("reward on held-out prompts, after", lambda r: r.reward_after, "{:.3f}", 0),
        ("answers without a mistake, before", lambda r: r.solved_before, "{:.0%}", 0),
        ("answers without a mistake, after", lambda r: r.solved_after, "{:.0%}", 0),
        ("trained tokens carried over", lambda r: r.carried_tokens / r.trained_tokens, "{:.0%}", 0),
        ("staleness of a trained token, mean", lambda r: r.staleness_mean, "{:.2f}", 0),
        ("staleness of a trained token, max", lambda r: r.staleness_max, "{}", 0),
    ]
    table = [f"{'':<40}{synchronous.name:>16}{april.name:>16}{'gain':>10}", "-" * 82]
    for label, value_of, form, better in lines:
        first, second = value_of(synchronous), value_of(april)
        ratio = second / first if better > 0 and first else first / second if better < 0 and second else None
        gain = "" if ratio is None else f"x {ratio:.2f}"
        table.append(f"{label:<40}{form.format(first):>16}{form.format(second):>16}{gain:>10}".rstrip())
    return "\n".join(table)


if __name__ == "__main__":
    main()
