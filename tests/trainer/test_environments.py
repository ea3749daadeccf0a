"""Training in environments against stock GRPO with the same completions, which a fake server has as a script."""

from __future__ import annotations

import json
import signal
import time
from itertools import pairwise

import pytest
import torch
from datasets import Dataset

from tests.checkpoint.test_resume import saved_groups
from tests.support.environments import GAME, LOG, Counting, Saved, Silent, Speaking
from tests.support.fake_vllm import FakeVLLM
from tests.support.preloaded import launch_preloaded
from tests.support.tool_calling import DATASET, END, TOKENIZER, ToolScript, call, multiply, trainer_arguments
from tests.trainer.test_tools import april, logs, stock
from trl_april.errors import ConfigError
from trl_april.weights.canary import trainer_logprobs


pytestmark = pytest.mark.usefixtures("one_thread")
BY_NAME = {"count": Saved, "again": Saved, "speak": Speaking, "judge": Silent}  # two share a column of rewards


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript(GAME).stream) as server:
        yield server


def observed(prompts, completions, environments, **kwargs):
    """As a reward function of TRL that reads the environments."""
    return [
        len(str(prompt)) + sum(len(str(message)) for message in messages) + getattr(environment, "counter", 0)
        for prompt, messages, environment in zip(prompts, completions, environments, strict=True)
    ]


def arguments(factory, *rows, **changes):
    dataset = Dataset.from_list([{"start": number, **row} for number in range(8) for row in rows or DATASET])
    given = {"environment_factory": factory, "train_dataset": dataset, "tools": [multiply], "reward_funcs": observed}
    limits = {"max_tool_calling_iterations": 3, "max_completion_length": 400}
    if len(rows) > 1:  # all in one batch
        limits |= {"per_device_train_batch_size": len(rows) * len(GAME), "max_steps": 1}
    return {"arguments": {**given, **changes}, **limits}


