"""The trainer is killed with -9 while agents by address have turns, and resumed: nothing is lost.

A fake server samples from the model, whose weights stay: the learning rate is 0.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.fake_vllm import FakeVLLM
from tests.trainer.test_addresses import Sampled
from tests.trainer.test_kills import (  # noqa: F401
    KILLS,
    STEPS,
    read,
    test_attempts_begin_where_the_last_complete_checkpoint_was,
    test_every_row_is_trained_once_as_in_an_undisturbed_run,
    test_what_a_checkpoint_held_is_resumed,
)
from trl_april.weights.canary import trainer_logprobs


pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def fake(tiny_model_dir, one_thread):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    script = Sampled(model, [model.config.eos_token_id])
    with FakeVLLM(vocab_size=model.config.vocab_size, script=script.stream) as server:
        server.prompt_logprobs = lambda ids: trainer_logprobs(model, ids, torch.device("cpu"))
        yield server


@pytest.fixture(scope="module")
def journals(forker, fake, tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    spec = {
        "url": fake.base_url, "model": tiny_model_dir, "folder": str(folder), "rows": 4 * STEPS, "kills": KILLS,
        "seed": 41, "seconds": 1.0,
        "options": {
            "max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "learning_rate": 0.0,
            "max_completion_length": 500, "over_provisioning": 1.75, "weight_sync_dir": str(folder), "use_cpu": True,
        },
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    process = forker.start("agent_kill_worker", folder / "spec.json", {"TOKENIZERS_PARALLELISM": "false"})
    output = process.communicate(timeout=1100)
    assert process.returncode == 0, output[-6000:]
    assert "start again" not in output, "every agent was given its recorded turns"
    return [read(path) for path in sorted(folder.glob("journal-*.jsonl"))]
