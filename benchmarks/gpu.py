"""Server and trainer beside each other on one GPU: throughput of the schedules, and seconds of a weight sync.

    python benchmarks/gpu.py                        # some ten minutes on one GPU with 40 GB, into gpu.json
    python benchmarks/gpu.py --rehearse             # the same on a CPU, with a tiny model

The model is a Qwen3 of 1.4 billion parameters with random weights in bfloat16 and a small vocabulary. Completion
lengths are forced: lognormal with a median of 150 tokens. After each round the trainer computes the gradients of
`--passes` forward and backward passes, while requests run if the schedule overlaps. Contestants alternate block by
block, as in `rollout.py`. Weight syncs are measured apart, through files, and each ends with the canary. A part that
is in the JSON file is not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch
import weight_sync
from countdown import build_model, build_tokenizer, save
from report import read_json, write_json
from rollout import CONTEXT, Contestant, measure
from rollout_report import Measurement, rows, table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from trl_april.server.local import LocalServer


SCHEDULES = {
    "synchronous": ("abort", 1.0),
    "the paper's": ("abort", 2.0),  # over_provisioning=2.0, overlap_generation=False
    "overlap": ("overlap", 2.0),
    "default": ("keep", 2.0),  # on a server of `trl-april serve`
}
COLUMNS = ["sigma", "mode", "factor", "trained tok/s", "ratio (range)", "in flight", "carried", "age mean", "oldest"]
ROWS, LENGTH = 8, 512  # of a forward and backward pass


class TrainingContestant(Contestant):
    """A contestant whose trainer computes on the server's GPU."""

    def __init__(self, model: PreTrainedModel, passes: int, *args: Any) -> None:
        super().__init__(*args)
        self._model, self._passes = model, passes

    async def _train(self) -> None:
        await asyncio.to_thread(train, self._model, self._passes)


def train(model: PreTrainedModel, passes: int) -> None:
    """Compute gradients, and wait for them."""
    for _ in range(passes):
        ids = torch.randint(3, 13, (ROWS, LENGTH), device=model.device)
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    if model.device.type != "cpu":
        torch.accelerator.synchronize()


def build(rehearse: bool) -> tuple[PreTrainedModel, Any]:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    if rehearse:
        model: PreTrainedModel = build_model(tokenizer)
        model.config.max_position_embeddings = CONTEXT
        return model, tokenizer
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=CONTEXT,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.device("cuda"):  # ROCm's name, too
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    return model, tokenizer


def run(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Measure the parts that are not in the results, and write the file after each."""
    parts = [part for part in ("sync", *options.sigma) if part not in [result["part"] for result in results]]
    if not parts:
        return
    model, tokenizer = build(options.rehearse)
    vllm_args = ["--max-model-len", str(CONTEXT)]
    vllm_args += ["--dtype", "float32", "--enforce-eager"] if options.rehearse else ["--dtype", "bfloat16"]
    if not options.rehearse:
        vllm_args += ["--gpu-memory-utilization", "0.4"]
    with tempfile.TemporaryDirectory(prefix="trl_april_bench_") as folder:
        save(model, tokenizer, Path(folder))
        with LocalServer(folder, vllm_args=vllm_args) as server:
            name = requests.get(f"{server.base_url}/v1/models", timeout=30).json()["data"][0]["id"]
            make = partial(TrainingContestant, model, options.passes)
            for part in parts:
                if part == "sync":
                    # A factor that bfloat16 can tell from 1.
                    found: Any = weight_sync.measure(
                        model, server.base_url, options.syncs, cpu=options.rehearse, scale=1.02
                    )
                else:
                    model.train()
                    measured = measure(
                        options, server.base_url, name, part, [*SCHEDULES.values()], 0, make=make
                    )  # fmt: skip
                    found = [asdict(one) for one in asyncio.run(measured)]
                results.append({"part": part, "found": found})
                write_json(options.json, settings_of(options), results)
                print(f"{part}: measured", flush=True)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    device = "cpu" if options.rehearse else torch.cuda.get_device_name()
    return {**{name: value for name, value in vars(options).items() if name != "json"}, "device": device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0], help="spread of log lengths")
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds of each schedule")
    parser.add_argument("--passes", type=int, default=8, help="forward and backward passes after each round")
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file for all measurements")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("No GPU is visible. --rehearse runs on a CPU.")
    # What contestants need beside.
    options.quota, options.group_size, options.median, options.block, options.warmup = 8, 8, 150, 2, 3
    options.max_staleness, options.useless, options.stream_interval, options.seed = 5, 0.0, 64, 0
    options.train_seconds = 0.0
    settings, results = read_json(options.json) if options.json.exists() else (settings_of(options), [])
    if settings != settings_of(options):
        raise SystemExit(f"{options.json} was measured with other options or on another device. Choose another file.")
    run(options, results)
    found = {result["part"]: result["found"] for result in results}
    measurements = [Measurement(**one) for part in options.sigma for one in found[part]]
    print(f"\n{table(rows(measurements), COLUMNS)}\n")
    before, after = (statistics.median(one[when] for one in found["sync"]) for when in ("before", "after"))
    print(
        f"Weight sync through files, medians of {len(found['sync'])}: {before:.2f} s while the server generates, then "
        f"{after:.2f} s while it is paused. The canary passed after each."
    )


if __name__ == "__main__":
    main()
