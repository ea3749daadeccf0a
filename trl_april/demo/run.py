"""The demo from beginning to end: model, warm start, server, two trainings, table, picture."""

import argparse
import importlib.util
import json
import os
import time
from pathlib import Path

import torch
import transformers

from .. import LocalServer
from ..errors import ConfigError
from ..report import read_run
from . import task
from .evaluate import Evaluation, evaluate, percentile
from .model import MAX_LENGTH, build_model, build_tokenizer, save
from .settings import QUICK, STANDARD, Settings
from .table import comparison
from .training import Recording, train
from .warm_start import warm_start


DESCRIPTION = """\
Train a small model with and without APRIL on this machine, and compare.

Everything is made here: a model of 0.1 million parameters, its tokenizer, and a task that a rule can check (counting
down to zero, from numbers with a long tail). After a short supervised warm start, the model is trained with GRPO twice
from the same weights, for the same number of optimiser steps, against the same vLLM server: synchronously, and with
twice as many prompt groups in flight as a step needs.
"""


def build_parser() -> argparse.ArgumentParser:
    """The options of the demo."""
    parser = argparse.ArgumentParser(
        prog="trl-april demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("demo_output"), help="where the results go (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help=f"optimiser steps of each training (default: {STANDARD.steps})")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, prompts and training (default: 0)")
    parser.add_argument("--keep-server-log", action="store_true", help="keep the log of the vLLM server")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, only to see that it runs")
    return parser


class Clock:
    """Prints lines with the time since the start of the demo in front."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)


def _describe(evaluation: Evaluation) -> str:
    return (
        f"reward {evaluation.reward:.3f}, {evaluation.solved:.0%} without a mistake, length of the answers: median "
        f"{evaluation.median_length:.0f} tokens, 99th percentile {evaluation.p99_length:.0f} "
        f"({evaluation.p99_length / evaluation.median_length:.1f} times the median)"
    )


def _describe_task(seed: int) -> str:
    numbers = task.training_dataset(10_000, seed)["number"]
    lengths = [len(task.solution(number)) + 1 for number in numbers]  # and the end token
    median, p99 = percentile(lengths, 0.5), percentile(lengths, 0.99)
    return f"length of the right answers: median {median} tokens, 99th percentile {p99} ({p99 / median:.1f} times)"


def run_demo(settings: Settings, *, output_dir: Path, seed: int, keep_server_log: bool) -> tuple[Recording, Recording]:
    """
    Runs the demo and prints what it finds.

    Args:
        settings ([`Settings`]):
            Sizes of everything.
        output_dir (`Path`):
            Folder for the model, the recordings and the picture.
        seed (`int`):
            Seed of model, prompts and training.
        keep_server_log (`bool`):
            Whether the server's log stays in `output_dir` when all goes well.

    Returns:
        The recordings of the synchronous run and of the run with APRIL.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "The demo draws a picture with matplotlib, which is not installed. Install it with "
            "`pip install 'trl-april[plots]'`."
        )
    clock = Clock()
    # Half of the cores: on the others the server decodes, and threads of both would wait for each other.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    output_dir.mkdir(parents=True, exist_ok=True)
    model_dir, log_path = output_dir / "warm_start", output_dir / "server.log"
    log_path.unlink(missing_ok=True)
    # Before the warm start, so that a missing vLLM is said at once.
    server = LocalServer(
        model_dir.resolve(),
        vllm_args=["--dtype", "float32", "--max-model-len", str(MAX_LENGTH), "--enforce-eager"],
        log_file=log_path,
        quiet=True,
    )

    clock.say(f"task: count down, {task.prompt(5)!r} asks for {task.solution(5)!r}; {_describe_task(seed)}")
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    clock.say(f"warm start: {settings.warm_start_steps} supervised steps for {parameters:,} parameters ...")
    warm_start(
        model,
        tokenizer,
        settings.warm_start_steps,
        seed,
        on_step=lambda step, loss: (
            clock.say(f"    step {step}: loss {loss:.3f}") if step % settings.warm_start_report == 0 else None
        ),
    )
    save(model, tokenizer, model_dir)
    before = evaluate(model, tokenizer, settings.held_out, settings.max_completion_length, seed)
    clock.say(f"after the warm start: {_describe(before)}")

    clock.say("starting the vLLM server ...")
    with server:
        clock.say(f"the server runs at {server.base_url}")

        def train_from_warm_start(name: str, over_provisioning: float, steps: int) -> Recording:
            recording, trained = train(
                name,
                over_provisioning,
                model_dir=model_dir,
                dataset=task.training_dataset(steps * settings.groups, seed + 1),
                base_url=server.base_url,
                output_dir=output_dir / (name or "rehearsal"),
                on_step=lambda step, seconds, reward: (
                    clock.say(f"    step {step}: {seconds:.1f} s, reward of the batch {reward:.3f}")
                    if steps >= settings.report_every and step % settings.report_every == 0
                    else None
                ),
                max_steps=steps,
                num_generations=settings.num_generations,
                per_device_train_batch_size=settings.micro_batch_size,
                gradient_accumulation_steps=settings.groups * settings.num_generations // settings.micro_batch_size,
                max_completion_length=settings.max_completion_length,
                learning_rate=settings.learning_rate,
                seed=seed,
            )
            if name:
                after = evaluate(trained, tokenizer, settings.held_out, settings.max_completion_length, seed)
                recording.reward_before, recording.reward_after = before.reward, after.reward
                recording.solved_before, recording.solved_after = before.solved, after.solved
                clock.say(f"{recording.seconds:.0f} s for {recording.steps} steps; {_describe(after)}")
            return recording

        clock.say("rehearsal: what is compiled at its first use must not count for either run ...")
        train_from_warm_start("", settings.over_provisioning, settings.rehearsal_steps)
        clock.say(f"synchronous training, {settings.steps} steps ...")
        synchronous = train_from_warm_start("synchronous", 1.0, settings.steps)
        clock.say(f"training with APRIL, {settings.steps} steps ...")
        april = train_from_warm_start("APRIL", settings.over_provisioning, settings.steps)
    if not keep_server_log:
        log_path.unlink()

    recordings = (synchronous, april)
    (output_dir / "recordings.json").write_text(json.dumps([recording.to_dict() for recording in recordings]))
    picture = output_dir / "april.png"
    from ..report.page import render  # here, because matplotlib is an extra
    from .plot import draw

    draw(*recordings, picture)
    report = output_dir / "report.html"
    report.write_text(render([read_run(output_dir / recording.name) for recording in recordings]), encoding="utf-8")
    print(f"\n{comparison(*recordings)}\n")
    clock.say(f"picture: {picture.resolve()}")
    clock.say(f"what happened in both runs: {report.resolve()}")
    return recordings


def run(argv: list[str]) -> int:
    """Runs the demo with the given options. Returns the exit code."""
    options = build_parser().parse_args(argv)
    settings = QUICK if options.quick else STANDARD
    if options.steps is not None:
        if options.steps < 1:
            raise ConfigError(f"--steps is {options.steps}, but there must be at least 1 step.")
        settings = settings.with_steps(options.steps)
    run_demo(settings, output_dir=options.output_dir, seed=options.seed, keep_server_log=options.keep_server_log)
    return 0
