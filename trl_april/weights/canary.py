"""The canary: log-probabilities that server and trainer must agree on after every weight sync.

Two checks find old weights on a server: both sides must agree as closely as their data types allow, and the server's
values must move when the trainer's do. Around the first sync, longer sequences are compared too, and values before the
sync distinguish a different computation from different weights. All these values come from prefills; now and then,
values of decoded tokens are compared with prefill values.
"""

from __future__ import annotations

import inspect
import logging
import math
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..engine.sampling import sampling_options
from ..errors import WeightSyncError
from .client import ServerControl
from .names import base_model


logger = logging.getLogger(__name__)

NUM_TOKENS = 33
DECODED = 8  # tokens
# Tolerated mean absolute difference, in nats and as a share of the values: rounding grows with the logits. In float32,
# both sides agree to 1e-6 on a CPU, and GPUs may use TF32. bfloat16 changed the values of small models by up to 1.2 %.
TOLERANCE_FLOAT32 = (5e-3, 3e-3)
TOLERANCE_OTHER = (0.5, 5e-2)
# In float32 on a CPU, ten times the rounding: beyond it, the two sides compute differently.
TOLERANCE_CPU = (2e-5, 5e-6)
ATTENTIONS_IN_32_BITS = ("sdpa", "eager", "flex_attention")  # all others are 16-bit kernels
LONGEST = 4096  # tokens; changes of a model's computation at longer inputs are not checked
# A change of the trainer's values that rounding on the server cannot hide.
VISIBLE_FLOAT32 = 1e-5
VISIBLE_OTHER = 2e-2


