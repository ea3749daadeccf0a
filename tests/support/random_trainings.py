"""Random trainings against the rows that stock GRPO trains: options, datasets, formats, streams, faults, processes.

A case is drawn from a seed, the same in all processes. The server's completions and faults follow from the tokens of a
request; weights stay, so that one model serves all trainings. Stock's rows are those of its own loop and data loader.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.support.fake_vllm import FakeVLLM, Stream
from tests.support.tiny import EOS, build_model, build_tokenizer
from trl_april.config import APRILGRPOConfig
from trl_april.trainer import APRILGRPOTrainer
from trl_april.weights.canary import trainer_logprobs


TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(EOS)
LETTERS = TOKENIZER("ABCDEFGHIJKLMNOPQRSTUVWXYZ")["input_ids"][-26:]  # of completions; prompts have none
LONGEST = 24
MODEL = build_model()


class Answers:
    """Completions of random lengths at random speeds. Faults break streams, or take the server's weights away."""

    def __init__(self, fake: FakeVLLM) -> None:
        self.fake, self.rng, self.faults = fake, random.Random(0), 0.0
        model = build_model()  # the same weights, in another thread than the trainer
        fake.prompt_logprobs = lambda ids: trainer_logprobs(model, ids, torch.device("cpu"))

    async def stream(self, stream: Stream) -> None:
        ids, index = stream.body["prompt"], int(stream.request.headers["X-Request-Id"].split("-")[-2])
        known = set(LETTERS)
        start = position = next((n for n, token in enumerate(reversed(ids)) if token not in known), len(ids))
        prompt = ids[: len(ids) - start]
        sample = random.Random(f"{prompt} {index}")
        length, seconds = sample.choice([sample.randint(1, 6), sample.randint(1, LONGEST)]), sample.random() / 1000
        stop = min(length, start + stream.body["max_tokens"])
        while True:
            await asyncio.sleep(seconds)
            if self.rng.random() < self.faults:
                if self.rng.random() < 0.1:
                    self.fake.weight_version = "default"  # as if restarted
                return stream.drop()
            await self.fake.unless_paused(stream)
            end = min(position + stream.body.get("stream_interval", 1), stop)
            cut = stream.aborted.is_set()
            tokens = [END if n == length - 1 else LETTERS[n % 26] for n in range(position, position if cut else end)]
            position += len(tokens)
            reason = "abort" if cut else "stop" if position == length else "length" if position == stop else None
            if tokens or position > start:
                await stream.tokens(tokens, [-1.0] * len(tokens), reason)
            if reason:
                return await stream.done()


class Changes(TrainerCallback):
    """Prolongs, shortens or stops training at the end of a step."""

    def __init__(self, at: int, max_steps: int | None, *, stops: bool = False) -> None:
        self.at, self.max_steps, self.stops = at, max_steps, stops

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            state.max_steps = self.max_steps or state.max_steps
            control.should_training_stop = self.stops or state.global_step >= state.max_steps


def draw(seed: int, processes: int) -> dict[str, Any]:
    """A case: options for both, for APRIL alone, and what else happens."""
    rng = random.Random(seed)
    generations, uses = rng.choice([2, 2, 3]), rng.choice([1, 1, 2])
    steps_per_generation, accumulation = rng.choice([(1, 1), (1, 1), (2, 2), (2, 1), (1, 2), (3, 2), (2, 3)])
    groups = processes * rng.randint(1, 2)  # per micro-batch
    quota = groups * steps_per_generation
    kind = rng.choice(["map", "map", "map", "transform", "stream", "shards", "once"])
    max_steps = rng.randint(2, 9)
    options = {
        "num_generations": generations, "per_device_train_batch_size": groups * generations // processes,
        "steps_per_generation": steps_per_generation, "gradient_accumulation_steps": accumulation,
        "num_iterations": uses, "max_steps": max_steps, "shuffle_dataset": rng.random() < 0.6,
        "seed": rng.randrange(100), "max_completion_length": rng.choice([LONGEST, 12]),
    }  # fmt: skip
    april = {
        "over_provisioning": rng.choice([1.0, 1.5, 2.0, 3.0, "auto"]),
        "overlap_generation": rng.choice([True, True, False]),
        "resume_kv": rng.choice(["auto", "recompute", "reuse"]),
        "max_staleness": rng.choice([None, 8, 8]), "staleness_policy": rng.choice(["wait", "wait", "ignore"]),
        "stream_interval": rng.choice([1, 3, 64]), "score_during_generation": rng.random() < 0.3,
        "dynamic_sampling": rng.random() < 0.2,
    }  # fmt: skip
    happens = rng.choice([None, None, None, "prolonged", "shortened", "stopped", "resumed", "resumed"])
    at, micro = rng.randint(1, max_steps), steps_per_generation * uses
    if happens == "resumed":  # between two batches: the batch inside of which training resumes is trained anew
        ends = [step for step in range(1, max_steps) if micro == accumulation or step % micro == 0]
        happens, at = ("resumed", rng.choice(ends)) if ends and accumulation in (1, micro) else (None, at)
    return {
        "seed": seed, "options": options, "april": april, "kind": kind,
        "rows": quota * rng.randint(2, 5) + 1,  # an epoch of a stream has an optimizer step, or training never ends
        "format": rng.choice([None, None, "numpy", "torch", "pandas"]) if kind == "map" else None,
        "happens": happens, "at": at, "by": rng.randint(1, 6),
        "faults": rng.choice([0.0, 0.0, 0.01, 0.05]),
    }  # fmt: skip


