"""Every loss on batches of mixed policy versions, compared with the papers.

From the finished groups on, everything on the trainer's side is real: `rollout_output`, TRL's scoring with its
importance-sampling ratio, shuffling and splitting, and `training_step`. The reference knows the tokens, their versions
and the weights of each version, and computes in float64, one sample at a time, without padding and masks.
"""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tests.support.serverless import ServerlessTrainer
from trl_april.bridge.construction import GSPO_EPSILON, GSPO_EPSILON_HIGH
from trl_april.bridge.training_pass import SCORING_TO_LOSS, can_be_regrouped, can_correct, rows_in_blocks
from trl_april.config import APRILGRPOConfig
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, Group
from trl_april.trainer import APRILGRPOTrainer
from trl_april.training.forward_pass import base_attention


pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = ["grpo", "dapo", "gspo", "dr_grpo", "bnpo", "cispo"]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

VERSIONS = 4  # policy versions 0 to 3 sampled the tokens; the batch is scored under version 3
NOW = VERSIONS  # the trained weights, one optimizer step after scoring, so that ratios are not 1
TOLERANCE = 1e-5

NUM_GENERATIONS = 4
BATCH = 8
ACCUMULATION = 2  # micro-batches per optimizer step
MAX_LENGTH = 14
EOS = 2
CAP, FLOOR = 1.5, 0.6  # of the importance-sampling weight

# The weights below reach each bound on both sides. None is TRL's default, which a mistake might restore.
EPSILONS = {"epsilon": 0.15, "epsilon_high": 0.25}
CLIPPING = dict.fromkeys(LOSSES, EPSILONS) | {"gspo": {}, "cispo": {"epsilon_high": 1.1}}


def once_each(values: list, others: list) -> list:
    """Each of the values with one of the others, which take turns."""
    return [(value, others[index % len(others)]) for index, value in enumerate(values)]


class MixedTrainer(ServerlessTrainer):
    version = VERSIONS - 1


def reward(completion_ids, **kwargs) -> list[float]:
    """Multiples of 1/4, so that float32 holds them exactly."""
    return [sum(ids) % 11 / 4 for ids in completion_ids]


# Policy versions and their samples


