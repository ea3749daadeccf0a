"""Bias of the gradient with and without the off-policy correction, by enumerating every completion.

Three tokens, completions of at most four, a small transformer, three policy versions. A resumed completion was
started under one version and continued under the next, so it is distributed as the product of pi_v(token | prefix)
over its tokens, `v` being the version of the token. Its recorded log-probabilities are exactly these.

- Weights that are the *product* of the tokens' ratios (TRL's `sequence_truncate` and `sequence_mask`, with bounds that
  nothing reaches) are unbiased, wherever the completion was cut, as long as the cut did not look ahead.
- `token_truncate`, the default of `APRILGRPOConfig`, weighs every token by its own ratio. It corrects the choice of
  the token, but neither its prefix nor its continuation. The remaining bias is of first order in the policy's drift,
  as without correction: half the drift, half the bias. Its variance does not grow exponentially with the length.

Everything from the pool to the gradient is what training runs: `rollout_output`, TRL's scoring, weights and loss
(`dr_grpo`, whose normaliser is a constant).
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from datasets import Dataset
from torch.func import functional_call
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.serverless import ServerlessTrainer
from tests.support.tiny import build_tokenizer
from trl_april.config import APRILGRPOConfig
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, Group


pytestmark = pytest.mark.usefixtures("one_thread")

A, B, EOS = range(3)
LENGTH = 4
PROMPT = [A]
NEWEST = 2  # trained; tokens are of versions 0, 1 and 2
NUM_GENERATIONS = 4
UNREACHED = 1e6  # a bound on weights that no weight reaches
COMPLETIONS = [
    *((*body, EOS) for length in range(LENGTH) for body in itertools.product((A, B), repeat=length)),
    *itertools.product((A, B), repeat=LENGTH),
]
Completion = tuple[int, ...]
Weights = dict[str, torch.Tensor]


def reward_of(completion: Completion) -> float:
    """Depends on order and length, so that the continuation of a token matters to its gradient."""
    alternations = sum(one != other for one, other in itertools.pairwise(completion))
    return 2.0 * (completion[:2] == (A, B)) + alternations + completion.count(B) - 0.5 * len(completion)


def reward(completion_ids, **kwargs) -> list[float]:
    return [reward_of(tuple(ids)) for ids in completion_ids]


def build_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=3, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=16, pad_token_id=None, bos_token_id=None,
        eos_token_id=EOS, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


@pytest.fixture(scope="module")
def policies() -> list[Weights]:
    """Weights of the three versions: a random walk of steps far larger than in training."""
    torch.manual_seed(4)
    weights, versions = build_model().state_dict(), []
    for _ in range(NEWEST + 1):
        weights = {name: value + 0.2 * torch.randn_like(value) for name, value in weights.items()}
        versions.append(weights)
    return versions


def with_drift(policies: list[Weights], scale: float) -> list[Weights]:
    """The same newest version, with older ones whose difference to it is scaled."""
    newest = policies[NEWEST]
    return [{name: newest[name] + scale * (old[name] - newest[name]) for name in newest} for old in policies]


def logprobs_of(weights: Weights) -> dict[Completion, torch.Tensor]:
    """Log-probability of every token of each completion."""
    rows = torch.tensor([[*PROMPT, *completion, *[EOS] * (LENGTH - len(completion))] for completion in COMPLETIONS])
    logits = functional_call(build_model().eval(), weights, (rows,)).logits[:, len(PROMPT) - 1 : -1]
    found = logits.log_softmax(-1).gather(-1, rows[:, len(PROMPT) :, None])[..., 0]
    return {completion: row[: len(completion)] for completion, row in zip(COMPLETIONS, found, strict=True)}


def true_gradient(weights: Weights) -> torch.Tensor:
    """Gradient of the expected reward, by differentiating the sum over all completions."""
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    expected = sum(logps.sum().exp() * reward_of(completion) for completion, logps in logprobs_of(weights).items())
    return torch.cat([one.flatten() for one in torch.autograd.grad(expected, [*weights.values()])])


# A cut gives the version that the next token of a completion is sampled under.
Cut = Callable[[Completion], int]


def after_tokens(first: int, second: int) -> Cut:
    """Cut after these numbers of tokens."""
    return lambda history: (len(history) >= first) + (len(history) >= second)


def after_each_b(history: Completion) -> int:
    """Cut after a certain token, so that resumed completions differ from the others."""
    return min(history.count(B), NEWEST)


AFTER_TOKENS = [after_tokens(*pair) for pair in itertools.combinations_with_replacement(range(1, LENGTH), 2)]
CUTS = {"after tokens": AFTER_TOKENS, "after each b": [after_each_b]}


class MixedTrainer(ServerlessTrainer):
    version = NEWEST


def make_trainer(trained: Weights, output_dir, batch_size: int, **options) -> MixedTrainer:
    args = APRILGRPOConfig(
        output_dir=str(output_dir), loss_type="dr_grpo", scale_rewards="none", per_device_train_batch_size=batch_size,
        num_generations=NUM_GENERATIONS, max_completion_length=LENGTH, gradient_checkpointing=False, bf16=False,
        use_cpu=True, report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": "a"}] * (batch_size // NUM_GENERATIONS))
    trainer = MixedTrainer(build_model(), reward, args, prompts, processing_class=build_tokenizer())
    trainer.model.load_state_dict(trained)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop otherwise
    return trainer


def enumerated(policies: list[Weights], cuts: list[Cut]) -> tuple[list[Group], torch.Tensor]:
    """Every completion under every cut, as it leaves the pool, with its probability; all cuts are equally likely.

    Completions are sampled, parked at the cuts and resumed under the next version. The last group is padded with
    completions of probability 0.
    """
    logprobs = [logprobs_of(weights) for weights in policies]
    cases = [(completion, cut) for cut in cuts for completion in COMPLETIONS]
    probabilities = torch.ones(len(cases), dtype=torch.float64) / len(cuts)
    padding = -len(cases) % NUM_GENERATIONS
    cases += cases[:padding]
    pool = Pool(len(cases) // NUM_GENERATIONS, over_provisioning=1.0, max_staleness=None)
    sizes = {"num_generations": NUM_GENERATIONS, "max_completion_length": LENGTH}
    for version in range(NEWEST + 1):
        pool.begin_round(version)
        for group_id in range(pool.schedule.room):
            pool.admit(group_id, {"prompt": "a"}, PROMPT, **sizes)
        for _, sample in pool.ready():
            case = sample.group_id * NUM_GENERATIONS + sample.index
            completion, cut = cases[case]
            start = end = len(sample)
            while end < len(completion) and cut(completion[:end]) == version:
                end += 1
            here = logprobs[version][completion][start:end]
            if case < len(probabilities):
                probabilities[case] *= here.sum().exp()
            pool.start(sample)
            pool.record(sample, completion[start:end], here.tolist())
            if end < len(completion):
                pool.park(sample)
            else:
                pool.finish(sample, FinishReason.STOP if completion[-1] == EOS else FinishReason.LENGTH)
    return pool.take(), torch.cat([probabilities, probabilities.new_zeros(padding)])


SEQUENCE = {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": UNREACHED}
TOKEN = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": UNREACHED}
UNCORRECTED = {"vllm_importance_sampling_correction": False}


def bias(policies: list[Weights], output_dir, cuts: list[Cut], **options) -> float:
    """Distance of the exact expectation of TRL's estimator from the true gradient, relative to its norm."""
    with torch.no_grad():
        groups, probabilities = enumerated(policies, cuts)
    samples = [sample for group in groups for sample in group.samples]
    trainer = make_trainer(policies[NEWEST], output_dir, len(samples), **options)
    trainer.groups = groups
    inputs = trainer._generate_and_score_completions([])
    rewards = torch.tensor([reward_of(tuple(sample.token_ids)) for sample in samples], dtype=torch.float64)
    # The loss is linear in the advantages, and the baseline is the expectation of a group's mean reward.
    inputs["advantages"] = probabilities * (rewards - probabilities @ rewards)
    trainer._step, trainer._buffered_inputs = 0, [inputs]
    trainer._compute_loss(trainer.model, inputs).backward()
    expected = -len(samples) * LENGTH * torch.cat([param.grad.flatten() for param in trainer.model.parameters()])
    truth = true_gradient(policies[NEWEST])
    return ((expected - truth).norm() / truth.norm()).item()


