"""What the correction makes exact, and what it does not, where every completion can be counted.

Three tokens, completions of at most four, policies that are tables, three policy versions. A resumed completion was
begun under one version and continued under the next, so the distribution that it comes from is the product over its
tokens of pi_v(token | what precedes it), `v` the version of the token. Its recorded log-probabilities are just those.

- The gradient estimator that is unbiased is the one with the *product* of the tokens' ratios as its weight, TRL's
  `sequence_truncate` and `sequence_mask` with bounds that nothing reaches. That is an identity, whatever cut the
  completion, as long as the cut did not look ahead.
- `token_truncate`, the default of `APRILGRPOConfig`, and `token_mask` weigh every token by its own ratio alone. That
  corrects which token was chosen, but neither how the completion got there nor what came after. What remains is a bias
  of the same order in the drift of the policy as without any correction: half the drift, half the bias. On the problem
  here it is less than half of the uncorrected one; there are others, one is below, where it is larger. What speaks for
  a weight per token is its variance, which does not grow exponentially with the length as the product's does; and
  truncating or masking the product, which then is needed, is a bias of its own.

Everything from the pool to the gradient is what training runs: `rollout_output`, TRL's scoring, weights and loss
(`dr_grpo`, whose normaliser is a constant: that of `grpo` or `dapo` would make it the gradient of something else).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

from tests.serverless import ServerlessTrainer
from trl_april.config import APRILGRPOConfig
from trl_april.pool import Pool
from trl_april.types import FinishReason, Group


pytestmark = pytest.mark.usefixtures("one_thread")

EOS, A, B = VOCABULARY = range(3)
LENGTH = 4
PROMPT = [A]
NEWEST = 2  # trained; tokens are of versions 0, 1 and 2
NUM_GENERATIONS = 4
UNREACHED = 1e6  # a bound on weights that no weight reaches


def reward_of(completion: tuple[int, ...]) -> float:
    """Depends on order and length, so that what comes after a token matters to its gradient."""
    alternations = sum(one != other for one, other in itertools.pairwise(completion))
    return 2.0 * (completion[:2] == (A, B)) + alternations + completion.count(B) - 0.5 * len(completion)


def reward(completion_ids, **kwargs) -> list[float]:
    return [reward_of(tuple(ids)) for ids in completion_ids]


# The policy


def index_of(history: tuple[int, ...]) -> int:
    """Row of the table for what has been generated so far."""
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
    return random_walk(4)


def random_walk(seed: int) -> list[torch.Tensor]:
    """Logits of the three versions, shape `(ROWS, 3)`, float64: steps far larger than those of training."""
    generator = torch.Generator().manual_seed(seed)
    steps = [0.5 * torch.randn(ROWS, len(VOCABULARY), generator=generator) for _ in range(NEWEST + 1)]
    return [table.double() for table in itertools.accumulate(steps)]


def with_drift(tables: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """The same newest version, and older ones that differ from it by `scale` as much."""
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


# Cuts. Each says under which version the next token of a completion is sampled, given what there is of it.

Cut = Callable[[tuple[int, ...]], int]


@dataclass(frozen=True)
class AfterTokens:
    """Cut after so many tokens, and again after so many: as by the clock."""

    first: int
    second: int

    def __call__(self, history: tuple[int, ...]) -> int:
        return (len(history) >= self.first) + (len(history) >= self.second)


def after_each_b(history: tuple[int, ...]) -> int:
    """Cut after a certain token: completions that are resumed are then unlike those that are not."""
    return min(history.count(B), NEWEST)


BY_THE_CLOCK: list[Cut] = [
    AfterTokens(*pair) for pair in itertools.combinations_with_replacement(range(LENGTH + 1), 2)
]
CUTS = {"by the clock": BY_THE_CLOCK, "after each b": [after_each_b]}


def behaviour_logprobs(tables: list[torch.Tensor], completion: tuple[int, ...], cut: Cut) -> torch.Tensor:
    """Log-probability of every token under the version that it is sampled from."""
    versions = [cut(completion[:position]) for position in range(len(completion))]
    return torch.stack([logprobs_of(table, completion) for table in tables])[versions, range(len(completion))]


# From the pool to the gradient


class TableTrainer(ServerlessTrainer):
    version = NEWEST


def make_trainer(trained: torch.Tensor, output_dir, batch_size: int, **options) -> TableTrainer:
    args = APRILGRPOConfig(
        output_dir=str(output_dir),
        loss_type="dr_grpo",
        scale_rewards="none",
        per_device_train_batch_size=batch_size,
        num_generations=NUM_GENERATIONS,
        max_completion_length=LENGTH,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
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
    trainer.current_gradient_accumulation_steps = 1  # as the training loop sets it
    return trainer


def gradient_of(trainer: TableTrainer, groups: list[Group], advantages: torch.Tensor | None = None) -> torch.Tensor:
    """Ascent direction that TRL computes for a batch, summed over its samples: shape `(ROWS, 3)`, float64.

    Args:
        advantages (`torch.Tensor` of shape `(batch,)`, *optional*):
            Instead of TRL's own, which the samples of a group have from each other.
    """
    trainer.groups = groups
    inputs = trainer._generate_and_score_completions([])
    if advantages is not None:
        inputs["advantages"] = advantages.float()
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, inputs).backward()
    normaliser = len(inputs["completion_ids"]) * LENGTH
    return -normaliser * trainer.model.table.weight.grad.T.double()


def pooled(count: int, draw: Callable[[int, int], Iterator[tuple[int, list[int], list[float], bool]]]) -> list[Group]:
    """Groups that went through the pool: sampled, parked at the cuts, resumed under the next version, finished.

    Args:
        count (`int`):
            Number of groups.
        draw (`Callable`):
            Given the position of a sample in the batch and the version, returns its next tokens, their
            log-probabilities, and whether it is complete.
    """
    pool = Pool(count, over_provisioning=1.0, max_staleness=None)
    for version in range(NEWEST + 1):
        pool.begin_round(version)
        for group_id in range(pool.ledger.groups_admitted, count):
            pool.admit(
                group_id, {"prompt": "a"}, PROMPT, num_generations=NUM_GENERATIONS, max_completion_length=LENGTH
            )  # fmt: skip
        for group, sample in pool.ready():
            pool.start(sample)
            token_ids, logprobs, complete = draw(group.group_id * NUM_GENERATIONS + sample.index, version)
            pool.record(sample, token_ids, logprobs)
            if complete:
                pool.finish(sample, FinishReason.STOP if token_ids[-1] == EOS else FinishReason.LENGTH)
            else:
                pool.park(sample)
    pool.check()
    return pool.take()


# By counting


def enumerated(tables: list[torch.Tensor], cuts: list[Cut]) -> tuple[list[Group], torch.Tensor]:
    """Every completion under every cut, as it leaves the pool, and how probable each is; all cuts alike.

    The last group is filled up with completions of probability 0.
    """
    cases = [(completion, cut) for cut in cuts for completion in all_completions()]
    probabilities = [behaviour_logprobs(tables, *case).sum().exp() / len(cuts) for case in cases]
    padding = -len(cases) % NUM_GENERATIONS
    cases += cases[:padding]
    done = [0] * len(cases)

    def draw(sample: int, version: int):
        completion, cut = cases[sample]
        start = end = done[sample]
        while end < len(completion) and cut(completion[:end]) == version:
            end += 1
        done[sample] = end
        logprobs = logprobs_of(tables[version], completion)[start:end]
        return list(completion[start:end]), logprobs.tolist(), end == len(completion)

    groups = pooled(len(cases) // NUM_GENERATIONS, draw)
    return groups, torch.tensor([*probabilities, *[0.0] * padding])


def expected_gradient(
    tables: list[torch.Tensor], trained: torch.Tensor, output_dir, cuts: list[Cut], **options
) -> torch.Tensor:
    """The expectation of TRL's estimator, exactly: its loss is linear in the advantages."""
    groups, probabilities = enumerated(tables, cuts)
    samples = [sample for group in groups for sample in group.samples]
    trainer = make_trainer(trained, output_dir, len(samples), **options)
    rewards = torch.tensor([reward_of(tuple(sample.token_ids)) for sample in samples], dtype=torch.float64)
    # The baseline is what a group's mean is on average: that of the completions as they were sampled.
    return gradient_of(trainer, groups, probabilities * (rewards - probabilities @ rewards))