class Policies:
    """Float64 models with the weights of each policy version: a random walk from the tiny model."""

    def __init__(self, model_dir: str) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.models = []
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
            self.models.append(model.eval())

    def logprobs(self, version: int, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
        """Log-probability of every completion token, shape `(length,)`, float64, with a graph."""
        logits = self.models[version](torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
        return logits.log_softmax(-1)[range(len(token_ids)), token_ids]


def load(model, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


@pytest.fixture(scope="module")
def policies(tiny_model_dir) -> Policies:
    return Policies(tiny_model_dir)


@pytest.fixture(scope="module")
def groups(policies) -> list[Group]:
    """Groups as they leave the pool: cut at random in every version but the last, and resumed in the next.

    Tokens are random. Their log-probabilities are those of their version. Most samples mix versions.
    """
    count = 2 * ACCUMULATION * BATCH // NUM_GENERATIONS
    rng = random.Random(7)
    pool = Pool(count, over_provisioning=1.0, max_staleness=None)
    plans = {}
    pool.begin_round(0)
    for group_id in range(count):
        prompt_ids = [1, *rng.choices(range(4, 60), k=rng.randint(2, 7))]
        group = pool.admit(
            group_id, {"prompt": f"{group_id}"}, prompt_ids, num_generations=NUM_GENERATIONS,
            max_completion_length=MAX_LENGTH,
        )  # fmt: skip
        for sample in group.samples:
            length = min(rng.randint(3, MAX_LENGTH), rng.randint(3, MAX_LENGTH))  # most are short
            token_ids = rng.choices(range(4, 60), k=length)
            if length < MAX_LENGTH:
                token_ids[-1] = EOS
            with torch.no_grad():
                logprobs = [policies.logprobs(version, prompt_ids, token_ids).tolist() for version in range(VERSIONS)]
            cuts = [*sorted(rng.choices(range(length + 1), k=VERSIONS - 1)), length]
            plans[sample] = (token_ids, logprobs, cuts)
    for version in range(VERSIONS):
        pool.begin_round(version)
        for _, sample in pool.ready():
            token_ids, logprobs, cuts = plans[sample]
            pool.start(sample)
            here = slice(len(sample), cuts[version])
            pool.record(sample, token_ids[here], logprobs[version][here])
            if len(sample) == len(token_ids):
                pool.finish(sample, FinishReason.STOP if token_ids[-1] == EOS else FinishReason.LENGTH)
            else:
                pool.park(sample)
    taken = pool.take()
    samples = [sample for group in taken for sample in group.samples]
    assert sum(len(set(sample.versions)) > 1 for sample in samples) > len(samples) / 2
    assert {version for sample in samples for version in sample.versions} == set(range(VERSIONS))
    return taken


# The trainers


def make_april(loss_type: str, model_dir, output_dir, **options) -> MixedTrainer:
    """A generation batch is for two optimizer steps, unless `options` say otherwise."""
    bounds = {"vllm_importance_sampling_clip_max": CAP, "vllm_importance_sampling_clip_min": FLOOR}
    sizes = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION}
    sizes |= {"steps_per_generation": 2 * options.get("gradient_accumulation_steps", ACCUMULATION)}
    args = APRILGRPOConfig(
        output_dir=str(output_dir), loss_type=loss_type, num_generations=NUM_GENERATIONS,
        max_completion_length=MAX_LENGTH, gradient_checkpointing=False, bf16=False, use_cpu=True, report_to=[],
        disable_tqdm=True, **{**bounds, **sizes, **CLIPPING.get(loss_type, {}), **options},
    )  # fmt: skip
    dataset = Dataset.from_list([{"prompt": f"{number}"} for number in range(8)])
    return MixedTrainer(model=model_dir, reward_funcs=reward, args=args, train_dataset=dataset)


def optimization_step(trainer, policies: Policies, *, in_blocks: bool = True):
    """Score a generation batch under the newest version, load the trained weights, and run the second optimizer step.

    Returns:
        The loss, the gradient of every parameter, and the completions of every micro-batch.
    """
    load(trainer.model, policies.weights[VERSIONS - 1])
    trainer.model.train()
    accumulation = trainer.args.gradient_accumulation_steps
    trainer.current_gradient_accumulation_steps = accumulation  # as the training loop sets it
    rows = [{"prompt": ""} for _ in range(trainer.args.generation_batch_size)]
    # TRL shuffles. With this seed losses are not close to 0, where relative errors would be rounding.
    torch.manual_seed(0)
    trainer._step = 0
    loss, held = torch.zeros(()), []
    with rows_in_blocks(trainer) if in_blocks else nullcontext():  # in training they are
        assert (base_attention(trainer.model) is not None) == in_blocks
        trainer._prepare_inputs(rows)
        load(trainer.model, policies.weights[NOW])
        trainer._step = accumulation
        trainer.model.zero_grad()
        for _ in range(accumulation):
            inputs = trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]
            rows_held = zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
            held.append([tuple(ids[mask.bool()].tolist()) for ids, mask in rows_held])
            loss = loss + trainer.training_step(trainer.model, rows, None)
    return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}, held


# The papers


@dataclass
class Example:
    """A sample as in the papers. `kept` are its positions in the loss."""

    prompt_ids: list[int]
    token_ids: list[int]
    versions: list[int]
    advantage: float
    kept: list[int]


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
    assert len(examples) == sum(len(group.samples) for group in groups), "keys must be distinct"
    return examples


