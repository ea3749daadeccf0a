"""The scripts, run as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


ROOT = Path(__file__).parent.parent


@pytest.mark.server
def test_quickstart_script(server, tiny_model_dir, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(8)))
    output = tmp_path / "out"
    options = {
        "model": tiny_model_dir, "dataset": data, "output_dir": output, "vllm_server_base_url": server.base_url,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 20, "max_steps": 2,
        "logging_steps": 1, "report_to": "none", "bf16": "false", "over_provisioning": 1.5,
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "scripts" / "quickstart.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "april/round_seconds" in done.stdout
    assert (output / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("given", "resumed"),
    [([], None), (["true"], True), (["False"], False), (["out/checkpoint-2"], "out/checkpoint-2")],
)
def test_quickstart_resumes_where_it_is_told_to(given, resumed, tiny_model_dir, tmp_path, monkeypatch):
    """Nobody but the script reads that option."""
    path = ROOT / "scripts" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart_script", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # where dataclasses look for annotations
    spec.loader.exec_module(script)
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    seen = []
    trainer = SimpleNamespace(
        train=lambda **arguments: seen.append(arguments), save_model=lambda folder: seen.append(folder)
    )
    monkeypatch.setattr(script, "APRILGRPOTrainer", lambda **arguments: trainer)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["--model", tiny_model_dir, "--dataset", str(data), "--output_dir", "out", "--bf16", "false"]
    arguments += [
        "--vllm_server_base_url",
        "http://127.0.0.1:1",
        *(["--resume_from_checkpoint", *given] if given else []),
    ]
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *arguments])
    script.main()
    assert seen == [{"resume_from_checkpoint": resumed}, "out"]
