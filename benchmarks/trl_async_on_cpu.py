"""What TRL's AsyncGRPOTrainer needs on a machine without CUDA or a hub. None of it changes what is scheduled when.

- The device's peak FLOPS, which it reads from torch.cuda for a metric: unknown.
- FlashAttention 3 of the hub, its only attention: another kernel, or the same function by torch's scaled dot product
  attention, segment by segment.
- Its weight transfer by NCCL: files in shared memory, through its own `weight_transfer` argument. The server is paused
  and resumed by TRL's client, with `clear_cache=false`: without it vLLM preempts all running requests at each sync.
- A conversation for each prompt, which it insists on, with a template that adds nothing to the text.
- A rollout queue that notes what the trainer takes from it, and so what it drops.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import countdown
import requests
import torch
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedTokenizerFast
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.vllm_client import VLLMClient

from trl_april.weights.files import shared_memory


LOAD_SECONDS = 300.0


class Attention:
    """The part of the `flash_attn` module that TRL's tree packing calls."""

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """Attention within each segment of packed rows, of shape `(tokens, heads, head_dim)`."""
        assert causal and window_size == (-1, -1)
        found = []
        lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        for one_q, one_k, one_v in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
            rows, columns = len(one_q), len(one_k)
            # FlashAttention aligns a causal mask to the lower right.
            mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
            heads = (one.transpose(0, 1)[None] for one in (one_q, one_k, one_v))
            out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)


class VarlenAttention:
    """The same by torch's own kernel, for CUDA."""

    @staticmethod
    def flash_attn_varlen_func(*tensors_and_lengths: Any, softmax_scale: float, **options: Any) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        options = {"window_size": (-1, 0), "enable_gqa": True}  # causal, aligned to the lower right
        return varlen_attn(*tensors_and_lengths, scale=softmax_scale, **options)


def supply() -> str:
    """Put into TRL's modules what they lack here. Returns the name of the attention: the first one that works."""
    if not torch.cuda.is_available():
        async_grpo_trainer.get_peak_flops_per_device = lambda *args: None
    kernels: dict[str, Callable[[], Any]] = {
        "FlashAttention 3": packing._flash_attn,
        "flash_attn": lambda: importlib.import_module("flash_attn"),
        "varlen_attn": lambda: VarlenAttention,
    }
    for name, kernel in kernels.items() if torch.cuda.is_available() else ():
        with suppress(Exception):  # not installed, no hub, not for this GPU
            q = torch.randn(3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            starts = torch.tensor([0, 3], device="cuda", dtype=torch.int32)
            found = kernel().flash_attn_varlen_func(
                q, q[:, :2], q[:, :2], starts, starts, 3, 3, softmax_scale=0.1, causal=True, window_size=(-1, -1)
            )
            (found[0] if isinstance(found, tuple) else found).sum().backward()
            packing._flash_attn = kernel
            return name
    packing._flash_attn = lambda: Attention
    return "sdpa by segments"


def converses(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Give a tokenizer a chat template that is the text of the messages, and a template that reads an answer back."""
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    content = {"close": tokenizer.eos_token, "content": "text"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": "",
        "fields": {"content": content},
    }
    return tokenizer


def as_conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its prompt as one message."""
    return {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}


def countdown_reward(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """The reward of the demo's task for completions as messages."""
    return countdown.countdown_reward([messages[-1]["content"] for messages in completions], **columns)


class WeightFiles:
    """TRL's `WeightTransferProtocol`, by files in shared memory."""

    def __init__(self, base_url: str) -> None:
        self._base_url, self._client = base_url, VLLMClient(base_url)

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()
        self._folder = Path(tempfile.mkdtemp(prefix="trl_async_weights_", dir=shared_memory()))

    def pause(self) -> None:
        self._post("pause", params={"mode": "keep", "clear_cache": "false"})

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        save_file({name: one.contiguous() for name, one in iterator}, self._folder / "model.safetensors")
        arguments = {"weights_path": str(self._folder)}
        self._post("collective_rpc", json={"method": "reload_weights", "kwargs": arguments})

    def resume(self) -> None:
        self._client.resume()

    def destroy(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _post(self, path: str, **options: Any) -> None:
        requests.post(f"{self._base_url}/{path}", timeout=LOAD_SECONDS, **options).raise_for_status()


def timed_start(worker: Any) -> list[float]:
    """A list that has the seconds of the start of TRL's rollout process, when it has started."""
    start, found = worker.start, []

    def timed() -> None:
        begun = time.monotonic()
        start()
        found.append(time.monotonic() - begun)

    worker.start = timed
    return found


@dataclass(frozen=True, slots=True)
class Taken:
    """A sample that the trainer took: completion tokens, age in policy versions, and whether it was dropped for it."""

    tokens: int
    age: int
    is_dropped: bool


class NotingQueue:
    """A rollout queue that keeps a note of each sample that is taken from it."""

    def __init__(self, inner: Any, version: Callable[[], int], max_staleness: int) -> None:
        self._inner, self._version, self._max_staleness = inner, version, max_staleness
        self.taken: list[Taken] = []

    def get(self, timeout: float | None = None) -> Any:
        sample = self._inner.get(timeout=timeout)
        age = self._version() - sample.model_version
        self.taken.append(Taken(int(sample.completion_mask.sum()), age, age > self._max_staleness))
        return sample

    def qsize(self) -> int:
        return int(self._inner.qsize())
