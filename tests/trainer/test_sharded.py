"""Sharded training in two processes on the real server: FSDP2 and DeepSpeed, whole models and adapters.

Every kind trains the same seeded, synchronous run as plain data-parallel training, so the losses have to be the same,
and the canary and the recorded log-probabilities say whether the weights arrive whole.
"""

import os
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.preloaded import launch_preloaded


pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(400)]

OPTIONS = {
    "max_steps": 4, "over_provisioning": 1.0, "max_completion_length": 16, "learning_rate": 1e-3,
    "generation_kwargs": {"seed": 5},
    # Evaluation reads the weights with no backward pass before it.
    "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4,
}  # fmt: skip
FULL = {"name": "full", "kind": "train_sharded", "options": OPTIONS}
LORA = {"name": "lora", "kind": "train_sharded", "lora": True, "options": {**OPTIONS, "learning_rate": 1e-2}}
# As it is meant to be used: partial samples and several versions.
APRIL = {"name": "april", "kind": "train_sharded", "options": {"max_steps": 6, "max_completion_length": 240}}
# Stage 2 of ZeRO has whole parameters. Plain data-parallel training is only what the losses are compared with.
RUNS = {"cpu_ddp": [FULL, LORA], "fsdp2": [FULL, LORA, APRIL], "zero2": [FULL], "zero3": [FULL, LORA]}
CASES = [(kind, run["name"]) for kind, runs in RUNS.items() if kind != "cpu_ddp" for run in runs]
COMPARED = [(kind, name) for kind, name in CASES if name != "april"]


@pytest.fixture(scope="module")
def sharded(server, forker, tiny_model_dir, tmp_path_factory):
    """Runs of every kind, by the names of their configurations; made when asked for."""
    folder = tmp_path_factory.mktemp("sharded")
    # DeepSpeed builds an extension when it is first used, with the ninja that is installed beside Python.
    common = {"env": {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}}
    common |= {"model": tiny_model_dir, "url": server.base_url}

    @cache
    def launched(config: str):
        runs = [{**run, "fsdp": config == "fsdp2"} for run in RUNS[config]]
        return launch_preloaded(forker, 2, runs, folder / config, config=f"{config}.yaml", **common)

    def run(config: str):
        done = launched(config)
        assert done.code == 0, done.output[-6000:]
        return done

    return run


def logged(done, name: str, key: str) -> list[float]:
    return [entry[key] for entry in done.result(name, 0)["log"] if key in entry]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_model_is_really_sharded(sharded, kind, name):
    """A setting that is slightly off runs plain data-parallel training, or two trainings."""
    results = sharded(kind).results(name, 2)
    assert [result["kind"] for result in results] == [kind, kind]
    for result in results:
        if kind == "zero2":  # only what the optimizer holds
            trained = result["optimizer"]
            assert 0 < trained < 0.6 * result["whole"]
        else:
            assert 0.4 < result["local"] / result["whole"] < 0.6
        assert result["optimizer"] > 0


@pytest.mark.parametrize(("kind", "name"), COMPARED)
def test_it_learns_what_data_parallel_training_learns(sharded, kind, name):
    for key in ("loss", "reward", "entropy", "eval_reward"):
        expected = logged(sharded("cpu_ddp"), name, key)
        assert len(expected) == (3 if "eval" in key else 4), key
        assert "eval" in key or len(set(expected)) == 4, key
        assert logged(sharded(kind), name, key) == pytest.approx(expected, abs=1e-4), key


@pytest.mark.parametrize(("kind", "name"), COMPARED)
def test_the_server_samples_from_the_weights_that_are_trained(sharded, kind, name):
    differences = logged(sharded(kind), name, "sampling/sampling_logp_difference/max")
    assert len(differences) == 4
    assert max(differences) < 1e-4


def test_partial_samples_are_resumed(sharded):
    results = sharded("fsdp2").results("april", 2)
    assert sum(sum(result["carried_here"]) for result in results) > 0
    # Beside a slow trainer a partial sample may end before the next version, which trains it.
    assert max(logged(sharded("fsdp2"), "april", "april/staleness_max")) >= 1
    assert [result["left"] for result in results] == [0, 0]