SEQUENCE = {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": UNREACHED}
TOKEN = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": UNREACHED}
UNCORRECTED = {"vllm_importance_sampling_correction": False}


def bias(tables, output_dir, cuts: list[Cut], **options) -> float:
    """Distance of the expected gradient from the true one, in lengths of the latter."""
    truth = true_gradient(tables[NEWEST])
    found = expected_gradient(tables, tables[NEWEST], output_dir, cuts, **options)
    return ((found - truth).norm() / truth.norm()).item()


class TestByCounting:
    def test_the_completions_are_all_there_are(self, tables):
        completions = list(all_completions())
        assert len(completions) == len(set(completions)) == 31
        for cut in (*BY_THE_CLOCK, after_each_b):
            total = sum(behaviour_logprobs(tables, completion, cut).sum().exp() for completion in completions)
            assert total.item() == pytest.approx(1, abs=1e-12)

    @pytest.mark.parametrize("cuts", CUTS)
    def test_the_pool_records_the_behaviour_distribution(self, tables, cuts):
        """The product of the recorded probabilities is the probability of the completion, which adds up to one."""
        groups, probabilities = enumerated(tables, CUTS[cuts])
        samples = [sample for group in groups for sample in group.samples]
        recorded = torch.tensor([math.exp(sum(sample.logprobs)) for sample in samples], dtype=torch.float64)
        recorded /= len(CUTS[cuts])
        real = probabilities > 0
        assert torch.allclose(recorded[real], probabilities[real], rtol=1e-5)
        assert recorded[real].sum().item() == pytest.approx(1, abs=1e-5)
        versions = [{segment.version for segment in sample.segments} for sample in samples]
        # Parked and resumed never, once, and twice.
        assert all(some in versions for some in ({0}, {0, 1}, {0, 1, 2}))

    def test_on_policy_the_estimator_is_the_true_gradient(self, tables, tmp_path):
        """Without stale tokens there is nothing to correct: this is about the test's own bookkeeping."""
        all_newest = [AfterTokens(0, 0)]
        for options in (SEQUENCE, TOKEN, UNCORRECTED):
            assert bias(tables, tmp_path, all_newest, **options) < 1e-6

    @pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
    @pytest.mark.parametrize("cuts", CUTS)
    def test_the_product_of_the_ratios_is_unbiased(self, tables, tmp_path, cuts, mode):
        options = {**SEQUENCE, "vllm_importance_sampling_mode": mode}
        assert bias(tables, tmp_path, CUTS[cuts], **options) < 1e-6

    @pytest.mark.parametrize("cuts", CUTS)
    def test_without_the_correction_the_gradient_is_wrong(self, tables, tmp_path, cuts):
        assert bias(tables, tmp_path, CUTS[cuts], **UNCORRECTED) > 0.2

    @pytest.mark.parametrize("cuts", CUTS)
    def test_ratios_per_token_are_biased_here_half_as_much_as_no_correction(self, tables, tmp_path, cuts):
        per_token = bias(tables, tmp_path, CUTS[cuts], **TOKEN)
        assert 0.02 < per_token < bias(tables, tmp_path, CUTS[cuts], **UNCORRECTED) / 2

    def test_ratios_per_token_can_be_further_off_than_no_correction(self, tmp_path):
        """No bound holds in general: what is left may be of the sign that the other errors cancelled."""
        tables = random_walk(5)
        assert bias(tables, tmp_path, BY_THE_CLOCK, **TOKEN) > 1.05 * bias(
            tables, tmp_path, BY_THE_CLOCK, **UNCORRECTED
        )
        assert bias(tables, tmp_path, BY_THE_CLOCK, **SEQUENCE) < 1e-6

    @pytest.mark.parametrize("options", [TOKEN, UNCORRECTED], ids=["per token", "uncorrected"])
    def test_half_the_drift_is_half_the_bias(self, tables, tmp_path, options):
        """A correction to the first order would leave a quarter."""
        larger, smaller = (
            bias(with_drift(tables, scale), tmp_path, BY_THE_CLOCK, **options) for scale in (1 / 16, 1 / 32)
        )
        assert smaller / larger == pytest.approx(0.5, abs=0.05)

    def test_ratios_per_token_are_exact_where_only_the_last_token_is_stale(self, tables, tmp_path):
        """Then the completion got there on-policy, and nothing comes after: the token's own ratio is all there is.

        Versions only grow, so for a prefix on-policy the weights that are trained are those of the first two versions.
        The logits of earlier positions still see rewards of the wrong last token, and are wrong.
        """
        trained = tables[0]
        last_token_is_stale = [AfterTokens(LENGTH - 1, LENGTH - 1)]
        found = expected_gradient([trained, trained, tables[NEWEST]], trained, tmp_path, last_token_is_stale, **TOKEN)
        truth = true_gradient(trained)
        last = slice(index_of((A,) * (LENGTH - 1)), None)
        assert truth[last].norm() > 0.01 * truth.norm()
        assert (found - truth)[last].norm() < 1e-6 * truth.norm()
        assert (found - truth).norm() > 0.01 * truth.norm()

    def test_truncation_is_a_bias_that_a_higher_bound_takes_away(self, tables, tmp_path):
        biases = [
            bias(tables, tmp_path, BY_THE_CLOCK, **{**SEQUENCE, "vllm_importance_sampling_clip_max": clip_max})
            for clip_max in (1.0, 2.0, 4.0, UNREACHED)
        ]
        assert biases == sorted(biases, reverse=True)
        assert biases[0] > 0.02 and biases[-1] < 1e-6


# By chance

BATCHES, BATCH = 40, 1000


def sampled(tables: list[torch.Tensor], count: int, generator: torch.Generator) -> list[Group]:
    """`count` samples, really drawn under one version after the other, cut after random numbers of tokens."""
    probabilities = [table.softmax(-1).tolist() for table in tables]
    logprobs = [table.log_softmax(-1).tolist() for table in tables]
    cuts = torch.randint(LENGTH + 1, (count, 2), generator=generator).sort().values.tolist()
    uniform = torch.rand(count, LENGTH, generator=generator).tolist()
    histories: list[tuple[int, ...]] = [()] * count

    def draw(sample: int, version: int):
        until = cuts[sample][version] if version < NEWEST else LENGTH
        history, recorded = histories[sample], []
        start = len(history)
        while len(history) < until and EOS not in history:
            row = index_of(history)
            threshold = uniform[sample][len(history)]
            eos, a, _ = probabilities[version][row]
            token_id = EOS if threshold < eos else A if threshold < eos + a else B
            recorded.append(logprobs[version][row][token_id])
            history += (token_id,)
        histories[sample] = history
        return list(history[start:]), recorded, bool(history) and (EOS in history or len(history) == LENGTH)

    return pooled(count // NUM_GENERATIONS, draw)


@pytest.fixture(scope="module")
def batches(tables) -> list[list[Group]]:
    generator = torch.Generator().manual_seed(4)
    return [sampled(tables, BATCH, generator) for _ in range(BATCHES)]


@dataclass
class Estimate:
    """Mean gradient over the batches and its standard errors, of every logit that has any chance: shape `(15, 3)`."""

    mean: torch.Tensor
    errors: torch.Tensor
    truth: torch.Tensor

    @property
    def scores(self) -> torch.Tensor:
        return (self.mean - self.truth) / self.errors


def estimate(tables, output_dir, batches, **options) -> Estimate:
    """The advantages are TRL's, the reward less the group's mean. A sample is part of its own mean, so the expectation
    is (G - 1)/G of the gradient; stale siblings do not bias it, being independent of the sample.
    """
    trainer = make_trainer(tables[NEWEST], output_dir, BATCH, **options)
    gradients = torch.stack([gradient_of(trainer, groups) / BATCH for groups in batches])
    truth = true_gradient(tables[NEWEST]) * (NUM_GENERATIONS - 1) / NUM_GENERATIONS
    rows = sorted({index_of(c[:position]) for c in all_completions() for position in range(len(c))})
    assert truth.norm() == truth[rows].norm()
    errors = gradients.std(0) / len(batches) ** 0.5
    return Estimate(gradients.mean(0)[rows], errors[rows], truth[rows])


@pytest.fixture(scope="module")
def estimates(tables, batches, tmp_path_factory) -> dict[str, Estimate]:
    corrections = {"sequence": SEQUENCE, "uncorrected": UNCORRECTED, "default": {}}
    return {
        name: estimate(tables, tmp_path_factory.mktemp(name), batches, **options)
        for name, options in corrections.items()
    }


class TestByChance:
    """40,000 samples. 45 logits are compared, so 4 standard errors are passed by chance once in some hundred seeds."""

    def test_half_the_samples_were_resumed(self, batches):
        samples = [sample for groups in batches for group in groups for sample in group.samples]
        assert len(samples) == BATCHES * BATCH
        assert sum(len(sample.segments) > 1 for sample in samples) > len(samples) / 3

    def test_the_corrected_gradient_is_the_on_policy_gradient(self, estimates):
        found = estimates["sequence"]
        assert found.scores.numel() == 45
        assert found.scores.abs().max() < 4
        assert found.scores.square().mean() < 2
        # Not for want of precision.
        assert found.errors.norm() < 0.05 * found.truth.norm()

    def test_the_uncorrected_gradient_is_not(self, estimates):
        assert estimates["uncorrected"].scores.abs().max() > 8

    def test_the_default_correction_is_nearer_than_none(self, estimates):
        """`token_truncate` at its default bound of 3: biased, as counted above, and so it is seen here too."""
        default, uncorrected = (estimates[name] for name in ("default", "uncorrected"))
        assert default.scores.abs().max() > 4
        assert (default.mean - default.truth).norm() < (uncorrected.mean - uncorrected.truth).norm() / 2
