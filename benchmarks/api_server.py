"""What a token costs in vLLM's API process: its output processing, with and without turning token ids into text.

    python benchmarks/api_server.py
    python benchmarks/api_server.py --streams 64 --json api_server.json

Microseconds of CPU time per token in vLLM's `OutputProcessor`, as for our requests: log-probabilities of the sampled
tokens, and chunks of 64. All streams of a server share one such process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import markdown, write_json
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists


VOCABULARY = 30_000
STEPS = 128  # tokens of each stream
PROMPT = list(range(100))


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of byte-level tokens, as those of most models."""
    vocabulary = {f"tok{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="tok0"))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="tok0")


def microseconds(tokenizer: PreTrainedTokenizerFast, streams: int, *, detokenize: bool) -> float:
    """CPU time per token."""
    processor = OutputProcessor(tokenizer, log_stats=True)
    for number in range(streams):
        request = EngineCoreRequest(
            request_id=f"r{number}", external_req_id=f"r{number}", prompt_token_ids=PROMPT, mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=2 * STEPS, logprobs=0, detokenize=detokenize, output_kind=RequestOutputKind.DELTA,
                stream_interval=64,
            ),
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt="a", data_parallel_rank=None,
        )  # fmt: skip
        collector = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
        processor.add_request(request, None, None, 0, collector)
    random, total = np.random.default_rng(0), 0.0
    for _ in range(STEPS):
        outputs = []
        for number, token in enumerate(random.integers(1, VOCABULARY, streams).tolist()):
            logprobs = LogprobsLists(
                np.array([[token]], np.int32), np.array([[-1.0]], np.float32), np.array([1], np.int32)
            )
            outputs.append(EngineCoreOutput(f"r{number}", [token], new_logprobs=logprobs))
        began = time.process_time()
        processor.process_outputs(outputs, time.monotonic(), IterationStats())
        total += time.process_time() - began
    return total / streams / STEPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args()
    gc.disable()
    found: list[dict[str, Any]] = []
    made = tokenizer()
    for streams in options.streams:
        turns = [
            {
                "text": microseconds(made, streams, detokenize=True),
                "ids": microseconds(made, streams, detokenize=False),
            }
            for _ in range(options.turns + 1)
        ][1:]  # the first one warms up
        found += [{"streams": streams, **turn} for turn in turns]
    cells = []
    for streams in options.streams:
        of_text, of_ids = ([one[kind] for one in found if one["streams"] == streams] for kind in ("text", "ids"))
        ranges = (f"{statistics.median(one):.1f} ({min(one):.1f} to {max(one):.1f})" for one in (of_text, of_ids))
        cells.append([str(streams), *ranges])
    print(markdown(["streams", "with text, µs per token", "token ids only, µs per token"], cells))
    if options.json:
        write_json(options.json, {"streams": options.streams, "turns": options.turns}, found)


if __name__ == "__main__":
    main()
