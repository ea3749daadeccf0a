"""Every loss on batches of mixed policy versions, against an implementation from the papers, and against stock TRL.

The trainer side is the real one from the finished groups on: the pool's groups, `rollout_output`, TRL's scoring with
its importance-sampling ratio, shuffling and splitting, `training_step`. The other side knows the tokens, the version
of each, and the weights of the versions. From these it computes even what the pool has recorded: float64, one sample
at a time, no padding and no masks.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import GRPOConfig, GRPOTrainer, TrlParser

from tests.serverless import ServerlessTrainer
from trl_april.batch import rollout_output
from trl_april.config import APRILGRPOConfig
from trl_april.gspo import GSPO_EPSILON, GSPO_EPSILON_HIGH
from trl_april.micro_batches import micro_batches_are_free
from trl_april.pool import Pool
from trl_april.types import FinishReason, Group


pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = ["grpo", "dapo", "gspo", "dr_grpo", "bnpo", "cispo"]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

VERSIONS = 4  # policy versions 0 to 3 sampled the tokens; the batch is scored under the last of them
NOW = VERSIONS  # the weights that are trained: one optimiser step after scoring, so ratios are not 1
TOLERANCE = 1e-5

NUM_GENERATIONS = 4
BATCH = 8
MAX_LENGTH = 14
EOS = 2
CAP, FLOOR = 1.5, 0.6  # of the importance-sampling weight

# Each bound is one that the weights below reach on both sides. None is TRL's default, which a mistake might restore.
EPSILONS = {"epsilon": 0.15, "epsilon_high": 0.25}
CLIPPING = dict.fromkeys(LOSSES, EPSILONS) | {"gspo": {}, "cispo": {"epsilon_high": 1.1}}


class MixedTrainer(ServerlessTrainer):
    version = VERSIONS - 1


def reward(completion_ids, **kwargs) -> list[float]:
    """Multiples of 1/4, so that float32 holds them exactly."""
    return [sum(ids) % 11 / 4 for ids in completion_ids]


# The weights of the policy versions, and the groups that they sampled


class Policies:
    """Float64 models with the weights of each policy version: a random walk from the tiny model."""

    def __init__(self, model_dir: str) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self._models = []
        generator = torch.Generator().manual_seed(1)
        weights = dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).named_parameters())
        for _ in range(VERSIONS + 1):
            # The step moves a log-probability by about 0.25: enough for clipping and truncation to occur.
            weights = {
                name: (value + 0.03 * torch.randn(value.shape, generator=generator)).detach()
                for name, value in weights.items()
            }
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
            load(model, weights)
            self.weights.append(weights)
            self._models.append(model.eval())

    def model(self, version: int):
        return self._models[version]

    def logprobs(self, version: int, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
        """Log-probability of every completion token, shape `(length,)`, float64, with a graph."""
        logits = self._models[version](torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
        return logits.log_softmax(-1)[range(len(token_ids)), token_ids]


def load(model, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


@pytest.fixture(scope="module")
def policies(tiny_model_dir) -> Policies:
    return Policies(tiny_model_dir)


def make_groups(policies: Policies, count: int, *, versions: Sequence[int] = range(VERSIONS)) -> list[Group]:
    """Groups as they leave the pool: cut at random in every version but the last, resumed in the next.

    The tokens are random, their log-probabilities those that the version has which is said to have sampled them.
    """
    rng = random.Random(5)
    pool = Pool(count, over_provisioning=1.0, max_staleness=None)
    plans = {}
    pool.begin_round(versions[0])
    for group_id in range(count):
        prompt_ids = [1, *rng.choices(range(4, 60), k=rng.randint(2, 7))]
        group = pool.admit(
            group_id,
            {"prompt": f"{group_id}"},
            prompt_ids,
            num_generations=NUM_GENERATIONS,
            max_completion_length=MAX_LENGTH,
        )
        for sample in group.samples:
            length = rng.randint(3, MAX_LENGTH)
            token_ids = rng.choices(range(4, 60), k=length)
            if length < MAX_LENGTH:
                token_ids[-1] = EOS
            with torch.no_grad():
                logprobs = [policies.logprobs(version, prompt_ids, token_ids).tolist() for version in versions]
            cuts = [*sorted(rng.choices(range(length + 1), k=len(versions) - 1)), length]
            plans[sample] = (token_ids, logprobs, cuts)
    for index, version in enumerate(versions):
        pool.begin_round(version)
        for _, sample in pool.ready():
            token_ids, logprobs, cuts = plans[sample]
            pool.start(sample)
            here = slice(len(sample), cuts[index])
            pool.record(sample, token_ids[here], logprobs[index][here])
            if len(sample) == len(token_ids):
                pool.finish(sample, FinishReason.STOP if token_ids[-1] == EOS else FinishReason.LENGTH)
            else:
                pool.park(sample)
    return pool.take()


@pytest.fixture(scope="module")
def groups(policies) -> list[Group]:
    """8 groups; most samples mix versions."""
    groups = make_groups(policies, 8)
    samples = [sample for group in groups for sample in group.samples]
    assert sum(len(set(sample.versions)) > 1 for sample in samples) > len(samples) / 2
    assert {version for sample in samples for version in sample.versions} == set(range(VERSIONS))
    return groups


# The trainers


def options_for(loss_type: str, accumulation: int, output_dir, **options) -> dict:
    """A generation batch of two optimiser steps with `accumulation` micro-batches each."""
    return {
        "output_dir": str(output_dir),
        "loss_type": loss_type,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": 2 * accumulation,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": MAX_LENGTH,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }


def make_trainer(cls, args, model_dir):
    dataset = Dataset.from_list([{"prompt": f"{number}"} for number in range(8)])
    return cls(model=model_dir, reward_funcs=reward, args=args, train_dataset=dataset)


def make_april(loss_type: str, accumulation: int, model_dir, output_dir, **options) -> MixedTrainer:
    options = {
        "vllm_importance_sampling_clip_max": CAP,
        "vllm_importance_sampling_clip_min": FLOOR,
        **CLIPPING[loss_type],
        **options,
    }
    args = APRILGRPOConfig(**options_for(loss_type, accumulation, output_dir, **options))
    return make_trainer(MixedTrainer, args, model_dir)


def optimisation_step(trainer, policies: Policies, *, step: int = 1, trained: int = NOW):
    """Score a generation batch under the newest version, load the weights `trained`, take its optimiser step `step`.

    Returns:
        The loss, the gradient of every parameter, and for every micro-batch the completions that it held.
    """
    accumulation = trainer.args.gradient_accumulation_steps
    load(trainer.model, policies.weights[VERSIONS - 1])
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = accumulation  # as the training loop sets it
    rows = [{"prompt": ""} for _ in range(trainer.args.generation_batch_size)]
    # TRL shuffles. The seed is one whose losses are not close to 0, as those of whole groups are: a relative error
    # would then be one of rounding.
    torch.manual_seed(0)
    trainer._step = 0
    trainer._prepare_inputs(rows)
    load(trainer.model, policies.weights[trained])
    trainer._step = step * accumulation
    trainer.model.zero_grad()
    loss, held = torch.zeros(()), []
    for _ in range(accumulation):
        inputs = trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]
        held.append(
            [
                tuple(ids[mask.bool()].tolist())
                for ids, mask in zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
            ]
        )
        loss = loss + trainer.training_step(trainer.model, rows, None)
    return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}, held


# The same from the papers


@dataclass
class Example:
    """A sample as the papers see it. `kept` are the positions that count; the others leave the loss."""

    prompt_ids: list[int]
    token_ids: list[int]
    versions: list[int]
    advantage: float
    kept: list[int]


@dataclass
class Reached:
    """What a test case has exercised, so that no case passes for want of it."""

    clipped_above: int = 0
    clipped_below: int = 0
    free: int = 0
    weights_changed: int = 0
    weights_kept: int = 0
    margins: list[float] = field(default_factory=list)


def examples_of(groups: Sequence[Group], kept) -> dict[tuple[int, ...], Example]:
    """By completion. The advantage is the reward less the group's mean, over its standard deviation (DeepSeekMath,
    arXiv 2402.03300, section 4.1.2), with TRL's 1e-4 in the denominator.
    """
    examples = {}
    for group in groups:
        rewards = reward([sample.token_ids.tolist() for sample in group.samples])
        for sample, value in zip(group.samples, rewards, strict=True):
            token_ids = sample.token_ids.tolist()
            examples[tuple(token_ids)] = Example(
                group.prompt_ids,
                token_ids,
                sample.versions,
                (value - fmean(rewards)) / (stdev(rewards) + 1e-4),
                [position for position in range(len(token_ids)) if kept(sample, position)],
            )
    assert len(examples) == sum(len(group.samples) for group in groups)  # the key tells them apart
    return examples


def correction(mode: str, old: torch.Tensor, sampled: torch.Tensor, reached: Reached) -> torch.Tensor:
    """Weight of every token for having been sampled with log-probability `sampled` instead of `old`.

    `*_truncate`: truncated importance sampling, min(ratio, C) (Ionides, "Truncated Importance Sampling", 2008; Yao et
    al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025), here bounded below as well.
    `*_mask`: the ratio where it lies within the bounds and 0 elsewhere (IcePop, in "Every Step Evolves", arXiv
    2510.18855). One ratio per token, or for `sequence_*` their product over the sequence.
    """
    log_weights = old - sampled
    weights = log_weights.sum().exp().expand_as(old) if mode.startswith("sequence") else log_weights.exp()
    outside = (weights < FLOOR) | (weights > CAP)
    reached.weights_changed += int(outside.sum())
    reached.weights_kept += int((~outside).sum())
    for bound in (FLOOR, CAP):
        reached.margins += (weights / bound - 1).abs().tolist()
    if mode.endswith("mask"):
        return torch.where(outside, torch.zeros_like(weights), weights)
    return weights.clip(FLOOR, CAP)


def clipped_surrogate(ratios: torch.Tensor, advantage: float, low: float, high: float, reached: Reached):
    """PPO's pessimistic bound (Schulman et al., arXiv 1707.06347, equation 7) with a bound for each side (DAPO).

    min(r A, clip(r) A) is r A, except that r is held down at 1 + high where A > 0, and up at 1 - low where A < 0.
    """
    above, below = (ratios > 1 + high) & (advantage > 0), (ratios < 1 - low) & (advantage < 0)
    reached.clipped_above += int(above.sum())
    reached.clipped_below += int(below.sum())
    reached.free += int((~above & ~below).sum())
    for bound in (1 + high, 1 - low):
        reached.margins += (ratios / bound - 1).abs().tolist()
    held = ratios.masked_fill(above, 1 + high).masked_fill(below, 1 - low)
    return held * advantage


def token_objectives(loss_type: str, new: torch.Tensor, old: torch.Tensor, advantage: float, reached: Reached):
    """What is to be maximised for every token, before the correction and before aggregation."""
    if loss_type == "gspo":
        # Group Sequence Policy Optimization (arXiv 2507.18071): equation 7 is the ratio, equation 5 the objective,
        # section 5.1 the clip range.
        ratio = (new - old).mean().exp().expand_as(new)
        return clipped_surrogate(ratio, advantage, GSPO_EPSILON, GSPO_EPSILON_HIGH, reached)
    if loss_type == "cispo":
        # MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, without a lower bound, and with the upper one as the
        # largest weight itself (ScaleRL, arXiv 2510.13786): min(r, cap), held constant, times A log pi.
        cap = CLIPPING["cispo"]["epsilon_high"]
        ratios = (new - old).exp().detach()
        reached.clipped_above += int((ratios > cap).sum())
        reached.free += int((ratios <= cap).sum())
        reached.margins += (ratios / cap - 1).abs().tolist()
        return ratios.clip(max=cap) * advantage * new
    return clipped_surrogate(
        (new - old).exp(), advantage, EPSILONS["epsilon"], EPSILONS["epsilon_high"], reached
    )  # fmt: skip


def paper_loss(
    loss_type: str,
    mode: str,
    policies: Policies,
    micro_batches: list[list[Example]],
    generation_batch: Sequence[Example],
    steps: int,
    reached: Reached,
) -> torch.Tensor:
    """Loss of one optimiser step.

    - `grpo` (DeepSeekMath, equation 3) and `gspo` (equation 5): mean over samples of the mean over their tokens.
    - `dapo` (arXiv 2503.14476, equation 8), and `cispo` with it: sum over tokens, divided by their number. TRL counts
      them in the generation batch, and divides by its `steps` optimiser steps.
    - `dr_grpo` (arXiv 2503.20783, section 3.1 and appendix A): sum over tokens, divided by a constant, the largest
      length.
    - `bnpo`: mean over the tokens of a micro-batch, then over micro-batches. The paper of that name (arXiv 2506.02864)
      is about normalising rewards; what TRL calls so is defined by its documentation of `loss_type`.
    """
    sums, lengths = [], []
    for batch in micro_batches:
        batch_sums, batch_lengths = [], []
        for example in batch:
            new = policies.logprobs(NOW, example.prompt_ids, example.token_ids)[example.kept]
            with torch.no_grad():
                by_version = [policies.logprobs(v, example.prompt_ids, example.token_ids) for v in range(VERSIONS)]
            old = by_version[VERSIONS - 1][example.kept]
            sampled = torch.stack(by_version)[example.versions, range(len(example.token_ids))][example.kept]
            if not example.kept:
                batch_sums.append(0 * new.sum())
                batch_lengths.append(0)
                continue
            objectives = token_objectives(loss_type, new, old, example.advantage, reached)
            batch_sums.append((objectives * correction(mode, old, sampled, reached)).sum())
            batch_lengths.append(len(example.kept))
        sums.append(batch_sums)
        lengths.append(batch_lengths)

    if loss_type in ("grpo", "gspo"):
        means = [
            total / max(length, 1)
            for batch_sums, batch_lengths in zip(sums, lengths, strict=True)
            for total, length in zip(batch_sums, batch_lengths, strict=True)
        ]
        return -sum(means) / len(means)
    if loss_type == "bnpo":
        means = [sum(batch_sums) / sum(batch_lengths) for batch_sums, batch_lengths in zip(sums, lengths, strict=True)]
        return -sum(means) / len(means)
    total = sum(sum(batch_sums) for batch_sums in sums)
    if loss_type == "dr_grpo":
        return -total / (sum(len(batch) for batch in micro_batches) * MAX_LENGTH)
    return -total / (sum(len(example.kept) for example in generation_batch) / steps)


def assert_as_in_the_papers(trainer, policies, groups, *, kept=lambda sample, position: True) -> None:
    loss_type, mode = trainer.args.loss_type, trainer.args.vllm_importance_sampling_mode
    trainer.groups = groups
    loss, gradients, held = optimisation_step(trainer, policies)

    examples = examples_of(groups, kept)
    reached = Reached()
    model = policies.model(NOW)
    model.zero_grad()
    expected = paper_loss(
        loss_type,
        mode,
        policies,
        [[examples[completion] for completion in batch] for batch in held],
        list(examples.values()),
        steps=2,
        reached=reached,
    )
    expected.backward()

    # The case is worth something: both kinds of bounds were at work, and left something alone.
    assert reached.clipped_above and reached.free and reached.weights_changed and reached.weights_kept, reached
    assert reached.clipped_below or loss_type == "cispo", reached
    # And it is decided the same way in float32: nothing sits on a bound.
    assert min(reached.margins) > 1e-4

    assert abs(expected.item()) > 1e-3
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE, abs=0)
    wrong = {
        name: error
        for name, parameter in model.named_parameters()
        if not (error := ((gradients[name] - parameter.grad).norm() / parameter.grad.norm()).item()) <= TOLERANCE
    }
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not wrong


class TestAgainstThePapers:
    @pytest.mark.parametrize("accumulation", [1, 2])
    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_loss_and_gradients_of_an_optimisation_step(
        self, loss_type, accumulation, policies, groups, tiny_model_dir, tmp_path
    ):
        trainer = make_april(loss_type, accumulation, tiny_model_dir, tmp_path)
        assert_as_in_the_papers(trainer, policies, groups[: 4 * accumulation])

    @pytest.mark.parametrize("mode", MODES[1:])  # the first is the default, above
    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_every_mode_of_the_correction(self, loss_type, mode, policies, groups, tiny_model_dir, tmp_path):
        trainer = make_april(loss_type, 2, tiny_model_dir, tmp_path, vllm_importance_sampling_mode=mode)
        assert_as_in_the_papers(trainer, policies, groups)

    @pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_masked_tokens_leave_the_loss(self, loss_type, mode, policies, groups, tiny_model_dir, tmp_path):
        """TRL's `env_mask`, as `staleness_policy="mask"` sets it. A sample of which nothing is left counts as 0."""
        bound = 1
        trainer = make_april(
            loss_type,
            2,
            tiny_model_dir,
            tmp_path,
            vllm_importance_sampling_mode=mode,
            staleness_policy="mask",
            max_staleness=bound,
        )
        oldest = VERSIONS - 1 - bound
        assert any(max(sample.versions) < oldest for group in groups for sample in group.samples)
        assert_as_in_the_papers(
            trainer, policies, groups, kept=lambda sample, position: sample.versions[position] >= oldest
        )

    def test_the_losses_differ_from_each_other_by_more_than_the_tolerance(
        self, policies, groups, tiny_model_dir, tmp_path
    ):
        """Otherwise one could stand for another above."""
        losses = []
        for loss_type in LOSSES:
            trainer = make_april(loss_type, 2, tiny_model_dir, tmp_path)
            trainer.groups = groups
            losses.append(optimisation_step(trainer, policies)[0].item())
        for index, one in enumerate(losses):
            assert all(abs(one - other) > 100 * TOLERANCE * abs(one) for other in losses[index + 1 :])


