"""The canary: a handful of log-probabilities that server and trainer must agree on after every weight sync.

A server that silently kept its old weights would make every recorded log-probability wrong while training goes on, so
it is an error. Two things are checked: that both sides agree, as closely as their data types allow, and that the
server moved when the trainer did, which finds old weights even where rounding hides them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import requests
import torch
from torch import nn

from .errors import ServerError, WeightSyncError
from .server_session import LATER


NUM_TOKENS = 33
# Mean absolute differences in nats. float32 on both sides agrees to 1e-6 when measured on a CPU; a GPU's reduced
# precision matrix products and mixed precision are coarser. Other weights of the same model differ by far more.
TOLERANCE_FLOAT32 = 5e-3
TOLERANCE_OTHER = 0.5
# A trainer's move that is certain to be visible in the server's rounding.
VISIBLE_FLOAT32 = 1e-5
VISIBLE_OTHER = 2e-2


class Canary:
    """Compares server and trainer on one fixed sequence of token ids.

    Args:
        vocab_size (`int`):
            Ids are drawn below it, always the same ones.
        exact (`bool`):
            Whether both sides compute in float32.
        comparable (`bool`, *optional*, defaults to `True`):
            Whether the two sides can be expected to agree at all. A quantized server's cannot, nor can those of a
            model with LongRoPE or Dynamic NTK, whose frequencies vLLM chooses by its context, and transformers by
            each input. Such a server only has to move.

    Attributes:
        exact (`bool`):
            As given. It may change between two comparisons.
    """

    def __init__(self, vocab_size: int, *, exact: bool, comparable: bool = True) -> None:
        generator = random.Random(0)
        self.token_ids = [generator.randrange(vocab_size) for _ in range(NUM_TOKENS)]
        self.exact = exact
        self._comparable = comparable
        self._last: tuple[list[float], list[float], bool] | None = None

    def compare(self, trainer: Sequence[float], server: Sequence[float], version: int) -> float:
        """Compare the log-probabilities of `token_ids[1:]` after a sync.

        Args:
            trainer (`Sequence[float]`, shape `(32,)`):
                The trainer's, in nats.
            server (`Sequence[float]`, shape `(32,)`):
                The server's, in nats.
            version (`int`):
                Policy version that was synced, for the message.

        Returns:
            `float`: Mean absolute difference, in nats.

        Raises:
            WeightSyncError: If the server does not hold the trainer's weights.
        """
        tolerance = TOLERANCE_FLOAT32 if self.exact else TOLERANCE_OTHER
        difference = distance(trainer, server)
        if not math.isfinite(difference):
            raise WeightSyncError(
                f"After the sync of policy version {version} a log-probability is not finite on one side: the weights "
                "have diverged, or did not arrive whole. Check the loss before it, and the server's log."
            )
        if self._comparable and difference > tolerance:
            raise WeightSyncError(
                f"After the sync of policy version {version} the log-probabilities of server and trainer differ by "
                f"{difference:.3g} nats in the mean, more than {tolerance:g}: the server does not hold the "
                "trainer's weights. Check that it serves the model that is trained, and its log for errors while "
                "loading weights."
            )
        if self._last is not None:
            last_trainer, last_server, was_exact = self._last
            visible = VISIBLE_FLOAT32 if self.exact and was_exact else VISIBLE_OTHER
            moved = distance(trainer, last_trainer)
            if moved > visible and list(server) == last_server:
                raise WeightSyncError(
                    f"After the sync of policy version {version} the trainer's log-probabilities have moved by "
                    f"{moved:.3g} nats and the server's not at all: the server has kept its old weights. Check its "
                    "log for errors while loading weights."
                )
        self._last = (list(trainer), list(server), self.exact)
        return difference


def trainer_logprobs(model: nn.Module, token_ids: list[int], device: torch.device) -> list[float]:
    """Log-probabilities of `token_ids[1:]` under `model`, at temperature 1 and without dropout, shape `(n - 1,)`.

    Under sharded training this is a collective call.
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
    values: list[float] = logprobs.tolist()
    return values


def server_logprobs(
    session: requests.Session, base_url: str, model: str, token_ids: list[int], *, timeout: float | None = None
) -> list[float]:
    """Log-probabilities of `token_ids[1:]` under the server's weights, at temperature 1, shape `(n - 1,)`.

    Asked for as prompt log-probabilities, which vLLM always computes anew instead of from its prefix cache.
    """
    body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    response = session.post(f"{base_url}/v1/completions", json=body, timeout=timeout)
    if response.status_code != 200:
        raise (ServerError if response.status_code in LATER else WeightSyncError)(
            f"The vLLM server answered {response.status_code} to the check of its weights: {response.text[:300]}. "
            "Look at its log, and check that it is a version of vLLM that TRL supports."
        )
    positions = response.json()["choices"][0]["prompt_logprobs"]
    return [entry[str(token_id)]["logprob"] for token_id, entry in zip(token_ids[1:], positions[1:], strict=True)]


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference of log-probabilities, in nats."""
    return math.fsum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)
