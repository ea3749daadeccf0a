"""The canary: log-probabilities that server and trainer must agree on after every weight sync.

With old weights on the server, every recorded log-probability would be wrong. Two checks find them: both sides agree
as closely as their data types allow, and the server's values change when the trainer's do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..errors import WeightSyncError
from .client import ServerControl


NUM_TOKENS = 33
# Mean absolute differences in nats. In float32, both sides agree to 1e-6 on a CPU; reduced-precision matrix products
# of GPUs and mixed precision are coarser. Other weights of the same model differ by far more.
TOLERANCE_FLOAT32 = 5e-3
TOLERANCE_OTHER = 0.5
# A change of the trainer's values that rounding on the server cannot hide.
VISIBLE_FLOAT32 = 1e-5
VISIBLE_OTHER = 2e-2


class Canary:
    """Compares server and trainer on a fixed sequence of token ids below `vocab_size`.

    `exact` says whether both sides compute in float32, and may change between two comparisons. If the sides are not
    `comparable`, as with a quantized server or a model that [`depends_on_width`], the server's values only have to
    change with the trainer's.
    """

    def __init__(self, vocab_size: int, *, exact: bool = False, comparable: bool = True) -> None:
        generator = random.Random(0)
        self.token_ids = [generator.randrange(vocab_size) for _ in range(NUM_TOKENS)]
        self.exact = exact
        self._comparable = comparable
        self._last: tuple[list[float], list[float], bool] | None = None

    def compare(self, trainer: Sequence[float], server: Sequence[float], version: int) -> float:
        """Compare the log-probabilities of `token_ids[1:]` after a sync, and return their distance."""
        tolerance = TOLERANCE_FLOAT32 if self.exact else TOLERANCE_OTHER
        difference = distance(trainer, server)
        if not math.isfinite(difference):
            raise WeightSyncError(
                f"After the sync of policy version {version}, a log-probability of the server or the trainer is not "
                "finite: the weights have diverged or arrived incomplete. Check the loss before the sync and the "
                "server's log."
            )
        if self._comparable and difference > tolerance:
            raise WeightSyncError(
                f"After the sync of policy version {version}, the log-probabilities of server and trainer differ by "
                f"{difference:.3g} nats on average, more than {tolerance:g}: the server does not hold the trainer's "
                "weights. Check that it serves the trained model, and see its log for errors while loading weights."
            )
        if self._last is not None:
            last_trainer, last_server, was_exact = self._last
            visible = VISIBLE_FLOAT32 if self.exact and was_exact else VISIBLE_OTHER
            moved = distance(trainer, last_trainer)
            if moved > visible and list(server) == last_server:
                raise WeightSyncError(
                    f"After the sync of policy version {version}, the trainer's log-probabilities have moved by "
                    f"{moved:.3g} nats and the server's not at all: the server has kept its old weights. See its log "
                    "for errors while loading weights."
                )
        self._last = (list(trainer), list(server), self.exact)
        return difference


def trainer_logprobs(model: nn.Module, token_ids: list[int], device: torch.device) -> list[float]:
    """Log-probabilities of `token_ids[1:]` under `model`, at temperature 1 and without dropout, shape `(n - 1,)`.

    A collective call if the model is sharded.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.tensor([token_ids], device=device)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None].to(logits.device)).squeeze(-1)
    finally:
        model.train(was_training)
    return logprobs.tolist()


def server_logprobs(server: ServerControl, model: str, token_ids: list[int]) -> list[float]:
    """Log-probabilities of `token_ids[1:]` under the server's weights, at temperature 1, shape `(n - 1,)`.

    Requested as prompt log-probabilities, which vLLM never takes from its prefix cache.
    """
    body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    positions = server.request("POST", "v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [entry[str(token_id)]["logprob"] for token_id, entry in zip(token_ids[1:], positions[1:], strict=True)]


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference of log-probabilities, in nats."""
    return math.fsum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


def depends_on_width(config: PreTrainedConfig) -> bool:
    """Whether a token's log-probability depends on the width of its batch, padding included.

    Dynamic NTK and LongRoPE (https://huggingface.co/papers/2402.13753) choose rotary frequencies by the longest
    position of an input. vLLM chooses them by its context length, so the two sides differ.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    of_layers = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    types = [str(one.get("rope_type", one.get("type"))) for one in of_layers]
    return any("dynamic" in name or name == "longrope" for name in types)