def correction(mode: str, old: torch.Tensor, sampled: torch.Tensor, reached: Counter) -> torch.Tensor:
    """Weight of every token for having been sampled with log-probability `sampled` instead of `old`.

    `*_truncate`: truncated importance sampling, min(ratio, C) (Ionides, "Truncated Importance Sampling", 2008; Yao et
    al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025), here bounded below as well.
    `*_mask`: the ratio where it lies within the bounds and 0 elsewhere (IcePop, in "Every Step Evolves", arXiv
    2510.18855). One ratio per token, or for `sequence_*` their product over the sequence.
    """
    log_weights = old - sampled
    weights = log_weights.sum().exp().expand_as(old) if mode.startswith("sequence") else log_weights.exp()
    outside = (weights < FLOOR) | (weights > CAP)
    reached["weights changed"] += int(outside.sum())
    reached["weights kept"] += int((~outside).sum())
    if mode.endswith("mask"):
        return torch.where(outside, torch.zeros_like(weights), weights)
    return weights.clip(FLOOR, CAP)


def trust_region(threshold: float | None, new, sampled, advantage: float, reached: Counter) -> torch.Tensor:
    """Which tokens stay in the loss: the mask of DPPO-Binary-TV (arXiv 2602.04879, section 4), relative to the policy
    that sampled the token. It leaves out tokens whose probability has grown by more than the threshold although A > 0,
    or has fallen by more although A < 0.
    """
    if threshold is None:
        return torch.ones_like(new, dtype=torch.bool)
    moved = new.detach().exp() - sampled.exp()
    left_out = (moved > threshold) if advantage > 0 else (-moved > threshold) & (advantage < 0)
    reached["out of the trust region"] += int(left_out.sum())
    return ~left_out


def clipped_surrogate(ratios: torch.Tensor, advantage: float, low: float, high: float, reached: Counter):
    """PPO's pessimistic bound (Schulman et al., arXiv 1707.06347, equation 7) with a bound for each side (DAPO).

    min(r A, clip(r) A) is r A, except that r is held down at 1 + high where A > 0, and up at 1 - low where A < 0.
    """
    above, below = (ratios > 1 + high) & (advantage > 0), (ratios < 1 - low) & (advantage < 0)
    reached["clipped above"] += int(above.sum())
    reached["clipped below"] += int(below.sum())
    reached["free"] += int((~above & ~below).sum())
    held = ratios.masked_fill(above, 1 + high).masked_fill(below, 1 - low)
    return held * advantage


def token_objectives(loss_type: str, new: torch.Tensor, old: torch.Tensor, advantage: float, reached: Counter):
    """Objective of every token, before the correction and before aggregation."""
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
        reached["clipped above"] += int((ratios > cap).sum())
        reached["free"] += int((ratios <= cap).sum())
        return ratios.clip(max=cap) * advantage * new
    return clipped_surrogate((new - old).exp(), advantage, EPSILONS["epsilon"], EPSILONS["epsilon_high"], reached)


