"""The model of `gpu.py`, its servers, and what its parts measure.

Torch and the libraries on top of it are imported by a part, in its own process.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests

from trl_april.server.local import LocalServer


STEPS, SKIPPED = 10, 5  # of training; before throughput is measured
SYNCS = 4
PROMPT_LENGTH = 16
CONTEXT = 4096  # of the model, and of a server with room
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model, of its trainings, and of the small KV cache."""

    shape: dict[str, Any]
    dtype: str  # of weights in files and on the server
    groups: int
    generations: int
    micro_batch: int
    mean: int  # tokens of a completion
    longest: int
    kv_tokens: int
    rounds: int  # of the default schedule, three times those of the synchronous one
    seconds: float  # in which the throughput of a training is measured
    flags: Sequence[str] = ()  # of a server

    @property
    def samples(self) -> int:
        """Completions of a step."""
        return self.groups * self.generations


CARD = Sizes(
    dict(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
         num_key_value_heads=8, head_dim=128),
    "bfloat16", groups=16, generations=8, micro_batch=8, mean=150, longest=1024, kv_tokens=16_384, rounds=12,
    seconds=20.0, flags=("--gpu-memory-utilization", "0.4"),
)  # fmt: skip
REHEARSAL = Sizes(
    dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
         num_key_value_heads=1, head_dim=32),
    "float32", groups=4, generations=4, micro_batch=4, mean=40, longest=256, kv_tokens=2048, rounds=6, seconds=4.0,
    flags=("--enforce-eager",),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """The folder of this run, and the server of a part, if it has one."""

    folder: Path
    base_url: str
    rehearse: bool

    @property
    def sizes(self) -> Sizes:
        return REHEARSAL if self.rehearse else CARD

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"  # ROCm's name, too

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    def server_flags(self, *, has_room: bool = True) -> list[str]:
        """Flags of a server beside the trainer, whose KV cache has room for all requests or for few of them."""
        sizes, shape = self.sizes, self.sizes.shape
        flags = ["--dtype", sizes.dtype, *sizes.flags]
        if has_room:
            return [*flags, "--max-model-len", str(CONTEXT)]
        width = 4 if sizes.dtype == "float32" else 2
        each = 2 * width * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        longest = PROMPT_LENGTH + sizes.longest
        return [*flags, "--max-model-len", str(longest), "--kv-cache-memory-bytes", str(each * sizes.kv_tokens)]


def gpu_variables() -> list[dict[str, str]]:
    """Environment variables that select the first and the second GPU; empty if there are fewer."""
    import torch

    name = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    count = torch.cuda.device_count()
    gpus = (os.environ.get(name) or ",".join(map(str, range(count)))).split(",")
    return [{name: gpu} for gpu in gpus[:2]] if count > 1 else [{}, {}]


