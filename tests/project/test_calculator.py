"""scripts/calculator.py: the tool, the reward, and a step of training on the fake server."""

from __future__ import annotations

import runpy

import pytest
import torch

from tests.support.docs_pages import ROOT
from tests.support.fake_vllm import FakeVLLM
from tests.support.tiny import build_chat_tokenizer, build_model
from tests.support.tool_calling import END, TOKENIZER, ToolScript, call
from trl_april.weights.canary import trainer_logprobs


SCRIPT = runpy.run_path(str(ROOT / "scripts" / "calculator.py"))


def test_the_tool_calculates_and_runs_no_code():
    assert SCRIPT["calculate"]("2 + 3 * -(4 - 1)") == "-7"
    for expression in ("__import__('os')", "2 ** 9", "1.5 + 1", "'a' * 3"):
        with pytest.raises(ValueError, match="only integers"):
            SCRIPT["calculate"](expression)


def test_the_reward_is_the_last_word_of_the_last_message():
    completions = [[{"content": text}] for text in ("It is 12", "12 it is", "")]
    assert SCRIPT["is_right"](completions, ["12", "12", "12"]) == [1.0, 0.0, 0.0]


def test_a_step_of_training(tmp_path, one_thread):
    model = build_model(vocab_size=len(TOKENIZER))
    for part in (model, build_chat_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    turns = [[call("calculate", expression="6 * 7") + END, "42" + END], ["Plain." + END]]
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript(turns).stream) as fake:
        fake.prompt_logprobs = lambda ids: trainer_logprobs(model, ids, torch.device("cpu"))
        options = {
            "vllm_server_base_url": fake.base_url, "output_dir": tmp_path / "out", "max_steps": 1, "bf16": False,
            "use_cpu": True, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 300,
            "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        trainer = SCRIPT["main"]([str(tmp_path / "model"), *words])
    (entry, _) = trainer.state.log_history
    assert trainer.april_enabled and (entry["tools/call_frequency"], entry["tools/failure_frequency"]) == (0.5, 0.0)