def paper_loss(
    loss_type: str, mode: str, policies: Policies, micro_batches: list[list[Example]], tokens_per_step: float,
    reached: Counter, dppo_threshold: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Loss of one optimizer step.

    - `grpo` (DeepSeekMath, equation 3) and `gspo` (equation 5): mean over samples of the mean over their tokens.
    - `dapo` (arXiv 2503.14476, equation 8), and `cispo` with it: sum over tokens, divided by their number, which TRL
      averages over the optimizer steps of a generation batch.
    - `dr_grpo` (arXiv 2503.20783, section 3.1 and appendix A): sum over tokens, divided by a constant, the largest
      length.
    - `bnpo`: mean over the tokens of a micro-batch, then over micro-batches, as documented by TRL.
    """

    def term(example: Example) -> tuple[torch.Tensor, int]:
        """Sum over the tokens of a sample, and their number."""
        new = policies.logprobs(NOW, example.prompt_ids, example.token_ids)[example.kept]
        with torch.no_grad():
            by_version = [policies.logprobs(v, example.prompt_ids, example.token_ids) for v in range(VERSIONS)]
        old = by_version[VERSIONS - 1][example.kept]
        sampled = torch.stack(by_version)[example.versions, range(len(example.token_ids))][example.kept]
        objectives = token_objectives(loss_type, new, old, example.advantage, reached)
        weights = correction(mode, old, sampled, reached)
        weights = weights * trust_region(dppo_threshold, new, sampled, example.advantage, reached)
        return (objectives * weights).sum(), len(example.kept)

    batches = [[term(example) for example in batch] for batch in micro_batches]
    terms = [pair for batch in batches for pair in batch]
    if loss_type in ("grpo", "gspo"):
        return -sum(total / max(length, 1) for total, length in terms) / len(terms)
    if loss_type == "bnpo":
        columns = [list(zip(*batch, strict=True)) for batch in batches]
        return -sum(sum(totals) / sum(lengths) for totals, lengths in columns) / len(batches)
    total = sum(total for total, _ in terms)
    return -total / (len(terms) * MAX_LENGTH if loss_type == "dr_grpo" else tokens_per_step)


def assert_as_in_the_papers(trainer, policies, groups, *, kept=lambda sample, position: True) -> None:
    loss_type, mode = trainer.args.loss_type, trainer.vllm_importance_sampling_mode
    trainer.groups = groups
    loss, gradients, held = optimization_step(trainer, policies)

    examples = examples_of(groups, kept)
    reached = Counter()  # branches of the papers that this case has exercised
    model = policies.models[NOW]
    model.zero_grad()
    micro_batches = [[examples[completion] for completion in batch] for batch in held]
    tokens_per_step = sum(len(example.kept) for example in examples.values()) / 2
    threshold = trainer.args.dppo_threshold
    expected = paper_loss(loss_type, mode, policies, micro_batches, tokens_per_step, reached, threshold)
    expected.backward()

    # Both kinds of bounds had an effect, and not on all tokens.
    assert all(reached[name] for name in ("clipped above", "free", "weights changed", "weights kept")), reached
    assert reached["clipped below"] or loss_type == "cispo", reached
    assert reached["out of the trust region"] or threshold is None, reached

    assert abs(expected.item()) > 1e-3
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE, abs=0)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= TOLERANCE * parameter.grad.norm(), name


class TestAgainstThePapers:
    @pytest.mark.parametrize(("loss_type", "mode"), once_each(LOSSES, MODES))
    def test_loss_and_gradients_of_mixed_versions_are_those_of_the_papers(
        self, loss_type, mode, policies, groups, tiny_model_dir, tmp_path
    ):
        trainer = make_april(loss_type, tiny_model_dir, tmp_path, vllm_importance_sampling_mode=mode)
        assert_as_in_the_papers(trainer, policies, groups)

    @pytest.mark.parametrize(("loss_type", "mode"), once_each(LOSSES, ["token_truncate", "sequence_truncate"]))
    def test_masked_tokens_and_those_out_of_the_trust_region_leave_the_loss(
        self, loss_type, mode, policies, groups, tiny_model_dir, tmp_path
    ):
        """`staleness_policy="mask"` sets TRL's `env_mask`. A sample without any token left counts as 0."""
        oldest = VERSIONS - 2
        trainer = make_april(
            loss_type, tiny_model_dir, tmp_path, vllm_importance_sampling_mode=mode, staleness_policy="mask",
            max_staleness=1, dppo_threshold=0.004,
        )  # fmt: skip
        assert any(max(sample.versions) < oldest for group in groups for sample in group.samples)
        assert_as_in_the_papers(trainer, policies, groups, kept=lambda sample, place: sample.versions[place] >= oldest)


# Micro-batches

# TRL takes means or quantiles over the tokens of a micro-batch here.
DEPEND_ON_MICRO_BATCHES = [
    {"loss_type": "bnpo"},
    {"loss_type": "grpo", "entropy_coef": 0.1},
    {"loss_type": "grpo", "entropy_coef": 0.1, "entropy_target": 1e9, "use_adaptive_entropy": True},
    {"loss_type": "grpo", "top_entropy_quantile": 0.5},
]


class TestMicroBatches:
    def steps(self, trainer, policies, groups, monkeypatch):
        """An optimizer step with our micro-batches and forward passes, and with TRL's."""
        trainer.groups = groups
        monkeypatch.setattr("trl_april.training.blocks.POSITIONS_PER_BLOCK", {"cpu": 2})  # many blocks
        ours = optimization_step(trainer, policies)
        monkeypatch.setattr("trl_april.bridge.training_pass.can_be_regrouped", lambda *args: False)
        return ours, optimization_step(trainer, policies, in_blocks=False)

    @pytest.mark.parametrize("loss_type", ["sapo", "luspo", "vespo", *(loss for loss in LOSSES if loss != "bnpo")])
    def test_samples_of_a_prompt_share_few_micro_batches_and_gradients_do_not_depend_on_it(
        self, loss_type, policies, groups, tiny_model_dir, tmp_path, monkeypatch
    ):
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "beta": 0.1}
        trainer = make_april(loss_type, tiny_model_dir, tmp_path, pad_to_multiple_of=1, **sizes)
        load(trainer.ref_model, policies.weights[0])
        ours, of_trl = self.steps(trainer, policies, groups, monkeypatch)
        (loss, gradients, held), (expected_loss, expected, held_by_trl) = ours, of_trl
        group_of = {tuple(sample.token_ids.tolist()): group.group_id for group in groups for sample in group.samples}
        prompts = [group_of[completion] for micro_batch in held for completion in micro_batch]
        assert len(list(groupby(prompts))) == len(set(prompts))
        assert {len(micro_batch) for micro_batch in held} >= {0, 5, 6} and {*map(len, held_by_trl)} == {4}
        assert sorted(sum(held, [])) == sorted(sum(held_by_trl, []))
        assert loss.item() == pytest.approx(expected_loss.item(), rel=TOLERANCE, abs=0)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= TOLERANCE * expected[name].norm(), name

    @pytest.mark.parametrize("options", DEPEND_ON_MICRO_BATCHES, ids=lambda options: list(options)[-1])
    def test_trls_micro_batches_are_kept_if_gradients_depend_on_them(
        self, options, policies, groups, tiny_model_dir, tmp_path, monkeypatch
    ):
        options = {**options}
        trainer = make_april(options.pop("loss_type"), tiny_model_dir, tmp_path, pad_to_multiple_of=1, **options)
        ours, of_trl = self.steps(trainer, policies, groups, monkeypatch)
        assert ours[2] == of_trl[2]
        if trainer.args.use_adaptive_entropy:
            return  # its coefficient changes with every step
        assert ours[0].item() == pytest.approx(of_trl[0].item(), rel=TOLERANCE, abs=0)
        for name, gradient in ours[1].items():
            assert (gradient - of_trl[1][name]).norm() <= TOLERANCE * of_trl[1][name].norm(), name

    def test_trls_micro_batches_are_kept_for_the_auxiliary_loss_of_experts_and_a_loss_of_a_subclass(self):
        def regrouped(cls=MixedTrainer, has_aux_loss=False) -> bool:
            trainer = cls.__new__(cls)
            trainer.args = APRILGRPOConfig("out", bf16=False, use_cpu=True)
            trainer._entropy_bonus_enabled, trainer.aux_loss_enabled = False, has_aux_loss
            return can_be_regrouped(trainer, APRILGRPOTrainer)

        assert regrouped() and not regrouped(has_aux_loss=True)
        for name in ("_compute_loss", "compute_loss"):
            assert not regrouped(type("Own", (APRILGRPOTrainer,), {name: lambda self, *args, **kwargs: None}))


