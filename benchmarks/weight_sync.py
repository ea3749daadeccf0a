"""Seconds of a weight sync through files, with the server generating and with the server paused.

    python benchmarks/weight_sync.py                     # a model of 250 million parameters, 9 syncs
    python benchmarks/weight_sync.py --layers 40 --syncs 5 --json weight_sync.json

A real vLLM server and a Qwen3 with random weights run on this machine, in float32. The trainer computes the canary's
log-probabilities and writes the weights while requests may run; then requests stop, and the server loads the files.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from countdown import build_tokenizer
from report import write_json
from rollout import serve
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from trl_april.distributed.processes import OneProcess
from trl_april.weights.sync import ServerGeneration


CONTEXT = 1024


def build(layers: int) -> PreTrainedModel:
    """A model of 12.6 million parameters per layer."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
            num_key_value_heads=8, head_dim=64, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        )
    )  # fmt: skip


def measure(
    model: PreTrainedModel, base_url: str, syncs: int, *, cpu: bool = True, scale: float = 1.001,
    weight_sync: str = "filesystem",
) -> list[dict[str, float]]:  # fmt: skip
    """Seconds of each sync before and after requests stop. The weights are scaled before each."""
    quiesced: list[float] = []
    generation = ServerGeneration(
        model=model, accelerator=Accelerator(cpu=cpu), processing_class=build_tokenizer(), processes=OneProcess(),
        trained_model=lambda: model, policy_version=lambda: len(quiesced), weight_sync=weight_sync,
        weight_sync_dir=None, needs_logprobs=False, api_key=None, server_base_url=base_url, max_completion_length=1,
    )  # fmt: skip
    found = []
    try:
        for _ in range(syncs + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= scale
            began = time.perf_counter()
            with generation.sync() as sync:
                quiesced.append(time.perf_counter())
                sync.load()
                sync.verify()
            found.append({"before": quiesced[-1] - began, "after": time.perf_counter() - quiesced[-1]})
    finally:
        generation.servers.give_up()
    return found[1:]  # the first sync warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20, help="layers of 12.6 million parameters")
    parser.add_argument("--syncs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args()
    model = build(options.layers)
    with serve(model, build_tokenizer(), CONTEXT) as base_url:
        found = measure(model, base_url, options.syncs)
    before, after = ([one[name] for one in found] for name in ("before", "after"))
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:,.0f} million parameters, {len(found)} syncs: "
        f"{statistics.median(before):.2f} s ({min(before):.2f} to {max(before):.2f}) while the server generates, then "
        f"{statistics.median(after):.2f} s ({min(after):.2f} to {max(after):.2f}) while it is paused."
    )
    if options.json:
        write_json(options.json, {"layers": options.layers, "syncs": options.syncs}, found)


if __name__ == "__main__":
    main()
