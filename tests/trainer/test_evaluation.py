"""Evaluations with tools, environments and rollout functions, whose completions a fake server has as a script."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter

import pytest
import torch
from datasets import Dataset

from tests.checkpoint.test_resume import saved_groups
from tests.server.test_process import wait_for
from tests.support.environments import GAME, Counting
from tests.support.fake_vllm import FakeVLLM
from tests.support.preloaded import launch_preloaded
from tests.support.tool_calling import (
    CALLS,
    DATASET,
    NUM_GENERATIONS,
    TOKENIZER,
    ByQuestion,
    ToolScript,
    trainer_arguments,
)
from tests.trainer import test_rollout_function as rollouts
from tests.trainer.test_environments import arguments
from tests.trainer.test_tools import april, logs, stock
from trl_april.errors import ConfigError
from trl_april.trainer import APRILGRPOTrainer
from trl_april.weights.canary import trainer_logprobs


pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"per_device_eval_batch_size": 8, "num_generations_eval": 2}


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ByQuestion().stream) as server:
        yield server


def metrics_of(trainer):
    assert trainer.evaluate()
    (found,) = logs(trainer)
    return found


def test_metrics_equal_stock_with_tools(fake, tmp_path):
    options = {**SIZES, "arguments": {"eval_dataset": DATASET.select(range(8))}, "log_completions": True}
    reference = stock(tmp_path, **options)
    reference.script = ByQuestion()
    wanted = metrics_of(reference)
    calls = Counter(CALLS)
    trainer = april(fake, tmp_path, **options)
    assert metrics_of(trainer) == pytest.approx(wanted, rel=1e-3, nan_ok=True)
    assert wanted["eval_tools/call_frequency"] > 0 and CALLS == calls
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trl-april-eval")]


def test_processes_whose_samples_have_different_turns_end_together(fake, forker, tmp_path):
    """TRL's own loop would wait forever for the process whose samples are complete."""
    model = trainer_arguments()["model"]
    fake.prompt_logprobs = lambda ids: trainer_logprobs(model, ids, torch.device("cpu"))
    runs = [{"name": "evaluated", "kind": "evaluate_with_tools"}]
    launched = launch_preloaded(forker, 2, runs, tmp_path, model="", url=fake.base_url)
    assert launched.code == 0, launched.output[-4000:]
    first, second = launched.results("evaluated", 2)
    reference = stock(
        tmp_path, arguments={"eval_dataset": DATASET.select(range(8)), "reward_funcs": number_of_tokens}, **SIZES
    )
    reference.script = ByQuestion()
    assert first["reward"] == second["reward"] == pytest.approx(metrics_of(reference)["eval_reward"], rel=1e-5)
    assert [result["lost"] for result in (first, second)] == [0, 0]


def number_of_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def test_samples_continue_after_an_outage(fake, tmp_path):
    """The server is restarted, without its weights, in the middle of an evaluation."""
    script, dropped = ByQuestion(), []

    async def stream(one):
        if len(fake.received_at("/v1/completions")) > 6 and not dropped:
            token_ids, logprobs = script.rest(one.body["prompt"], 0)
            dropped.append([*one.body["prompt"], *token_ids[:3]])
            await one.tokens(token_ids[:3], logprobs[:3], None)
            fake.weight_version = "default"
            one.drop()
            return
        await script.stream(one)

    fake.script = stream
    options = {**SIZES, "arguments": {"eval_dataset": DATASET.select(range(8))}}
    trainer = april(fake, tmp_path, **options)
    found = metrics_of(trainer)
    reference = stock(tmp_path, **options)
    reference.script = ByQuestion()
    assert found == pytest.approx(metrics_of(reference), rel=1e-3, nan_ok=True)
    versions = [one.body["new_version"] for one in fake.received_at("/update_weight_version") if one.body]
    assert versions == ["incomplete", "0"] * 2
    assert dropped[0] in [one.body["prompt"] for one in fake.received_at("/v1/completions")]


def test_environments_are_not_those_of_samples_in_flight(fake, tmp_path):
    options = arguments(Counting, reward_funcs=None, tools=[], eval_dataset=DATASET.select([0]))
    options |= {"eval_strategy": "steps", "eval_steps": 1, "over_provisioning": 2.0, "per_device_eval_batch_size": 8}
    begun, instances = [], []

    class Trainer(APRILGRPOTrainer):
        def evaluation_loop(self, *args, **kwargs):
            begun.append(True)
            environments = self._april_session._restorable
            before = [occupied.instance for occupied in environments._occupied.values()]
            output = super().evaluation_loop(*args, **kwargs)
            instances.append((len(before), {*map(id, self._environment_pool[None])}))
            # Samples that finished meanwhile have returned theirs.
            after = {id(occupied.instance) for occupied in environments._occupied.values()}
            assert not instances[-1][1] & {*map(id, before)} & after
            return output

    script = ToolScript(GAME)

    async def stream(one):
        """The second group runs until an evaluation begins."""
        is_second = int(one.request.headers["X-Request-Id"].split("-")[-3]) == 1
        while is_second and not begun and not one.aborted.is_set():
            await asyncio.sleep(0.01)
        await script.stream(one)

    fake.script = stream
    trainer = april(fake, tmp_path, Trainer, **options)
    trainer.train()
    assert len(instances) == 2 and any(count for count, _ in instances)
    assert len(instances[0][1]) >= 8 and instances[0][1] & instances[1][1]  # they are used again
    evaluated = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert evaluated == [7.0] * 2  # the count of the first sample of the script