class Canary:
    """Compares server and trainer on a fixed sequence of token ids below `vocab_size`.

    `exact` says whether both sides compute in float32, and `on_cpu` whether on CPUs. If they are not `comparable`, as
    with a quantized server, the server's values only have to change with the trainer's. `explain` returns the likely
    causes of a difference after a number of tokens, and the remedy.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        exact: bool = False,
        comparable: bool = True,
        on_cpu: bool = False,
        explain: Callable[[int], str] = lambda tokens: "Either side may be quantized.",
    ) -> None:
        self.token_ids = random_tokens(vocab_size, NUM_TOKENS)
        self.exact = exact
        self._comparable = comparable
        self._on_cpu = on_cpu
        self._explain = explain
        self._has_warned = False
        # Values of both sides when the server's values last changed, so that steps too small to see add up.
        self._last: tuple[list[float], list[float], bool] | None = None

    def compare(self, trainer: Sequence[float], server: Sequence[float], version: int) -> float:
        """Compare the log-probabilities of `token_ids[1:]` after a sync, and return their distance."""
        difference = distance(trainer, server)
        after = f"After the sync of policy version {version}"
        if not math.isfinite(difference):
            both = ("trainer", trainer), ("server", server)
            sides = [side for side, values in both if not all(map(math.isfinite, values))]
            raise WeightSyncError(
                f"{after}, log-probabilities of the {' and the '.join(sides)} are NaN or infinite: the weights have "
                "diverged or arrived incomplete. Check the loss before the sync and the server's log."
            )
        self._check_moved(trainer, server, version)
        limit = tolerance(trainer, exact=self.exact)
        if self._comparable and difference > limit:
            raise WeightSyncError(
                f"{after}, the log-probabilities of server and trainer differ by {difference:.3g} nats on average, "
                f"more than {limit:.3g}: the server does not hold the trainer's weights. Check that it serves the "
                "trained model, and see its log for errors while loading weights."
            )
        self._warn_if_apart(trainer, difference, NUM_TOKENS)
        if self._last is None or list(server) != self._last[1]:
            self._last = (list(trainer), list(server), self.exact)
        return difference

    def compare_around(
        self,
        lengths: Sequence[int],
        trainer: Sequence[Sequence[float]],
        before: Sequence[Sequence[float]] | None,
        after: Sequence[Sequence[float]],
        version: int,
    ) -> float:
        """[`compare`] the first of several sequences of these lengths after a sync, and check the others.

        `before` are the server's values before the first sync, if it had the trainer's checkpoint: that difference is
        not caused by the weights, and must not grow in the sync.
        """
        differences = [distance(*pair) for pair in zip(trainer, after, strict=True)]
        for place, old in enumerate(before or ()):
            known, limit = distance(trainer[place], old), self._rounding(trainer[place])
            if differences[place] > known + limit:
                raise WeightSyncError(
                    f"After {lengths[place]} tokens, the log-probabilities of server and trainer differed by "
                    f"{known:.3g} nats on average before the first sync, when the server had the weights of the "
                    f"trainer's own checkpoint, and differ by {differences[place]:.3g} after it: some weights have "
                    "not arrived, or were changed on the way. See the server's log for errors while loading weights."
                )
            if place == 0 and distance(old, after[0]) <= limit and differences[0] > tolerance(old, exact=self.exact):
                self._comparable = False
        mismatch = self.compare(trainer[0], after[0], version)
        for values, difference, length in list(zip(trainer, differences, lengths, strict=True))[1:]:
            self._warn_if_apart(values, difference, length)
        return mismatch

    def compare_decoded(
        self, decoded: Sequence[float], prefilled: Sequence[float], version: int, *, exact: bool
    ) -> None:
        """Compare log-probabilities of tokens as a server decoded them, and as it computes them in a prompt."""
        difference, limit = distance(decoded, prefilled), tolerance(prefilled, exact=exact)
        if not difference > limit:  # NaN is reported where it concerns rollouts
            return
        message = (
            f"After the sync of policy version {version}, tokens that the server decodes have log-probabilities that "
            f"differ by {difference:.3g} nats on average, more than {limit:.3g}, from the log-probabilities of the "
            "same tokens in a prompt. Its graphs for decoding may hold older weights: try --enforce-eager, and on AMD "
            "VLLM_ROCM_USE_AITER_FP8BMM=0 in the server's environment."
        )
        if self._comparable:
            raise WeightSyncError(message)
        logger.warning("%s Or decoding takes a different path for quantized weights.", message)

    def _rounding(self, values: Sequence[float]) -> float:
        return tolerance(values, exact=self.exact, on_cpu=self._on_cpu)

    def _warn_if_apart(self, trainer: Sequence[float], difference: float, length: int) -> None:
        """Warn once if the sides compute different values."""
        limit = self._rounding(trainer)
        if not difference <= limit and not self._has_warned:  # it may be NaN
            self._has_warned = True
            apart = f"differ by {difference:.3g} nats on average, more than {limit:.3g}"
            logger.warning(
                f"After {length} tokens, the log-probabilities of server and trainer "
                f"{'are NaN' if math.isnan(difference) else apart}: they compute otherwise. {self._explain(length)} "
                "The importance-sampling correction covers the difference, but training may be noisier. The metric "
                f"april/sync_mismatch follows it for {NUM_TOKENS} tokens."
            )

    def _check_moved(self, trainer: Sequence[float], server: Sequence[float], version: int) -> None:
        """Raise if the server's values stayed while the trainer's moved by more than the rounding on both sides."""
        if self._last is None:
            return
        last_trainer, last_server, was_exact = self._last
        moved, moved_server = distance(trainer, last_trainer), distance(server, last_server)
        visible = VISIBLE_FLOAT32 if self.exact and was_exact else VISIBLE_OTHER
        if self._comparable:
            # Values of a busy GPU differ slightly between two requests.
            visible = max(visible, distance(last_trainer, last_server) * (4 if moved_server else 1))
        elif moved_server:
            return
        if moved > visible and moved_server < moved / 4:
            raise WeightSyncError(
                f"After the sync of policy version {version}, the trainer's log-probabilities have moved by "
                f"{moved:.3g} nats and the server's by {moved_server:.3g}: the server has kept its old weights. See "
                "its log for errors while loading weights."
            )


def random_tokens(vocab_size: int, number: int) -> list[int]:
    """Fixed token ids below `vocab_size`; a shorter sequence is the beginning of a longer sequence."""
    generator = random.Random(0)
    return [generator.randrange(vocab_size) for _ in range(number)]


def tolerance(values: Sequence[float], *, exact: bool, on_cpu: bool = False) -> float:
    """Largest distance from `values` at which both sides have equal weights; `on_cpu`, equal computations."""
    least, share = (TOLERANCE_CPU if on_cpu else TOLERANCE_FLOAT32) if exact else TOLERANCE_OTHER
    return max(least, share * math.fsum(map(abs, values)) / len(values))


def trainer_logprobs(
    model: nn.Module, token_ids: list[int], device: torch.device, *, as_next: bool = False
) -> list[float]:
    """Log-probabilities of `token_ids[1:]` under `model`, at temperature 1 and without dropout, shape `(n - 1,)`.

    With `as_next`, as in [`next_logprobs`]; otherwise each token follows the tokens before it. Computed in the data
    type of the weights, unless the model [`needs_autocast`]. A collective call if the model is sharded.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _without_autocast(model):
            ids = torch.tensor([token_ids], device=device)
            last = as_next and "logits_to_keep" in inspect.signature(base_model(model).forward).parameters
            options = {"logits_to_keep": 1} if last else {}  # all logits of a long sequence take gigabytes
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options).logits[0]
            wanted = ids[0, 1:NUM_TOKENS] if as_next else ids[0, 1:]
            logits = logits[-1:].float().expand(len(wanted), -1) if as_next else logits[:-1].float()
            logprobs = logits.log_softmax(-1).gather(-1, wanted[:, None].to(logits.device)).squeeze(-1)
    finally:
        model.train(was_training)
    return logprobs.tolist()


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    """The data types of the weights."""
    return {param.dtype for param in model.parameters()}