def build(work: Work) -> Found:
    """Save the model and its tokenizer."""
    import torch
    from countdown import build_tokenizer, save
    from models import versions
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer(work.sizes.shape["vocab_size"])
    torch.manual_seed(0)
    with torch.device(work.device):
        config = Qwen3Config(
            **work.sizes.shape, max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        end_evenly(model, work.sizes.mean)
    save(model.to(getattr(torch, work.sizes.dtype)), tokenizer, Path(work.model))
    device = work.device if work.rehearse else torch.cuda.get_device_name()
    return {"device": device, "parameters": model.num_parameters(), **versions()}


def end_evenly(model: Any, mean: int) -> None:
    """Give EOS a probability of about `1 / mean` at every position.

    The first of the hidden states becomes a constant beside which the others are small, so it is one after the last
    norm, too. EOS gets its logit from it, and every other token 1.
    """
    import torch

    size = model.config.hidden_size
    with torch.no_grad():
        for layer in model.model.layers:
            for output in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                output *= 0.1  # against growth from layer to layer
                output[0] = 0.0
            layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0.0
        model.model.norm.weight[:] = 8.0  # more, and every token would be followed by itself
        model.model.norm.weight[0] = 1 / size
        embeddings = model.get_input_embeddings().weight  # and those of the output
        embeddings[:, 0] = size**0.5
        embeddings[model.config.eos_token_id, 0] *= 1 + math.log(model.config.vocab_size / (mean - 1))


# Training


def has_odd_length(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """A reward that differs within almost every group."""
    return [float(len(messages[-1]["content"]) % 2) for messages in completions]


def train(
    work: Work, make: Any, config: Any, key: str, *, micro_batch: int, steps: int | None = None, arguments: Found,
    **options: Any,
) -> tuple[Any, Found]:  # fmt: skip
    """Train with `make`, one of the trainers, for a number of steps, or as long as throughput is measured.

    `key` is that of the trained tokens in the trainer's log.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl_async_on_cpu import converses

    sizes, ends = work.sizes, []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())
            if steps is None and len(ends) > SKIPPED:
                control.should_training_stop |= ends[-1] - ends[SKIPPED - 1] > sizes.seconds

    args = config(
        str(work.folder / "trainer"), per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=sizes.samples // micro_batch,
        num_generations=sizes.generations, max_completion_length=sizes.longest,
        max_steps=steps or 10_000,  # never near its end, where our schedule has fewer groups in flight
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=work.rehearse,
        bf16=not work.rehearse, **options,
    )  # fmt: skip
    digits = random.Random(0)
    prompts = ["".join(digits.choices("0123456789", k=PROMPT_LENGTH)) for _ in range(1024)]
    trainer = make(
        model=work.model, reward_funcs=has_odd_length, args=args, callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]),
        processing_class=converses(AutoTokenizer.from_pretrained(work.model)), **arguments,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = trainer.state.log_history
    tokens = [one[key] for one in logs if key in one]
    return trainer, {
        "steps": trainer.state.global_step,
        "trained tok/s": sum(tokens[SKIPPED:]) / (ends[-1] - ends[SKIPPED - 1]),
        "tokens per step": statistics.fmean(tokens[SKIPPED:]),
        "gradient norm": next(one["grad_norm"] for one in reversed(logs) if "grad_norm" in one),
    }


def ours(work: Work, *, attention: str = "sdpa", lora: bool = False, **options: Any) -> Found:
    """Train with our trainer, on the server of the part or on one that it starts."""
    from peft import LoraConfig

    from trl_april import APRILGRPOConfig, APRILGRPOTrainer

    trainer, found = train(
        work, APRILGRPOTrainer, APRILGRPOConfig, "april/trained_tokens", micro_batch=work.sizes.micro_batch,
        arguments={"peft_config": LoraConfig(r=16, target_modules="all-linear") if lora else None},
        vllm_server_base_url=work.base_url or None, model_init_kwargs={"attn_implementation": attention}, **options,
    )  # fmt: skip
    rounds = [one for one in trainer.state.log_history if "april/sync_seconds" in one]
    return {
        **found,
        "weights by": trainer.vllm_generation.weight_sync,
        "sync s": statistics.median(one["april/sync_seconds"] for one in rounds),
        "oldest": max(one["april/staleness_max"] for one in rounds),
    }


def trl_async(work: Work) -> Found:
    """Train with TRL's AsyncGRPOTrainer. Its own transport, NCCL, cannot connect a GPU to itself.

    It fills each micro-batch up to the server's context, so a step gets as many of them as our samples would fill.
    """
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl_async_on_cpu import WeightFiles, supply

    attention, sizes = supply(), work.sizes
    micro_batches = max(1, round(sizes.samples * (PROMPT_LENGTH + sizes.mean) / CONTEXT))
    _, found = train(
        work, AsyncGRPOTrainer, AsyncGRPOConfig, "batch/trained_tokens_per_step",
        micro_batch=sizes.samples // micro_batches,
        arguments={"weight_transfer": WeightFiles(work.base_url)}, vllm_server_base_url=work.base_url,
    )  # fmt: skip
    return {**found, "weights by": "filesystem", "attention": attention}


def on_small_cache(work: Work, **options: Any) -> Found:
    """Train with our trainer, and count the requests that the server preempts."""

    def preempted() -> float:
        text = requests.get(f"{work.base_url}/metrics", timeout=30).text
        return sum(map(float, re.findall(r"^vllm:num_preemptions_total\S* (\S+)$", text, re.MULTILINE)))

    before = preempted()
    return {**ours(work, **options), "preempted": preempted() - before}


# Weight syncs and rollouts


def sync(work: Work, transport: str) -> Found:
    """Median seconds of a weight sync until the server pauses, and from then on."""
    import torch
    from transformers import AutoModelForCausalLM
    from weight_sync import measure

    from trl_april.config import WEIGHT_SYNCS

    if transport not in WEIGHT_SYNCS:
        return {"left out": f"this version has no weight_sync={transport!r}"}
    second = gpu_variables()[1]
    if transport == "nccl" and not second:
        return {"left out": "needs a second GPU"}
    # In float32, as trainers load it.
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).to(work.device)
    server: Any = nullcontext(work)
    if transport == "nccl":
        server = LocalServer(work.model, vllm_args=work.server_flags(), env=second, quiet=True)
    with server as running:
        # A factor that bfloat16 can tell from 1.
        syncs = measure(model, running.base_url, SYNCS, cpu=work.rehearse, scale=1.02, weight_sync=transport)
    return {f"{when} s": statistics.median(one[when] for one in syncs) for when in ("before", "after")}


def rollout(work: Work, mode: str, *, is_synchronous: bool = False) -> Found:
    """Throughput of a mode of `rollout.py`, with the factor and the bound of the defaults unless it is synchronous."""
    from rollout import measure

    from trl_april.config import AprilOptions

    sizes, defaults = work.sizes, AprilOptions().with_schedule()
    rounds = sizes.rounds // 3 if is_synchronous else sizes.rounds
    factor = 1.0 if is_synchronous else defaults.over_provisioning
    options = argparse.Namespace(
        quota=sizes.groups, group_size=sizes.generations, median=sizes.mean * 2 // 3, rounds=rounds, block=rounds,
        warmup=1 if is_synchronous else 4, max_staleness=defaults.max_staleness, useless=0.0, seed=0,
        stream_interval=defaults.stream_interval, train_seconds=0.0,
    )  # fmt: skip
    name = requests.get(f"{work.base_url}/v1/models", timeout=30).json()["data"][0]["id"]
    (found,) = asyncio.run(measure(options, work.base_url, name, 1.0, [(mode, factor)], 0))
    return {
        "factor": factor,
        "trained tok/s": found.trained_per_second,
        "generated tok/s": found.generated_per_second,
        "in flight": found.in_flight_mean,
        "oldest": found.staleness_max,
        "seconds": found.seconds,
    }


@dataclass(frozen=True, slots=True)
class Part:
    """Measurements in one process.

    Args:
        measurements (`dict[str, Callable]`):
            By name.
        least (`float`):
            Seconds that it needs. With fewer left, it is not started.
        has_room (`bool`, *optional*):
            Whether the KV cache of its server has room for all requests. By default it has no server.
        module (`str`, *optional*):
            A module that it needs.
    """

    measurements: dict[str, Callable[[Work], Found]]
    least: float
    has_room: bool | None = None
    module: str | None = None


DEFAULT_MODE = "keep"  # what `rollout.py` calls the default `overlap_generation` and `resume_kv`
SDPA, FLASH = "sdpa", "flash_attention_2"
MODEL = Part({"": build}, 0)
PARTS = {
    "full": Part({SDPA: partial(ours, steps=STEPS)}, 60),
    "full-flash": Part({FLASH: partial(ours, steps=STEPS, attention=FLASH)}, 60, module="flash_attn"),
    "lora": Part({SDPA: partial(ours, steps=STEPS, lora=True)}, 60),
    "lora-flash": Part({FLASH: partial(ours, steps=STEPS, attention=FLASH, lora=True)}, 60, module="flash_attn"),
    "sync": Part({name: partial(sync, transport=name) for name in ("filesystem", "ipc", "nccl")}, 50, has_room=True),
    "rollout": Part(
        {
            "synchronous": partial(rollout, mode="abort", is_synchronous=True),
            "default": partial(rollout, mode=DEFAULT_MODE),
            "uninterrupted": partial(rollout, mode="uninterrupted"),
        },
        40,
        has_room=True,
    ),
    "default": Part({"": ours}, 40, has_room=True),
    "trl-async": Part({"": trl_async}, 40, has_room=True),
    "kv": Part(
        {"default": on_small_cache, "synchronous": partial(on_small_cache, over_provisioning=1.0)}, 60, has_room=False
    ),
}