# Stock TRL

STOCK_OPTIONS = {
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": GSPO_EPSILON,
        "epsilon_high": GSPO_EPSILON_HIGH,
    }
}


def own_logprobs(trainer, groups: Sequence[Group], policies: Policies) -> list[list[float]]:
    """Log-probabilities of the completions as the trainer's own model has them in scoring, bit for bit."""
    load(trainer.model, policies.weights[VERSIONS - 1])
    trainer.model.train()
    trainer.rollout_func = lambda prompts, trainer: {**rollout_output(groups), "logprobs": None}
    rows = [{"prompt": ""} for group in groups for _ in group.samples]
    inputs = trainer._generate_and_score_completions(rows)
    return [
        logprobs[mask.bool()].tolist()
        for logprobs, mask in zip(inputs["old_per_token_logps"], inputs["completion_mask"], strict=True)
    ]


class TestAgainstStock:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_bit_for_bit_when_nothing_is_stale(self, loss_type, mode, policies, tiny_model_dir, tmp_path):
        """Stock GRPO without vLLM, given the same completions; every token here is of the newest version.

        Both optimiser steps of the generation batch: in the first the ratio is 1, in the second tokens are clipped.
        """
        options = options_for(loss_type, 1, tmp_path)
        stock_args = GRPOConfig(**{**options, **CLIPPING[loss_type], **STOCK_OPTIONS.get(loss_type, {})})
        stock = make_trainer(GRPOTrainer, stock_args, tiny_model_dir)
        groups = make_groups(policies, 4, versions=[VERSIONS - 1])
        samples = [sample for group in groups for sample in group.samples]
        for sample, logprobs in zip(samples, own_logprobs(stock, groups, policies), strict=True):
            sample.logprobs[:] = type(sample.logprobs)("f", logprobs)

        april = make_april(loss_type, 1, tiny_model_dir, tmp_path, vllm_importance_sampling_mode=mode)
        april.groups = groups
        for step, trained in [(0, VERSIONS - 1), (1, NOW)]:
            stock_loss, stock_gradients, stock_held = optimisation_step(stock, policies, step=step, trained=trained)
            loss, gradients, held = optimisation_step(april, policies, step=step, trained=trained)
            assert held == stock_held
            assert torch.equal(loss, stock_loss)
            assert gradients.keys() == stock_gradients.keys()
            for name, gradient in gradients.items():
                assert torch.equal(gradient, stock_gradients[name]), name
            assert any(gradient.any() for gradient in gradients.values())
        # The comparison is one of corrected with uncorrected losses.
        assert "importance_sampling_ratio" in april._buffered_inputs[0]
        assert "importance_sampling_ratio" not in stock._buffered_inputs[0]

    def test_one_stale_token_shows(self, policies, tiny_model_dir, tmp_path):
        """The comparison above can fail."""
        groups = make_groups(policies, 4, versions=[VERSIONS - 1])
        april = make_april("grpo", 1, tiny_model_dir, tmp_path)
        april.groups = groups
        before = optimisation_step(april, policies)[0]
        for group in groups:
            group.samples[0].logprobs[0] -= 0.1
        assert not torch.equal(optimisation_step(april, policies)[0], before)