def dataset_of(case: dict[str, Any]) -> Dataset | IterableDataset:
    rows = [{"prompt": f"{n}+{n}=", "number": n} for n in range(case["rows"])]
    dataset = Dataset.from_list(rows)
    if case["kind"] == "transform":
        return dataset.with_transform(lambda batch: {**batch, "prompt": [f"{text} " for text in batch["prompt"]]})
    if case["kind"] == "stream":
        return dataset.to_iterable_dataset()
    if case["kind"] == "shards":
        return dataset.to_iterable_dataset(num_shards=2)
    if case["kind"] == "once":  # a row exists once; every opening and every row is counted
        taken = iter(range(10**6))
        return IterableDataset.from_generator(lambda: ({"prompt": f"{n}+1=", "number": n} for n in taken))
    return dataset.with_format(case["format"])


class StockRows(GRPOTrainer):
    """Counts the rows of stock GRPO's generations, and computes nothing."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            self.trained.update(int(row["number"]) for row in inputs)
        self._step += 1
        return torch.zeros(())


def differences(case: dict[str, Any], trained: Counter[int], left: int, wanted: Counter[int]) -> str:
    """What is wrong with the samples of each row that were trained, and with the groups left; empty if nothing is."""
    # Shortened or stopped, training ends too early for some of the rows in flight. Prolonged, it opens its stream
    # anew: the batch that the data loader read ahead is lost, in stock too, and which one that is depends on timing.
    if case["happens"] in ("shortened", "stopped") or (case["kind"], case["happens"]) == ("once", "prolonged"):
        once = case["kind"] != "once" or set(trained.values()) <= {case["options"]["num_generations"]}
        is_as_many = trained.total() == wanted.total() and once
        return "" if is_as_many else f"{trained} instead of {wanted.total()} samples"
    differ = f"too often {trained - wanted}, missing {wanted - trained}" if trained != wanted else ""
    return differ + (f" {left} groups left" if left else "")


def trained_rows(case: dict[str, Any], folder: Path, make: Callable[..., Any]) -> tuple[Counter[int], int]:
    """Samples of each row that were trained, and the groups left at the end."""
    trained: Counter[int] = Counter()
    at, happens, options = case["at"], case["happens"], dict(case["options"])
    options |= {"save_strategy": "steps", "save_steps": at} if happens == "resumed" else {"save_strategy": "no"}
    change = {
        "prolonged": Changes(at, options["max_steps"] + case["by"]),
        "shortened": Changes(at, max(at, options["max_steps"] - case["by"])),
        "stopped": Changes(at, None, stops=True),
        "resumed": Changes(at, None, stops=True),
    }.get(happens)

    if make is stock and happens == "resumed":  # the same as without; stock itself repeats the order of an epoch
        options["save_strategy"], change = "no", None
    trainer = make(case, folder, trained, options, [change] if change else [])
    trainer.train()
    if options["save_strategy"] == "steps":
        trainer = make(case, folder, trained, options, [])
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{at}"))
    left = 0 if make is stock else len(trainer.pool)
    shutil.rmtree(folder, ignore_errors=True)
    return trained, left


COMMON = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
    "learning_rate": 0.0, "logging_steps": 100, "beta": 0.0, "log_level": "error",
}  # fmt: skip


def stock(case: dict[str, Any], folder: Path, trained: Counter[int], options: dict[str, Any], callbacks: Any) -> Any:
    args = GRPOConfig(str(folder), use_vllm=False, **COMMON, **options)
    trainer = StockRows(
        MODEL, lambda **kwargs: None, args, dataset_of(case), processing_class=TOKENIZER, callbacks=callbacks
    )
    trainer.trained = trained
    return trainer


def april(url: str) -> Callable[..., Any]:
    def make(
        case: dict[str, Any], folder: Path, trained: Counter[int], options: dict[str, Any], callbacks: Any
    ) -> APRILGRPOTrainer:
        done: list[Any] = []

        class Recorded(APRILGRPOTrainer):
            def _april_run_round(self) -> Any:
                found = super()._april_run_round()
                trained.update(int(group.row["number"]) for group in found.groups for _ in group.samples)
                return found

        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            done.extend(completions)
            return [float(n % 2) for n in range(len(completions))]

        args = APRILGRPOConfig(
            str(folder), vllm_server_base_url=url, save_on_signal=False, **COMMON, **options, **case["april"]
        )
        return Recorded(MODEL, reward, args, dataset_of(case), processing_class=TOKENIZER, callbacks=callbacks)

    return make


def quiet() -> None:
    """Trainings here provoke warnings by design."""
    logging.getLogger("trl_april").setLevel(logging.ERROR)
