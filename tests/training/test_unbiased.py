"""Bias of the gradient with and without the off-policy correction, by enumerating every completion.

Three tokens, completions of at most four, policies that are tables, three policy versions. A resumed completion was
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
from collections.abc import Callable, Iterator

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

from tests.support.serverless import ServerlessTrainer
from trl_april.config import APRILGRPOConfig
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, Group


pytestmark = pytest.mark.usefixtures("one_thread")

EOS, A, B = VOCABULARY = range(3)
LENGTH = 4
PROMPT = [A]
NEWEST = 2  # trained; tokens are of versions 0, 1 and 2
NUM_GENERATIONS = 4
UNREACHED = 1e6  # a bound on weights that no weight reaches


def reward_of(completion: tuple[int, ...]) -> float:
    """Depends on order and length, so that the continuation of a token matters to its gradient."""
    alternations = sum(one != other for one, other in itertools.pairwise(completion))
    return 2.0 * (completion[:2] == (A, B)) + alternations + completion.count(B) - 0.5 * len(completion)


def reward(completion_ids, **kwargs) -> list[float]:
    return [reward_of(tuple(ids)) for ids in completion_ids]


def index_of(history: tuple[int, ...]) -> int:
    """Row of the table for a completion so far."""
    index = 0
    for token_id in history:
        index = index * len(VOCABULARY) + token_id + 1
    return index


ROWS = index_of((B,) * LENGTH) + 1


class Histories(nn.Module):
    """A one-hot vector for the completion so far, at every position."""

    def forward(self, input_ids, attention_mask=None, **kwargs) -> BaseModelOutput:
        rows = torch.zeros_like(input_ids)
        for position in range(len(PROMPT), input_ids.shape[1]):
            rows[:, position] = rows[:, position - 1] * len(VOCABULARY) + input_ids[:, position] + 1
        return BaseModelOutput(last_hidden_state=nn.functional.one_hot(rows, ROWS).float())


class TableConfig(PretrainedConfig):
    model_type = "table-of-histories"


class Table(PreTrainedModel):
    """A language model whose logits are the row of a table for the completion so far: no weight is shared."""

    config_class = TableConfig
    base_model_prefix = "histories"

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        self.histories = Histories()
        self.table = nn.Linear(ROWS, len(VOCABULARY), bias=False)
        self.generation_config = GenerationConfig(eos_token_id=EOS)

    def get_output_embeddings(self) -> nn.Linear:
        return self.table

    def forward(self, input_ids, attention_mask=None, **kwargs):
        raise NotImplementedError("Training uses the head that TRL fuses in.")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<eos>": EOS, "a": A, "b": B}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", padding_side="left")


@pytest.fixture(scope="module")
def tables() -> list[torch.Tensor]:
    """Logits of the three versions, shape `(ROWS, 3)`, float64: a random walk of steps far larger than in training."""
    generator = torch.Generator().manual_seed(4)
    steps = [0.5 * torch.randn(ROWS, len(VOCABULARY), generator=generator) for _ in range(NEWEST + 1)]
    return [table.double() for table in itertools.accumulate(steps)]


def with_drift(tables: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """The same newest version, with older ones whose difference to it is scaled."""
    return [tables[NEWEST] + scale * (table - tables[NEWEST]) for table in tables]


def logprobs_of(table: torch.Tensor, completion: tuple[int, ...]) -> torch.Tensor:
    """Log-probability of every token."""
    rows = [index_of(completion[:position]) for position in range(len(completion))]
    return table.log_softmax(-1)[rows, list(completion)]


def all_completions() -> Iterator[tuple[int, ...]]:
    for length in range(1, LENGTH + 1):
        for body in itertools.product((A, B), repeat=length - 1):
            yield (*body, EOS)
    yield from itertools.product((A, B), repeat=LENGTH)


def true_gradient(table: torch.Tensor) -> torch.Tensor:
    """Gradient of the expected reward, by differentiating the sum over all completions."""
    table = table.clone().requires_grad_()
    expected = sum(
        logprobs_of(table, completion).sum().exp() * reward_of(completion) for completion in all_completions()
    )
    (gradient,) = torch.autograd.grad(expected, table)
    return gradient


# A cut gives the version that the next token of a completion is sampled under.
Cut = Callable[[tuple[int, ...]], int]


def after_tokens(first: int, second: int) -> Cut:
    """Cut after these numbers of tokens."""
    return lambda history: (len(history) >= first) + (len(history) >= second)


def after_each_b(history: tuple[int, ...]) -> int:
    """Cut after a certain token, so that resumed completions differ from the others."""
    return min(history.count(B), NEWEST)


AFTER_TOKENS = [after_tokens(*pair) for pair in itertools.combinations_with_replacement(range(1, LENGTH), 2)]
CUTS = {"after tokens": AFTER_TOKENS, "after each b": [after_each_b]}


def behaviour_logprobs(tables: list[torch.Tensor], completion: tuple[int, ...], cut: Cut) -> torch.Tensor:
    """Log-probability of every token under the version that samples it."""
    versions = [cut(completion[:position]) for position in range(len(completion))]
    return torch.stack([logprobs_of(table, completion) for table in tables])[versions, range(len(completion))]


class TableTrainer(ServerlessTrainer):
    version = NEWEST


def make_trainer(trained: torch.Tensor, output_dir, batch_size: int, **options) -> TableTrainer:
    args = APRILGRPOConfig(
        output_dir=str(output_dir), loss_type="dr_grpo", scale_rewards="none", per_device_train_batch_size=batch_size,
        num_generations=NUM_GENERATIONS, max_completion_length=LENGTH, gradient_checkpointing=False, bf16=False,
        use_cpu=True, report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": "a"}] * (batch_size // NUM_GENERATIONS))
    trainer = TableTrainer(
        model=Table(TableConfig()),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
    with torch.no_grad():
        trainer.model.table.weight.copy_(trained.T)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop otherwise
    return trainer


def enumerated(tables: list[torch.Tensor], cuts: list[Cut]) -> tuple[list[Group], torch.Tensor]:
    """Every completion under every cut, as it leaves the pool, with its probability; all cuts are equally likely.

    Completions are sampled, parked at the cuts and resumed under the next version. The last group is padded with
    completions of probability 0.
    """
    cases = [(completion, cut) for cut in cuts for completion in all_completions()]
    probabilities = [behaviour_logprobs(tables, *case).sum().exp() / len(cuts) for case in cases]
    padding = -len(cases) % NUM_GENERATIONS
    cases += cases[:padding]
    count = len(cases) // NUM_GENERATIONS
    pool = Pool(count, over_provisioning=1.0, max_staleness=None)
    sizes = {"num_generations": NUM_GENERATIONS, "max_completion_length": LENGTH}
    for version in range(NEWEST + 1):
        pool.begin_round(version)
        for group_id in range(pool.schedule.room):
            pool.admit(group_id, {"prompt": "a"}, PROMPT, **sizes)
        for _, sample in pool.ready():
            completion, cut = cases[sample.group_id * NUM_GENERATIONS + sample.index]
            start = end = len(sample)
            while end < len(completion) and cut(completion[:end]) == version:
                end += 1
            pool.start(sample)
            logprobs = logprobs_of(tables[version], completion)[start:end]
            pool.record(sample, completion[start:end], logprobs.tolist())
            if end < len(completion):
                pool.park(sample)
            else:
                pool.finish(sample, FinishReason.STOP if completion[-1] == EOS else FinishReason.LENGTH)
    return pool.take(), torch.tensor([*probabilities, *[0.0] * padding])


SEQUENCE = {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": UNREACHED}
TOKEN = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": UNREACHED}
UNCORRECTED = {"vllm_importance_sampling_correction": False}


def bias(tables: list[torch.Tensor], output_dir, cuts: list[Cut], **options) -> float:
    """Distance of the exact expectation of TRL's estimator from the true gradient, relative to its norm."""
    groups, probabilities = enumerated(tables, cuts)
    samples = [sample for group in groups for sample in group.samples]
    trainer = make_trainer(tables[NEWEST], output_dir, len(samples), **options)
    trainer.groups = groups
    inputs = trainer._generate_and_score_completions([])
    rewards = torch.tensor([reward_of(tuple(sample.token_ids)) for sample in samples], dtype=torch.float64)
    # The loss is linear in the advantages, and the baseline is the expectation of a group's mean reward.
    inputs["advantages"] = (probabilities * (rewards - probabilities @ rewards)).float()
    trainer._step, trainer._buffered_inputs = 0, [inputs]
    trainer._compute_loss(trainer.model, inputs).backward()
    expected = -len(samples) * LENGTH * trainer.model.table.weight.grad.T.double()
    truth = true_gradient(tables[NEWEST])
    return ((expected - truth).norm() / truth.norm()).item()