# Which micro-batch of its optimiser step a sample is in

# Where TRL takes means or quantiles over the tokens of a micro-batch, it matters.
IT_MATTERS = [
    {"loss_type": "bnpo"},
    {"loss_type": "grpo", "entropy_coef": 0.1},
    {"loss_type": "grpo", "entropy_coef": 0.1, "entropy_target": 1e9, "use_adaptive_entropy": True},
    {"loss_type": "grpo", "top_entropy_quantile": 0.5},
]


class TestMicroBatches:
    def steps(self, trainer, policies, groups, monkeypatch):
        """An optimiser step with the micro-batches as they are, and with those of TRL."""
        trainer.groups = groups
        ours = optimisation_step(trainer, policies)
        with monkeypatch.context() as patched:
            patched.setattr("trl_april.trainer.micro_batches_are_free", lambda trainer: False)
            return ours, optimisation_step(trainer, policies)

    @pytest.mark.parametrize("loss_type", [loss for loss in LOSSES if loss != "bnpo"])
    def test_like_lengths_are_in_one_and_the_gradients_are_the_same(
        self, loss_type, policies, groups, tiny_model_dir, tmp_path, monkeypatch
    ):
        trainer = make_april(loss_type, 2, tiny_model_dir, tmp_path, pad_to_multiple_of=1)
        ours, of_trl = self.steps(trainer, policies, groups, monkeypatch)
        (loss, gradients, held), (expected_loss, expected, held_by_trl) = ours, of_trl
        lengths = [len(completion) for micro_batch in held for completion in micro_batch]
        assert lengths == sorted(lengths, reverse=True)
        assert held != held_by_trl and sorted(sum(held, [])) == sorted(sum(held_by_trl, []))
        assert loss.item() == pytest.approx(expected_loss.item(), rel=TOLERANCE, abs=0)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= TOLERANCE * expected[name].norm(), name

    @pytest.mark.parametrize("options", IT_MATTERS, ids=lambda options: list(options)[-1])
    def test_they_are_as_trl_made_them_where_that_changes_the_gradients(
        self, options, policies, groups, tiny_model_dir, tmp_path, monkeypatch
    ):
        options = {**options}
        trainer = make_april(options.pop("loss_type"), 2, tiny_model_dir, tmp_path, pad_to_multiple_of=1, **options)
        (_, gradients, held), (_, expected, held_by_trl) = self.steps(trainer, policies, groups, monkeypatch)
        assert held == held_by_trl
        # And it does: with this rule broken, they would differ.
        monkeypatch.setattr("trl_april.trainer.micro_batches_are_free", lambda trainer: True)
        _, sorted_gradients, _ = optimisation_step(trainer, policies)
        assert any(
            (gradient - expected[name]).norm() > TOLERANCE * expected[name].norm()
            for name, gradient in sorted_gradients.items()
        )

    def test_the_auxiliary_loss_of_experts_is_one_of_those(self, tiny_model_dir, tmp_path):
        trainer = make_april("grpo", 2, tiny_model_dir, tmp_path)
        assert micro_batches_are_free(trainer)
        trainer.aux_loss_enabled = True
        assert not micro_batches_are_free(trainer)

    @pytest.mark.parametrize("name", ["_compute_loss", "compute_loss"])
    def test_a_subclass_with_a_loss_of_its_own_gets_what_trl_made(self, name, tiny_model_dir, tmp_path):
        trainer = make_april("grpo", 2, tiny_model_dir, tmp_path)
        trainer.__class__ = type("Own", (MixedTrainer,), {name: lambda self, *args, **kwargs: None})
        assert not micro_batches_are_free(trainer)