def test_estimator_is_the_true_gradient_on_policy(policies, tmp_path):
    """Without stale tokens there is nothing to correct; this checks the test's own bookkeeping."""
    for options in (SEQUENCE, TOKEN, UNCORRECTED):
        assert bias(policies, tmp_path, [after_tokens(0, 0)], **options) < 1e-6


@pytest.mark.parametrize("cuts", CUTS)
def test_product_of_the_ratios_is_unbiased(policies, tmp_path, cuts):
    for mode in ("sequence_truncate", "sequence_mask"):
        assert bias(policies, tmp_path, CUTS[cuts], **{**SEQUENCE, "vllm_importance_sampling_mode": mode}) < 1e-6, mode
    assert bias(policies, tmp_path, CUTS[cuts], **TOKEN) > 0.02
    assert bias(policies, tmp_path, CUTS[cuts], **UNCORRECTED) > 0.2


@pytest.mark.parametrize("options", [TOKEN, UNCORRECTED], ids=["per token", "uncorrected"])
def test_half_the_drift_is_half_the_bias(policies, tmp_path, options):
    """A correction to first order would leave a quarter."""
    larger, smaller = (
        bias(with_drift(policies, scale), tmp_path, AFTER_TOKENS, **options) for scale in (1 / 64, 1 / 128)
    )
    assert smaller / larger == pytest.approx(0.5, abs=0.05)