# One forward pass

OF_MODES = [{"vllm_importance_sampling_mode": mode} for mode in MODES]
SPECIAL_CASES = [
    ("vespo", {"vllm_importance_sampling_mode": "token_mask"}),
    ("grpo", {"beta": 0.1, "off_policy_mask_threshold": 0.05, "staleness_policy": "mask", "max_staleness": 1}),
    ("grpo", {"dppo_threshold": 0.004}),
    ("dapo", {"steps_per_generation": 1}),  # two generation batches in one optimizer step
    ("grpo", {"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_mode": "sequence_mask"}),
]


class TestTrainingPass:
    """A batch of one optimizer step: its correction needs no forward pass of its own."""

    def train(self, trainer, policies, groups) -> tuple:
        """Loss, gradients, metrics and number of forward passes of an optimizer step, in float64.

        Without blocks: norms are in float32, and so depend on the shape of a pass.
        """
        load(trainer.model.double(), policies.weights[VERSIONS - 1])
        trainer.model.train().zero_grad()
        if trainer.beta:
            load(trainer.ref_model.double(), policies.weights[0])
        trainer.current_gradient_accumulation_steps = ACCUMULATION
        trainer._metrics["train"].clear()
        trainer._step, trainer._buffered_inputs = 0, None
        per_batch = trainer.args.generation_batch_size // NUM_GENERATIONS
        rows = [{"prompt": ""} for _ in range(trainer.args.generation_batch_size)]
        passes, loss = [], torch.zeros(())
        hook = trainer.model.register_forward_pre_hook(lambda *call: passes.append(torch.is_grad_enabled()))
        torch.manual_seed(0)  # of TRL's shuffling
        for micro_step in range(ACCUMULATION):
            trainer.groups = groups[micro_step // trainer.args.steps_per_generation * per_batch :][:per_batch]
            loss = loss + trainer.training_step(trainer.model, rows, None)
        hook.remove()
        gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        of_time = ("profiling/", "step_time", "num_tokens")  # the last counts from the first step on
        metrics = {name: v for name, v in trainer._metrics["train"].items() if not name.startswith(of_time)}
        return loss, gradients, metrics, passes

    @pytest.mark.parametrize(("loss_type", "options"), [*once_each(LOSSES, OF_MODES), *SPECIAL_CASES])
    def test_loss_gradients_and_metrics_are_those_of_two_passes(
        self, loss_type, options, policies, groups, tiny_model_dir, tmp_path, monkeypatch
    ):
        options = {"steps_per_generation": ACCUMULATION, **options}
        trainer = make_april(loss_type, tiny_model_dir, tmp_path, **options)
        loss, gradients, metrics, passes = self.train(trainer, policies, groups)
        monkeypatch.setattr("trl_april.bridge.training_pass.can_correct", lambda *args: False)
        expected_loss, expected, expected_metrics, two_passes = self.train(trainer, policies, groups)

        assert passes == [True] * ACCUMULATION and len(two_passes) > len(passes)
        assert abs(loss.item()) > 1e-6
        assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-9, abs=0)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-9 * expected[name].norm(), name
        corrected = [name for name in metrics if name.startswith(("sampling/", "april/correction/"))]
        assert {"sampling/importance_sampling_ratio/min", "april/correction/age_0/clipped_fraction"} <= {*corrected}
        assert metrics.keys() == expected_metrics.keys()
        for name, values in metrics.items():
            assert values == pytest.approx(expected_metrics[name], rel=1e-6, abs=1e-9, nan_ok=True), name

    def test_two_passes_remain_if_the_policy_moves_or_a_subclass_may_read_the_first(self):
        def corrects(cls=MixedTrainer, **options) -> bool:
            args = APRILGRPOConfig("out", bf16=False, use_cpu=True, gradient_accumulation_steps=4, **options)
            return can_correct(cls, APRILGRPOTrainer, args)

        assert corrects() and corrects(steps_per_generation=2)
        assert not corrects(steps_per_generation=8) and not corrects(num_iterations=2)
        for name in SCORING_TO_LOSS:
            assert not corrects(type("Own", (MixedTrainer,), {name: lambda self, *args: None}))