# loss_type="gspo"

CPU = {"use_cpu": True, "bf16": False}
RESOLVED = {"loss_type": "grpo", "importance_sampling_level": "sequence"}


def resolved(args, model_dir, cls=MixedTrainer) -> dict:
    """What the trainer made of the config."""
    trainer = make_trainer(cls, args, model_dir)
    names = ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high")
    return {name: getattr(trainer, name) for name in names}


def stored(args: GRPOConfig) -> dict:
    return {name: args.to_dict()[name] for name in ("loss_type", "epsilon", "epsilon_high", "beta")}


class TestGspo:
    @pytest.mark.parametrize(
        ("given", "low", "high"),
        [
            ({}, GSPO_EPSILON, GSPO_EPSILON_HIGH),
            ({"epsilon": 1e-3}, 1e-3, 1e-3),  # TRL: the upper bound follows the lower
            ({"epsilon": 1e-3, "epsilon_high": 2e-3}, 1e-3, 2e-3),
            ({"epsilon_high": 2e-3}, GSPO_EPSILON, 2e-3),
        ],
    )
    @pytest.mark.parametrize("use_vllm", [True, False])
    def test_is_resolved_for_trl_and_left_in_the_config(self, given, low, high, use_vllm, tiny_model_dir, tmp_path):
        """Also where stock GRPO runs."""
        options = options_for("gspo", 1, tmp_path, **given, use_vllm=use_vllm)
        args = APRILGRPOConfig(**options)
        before = args.to_dict()
        assert resolved(args, tiny_model_dir) == {**RESOLVED, "epsilon_low": low, "epsilon_high": high}
        assert args.to_dict() == before
        assert before["loss_type"] == "gspo"

    def test_has_the_papers_clip_range(self):
        """Section 5.1 of arXiv 2507.18071."""
        assert (GSPO_EPSILON, GSPO_EPSILON_HIGH) == (3e-4, 4e-4)

    def test_other_losses_are_left_alone(self, tiny_model_dir, tmp_path):
        args = APRILGRPOConfig(**options_for("dapo", 1, tmp_path))
        assert resolved(args, tiny_model_dir) == {
            "loss_type": "dapo",
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
        }

    def test_a_config_is_restored_when_the_constructor_fails(self, tiny_model_dir, tmp_path):
        args = APRILGRPOConfig(**options_for("gspo", 1, tmp_path))
        before = args.to_dict()
        dataset = Dataset.from_list([{"prompt": f"{number}"} for number in range(8)])
        with pytest.raises(OSError):
            MixedTrainer(model=str(tmp_path / "nothing"), reward_funcs=reward, args=args, train_dataset=dataset)
        assert args.to_dict() == before

    @pytest.mark.parametrize("given", [{}, {"epsilon": 1e-3, "epsilon_high": 2e-3}])
    def test_survives_saving_and_reloading(self, given, tiny_model_dir, tmp_path):
        """As `to_dict`, as JSON, and as the `training_args.bin` of a checkpoint, after a trainer has used it."""
        args = APRILGRPOConfig(**options_for("gspo", 1, tmp_path, **given))
        expected = resolved(args, tiny_model_dir)
        torch.save(args, tmp_path / "training_args.bin")
        reloaded = [torch.load(tmp_path / "training_args.bin", weights_only=False)]
        for values in (args.to_dict(), json.loads(args.to_json_string())):
            del values["generation_batch_size"]  # TRL fills it in, and takes either this or steps_per_generation
            (parsed,) = HfArgumentParser(APRILGRPOConfig).parse_dict(values, allow_extra_keys=True)
            reloaded.append(parsed)
        for again in reloaded:
            assert stored(again) == stored(args)
            assert again.loss_type == "gspo"
            assert resolved(again, tiny_model_dir) == expected

    @pytest.mark.parametrize("given", [{}, {"epsilon": 1e-3, "epsilon_high": 2e-3}])
    def test_yaml_and_command_line(self, given, tiny_model_dir, tmp_path):
        options = options_for("gspo", 1, tmp_path, **given)
        expected = resolved(APRILGRPOConfig(**options), tiny_model_dir)
        yaml = tmp_path / "config.yaml"
        yaml.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
        flags = [
            text
            for name, value in options.items()
            if name != "report_to"
            for text in (f"--{name}", str(value))
        ]  # fmt: skip
        for arguments in (["--config", str(yaml)], [*flags, "--report_to", "none"]):
            (args,) = TrlParser(APRILGRPOConfig).parse_args_and_config(arguments)
            assert args.loss_type == "gspo"
            assert resolved(args, tiny_model_dir) == expected

    def test_the_command_line_wins_over_yaml(self, tmp_path):
        yaml = tmp_path / "config.yaml"
        yaml.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nloss_type: dapo\n")
        (args,) = TrlParser(APRILGRPOConfig).parse_args_and_config(["--config", str(yaml), "--loss_type", "gspo"])
        assert args.loss_type == "gspo"

    def test_a_stock_config_may_name_it_too(self, tiny_model_dir, tmp_path):
        args = GRPOConfig(**options_for("gspo", 1, tmp_path), use_vllm=True, vllm_mode="server")
        expected = {**RESOLVED, "epsilon_low": GSPO_EPSILON, "epsilon_high": GSPO_EPSILON_HIGH}
        assert resolved(args, tiny_model_dir) == expected
        assert math.isclose(args.epsilon, 0.2)
