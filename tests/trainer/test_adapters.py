"""LoRA training whose adapter travels alone, on real servers."""

from typing import Any

import pytest
import requests
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.support.effort import until_shown
from tests.support.tiny import build_model
from tests.trainer.test_overlap import counter
from tests.trainer.test_trainer import check_logprobs, make_trainer, rows_of
from trl_april import LocalServer
from trl_april.weights.adapters import write_adapter


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]

FLAGS = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
# As the trainer starts its own server, but with places for three adapters.
LORA = ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"]


def adapter(**options) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **{"r": 4, **options})


@pytest.fixture(scope="module")
def lora_server(tiny_model_dir):
    with LocalServer(tiny_model_dir, vllm_args=FLAGS + LORA, quiet=True) as running:
        yield running


def test_every_token_has_the_adapter_that_sampled_it(lora_server, tiny_model_dir, tmp_path):
    """To 1e-4 in float32, also in requests that live through weight syncs, for which nothing is paused."""

    def trained() -> Any:
        trainer = make_trainer(
            lora_server, tiny_model_dir, tmp_path, peft_config=adapter(init_lora_weights=False), resume_kv="keep",
            overlap_generation=True, over_provisioning=3.0, max_completion_length=600, max_staleness=3,
            max_steps=8, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=16, eval_dataset=rows_of(4),
        )  # fmt: skip
        servers = trainer.vllm_generation.servers
        assert trainer.vllm_generation.weight_sync == "adapter"
        servers.pause = lambda: pytest.fail("The server was paused.")
        trainer.lived = []  # requests on earlier adapters after a sync

        def note():
            running, version = trainer._april_session.driver._requests.running, trainer.state.global_step
            trainer.lived.append([request.version for request in running.values() if request.version < version])

        announce = servers.announce
        servers.announce = lambda holding: (announce(holding), trainer._april_session and note())
        trainer.train()
        return trainer

    trainer = until_shown(trained, lambda trainer: any(trainer.lived))
    assert check_logprobs(trainer) > 5000
    ages = [done.version - v for done in trainer.rounds for g in done.groups for s in g.samples for v in s.versions]
    assert 1 <= max(ages) <= 3 and len(trainer.pool) == 0
    assert any("eval_reward" in entry for entry in trainer.state.log_history)
    assert trainer.vllm_generation.sync_mismatch < 1e-4


def test_adapter_of_a_quantized_model(lora_server, tiny_model_dir, tmp_path):
    """The server has the weights before quantization, and the difference is in the log."""
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, quantization_config=quantization, dtype=torch.float32)
    trainer = make_trainer(
        lora_server, model, tmp_path, max_steps=3, max_completion_length=60, use_cpu=True, peft_config=adapter()
    )
    assert trainer.vllm_generation.weight_sync == "adapter"
    trainer.train()
    mismatch = [entry["april/sync_mismatch"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(mismatch) == 3 and all(1e-4 < one < 0.2 for one in mismatch)
    assert sum(done.carried_tokens for done in trainer.rounds) > 0 == len(trainer.pool)


def test_adapters_share_no_kv_blocks(lora_server, tiny_model_dir, tmp_path):
    """Even under one cache salt, as `resume_kv="reuse"` sends it."""
    model = get_peft_model(build_model(), adapter(init_lora_weights=False))
    write_adapter(model, tmp_path)
    url, hits = lora_server.base_url, []
    for name in ("first", "second", "second"):
        requests.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(tmp_path)}, timeout=60)
        before = counter(lora_server, "vllm:prefix_cache_hits_total")
        body = {"model": name, "prompt": [5 + n % 70 for n in range(600)], "max_tokens": 1, "cache_salt": "one"}
        requests.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        hits.append(counter(lora_server, "vllm:prefix_cache_hits_total") - before)
    assert hits[:2] == [0, 0] and hits[2] > 0