def needs_autocast(model: nn.Module) -> bool:
    """Whether mixed precision must stay on: FlashAttention needs 16 bits, and weights may have several data types."""
    attention = str(base_model(model).config.get_text_config()._attn_implementation)
    return len(dtypes_of(model)) > 1 or not attention.endswith(ATTENTIONS_IN_32_BITS)


@contextmanager
def _without_autocast(model: nn.Module) -> Iterator[None]:
    """Undo accelerate's mixed precision for a forward pass: its rounding is not in the weights that are sent."""
    if "_original_forward" not in vars(model) or needs_autocast(model):
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
    choice = _choice(server, body, headers)
    if choice is None:
        return [math.nan] * (len(token_ids) - 1)
    of_tokens = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
    return [entry[str(token_id)]["logprob"] for token_id, entry in of_tokens]


def next_logprobs(
    server: ServerControl, model: str, token_ids: list[int], headers: dict[str, str] | None = None
) -> list[float]:
    """Log-probabilities of the first `token_ids[1:]`, each as the next token after all `token_ids`, on the server.

    Shape `(min(n, NUM_TOKENS) - 1,)`. For servers with adapters: vLLM applies an adapter to prompt log-probabilities
    as if no other request ran, and on a CPU crashes if other requests run. Also for long sequences: prompt
    log-probabilities would hold the logits of thousands of positions besides a full KV cache.
    """
    wanted = token_ids[1:NUM_TOKENS]
    body = {"model": model, "prompt": token_ids, "max_tokens": 1, "logprobs": 0}
    body |= sampling_options().body  # a server's own defaults could truncate
    body |= {"logprob_token_ids": sorted(set(wanted)), "return_tokens_as_token_ids": True}
    body |= {"cache_salt": secrets.token_hex(6)}  # its cache may hold blocks of older weights
    choice = _choice(server, body, headers)
    if choice is None:
        return [math.nan] * len(wanted)
    (logprobs,) = choice["logprobs"]["top_logprobs"]
    return [logprobs[f"token_id:{token_id}"] for token_id in wanted]


def _choice(server: ServerControl, body: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any] | None:
    """The server's answer to a request for a completion; `None` if it computes NaN, which JSON does not have."""
    try:
        (choice,) = server.request("POST", "v1/completions", body, headers=headers)["choices"]
    except WeightSyncError as error:
        if "Out of range float" not in str(error):
            raise
        return None
    return dict(choice)