def test_estimator_is_the_true_gradient_on_policy(tables, tmp_path):
    """Without stale tokens there is nothing to correct; this checks the test's own bookkeeping."""
    for options in (SEQUENCE, TOKEN, UNCORRECTED):
        assert bias(tables, tmp_path, [after_tokens(0, 0)], **options) < 1e-6


@pytest.mark.parametrize("cuts", CUTS)
def test_product_of_the_ratios_is_unbiased(tables, tmp_path, cuts):
    for mode in ("sequence_truncate", "sequence_mask"):
        assert bias(tables, tmp_path, CUTS[cuts], **{**SEQUENCE, "vllm_importance_sampling_mode": mode}) < 1e-6, mode
    assert bias(tables, tmp_path, CUTS[cuts], **TOKEN) > 0.02
    assert bias(tables, tmp_path, CUTS[cuts], **UNCORRECTED) > 0.2


@pytest.mark.parametrize("options", [TOKEN, UNCORRECTED], ids=["per token", "uncorrected"])
def test_half_the_drift_is_half_the_bias(tables, tmp_path, options):
    """A correction to first order would leave a quarter."""
    larger, smaller = (
        bias(with_drift(tables, scale), tmp_path, AFTER_TOKENS, **options) for scale in (1 / 16, 1 / 32)
    )
    assert smaller / larger == pytest.approx(0.5, abs=0.05)