@pytest.mark.parametrize(
    "options",
    [
        arguments(Counting, reward_funcs=None),  # the environment's own
        arguments(BY_NAME, *({"environment": name, "prompt": DATASET[0]["prompt"]} for name in BY_NAME)),
        arguments(Counting, train_dataset=None),
    ],
    ids=["one factory", "several by name", "no dataset"],
)
def test_batches_rewards_and_metrics_equal_stock(fake, tmp_path, options):
    LOG.clear()
    reference = stock(tmp_path, **options, shuffle_dataset=False)
    reference.script = ToolScript(GAME)
    reference.train()
    counted = LOG.copy()
    LOG.clear()
    trainer = april(fake, tmp_path, **options, shuffle_dataset=False)
    factories = trainer.environment_factories
    trainer.train()
    assert trainer.april_enabled and trainer.environment_factories is factories and trainer.environments is None
    for ours, theirs in zip(trainer.batches, reference.batches, strict=True):
        assert theirs.keys() - ours.keys() == {"old_per_token_logps", "importance_sampling_ratio"}
        assert all(torch.equal(values, theirs[name]) for name, values in ours.items() if name in theirs)
    for ours, theirs in zip(logs(trainer), logs(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, nan_ok=True)
    assert {**LOG, "construction": 0} == {**counted, "construction": 0}, "a reset or a call was made again"


@pytest.mark.parametrize("options", [{"overlap_generation": False}, {"dynamic_sampling": True}, {}])
def test_samples_that_are_cut_and_resumed_keep_their_instances(fake, tmp_path, caplog, options):
    """The reward of a sample is its own count. Evaluations beside training have instances of their own."""
    fake.script = ToolScript(GAME, seconds_per_chunk=0.01).stream
    LOG.clear()
    changes = {"over_provisioning": 2.0, "max_steps": 4, "stream_interval": 5, "log_completions": True, **options}
    trainer = april(fake, tmp_path, **arguments(Counting, reward_funcs=None, tools=[]), **changes)
    rewards = []
    trained = trainer._april_run_round

    def run_round():
        done = trained()
        rewards.extend((group.row["start"], group.score.rewards) for group in done.groups)
        return done

    trainer._april_run_round = run_round
    trainer.train()
    counts = [7, 4, 0, 0, 0, 6, 1, 3]
    assert rewards == [(start, [[start + count] for count in counts]) for start, _ in rewards] and len(rewards) == 4
    assert LOG["reset"] == 4 * len(GAME) and 1 + 2 * len(GAME) >= LOG["construction"] >= len(GAME)
    assert "up to 16 instances in all processes together, for 2 groups of 8 samples" in caplog.text
    assert len(trainer.pool) == 0 and sum(done.carried_tokens for done in trainer.round_history) > 0


def test_each_process_scores_its_groups(fake, forker, tmp_path):
    """Instances stay where they are; scores and conversations travel to the process that trains a part of a group."""
    model = trainer_arguments()["model"]
    fake.prompt_logprobs = lambda ids: trainer_logprobs(model, ids, torch.device("cpu"))
    fake.script = ToolScript(GAME, seconds_per_chunk=0.01).stream
    launched = launch_preloaded(
        forker, 2, [{"name": "shared", "kind": "train_with_environments"}], tmp_path, model="", url=fake.base_url
    )
    assert launched.code == 0, launched.output[-4000:]
    results = launched.results("shared", 2)
    samples = [one for step in range(3) for result in results for one in result["samples"][4 * step : 4 * step + 4]]
    assert [index for _, index, *_ in samples] == [*range(8)] * 3
    contents = [content for _, _, *content in samples]
    assert contents == contents[:8] * 3
    assert [rewards for _, _, *rewards in contents[:8]] == [
        [len(token_ids), count] for (token_ids, *_), count in zip(contents, [7, 4, 0, 0, 0, 6, 1, 3], strict=False)
    ]
    assert {round(entry["tools/call_frequency"], 3) for entry in results[0]["log"]} == {2.0}


def test_a_killed_run_resumes_with_its_environments(fake, forker, tmp_path):
    """SIGTERM in the middle of a call that never returns, which blocks neither the checkpoint nor the exit.

    Its sample continues before the call, and a finished one with its score.
    """
    turns = [[call("count", by=3) + END, call("count", by=2) + END, "5" + END], [call("count", by=1) + END, "1" + END]]
    fake.script = ToolScript(turns).stream
    model = trainer_arguments()["model"]
    fake.prompt_logprobs = lambda ids: trainer_logprobs(model, ids, torch.device("cpu"))
    spec = tmp_path / "spec.json"

    def start(**run):
        runs = [{"name": "run", "kind": "train_with_an_environment_that_hangs", **run}]
        spec.write_text(json.dumps({"url": fake.base_url, "folder": str(tmp_path), "runs": runs}))
        return forker.start("worker", spec, {"ACCELERATE_USE_CPU": "true"})

    process = start(hangs=True)
    while not (tmp_path / "hangs").exists():
        assert process.poll() is None, process.output()[-4000:]
        time.sleep(0.05)
    # The second sample ends meanwhile.
    requests = [len(fake.received_at("/v1/completions"))]
    while len(requests) < 5 or any(before != after for before, after in pairwise(requests[-5:])):
        time.sleep(0.05)
        requests.append(len(fake.received_at("/v1/completions")))
    process.send_signal(signal.SIGTERM)
    output = process.communicate(60)
    assert process.returncode == 143, output[-4000:]
    (group,) = saved_groups(
        tmp_path / "checkpoint-1", DATASET.to_list(), has_environments=True, dynamic_sampling=True
    ).values()
    states = [sample.conversation.environment for sample in group.samples]
    assert states == [{"counter": 3}, {"counter": 1}]
    assert group.samples[0].conversation.turn_ended == "stop" and group.samples[1].finish_reason == "stop"

    process = start(hangs=False)
    output = process.communicate(60)
    assert process.returncode == 0, output[-4000:]
    found = json.loads((tmp_path / "run-0.json").read_text())
    assert [[own for _, own in group] for group in found["rewards"]] == [[5.0, 1.0]] * 2
    assert found["token_ids"][0] == found["token_ids"][1]
    assert found["restarted"] == [0, 0, 0] and "2 samples with" not in output
    assert found["counted"]["restoration"] == found["counted"]["reset"] == 2 and found["counted"]["count"] == 1 + 3


def by_address(places):
    """As TRL's example for CARLA: each instance takes the next address of an iterator."""
    addresses = iter(range(places))
    return type("ByAddress", (Counting,), {"__init__": lambda self: (next(addresses), Counting.__init__(self))[1]})


def by_session(places):
    """An OpenEnv server of `places` sessions, which each instance opens with its first reset."""
    sessions = set()

    def reset(self, **row):
        if self not in sessions:
            if len(sessions) == places:
                raise RuntimeError("CAPACITY_REACHED")
            sessions.add(self)
        return Counting.reset(self, **row)

    return type("BySession", (Counting,), {"reset": reset})


@pytest.mark.parametrize(("factory", "places", "evaluates"), [(by_address, 8, True), (by_session, 11, False)])
def test_a_server_with_places_for_one_batch_is_enough(fake, tmp_path, caplog, factory, places, evaluates):
    """TRL's page on OpenEnv asks for no more. Evaluations use those of training, if no sample is in flight."""
    fake.script = ToolScript(GAME, seconds_per_chunk=0.01).stream
    options = arguments(factory(places), reward_funcs=None, tools=[], eval_dataset=DATASET.select([0]))
    if evaluates:
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    trainer = april(fake, tmp_path, **options, over_provisioning=1.0 if evaluates else 3.0)
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps
    assert caplog.text.count(f"No more than {places} environments") <= (not evaluates)
    assert sum("eval_reward" in entry for entry in trainer.state.log_history) == evaluates * trainer.args.max_steps


def test_an_evaluation_waits_for_no_place_of_samples_in_flight(tmp_path):
    """They may wait for a place that it holds."""
    options = arguments(by_address(9), reward_funcs=None, tools=[], eval_dataset=DATASET.select(range(8)))
    options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "stream_interval": 5}
    script = ToolScript(GAME, seconds_per_chunk=0.01).stream
    with FakeVLLM(keeps_requests=True, vocab_size=len(TOKENIZER), script=script) as fake:
        with pytest.raises(ConfigError, match="All 9 environments are in use.*per_device_eval_batch_size"):
            april(fake, tmp_path, **options, over_provisioning=2.0).train()


def test_fewer_places_than_samples_at_once_are_an_error(fake, tmp_path):
    options = arguments(by_session(7), reward_funcs=None, tools=[], eval_dataset=DATASET.select([0]))
    trainer = april(fake, tmp_path, **options, per_device_eval_batch_size=8)
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
        trainer.train()
    trainer.environment_factories = {None: by_session(0)}
    with pytest.raises((RuntimeError, ConfigError), match="CAPACITY_REACHED|one for each row of its batch"):
        trainer.evaluate()