def decoded_logprobs(
    server: ServerControl, model: str, token_ids: list[int], headers: dict[str, str] | None = None
) -> tuple[list[int], list[float]]:
    """Tokens that the server samples after `token_ids`, and their log-probabilities, at temperature 1.

    Shapes `(DECODED,)`. Without truncation, raw and processed log-probabilities are the same, unlike in greedy
    sampling, and comparable with log-probabilities of a prompt.
    """
    body = {"model": model, "prompt": token_ids, "max_tokens": DECODED, "logprobs": 0, "return_token_ids": True}
    body |= sampling_options({"ignore_eos": True}).body
    body |= {"cache_salt": secrets.token_hex(6)}
    choice = _choice(server, body, headers)
    if choice is None:
        return [0] * DECODED, [math.nan] * DECODED
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference of log-probabilities, in nats."""
    return math.fsum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


def depends_on_width(config: PreTrainedConfig) -> bool:
    """Whether a token's log-probability depends on the width of its batch, padding included.

    Dynamic NTK and LongRoPE choose rotary frequencies by the longest position of an input.
    """
    return any(kind == "longrope" or "dynamic" in kind for kind, _ in turning_points(config))


def turning_points(config: PreTrainedConfig) -> list[tuple[str, int]]:
    """Where a model's computation changes: a type of RoPE or "window", and the number of tokens before the change."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    points = []
    for parameters in (rope, *(layer for layer in rope.values() if isinstance(layer, dict))):
        kind = str(parameters.get("rope_type", parameters.get("type")))
        length = parameters.get("original_max_position_embeddings")
        if length or kind == "longrope" or "dynamic" in kind:
            points.append((kind, int(length or getattr(text, "max_position_embeddings", 0))))
    if window := getattr(text, "sliding_window", None):
        points.append(("window", int(window)))
    return points


def lengths_to_compare(config: PreTrainedConfig, context: int) -> list[int]:
    """Lengths in tokens of the sequences that are compared around the first sync, on servers with this context.

    Each turning point is exceeded by the length of the canary.
    """
    points = {length for _, length in turning_points(config) if 0 < length <= LONGEST}
    return [NUM_TOKENS, *(length + NUM_TOKENS for length in sorted(points) if length + NUM_TOKENS < context)]


def differs_from_start(config: PreTrainedConfig, context: int) -> bool:
    """Whether vLLM and transformers choose different rotary frequencies even for short sequences.

    With LongRoPE, transformers chooses by the length of the input, vLLM by its context.
    """
    return any(kind == "longrope" and context > length for kind, length in turning_points(config))


def why_otherwise(config: PreTrainedConfig, context: int, tokens: int) -> str:
    """Likely causes of a difference after a number of tokens, for a server with this context, and the remedy."""
    for kind, length in turning_points(config):
        if kind == "longrope" and tokens <= length < context:
            return (
                f"With LongRoPE, transformers takes the short factors up to {length} tokens, and vLLM always "
                f"the long factors, since its context of {context} tokens is longer. If samples fit, set "
                f"vllm_max_model_length={length} (--max-model-len of a server elsewhere); otherwise only sequences of "
                f"more than {length} tokens are exact."
            )
    for kind, length in turning_points(config):
        if tokens == length + NUM_TOKENS:
            part = f"sliding window (sliding_window={length})" if kind == "window" else f"rope_type={kind!r}"
            return (
                f"Up to {length} tokens they may agree: they understand the {part} of {config.model_type!r} in "
                f"different ways. Keep prompts and completions within {length} tokens together, or take versions of "
                "both that agree."
            )
    if getattr(config.get_text_config(), "hidden_act", None) == "xielu":
        return "vLLM keeps the parameters of the activation xIELU in bfloat16, with any --dtype."
    attention = str(config._attn_implementation).removeprefix("april_blocks_")
    return (
        f"Either side may be quantized, or leave out a part of {config.model_type!r} that depends on the trainer's "
        f"attn_implementation={attention!r}, such as a cap of attention logits: try "
        "model_init_kwargs={'attn_implementation': 'eager'}, or take versions of both that agree."
    )
