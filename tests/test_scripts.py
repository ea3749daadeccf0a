"""The scripts, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.server

ROOT = Path(__file__).parent.parent


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