class LastGroup:
    """A script in which group 3 waits until `begun`."""

    def __init__(self) -> None:
        self.begun, self._script = threading.Event(), ToolScript()

    async def stream(self, one) -> None:
        is_last = int(one.request.headers["X-Request-Id"].split("-")[-3]) == 3
        while is_last and not self.begun.is_set() and not one.aborted.is_set():
            await asyncio.sleep(0.01)
        await self._script.stream(one)


EVALUATED = {
    "per_device_train_batch_size": 2 * NUM_GENERATIONS, "over_provisioning": 2.0, "max_steps": 2,
    "per_device_eval_batch_size": 8, "num_generations_eval": 2, "eval_strategy": "steps", "eval_steps": 1,
}  # fmt: skip


def test_no_group_is_scored_beside_an_evaluation(fake, tmp_path):
    script, inside, most = LastGroup(), [], []
    evaluates = threading.Event()

    class Trainer(APRILGRPOTrainer):
        def evaluation_loop(self, *args, **kwargs):
            script.begun.set()
            wait_for(lambda: inside or evaluates.is_set())
            return super().evaluation_loop(*args, **kwargs)

    def reward(completions, trainer_state, **kwargs):
        """Notes how many calls of it run."""
        inside.append(True)
        most.append(len(inside))
        if threading.current_thread() is threading.main_thread():
            evaluates.set()
        elif trainer_state.global_step:
            evaluates.wait(1.0)
        inside.pop()
        return [float(len(messages)) for messages in completions]

    fake.script = script.stream
    arguments = {"reward_funcs": reward, "eval_dataset": DATASET.select(range(4))}
    april(fake, tmp_path, Trainer, arguments=arguments, score_during_generation=True, **EVALUATED).train()
    assert evaluates.is_set() and max(most) == 1


def test_training_resumes_without_scoring_during_generation(fake, tmp_path):
    script = LastGroup()

    class Trainer(APRILGRPOTrainer):
        def evaluation_loop(self, *args, **kwargs):
            wait_for(lambda: script.begun.is_set() or any(group.score for group in [*self._april_session.pool]))
            return super().evaluation_loop(*args, **kwargs)

        def _save_checkpoint(self, *args, **kwargs):
            super()._save_checkpoint(*args, **kwargs)
            script.begun.set()

    fake.script = script.stream
    options = {
        **EVALUATED,
        "save_strategy": "steps",
        "save_steps": 1,
        "arguments": {"eval_dataset": DATASET.select([0])},
    }
    april(fake, tmp_path, Trainer, score_during_generation=True, **copy.copy(options)).train()
    checkpoint = tmp_path / "april" / "checkpoint-1"
    saved = saved_groups(checkpoint, DATASET.to_list(), has_tools=True).values()
    assert [group.score is None for group in saved] == [False, True]
    resumed = april(fake, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert len(resumed.batches) == 1


def test_a_rollout_function_is_evaluated(fake, tmp_path):
    fake.script = ToolScript(rollouts.TURNS).stream
    question = Dataset.from_list([{"prompt": [{"role": "user", "content": "q2"}], "number": 2}])
    options = {"per_device_eval_batch_size": 3, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trainer = rollouts.trainer_of(fake, tmp_path, arguments={"eval_dataset": question}, **options)
    trainer.train()
    text = len("".join(rollouts.TURNS[0])) - 2 * len("<|im_end|>") + len("\nuser\nAre you sure?\nassistant\n")
    expected = text + sum(rollouts.LENGTHS[0]) / 1000 + 2
    found = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert found == pytest.approx([expected] * 2, rel=1e-5)


def test_evaluation_prompts_that_leave_little_or_are_empty(tmp_path):
    """A server would answer 400 to all of them. Empty ones begin with BOS or EOS, as those of training do."""

    async def stream(one):
        count = one.body["max_tokens"]
        await one.tokens([5] * count, [-1.0] * count, "length")
        await one.done()

    with FakeVLLM(vocab_size=len(TOKENIZER), script=stream, max_model_len=60) as fake:
        rows = Dataset.from_list([{"prompt": text} for text in ("", "a" * 55, "b")])
        options = {"max_completion_length": 20, "num_generations_eval": 2, "per_device_eval_batch_size": 6}
        trainer = april(
            fake, tmp_path, **options,
            arguments={"eval_dataset": rows, "train_dataset": rows, "tools": None, "reward_funcs": number_of_tokens},
        )  # fmt: skip
        assert trainer.evaluate()["eval_reward"] == pytest.approx((20 + 5 + 20) / 3)
        bodies = [one.body for one in fake.received_at("/v1/completions") if one.body.get("stream")]
        first = trainer.processing_class.bos_token_id or trainer.processing_class.eos_token_id
        sizes = Counter((len(body["prompt"]), body["max_tokens"]) for body in bodies)
        assert sizes == {(1, 20): 4, (55, 5): 2}
        assert [first] in [body["prompt"] for body in bodies]


def test_evaluation_prompts_without_room_are_refused_before_training(tmp_path):
    with FakeVLLM(vocab_size=len(TOKENIZER), max_model_len=600) as fake:
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "x" * n}]} for n in (1, 700)])
        options = {"eval_strategy": "steps", "eval_steps": 1, "arguments": {"eval_dataset": {"long": rows}}}
        trainer = april(fake, tmp_path, **options)
        with pytest.raises(ConfigError, match="row 1, the longest of the evaluation long dataset, has .*no room"):
            trainer.train()
        assert trainer.state.global_step == 0
