"""The canary: log-probabilities that server and trainer must agree on after every weight sync.

With old weights on the server, every recorded log-probability would be wrong. Two checks find them: both sides agree
as closely as their data types allow, and the server's values move when the trainer's do.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..engine.sampling import sampling_options
from ..errors import WeightSyncError
from .client import ServerControl


logger = logging.getLogger(__name__)

NUM_TOKENS = 33
# Tolerated mean absolute difference, in nats, and as a share of the values, since rounding grows with the logits. In
# float32, both sides agree to 1e-6 on a CPU, and GPUs may use TF32, with 11 bits. bfloat16, with 8 bits, changed the
# values of small models with weights of any size by up to 1.2 %. Other weights differ by far more.
TOLERANCE_FLOAT32 = (5e-3, 3e-3)
TOLERANCE_OTHER = (0.5, 5e-2)
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
        self._has_warned = False
        # Values of both sides when the server's last changed, so that steps too small to see add up.
        self._last: tuple[list[float], list[float], bool] | None = None

    def compare(self, trainer: Sequence[float], server: Sequence[float], version: int) -> float:
        """Compare the log-probabilities of `token_ids[1:]` after a sync, and return their distance."""
        difference = distance(trainer, server)
        if not math.isfinite(difference):
            raise WeightSyncError(
                f"After the sync of policy version {version}, a log-probability of the server or the trainer is not "
                "finite: the weights have diverged or arrived incomplete. Check the loss before the sync and the "
                "server's log."
            )
        self._check_moved(trainer, server, version)
        limit = tolerance(trainer, exact=self.exact)
        if self._comparable and difference > limit:
            raise WeightSyncError(
                f"After the sync of policy version {version}, the log-probabilities of server and trainer differ by "
                f"{difference:.3g} nats on average, more than {limit:.3g}: the server does not hold the trainer's "
                "weights. Check that it serves the trained model, and see its log for errors while loading weights."
            )
        if difference > limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The log-probabilities of server and trainer differ by %.3g nats on average, more than %.3g: one of "
                "them is quantized, or computes otherwise. The importance-sampling correction covers it, but training "
                "may be noisier. The metric april/sync_mismatch follows it.",
                difference,
                limit,
            )
        if self._last is None or list(server) != self._last[1]:
            self._last = (list(trainer), list(server), self.exact)
        return difference

    def _check_moved(self, trainer: Sequence[float], server: Sequence[float], version: int) -> None:
        """Raise if the server's values stayed while the trainer's moved.

        With the new weights, the server moves as far as the trainer, up to the rounding on both sides. Its size is
        known from their last distance.
        """
        if self._last is None:
            return
        last_trainer, last_server, was_exact = self._last
        moved, moved_server = distance(trainer, last_trainer), distance(server, last_server)
        visible = VISIBLE_FLOAT32 if self.exact and was_exact else VISIBLE_OTHER
        if self._comparable:
            # Values of a busy GPU differ slightly from one request to the next.
            visible = max(visible, distance(last_trainer, last_server) * (4 if moved_server else 1))
        elif moved_server:
            return
        if moved > visible and moved_server < moved / 4:
            raise WeightSyncError(
                f"After the sync of policy version {version}, the trainer's log-probabilities have moved by "
                f"{moved:.3g} nats and the server's by {moved_server:.3g}: the server has kept its old weights. See "
                "its log for errors while loading weights."
            )


def tolerance(values: Sequence[float], *, exact: bool) -> float:
    """Distance from the log-probabilities `values` of the trainer up to which the server has the same weights."""
    least, share = TOLERANCE_FLOAT32 if exact else TOLERANCE_OTHER
    return max(least, share * math.fsum(map(abs, values)) / len(values))


def trainer_logprobs(
    model: nn.Module, token_ids: list[int], device: torch.device, *, as_next: bool = False
) -> list[float]:
    """Log-probabilities of `token_ids[1:]` under `model`, at temperature 1 and without dropout, shape `(n - 1,)`.

    `as_next` as in [`next_logprobs`], otherwise each after the tokens before it.

    Computed in the data type of the weights. A collective call if the model is sharded.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _without_autocast(model):
            ids = torch.tensor([token_ids], device=device)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float()
            logits = logits[-1:].expand(len(token_ids) - 1, -1) if as_next else logits[:-1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None].to(logits.device)).squeeze(-1)
    finally:
        model.train(was_training)
    return logprobs.tolist()


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    """The data types of the weights."""
    return {param.dtype for param in model.parameters()}


@contextmanager
def _without_autocast(model: nn.Module) -> Iterator[None]:
    """Undo accelerate's mixed precision for a forward pass: its rounding is not in the weights that are sent.

    A model with weights of several data types may not compute without it.
    """
    if "_original_forward" not in vars(model) or len(dtypes_of(model)) > 1:
        yield
        return
    wrapped, model.forward = model.forward, model._original_forward
    try:
        yield
    finally:
        model.forward = wrapped


def server_logprobs(
    server: ServerControl, model: str, token_ids: list[int], headers: dict[str, str] | None = None
) -> list[float]:
    """Log-probabilities of `token_ids[1:]` under the server's weights, at temperature 1, shape `(n - 1,)`.

    Requested as prompt log-probabilities, which vLLM never takes from its prefix cache.
    """
    body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = server.request("POST", "v1/completions", body, headers=headers)
    positions = answer["choices"][0]["prompt_logprobs"]
    return [entry[str(token_id)]["logprob"] for token_id, entry in zip(token_ids[1:], positions[1:], strict=True)]


def next_logprobs(
    server: ServerControl, model: str, token_ids: list[int], headers: dict[str, str] | None = None
) -> list[float]:
    """Log-probabilities of `token_ids[1:]`, each as the next token after all `token_ids`, on the server.

    For an adapter: vLLM applies it to prompt log-probabilities as if no other request ran, and on a CPU it crashes if
    one does.
    """
    body = {"model": model, "prompt": token_ids, "max_tokens": 1, "logprobs": 0}
    body |= sampling_options().body  # a server's own defaults could truncate
    body |= {"logprob_token_ids": sorted(set(token_ids)), "return_tokens_as_token_ids": True}
    answer = server.request("POST", "v1/completions", body, headers=headers)
    (found,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return [found[f"token_id:{token_id}"] for token_id in token_ids[1:]]


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
