"""A weight sync of a LoRA adapter alone against one of merged weights through files.

    python benchmarks/adapters.py --json adapters.json    # 250 million parameters, rank 16, 5 syncs each

A real vLLM server and a Qwen3 with random weights run on this machine, in float32. Beside each sync a request streams
its tokens one by one. The standstill is the longest time between two of them while the server loads the files,
minus the median before; the canary is one more short request after it. Afterwards 16 requests at once show what the
adapter costs in generation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import requests
import torch
from accelerate import Accelerator
from countdown import build_tokenizer
from peft import LoraConfig, get_peft_model
from report import write_json
from rollout import serve
from weight_sync import CONTEXT, build

from trl_april.distributed.processes import OneProcess
from trl_april.weights.files import shared_memory
from trl_april.weights.sync import ServerGeneration


class Stream:
    """A request whose tokens arrive one by one, with their times."""

    def __init__(self, base_url: str, model: str) -> None:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": CONTEXT - 3, "ignore_eos": True, "stream": True}
        self.times: list[float] = []
        self._response = requests.post(f"{base_url}/v1/completions", json=body, stream=True, timeout=600)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        while len(self.times) < 20:
            time.sleep(0.01)

    def _read(self) -> None:
        try:
            for line in self._response.iter_lines(chunk_size=None):
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())
        except (requests.RequestException, AttributeError):
            pass  # closed

    def close(self) -> None:
        self._response.close()
        self._thread.join(5)

    def standstill(self, began: float, ended: float) -> float:
        gaps = list(zip(self.times, self.times[1:], strict=False))
        usual = [right - left for left, right in gaps if right < began]
        return max(right - left for left, right in gaps if right > began and left < ended) - statistics.median(usual)


def rate(base_url: str, model: str) -> float:
    """Tokens per second of 16 requests at once."""
    body = {"model": model, "prompt": [[5, 6, 7]] * 16, "max_tokens": 32, "ignore_eos": True}
    began = time.perf_counter()
    requests.post(f"{base_url}/v1/completions", json=body, timeout=600).raise_for_status()
    return 16 * 32 / (time.perf_counter() - began)


def measure(way: str, model: Any, base_url: str, syncs: int) -> dict[str, Any]:
    """Bytes, seconds and standstill of each sync, and the tokens per second afterwards."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as parent:
        found: list[dict[str, float]] = []
        size, stopped, loaded = [0], [0.0], [0.0]
        generation = ServerGeneration(
            model=model, accelerator=Accelerator(cpu=True), processing_class=None, processes=OneProcess(),
            trained_model=lambda: model, policy_version=lambda: len(found), weight_sync=way, weight_sync_dir=parent,
            needs_logprobs=False, api_key=None, server_base_url=base_url, max_completion_length=1, resume_kv="keep",
        )  # fmt: skip

        def quiesce() -> None:
            newest = max(Path(parent).iterdir(), key=lambda folder: folder.stat().st_mtime)
            size[0] = sum(file.stat().st_size for file in newest.iterdir())
            stopped[0] = time.perf_counter()
            if way == "filesystem":
                generation.servers.pause()

        send = generation.server.load

        def load(*args: Any) -> Any:
            answer = send(*args)
            loaded[0] = time.perf_counter()
            return answer

        generation.server.load = load
        for _ in range(syncs + 1):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter += 1e-3 * torch.randn_like(parameter)
            stream = Stream(base_url, generation.adapter or generation.server_info.model)
            began = time.perf_counter()
            with generation.sync() as sync:
                quiesce()
                sync.load()
                sync.verify()
            ended = time.perf_counter()
            time.sleep(0.5)
            stream.close()
            seconds = {"seconds": ended - began, "standstill": stream.standstill(stopped[0], loaded[0])}
            found.append({"bytes": size[0], **seconds})
        served = generation.adapter or generation.server_info.model
        rates = [rate(base_url, served) for _ in range(2)]
        return {"way": way, "syncs": found[1:], "tokens_per_second": max(rates)}  # the first ones warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20, help="layers of 12.6 million parameters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the server needs the other cores
    results = []
    for way, flags in (("filesystem", []), ("adapter", ["--enable-lora", "--max-loras", "4"])):
        base = build(options.layers)
        with serve(base, build_tokenizer(), CONTEXT, flags) as base_url:
            model = get_peft_model(base, LoraConfig(r=options.rank, target_modules="all-linear"))
            results.append(measure(way, model, base_url, options.syncs))
        medians = {
            name: statistics.median(one[name] for one in results[-1]["syncs"])
            for name in ("bytes", "seconds", "standstill")
        }
        print(json.dumps({"way": way, **medians, "tokens_per_second": results[-1]["tokens_per_second"]}))
    if options.json:
        write_json(options.json, {"layers": options.layers, "rank": options.rank, "syncs": options.syncs}, results)


if __name__ == "__main__":
    main()
